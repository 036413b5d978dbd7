"""ModelConfig and EngineConfig: frozen, complete before anything is loaded; ModelInfo: what was loaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

BUNDLED_TARGET = Path(__file__).parent / "pair" / "target"
BUNDLED_DRAFT = Path(__file__).parent / "pair" / "draft"

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Compile = Literal["auto", "off"]
Verification = Literal["coupled", "rejection"]
Speculation = Literal["adaptive", "fixed", "off"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and how it is held in memory."""

    path: str
    """A transformers directory, or a hub name that is already in the local cache."""
    dtype: Dtype = "auto"
    """auto: bfloat16 on CUDA and on CPUs with AMX, else float32."""
    device: Device = "auto"
    """auto: cuda where there is one, else cpu."""
    revision: str | None = None
    """A hub revision to pin."""
    compile: Compile = "off"
    """auto: passes run compiled where that pays, as soon as a process in the background has compiled them."""
    num_threads: int | None = None
    """CPU threads of a forward pass; None leaves torch's own choice, or a worker's, which tries some."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What bounds the batch, the cache and the draft."""

    num_speculative_tokens: int = 4
    """Draft tokens per round at most (k); 0 is plain decoding."""
    speculation: Speculation = "adaptive"
    """adaptive: as many of them, from none to all, as measured goodput says. fixed: always all. off: none."""
    verification: Verification = "coupled"
    """coupled: shared Gumbel noise, token ids only. rejection: Leviathan et al., sparse draft rows."""
    max_num_seqs: int = 32
    """Requests that share a round."""
    max_num_batched_tokens: int = 1024
    """Tokens of one target forward pass, prefill chunks and drafts together."""
    max_queued_requests: int = 256
    """Requests that may wait before new ones are refused."""
    max_model_len: int | None = None
    """Context length; None takes the target's own."""
    block_size: int = 16
    """Tokens in one KV block."""
    num_blocks: int | None = None
    """KV blocks; None sizes them from memory_fraction."""
    memory_fraction: float = 0.5
    """Share of the memory free after loading that KV blocks may take (at most what max_num_seqs full contexts need)."""
    enable_prefix_caching: bool = True
    """Whether requests share the KV blocks of equal prefixes."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the other rooms need to know of a loaded model."""

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: list[int]
    num_parameters: int
    dtype: str
    device: str
