"""GroupConfig: the models, the engine and the placement of one speculation group; frozen before any worker starts."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from engine.config import EngineConfig, ModelConfig
from engine.drafting.registry import Method, method_of
from engine.drafting.settle import check_kinds
from engine.errors import ModelError
from engine.heads.config import drafts_blocks
from engine.models.source import ModelSource
from engine.protocols import Overlap

LogFormat = Literal["text", "json"]
RunAhead = Literal["auto", "on", "off"]
DraftLearning = Literal["off", "on"]

DRAFT_CORES = 1
"""Cores of a draft on a CPU. The target's ranks share all cores, or all others where the draft runs ahead of them."""


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """A target over `tensor_parallel_size` ranks, and its draft."""

    target: ModelConfig
    draft: ModelConfig | None = None
    """The model that the drafting method loads; None if the method loads none."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Settled: `drafting` names the method."""
    run_ahead: RunAhead = "auto"
    """Whether the draft worker runs ahead; auto: if each model has a device or cores of its own."""
    draft_pool: bool = False
    """Whether the draft worker belongs to a pool that other groups share, so that none is placed with this group."""
    draft_learning: DraftLearning = "off"
    draft_learning_share: float = 0.5
    draft_learning_path: Path | None = None
    tensor_parallel_size: int = 1
    target_label_selector: Mapping[str, str] = field(default_factory=dict)
    """Labels that the nodes of the target's ranks and of the Router replica must have."""
    draft_label_selector: Mapping[str, str] = field(default_factory=dict)
    round_timeout_s: float = 60.0
    """The longest that a round waits before the target counts as lost; see `RoundTimes`."""
    hang_timeout_s: float = 10.0
    """A worker that leaves pings unanswered for so long counts as lost, and is replaced."""
    start_timeout_s: float = 600.0
    log_format: LogFormat = "text"

    @property
    def method(self) -> Method:
        return method_of(self.engine.drafting)

    @property
    def has_draft_worker(self) -> bool:
        return self.draft is not None

    @property
    def places_draft_worker(self) -> bool:
        """Whether the group places a draft worker of its own."""
        return self.has_draft_worker and not self.draft_pool

    @property
    def overlaps(self) -> tuple[Overlap, ...]:
        """What the draft worker can do while the target verifies; empty without a draft worker."""
        if not self.has_draft_worker:
            return ()
        ahead: tuple[Overlap, ...] = ("ahead",) if self.run_ahead == "on" else ()
        # A round's features are sent when no other round waits, so a draft that reads them cannot alternate. vLLM adds
        # each request that was not in its last round anew, with all its tokens.
        is_ordered = self.method.reads_features or self.target.execution == "vllm"
        return ("none", *ahead) if is_ordered else ("none", *ahead, "alternate")


def suited_to_models(config: GroupConfig, target: ModelSource, draft: ModelSource | None) -> GroupConfig:
    """Turn `run_ahead` off if such models cannot run ahead; raise ModelError if a setting does not fit their kind."""
    check_kinds(target, draft, config.method)
    drafts_ahead = not drafts_blocks(target.head)  # a block reads features of accepted tokens, known with the verdict
    if config.run_ahead == "on":
        if not drafts_ahead:
            raise ModelError(
                "run_ahead is on, but the head drafts blocks, which need the verdict; set run_ahead to off"
            )
        target.refuse("run_ahead")
        for each in draft.drafts if draft else ():
            each.refuse_to_draft("run_ahead")
    refusals = {*target.kind.refusals}.union(*(each.kind.draft_refusals for each in (draft.drafts if draft else ())))
    return config if drafts_ahead and "run_ahead" not in refusals else replace(config, run_ahead="off")
