"""The one exception of the training tool: its message is the line the user reads."""


class TrainingError(Exception):
    """What the user asked for cannot be done; no checkpoint is lost."""
