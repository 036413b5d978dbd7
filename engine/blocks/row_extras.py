"""RowExtras: what a kind of cache adds to the scheduler's rows; a plain cache, KV blocks alone, adds nothing.

What it adds to passes is its `engine.execution.kv_tensors.PassExtras`. Each kind is in a room that only this table
names.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from engine.blocks.block_pool import BlockPool
from engine.config import EngineConfig, ModelInfo, import_named
from engine.protocols import Request, ScheduledRow


class RowExtras:
    """A cache of keys and values alone; other kinds derive from it.

    Attributes:
        drafts_beyond_plan: whether a row may have more draft tokens than `num_speculative_tokens`.
        slots: the slots that requests get beside their blocks, one each; None if they get none.
    """

    drafts_beyond_plan = True
    slots: BlockPool | None = None

    def is_unsure(self, request: Request) -> bool:
        """Return whether a lost round leaves it unknown what a request's slot holds, so that it must be recomputed."""
        return False

    def admit(self, request: Request, digests: Sequence[bytes]) -> int | None:
        """Admit a request whose cached blocks have these digests.

        Returns how many of the blocks the request can use, or None if it must wait.
        """
        return len(digests)

    def release(self, request: Request) -> None:
        """Free what a request has; it may have nothing."""

    def clear(self) -> None:
        """Forget everything, because the target lost its cache; no request is running."""

    def row_length(self, request: Request, start: int, length: int) -> int:
        """Return the length of a row that begins at `start`, given the most tokens that the budget has for it."""
        return length

    def assign(self, rows: list[ScheduledRow]) -> None:
        """Set the `slot` of the rows of the next round."""

    def commit(self, request: Request, digests: Sequence[bytes]) -> None:
        """Learn that a request's row was computed; its computed blocks have these digests."""


class CacheKind(NamedTuple):
    """The import paths of a kind's `RowExtras`, made of an `EngineConfig` and a `ModelInfo`, and `PassExtras`."""

    rows: str
    passes: str


KINDS: Mapping[str, CacheKind] = {
    "states": CacheKind("engine.hybrids.state_slots:StateSlots", "engine.hybrids.state_tensors:StateTensors"),
    "inputs": CacheKind("engine.encoder_decoder.input_rows:InputRows", "engine.encoder_decoder.inputs:InputPasses"),
}
"""The kinds of caches that are not plain, by name."""


def kind_of(info: ModelInfo) -> CacheKind | None:
    """Return the kind of a model's cache; None if it is a plain one."""
    if info.state_chunk:
        return KINDS["states"]
    return None if info.start_id is None else KINDS["inputs"]


def make_row_extras(config: EngineConfig, info: ModelInfo) -> RowExtras:
    """Return what a model's cache adds to rows."""
    if (kind := kind_of(info)) is None:
        return RowExtras()
    extras: RowExtras = import_named("the kind of cache", kind.rows)(config, info)
    return extras


def make_pass_extras(kind: CacheKind, *arguments: Any) -> Any:
    """Return what a kind of cache adds to passes."""
    return import_named("the kind of cache", kind.passes)(*arguments)
