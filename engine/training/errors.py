"""TrainingError: the exception of the training tool; its command line prints the message."""

from engine.errors import PacelineError


class TrainingError(PacelineError):
    """The command cannot be carried out; the last checkpoint is unchanged."""
