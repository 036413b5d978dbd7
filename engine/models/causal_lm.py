"""CausalLM: a loaded transformers module with its configuration; a backend runs it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, Mistral4Config, Mistral4ForCausalLM, PreTrainedConfig

from engine.config import ModelInfo
from engine.errors import ModelError
from engine.models.layers.layer_attention import ATTENTION_NAME, AttentionContext, KVShape
from engine.models.layers.layer_state import StateShape
from engine.models.layers.linear_layers import WITHOUT_KV, has_state, layer_kinds
from engine.models.layers.mixed_layers import num_shared, why_mixed

AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)  # transformers does not list it


class Reducer(Protocol):
    """Sums over all ranks. Every rank makes the same calls in the same order and gets the same bits."""

    def sum(self, partial: Tensor) -> Tensor:
        """Return a new tensor, the sum in rank order."""
        ...

    def close(self) -> None:
        """Leave the ranks' communicator."""
        ...


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of a tensor-parallel model, with the reducer that sums the ranks' results."""

    rank: int
    world_size: int
    reducer: Reducer


class HeadModule(Protocol):
    """A trained head, over the cache of its target; execution asks the `CausalLM` that has it. See `engine.heads.head`.

    Attributes:
        config: what its files say.
        attends_from: the first place that has keys and values.
        keeps_kv: whether it drafts in the target's process.
        drafts_blocks: whether a pass drafts several tokens, which may see one another.
        kv_shape: the keys and values that it caches per token.
        state_size: the number of values in a token's state.
    """

    config: Any
    attends_from: int
    keeps_kv: bool
    drafts_blocks: ClassVar[bool]

    @property
    def kv_shape(self) -> KVShape: ...
    @property
    def state_size(self) -> int: ...


@dataclass
class CausalLM:
    """A language model on one device, or one rank's shard of it."""

    loaded_by: ClassVar[Any] = AutoModelForCausalLM
    attention: ClassVar[str] = ATTENTION_NAME

    module: nn.Module
    config: PreTrainedConfig
    info: ModelInfo
    device: torch.device
    dtype: torch.dtype
    shard: Shard | None = None
    kv_dtype: torch.dtype | None = None  # of the KV cache; None is `dtype`
    head: HeadModule | None = None  # fed by the model's passes; a head's own model has it as `module`, too
    state_shapes: Sequence[StateShape] = ()  # of each linear layer of this rank

    @classmethod
    def why_eager(cls, config: PreTrainedConfig) -> str | None:
        """Return why passes of a model with this configuration are never compiled; None if they can be."""
        return "it has linear layers" if has_state(config) else why_mixed(config)

    @classmethod
    def load_module(cls, directory: Path, config: PreTrainedConfig, dtype: torch.dtype, **arguments: Any) -> nn.Module:
        """Load the module by transformers' `from_pretrained`; raise ModelError if the files lack a weight."""
        module, loading = cls.loaded_by.from_pretrained(
            directory,
            config=config,
            generation_config=GenerationConfig(),  # type: ignore[no-untyped-call] # or it would read the file again
            dtype=dtype,
            attn_implementation=cls.attention,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **arguments,
        )
        if missing := sorted(loading["missing_keys"]):  # transformers only warns, and draws them
            raise ModelError(f"{directory} lacks the weights {', '.join(missing[:3])}")
        assert isinstance(module, nn.Module)
        return module

    @property
    def kv_shape(self) -> KVShape:
        return kv_shape(self.config, self.shard.world_size if self.shard else 1)

    @property
    def is_part(self) -> bool:
        """Whether this is a head alone, which needs another model's cache."""
        module: Any = self.module
        return self.head is module

    @property
    def drafts_blocks(self) -> bool:
        """Whether its head drafts several tokens in a pass."""
        return self.head is not None and self.head.drafts_blocks

    @property
    def attends_from(self) -> int:
        """The first place that has keys and values."""
        return self.head.attends_from if self.head is not None else 0

    @property
    def is_split(self) -> bool:
        """Whether its head drafts in another process."""
        return self.head is not None and (self.is_part or not self.head.keeps_kv)

    @property
    def configurations(self) -> list[Any]:
        """What computes its passes: its configuration, and its head's."""
        return [self.config] if self.head is None else [self.config, self.head.config]

    @property
    def added_to_cache(self) -> tuple[KVShape, Tensor] | tuple[()]:
        """A head's keys and values, and the like of a token's state; see `KVTensors`."""
        if self.head is None:
            return ()
        return self.head.kv_shape, torch.empty(self.head.state_size, dtype=self.dtype, device=self.device)

    @property
    def num_cached_layers(self) -> int:
        """The number of layers in the cache, including a head's."""
        return self.kv_shape.layers + (self.head.kv_shape.layers if self.head else 0)

    @property
    def num_slot_layers(self) -> int:
        """The number of layers with a slot per request in the cache; see `PassExtras`."""
        return len(self.state_shapes)

    def replace_module(self, module: Any) -> None:
        """Hold another module that computes the same, and its head."""
        if self.head is not None:
            self.head = module if self.is_part else module.head
        self.module = module

    def forward(self, batch: Any) -> Tensor:
        """Compute a `ForwardBatch`; return [n, vocab] logits in the model's number format."""
        return forward(self.module, batch.token_ids, batch.positions, batch.logit_indices, batch.paged)


def kv_shape(config: PreTrainedConfig, world_size: int) -> KVShape:
    """Return a rank's KV cache shape; every rank caches latents whole (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""
    text = config.get_text_config()
    layers = (getattr(text, "num_decoder_layers", None) or text.num_hidden_layers) - num_shared(config)
    layers -= sum(kind in WITHOUT_KV for kind in layer_kinds(config))
    if not text.per_layer_attributes:
        return KVShape(layers, *_layer_sizes(text, world_size))
    sizes_by_layer = tuple(_layer_sizes(text.per_layer_config[layer], world_size) for layer in range(layers))
    largest = max(sizes_by_layer, key=lambda sizes: sizes[0] * (sizes[1] + sizes[2]), default=(0, 0, 0))
    return KVShape(layers, *largest, sizes_by_layer)


def _layer_sizes(text: PreTrainedConfig, world_size: int) -> tuple[int, int, int]:
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    key_dim = value_dim = head_dim
    if getattr(text, "kv_lora_rank", None):
        kv_heads, world_size = 1, 1
        key_dim, value_dim = text.kv_lora_rank + text.qk_rope_head_dim, 0
    return kv_heads if holds_attention_whole(text) else max(1, kv_heads // world_size), key_dim, value_dim


def holds_attention_whole(config: PreTrainedConfig) -> bool:
    """Return whether every rank computes all heads, because a norm over all heads follows the projections."""
    plan = config.base_model_tp_plan or {}
    return any(style == "colwise_gather_output" and "self_attn" in name for name, style in plan.items())


def num_weights(module: nn.Module) -> int:
    """Return how many weights a module has; quantised weights count, their scales do not."""
    layers: list[Any] = [layer for layer in module.modules() if hasattr(layer, "in_features")]
    counted = {id(parameter) for layer in layers for parameter in layer.parameters()}
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    others = [parameter for parameter in module.parameters() if id(parameter) not in counted]
    count: int = sum(layer.in_features * layer.out_features for layer in layers)
    count += sum(2 * buffer.numel() for name, buffer in module.named_buffers() if name.endswith("_blocks"))
    return count + sum(tensor.numel() for tensor in (*biases, *others))


def forward(
    module: nn.Module, token_ids: Tensor, positions: Tensor, logit_indices: Tensor, context: AttentionContext
) -> Tensor:
    """Run a transformers model with all that follows its output head; return [n, vocab] logits in the model's format.

    token_ids, positions: [tokens] int64; logit_indices: [n] the tokens that need logits.
    """
    logits: Tensor = module(
        input_ids=token_ids.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        use_cache=False,
        logits_to_keep=logit_indices,
        paged=context,
    ).logits
    return logits[0]
