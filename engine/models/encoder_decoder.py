"""Encoder-decoders of the T5 family, whose encoder's output lies in the same KV cache as the decoder's tokens.

A request's context is the encoder's input, the token that starts the text, and the text. In every layer of the cache,
the slots of the encoder's tokens hold their keys and values for cross-attention, and those of the decoder's tokens
theirs for self-attention. So one block table holds all that a request needs: it is planned, allocated, preempted and
computed again like any other.

The encoder runs once, over one whole input at a time. The decoder's passes are flat and paged, as in `attention`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from engine.execution.attention import AttentionContext, KVTensors, write_slots
from engine.execution.batch import EncoderInput, ForwardBatch
from engine.execution.dot_product import AttentionParams

DECODER_ATTENTION = "paceline_encoder_decoder"
CONTEXT_LENGTH = 2048
"""Tokens of prompt and text together; the models set no limit, because their positions are relative."""


def prepare(module: nn.Module) -> None:
    """Change a loaded module for `compute`: its decoder's attention, its biases, and the projections of its encoder.

    The keys and values of cross-attention are computed from the encoder's output, so the decoder's layers need no
    projections for them. Its self-attention passes on a table of biases by distance in place of a bias for every pair.
    """
    decoder: Any = module.decoder
    decoder.config._attn_implementation = DECODER_ATTENTION
    decoder.register_forward_hook(_keep_tokens_with_logits, with_kwargs=True)
    projections = nn.ModuleList()
    for block in decoder.block:
        self_attention, cross_attention = block.layer[0].SelfAttention, block.layer[1].EncDecAttention
        if self_attention.has_relative_attention_bias:
            self_attention.compute_bias = _Constant(_bias_by_distance(self_attention))
        projections.append(nn.ModuleList([cross_attention.k, cross_attention.v]))
        cross_attention.k, cross_attention.v = nn.Identity(), nn.Identity()
    module.encoder_projections = projections


def compute(module: nn.Module, batch: ForwardBatch) -> Tensor:
    """Encode the batch's inputs, then run the decoder.

    Returns:
        [n, vocab] logits, in the model's number format.
    """
    for encoder_input in batch.encoder_inputs:
        _encode(module, encoder_input, batch.paged.kv)
    config: Any = module.config
    if not len(batch.token_ids):
        return torch.empty(0, config.vocab_size, device=batch.token_ids.device)
    # Tells the layers to call cross-attention. Its keys and values are in the cache, so its content does not matter.
    placeholder = torch.zeros(1, 1, config.num_heads * config.d_kv, device=batch.token_ids.device)
    logits: Tensor = module(
        decoder_input_ids=batch.token_ids.unsqueeze(0),
        encoder_outputs=(placeholder,),
        use_cache=False,
        logits_to_keep=batch.logit_indices,
        paged=batch.paged,
    ).logits
    return logits[0]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    position_bias: Tensor,
    paged: AttentionContext,
    **_: object,
) -> tuple[Tensor, None]:
    """Attend in a layer of the decoder; transformers calls this.

    Args:
        query: [1, heads, tokens, d].
        key, value: [1, heads, tokens, d] of self-attention; of cross-attention they mean nothing.
        position_bias: [heads, distances] of self-attention; of cross-attention it means nothing.

    Returns:
        [1, tokens, heads, d], and None for the attention weights.
    """
    assert attention_mask is None
    is_cross = not module.is_causal
    params = AttentionParams(scaling=scaling, bias=None if is_cross else position_bias, is_cross=is_cross)
    layer: int = module.layer_idx  # type: ignore[assignment]
    return paged.attend(layer, query[0], key[0], value[0], params).unsqueeze(0), None


class _Constant:
    """A function that returns the same tensor for all arguments."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __call__(self, *_: object, **__: object) -> Tensor:
        return self._tensor


def _bias_by_distance(attention: Any) -> Tensor:
    """Return [heads, distances] the biases between a token and those before it; all longer distances have the last."""
    longest = attention.relative_attention_max_distance
    bias: Tensor = attention.compute_bias(1, longest + 1, past_seen_tokens=longest)
    return bias[0, :, 0].flip(-1)


def _keep_tokens_with_logits(_: nn.Module, __: object, kwargs: dict[str, Any], output: Any) -> Any:
    """Drop the decoder's other outputs, before the head computes logits from them."""
    output.last_hidden_state = output.last_hidden_state[:, kwargs["logits_to_keep"]]
    return output


def _encode(module: nn.Module, encoder_input: EncoderInput, kv: KVTensors) -> None:
    """Run the encoder, and write the keys and values of every layer's cross-attention."""
    encoder: Any = module.encoder
    hidden = encoder(input_ids=encoder_input.token_ids.unsqueeze(0)).last_hidden_state[0]
    projections: Any = module.encoder_projections
    for layer, pair in enumerate(projections):
        for cache, projection in zip((kv.keys[layer], kv.values[layer]), pair, strict=True):
            entries = projection(hidden).unflatten(-1, cache.shape[2:]).transpose(0, 1)
            write_slots(cache, encoder_input.slots, entries)


AttentionInterface.register(DECODER_ATTENTION, attend)
