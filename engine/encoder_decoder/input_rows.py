"""InputRows: an encoder's input is scheduled in one row, together with the token that starts the text."""

from engine.blocks.row_extras import RowExtras
from engine.config import EngineConfig, ModelInfo
from engine.protocols import Request


class InputRows(RowExtras):
    """Schedules whole inputs; an input may exceed the budget, because the encoder computes it in its own pass."""

    def __init__(self, _config: EngineConfig, _target: ModelInfo) -> None:
        """Take the arguments of every `RowExtras`."""

    def row_length(self, request: Request, start: int, length: int) -> int:
        return max(length, request.input_length + 1) if start < request.input_length else length
