"""CausalLM: a loaded transformers module with its configuration; a backend runs it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from engine.config import ModelInfo
from engine.execution.attention import AttentionContext, KVShape


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of a tensor-parallel model.

    `all_reduce` sums a tensor over the ranks in place and returns it.
    """

    rank: int
    world_size: int
    all_reduce: Callable[[Tensor], Tensor]


@dataclass(slots=True)
class CausalLM:
    """A language model on one device, or one rank's shard of it; it may have an encoder (`encoder_decoder`)."""

    module: nn.Module
    config: PreTrainedConfig
    info: ModelInfo
    device: torch.device
    dtype: torch.dtype
    shard: Shard | None = None

    @property
    def kv_shape(self) -> KVShape:
        """What this rank's KV cache holds per token."""
        return kv_shape(self.config, self.shard.world_size if self.shard else 1)


def kv_shape(config: PreTrainedConfig, world_size: int) -> KVShape:
    """Return what the KV cache of a rank holds per token.

    Latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) is cached as the keys and values that it is expanded
    to, one of each per query head.
    """
    text = config.get_text_config()
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    key_dim = value_dim = head_dim
    if getattr(text, "kv_lora_rank", None):
        kv_heads = heads
        key_dim, value_dim = text.qk_nope_head_dim + text.qk_rope_head_dim, text.v_head_dim
    layers = text.num_decoder_layers if config.is_encoder_decoder else text.num_hidden_layers
    return KVShape(layers, kv_heads // world_size, key_dim, value_dim)


def forward(
    module: nn.Module, token_ids: Tensor, positions: Tensor, logit_indices: Tensor, context: AttentionContext
) -> Tensor:
    """Run a transformers model's forward, including anything after its head, such as logit scaling.

    Args:
        token_ids, positions: [tokens] int64.
        logit_indices: [n] the tokens that need logits.

    Returns:
        [n, vocab] logits, in the model's number format.
    """
    logits: Tensor = module(
        input_ids=token_ids.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        use_cache=False,
        logits_to_keep=logit_indices,
        paged=context,
    ).logits
    return logits[0]
