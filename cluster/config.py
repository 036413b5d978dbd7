"""GroupConfig: the models, the engine and the placement of one speculation group; frozen before any worker starts."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from cluster.log_format import LogFormat
from engine.config import EngineConfig, ModelConfig
from engine.drafting.registry import Method, check_family, choose_method
from engine.errors import ModelError

RunAhead = Literal["auto", "on", "off"]


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """A target over `tensor_parallel_size` ranks, and its draft."""

    target: ModelConfig
    """The model whose text is served."""
    draft: ModelConfig | None = None
    """The model that the drafting method loads, if it loads one."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Bounds of the batch, the cache and the draft."""
    run_ahead: RunAhead = "auto"
    """Whether the draft worker drafts for the likeliest verdicts while the target verifies; auto: where each model has
    a device or cores of its own."""
    tensor_parallel_size: int = 1
    """Ranks that share the target's weights."""
    target_accelerator_type: str | None = None
    """Ray's name of the GPU type that each target rank needs, such as H100; None takes any."""
    draft_accelerator_type: str | None = None
    """Ray's name of the GPU type that the draft needs; None takes any."""
    target_nodes: int = 1
    """Nodes that the target's ranks may be spread over; 1 keeps them on one."""
    target_label_selector: Mapping[str, str] = field(default_factory=dict)
    """Labels that the nodes of the target's ranks and of the Router replica must have."""
    draft_label_selector: Mapping[str, str] = field(default_factory=dict)
    """Labels that the draft's node must have."""
    draft_timeout_s: float = 1.0
    """Seconds that a round waits for its drafts before it goes on without them."""
    verify_timeout_s: float = 60.0
    """Seconds that a round waits for the target before the target counts as lost."""
    hang_timeout_s: float = 10.0
    """Seconds for which a worker may not answer a ping before it counts as lost and is replaced."""
    start_timeout_s: float = 600.0
    """Seconds that placing and loading the workers may take."""
    log_format: LogFormat = "text"
    """How workers write their log."""

    @property
    def method(self) -> Method:
        """How drafts are made, and where."""
        return choose_method(self.engine, has_draft_model=self.draft is not None)

    @property
    def has_draft_worker(self) -> bool:
        """Whether drafts are made in a process of their own."""
        return self.method.runs_in == "draft"


def suited_to_models(config: GroupConfig) -> GroupConfig:
    """Return the configuration with `run_ahead` off if the target is an encoder-decoder.

    Raises:
        ModelError: there is no such model, or a setting does not fit the kind of the models.
    """
    if not check_family(config.target, config.draft, config.method):
        return config
    if config.run_ahead == "on":
        raise ModelError(f"run_ahead is on, but {config.target.path} is an encoder-decoder; its draft cannot run ahead")
    return replace(config, run_ahead="off")
