"""EAGLE-3 (Li et al., arXiv:2503.01840) and EAGLE-3.1: layers over each token and its predecessor's feature.

A feature is the target's outputs at a few layers, projected to the head's width. If the target has not computed the
predecessor, the head's own output replaces the feature, as in training ("training-time test").
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from engine.heads.config import HeadConfig
from engine.heads.head import Head, HeadOutput, Rotary, keys_and_values
from engine.models.layers.layer_attention import ATTENTION_NAME, AttentionContext

_LAYERS: dict[str, Any] = {"llama": LlamaDecoderLayer, "qwen3": Qwen3DecoderLayer}


class Eagle3Head(Head):
    """Drafts one token a pass; its parameters have the names of `speculators`."""

    def __init__(self, config: HeadConfig, embed_tokens: nn.Module, lm_head: nn.Module, first_layer: int) -> None:
        super().__init__(config, embed_tokens, lm_head, first_layer)
        layers: Any = config.layers
        width = config.target_hidden_size
        layers._attn_implementation = ATTENTION_NAME
        self.fc = nn.Linear(len(config.taps) * width, layers.hidden_size, bias=config.fc_bias)
        self.input_norm = _norm(layers, len(config.taps) * width) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList([_norm(layers, width) for _ in config.taps]) if config.fc_norm else None
        self.layers = nn.ModuleList([_LAYERS[layers.model_type](layers, i) for i in range(layers.num_hidden_layers)])
        first: Any = self.layers[0]
        first.hidden_norm = _norm(layers, layers.hidden_size)
        for name in ("q_proj", "k_proj", "v_proj"):
            projection = getattr(first.self_attn, name)
            wider = nn.Linear(2 * layers.hidden_size, projection.out_features, projection.bias is not None)
            setattr(first.self_attn, name, wider)
        kinds = getattr(layers, "layer_types", None) or ["full_attention"] * len(self.layers)
        for index, (layer, kind) in enumerate(zip(self.layers, kinds, strict=True), first_layer):
            attention: Any = layer.self_attn
            attention.layer_idx, attention.attends_from = index, self.attends_from
            # Llama's layers have no window of their own.
            attention.window = layers.sliding_window if kind == "sliding_attention" else None
        self.norm = _norm(layers, layers.hidden_size)
        self.rotary_emb = LlamaRotaryEmbedding(layers)

    def feature(self, taps: Sequence[Tensor]) -> Tensor:
        if self.fc_norm is not None:
            taps = [norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)]
        joined = torch.cat(list(taps), -1)
        result: Tensor = self.fc(joined if self.input_norm is None else self.input_norm(joined))
        return result

    def absorb(self, token_ids: Tensor, positions: Tensor, context: AttentionContext) -> None:
        """Write keys and values; the last layer's output is not needed."""
        embedded, states = self._inputs(token_ids, context)
        rotary = self.rotary_emb(embedded, positions)
        for layer in range(len(self.layers) - 1):
            states = self._run(layer, embedded, states, rotary, paged=context)
        last = len(self.layers) - 1
        attention: Any = self.layers[last].self_attn
        context.write(attention.layer_idx, *keys_and_values(attention, self._joined(last, embedded, states), rotary))

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor, paged: AttentionContext, **_: object
    ) -> HeadOutput:
        """Compute a pass over [1, tokens], and keep the head's own states of the tokens in `logits_to_keep`, [n]."""
        embedded, states = self._drafting_inputs(input_ids, paged)
        rotary = self.rotary_emb(embedded, position_ids)
        for layer in range(len(self.layers)):
            states = self._run(layer, embedded, states, rotary, paged=paged)
        states = states[:, logits_to_keep]
        normed = self.norm(states)
        paged.write_states((normed if self.config.norm_output else states)[0], logits_to_keep)
        return HeadOutput(self.vocab_logits(normed))

    def _inputs(self, token_ids: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        embedded: Tensor = self.embed_tokens(token_ids)
        return embedded, context.read_states(of_parents=True).unsqueeze(0).to(embedded.dtype)

    def _drafting_inputs(self, token_ids: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        return self._inputs(token_ids, context)

    def _joined(self, index: int, embedded: Tensor, states: Tensor) -> Tensor:
        layer: Any = self.layers[index]
        if index:
            normed: Tensor = layer.input_layernorm(states)
            return normed
        return torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(states)], -1)

    def _run(self, index: int, embedded: Tensor, states: Tensor, rotary: Rotary, **paged: object) -> Tensor:
        layer: Any = self.layers[index]
        joined = self._joined(index, embedded, states)
        if index == 0 and self.config.norm_before_residual:
            states = layer.hidden_norm(states)
        attended, _ = layer.self_attn(joined, position_embeddings=rotary, attention_mask=None, **paged)
        states = states + attended
        result: Tensor = states + layer.mlp(layer.post_attention_layernorm(states))
        return result


def _norm(config: PreTrainedConfig, size: int) -> nn.Module:
    return LlamaRMSNorm(size, eps=config.rms_norm_eps)
