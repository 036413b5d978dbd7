"""RowExtras: what a cache adds to the scheduler's rows; a cache of KV blocks alone adds nothing.

Its counterpart in forward passes is `engine.execution.kv_tensors.PassExtras`. Only `KINDS` names the folders of other
caches.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from engine.blocks.block_pool import BlockPool
from engine.config import EngineConfig, ModelInfo, import_named
from engine.protocols import Request, ScheduledRow


class RowExtras:
    """A cache of KV blocks alone; other caches derive from it.

    Attributes:
        drafts_beyond_plan: whether a row may have more draft tokens than `num_speculative_tokens`.
        slots: each request also gets a slot of these.
    """

    drafts_beyond_plan = True
    slots: BlockPool | None = None

    def is_unsure(self, request: Request) -> bool:
        """Return whether a request must be recomputed, because a lost round may have changed its slot."""
        return False

    def admit(self, request: Request, digests: Sequence[bytes]) -> int | None:
        """Admit a request; return how many of its cached blocks it can use, or None if it must wait."""
        return len(digests)

    def release(self, request: Request) -> None:
        """Free a request's slot, if it has a slot."""

    def clear(self) -> None:
        """Forget everything, because the target lost its cache; no request is running."""

    def row_length(self, request: Request, start: int, length: int) -> int:
        """Return the length of a row that begins at `start`; `length` is the most that the budget allows."""
        return length

    def assign(self, rows: list[ScheduledRow]) -> None:
        """Set the `slot` of the rows of the next round."""

    def commit(self, request: Request, digests: Sequence[bytes]) -> None:
        """Record that a request's row was computed; `digests` belong to its computed blocks."""


class CacheKind(NamedTuple):
    """The import paths of a cache's `RowExtras` and `PassExtras`."""

    rows: str
    passes: str


KINDS: Mapping[str, CacheKind] = {
    "states": CacheKind("engine.hybrids.state_slots:StateSlots", "engine.hybrids.state_tensors:StateTensors"),
    "inputs": CacheKind("engine.encoder_decoder.input_rows:InputRows", "engine.encoder_decoder.inputs:InputPasses"),
}


def kind_of(info: ModelInfo) -> CacheKind | None:
    """Return the kind of a model's cache; None for KV blocks alone."""
    if info.state_chunk:
        return KINDS["states"]
    return None if info.start_id is None else KINDS["inputs"]


def make_row_extras(config: EngineConfig, info: ModelInfo) -> RowExtras:
    """Return the `RowExtras` of a model's cache."""
    if (kind := kind_of(info)) is None:
        return RowExtras()
    extras: RowExtras = import_named("the kind of cache", kind.rows)(config, info)
    return extras


def make_pass_extras(kind: CacheKind, *arguments: Any) -> Any:
    """Return a cache's `PassExtras`."""
    return import_named("the kind of cache", kind.passes)(*arguments)
