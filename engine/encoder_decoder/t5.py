"""Encoder-decoders of the T5 family, whose encoder's output lies in the same KV cache as the decoder's tokens.

A request's context is the encoder's input, the token that starts the text, and the text. In each layer of the cache,
input tokens have keys and values for cross-attention, and text tokens for self-attention. So a request has one block
table, like any other request. The encoder runs over one whole input at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForSeq2SeqLM, PreTrainedConfig

from engine.models.causal_lm import CausalLM
from engine.models.layers.layer_attention import paged_attention

_ATTENTION_NAME = "paceline-decoder"


@dataclass
class EncoderDecoderLM(CausalLM):
    """A loaded encoder-decoder.

    Keys and values of cross-attention are computed when an input is encoded, so these projections move out of the
    decoder's layers. Self-attention passes on a table of biases by distance in place of a bias for every pair.
    """

    loaded_by = AutoModelForSeq2SeqLM
    attention = "sdpa"

    @classmethod
    def why_eager(cls, _config: PreTrainedConfig) -> str | None:
        return "it is an encoder-decoder"

    def __post_init__(self) -> None:
        decoder: Any = self.module.decoder
        decoder.config._attn_implementation = _ATTENTION_NAME
        decoder.register_forward_hook(_keep_tokens_with_logits, with_kwargs=True)
        projections = nn.ModuleList()
        for block in decoder.block:
            self_attention, cross_attention = block.layer[0].SelfAttention, block.layer[1].EncDecAttention
            if self_attention.has_relative_attention_bias:
                self_attention.compute_bias = _constant(bias_by_distance(self_attention))
            projections.append(nn.ModuleList([cross_attention.k, cross_attention.v]))
            cross_attention.k, cross_attention.v = nn.Identity(), nn.Identity()
            cross_attention.is_kv_shared_layer = True
        self.module.encoder_projections = projections

    def forward(self, batch: Any) -> Tensor:
        for encoder_input in batch.added.inputs if batch.added is not None else ():
            self._encode(encoder_input.token_ids, encoder_input.slots, batch.paged)
        config: Any = self.module.config
        if not len(batch.token_ids):
            return torch.empty(0, config.vocab_size, device=batch.token_ids.device)
        # Makes the layers call cross-attention; its content is unused, because keys and values are in the cache.
        placeholder = torch.zeros(1, 1, config.num_heads * config.d_kv, device=batch.token_ids.device)
        logits: Tensor = self.module(
            decoder_input_ids=batch.token_ids.unsqueeze(0),
            encoder_outputs=(placeholder,),
            use_cache=False,
            logit_indices=batch.logit_indices,
            paged=batch.paged,
        ).logits
        return logits[0]

    def _encode(self, token_ids: Tensor, slots: Tensor, paged: Any) -> None:
        module: Any = self.module
        hidden = module.encoder(input_ids=token_ids.unsqueeze(0)).last_hidden_state[0]
        heads = (module.config.num_heads, module.config.d_kv)
        for layer, pair in enumerate(module.encoder_projections):
            key, value = (projection(hidden).unflatten(-1, heads).transpose(0, 1) for projection in pair)
            paged.write(layer, key, value, slots)


def bias_by_distance(attention: Any) -> Tensor:
    """Return the biases by distance between two tokens, [heads, distances]; longer distances have the last bias."""
    longest = attention.relative_attention_max_distance
    bias: Tensor = attention.compute_bias(1, longest + 1, past_seen_tokens=longest)
    return bias[0, :, 0].flip(-1)


def _constant(tensor: Tensor) -> Callable[..., Tensor]:
    return lambda *_, **__: tensor


def _keep_tokens_with_logits(_: nn.Module, __: object, kwargs: dict[str, Any], output: Any) -> Any:
    """Drop the decoder's other outputs, so that no logits are computed from them."""
    output.last_hidden_state = output.last_hidden_state[:, kwargs["logit_indices"]]
    return output


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *arguments: Any,
    position_bias: Tensor,
    **keywords: Any,
) -> tuple[Tensor, None]:

    def masking(group: Any, like: Tensor, block_size: int) -> Tensor:
        if module.is_causal:
            mask: Tensor = group.added.biased_mask(group, position_bias, block_size)
        else:
            mask = group.added.cross_mask(group, like, block_size)
        return mask

    return paged_attention(module, query, key, value, *arguments, masking=masking, **keywords)


AttentionInterface.register(_ATTENTION_NAME, _attention)
