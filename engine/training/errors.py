"""The one exception of the training tool: its message is the line the user reads."""

from engine.errors import PacelineError


class TrainingError(PacelineError):
    """What the user asked for cannot be done; no checkpoint is lost."""
