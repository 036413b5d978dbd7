"""MtpHead: a checkpoint's multi-token prediction layer drafts (DeepSeek-V3, arXiv:2412.19437, section 2.2).

Checkpoints hold it after their decoder layers; transformers drops it. It is a decoder layer of the family, over a
projection of a token's embedding and its predecessor's state. States are normed: the target's by its final norm, the
layer's own by its last norm. As in transformers' `MTPCandidateGenerator`, no embedding is zeroed; vLLM zeroes the
second token's. Of several such layers only the first drafts: later ones cache what depends on later tokens.
"""

import copy
import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import WeightRenaming

from engine.errors import ModelError
from engine.heads.config import HeadConfig
from engine.heads.head import Head, HeadOutput, Rotary
from engine.models.layers.layer_attention import ATTENTION_NAME, AttentionContext, AttentionParams
from engine.models.layers.quantization import on_meta
from engine.models.source import ModelSource
from engine.models.weights import FileNames

logger = logging.getLogger(__name__)

_PUBLISHED = {
    "enorm": r"layers\.{n}\.enorm|mtp\.pre_fc_norm_embedding|mtp_layers\.0\.token_layernorm",
    "hnorm": r"layers\.{n}\.hnorm|mtp\.pre_fc_norm_hidden|mtp_layers\.0\.hidden_layernorm",
    "eh_proj": r"layers\.{n}\.eh_proj|mtp\.fc|mtp_layers\.0\.input_proj",
    "norm": r"layers\.{n}\.shared_head\.norm|mtp\.norm|mtp_layers\.0\.final_layernorm",
    "mtp_block": r"layers\.{n}(?!\.embed_tokens|\.shared_head)|mtp\.layers\.0|mtp_layers\.0",
}
"""Names in files of DeepSeek-V3 and GLM (targets of n layers); of Qwen and Mellum; of MiMo and speculators."""


class MtpHead(Head):
    """Drafts one token a pass; its weights are on the meta device until they are loaded."""

    def __init__(self, config: HeadConfig, embed_tokens: nn.Module, lm_head: nn.Module, first_layer: int) -> None:
        super().__init__(config, embed_tokens, lm_head, first_layer)
        layers, dtype = config.layers, torch.get_default_dtype()
        model: Any = on_meta(layers, attn_implementation=ATTENTION_NAME, dtype=dtype)
        decoder = model.get_decoder()
        self.enorm, self.hnorm, self.norm = (copy.deepcopy(decoder.norm) for _ in range(3))
        self.eh_proj = nn.Linear(2 * layers.hidden_size, layers.hidden_size, False, device="meta", dtype=dtype)
        self.mtp_block = decoder.layers[0]
        self.mtp_block.self_attn.layer_idx = first_layer
        self.mtp_block.self_attn.attends_from = self.attends_from
        self.rotary_emb = type(decoder.rotary_emb)(layers)
        published = {part: names.format(n=config.taps[0]) for part, names in _PUBLISHED.items()}
        renamings = [WeightRenaming(rf"^(?:model\.)?(?:{names})\.", f"{part}.") for part, names in published.items()]
        self.names = _Names(model, renamings)

    def attach(self, lm: Any, source: ModelSource) -> None:
        projections = [name for name in source.weight_shapes if self.names.parameter(name) == "eh_proj.weight"]
        if not projections:
            raise ModelError(f"{source.path} has no MTP layers in its checkpoint")
        if source.settings.get("quantization_config"):
            raise ModelError(f"{source.path} is saved quantised, and so are its MTP layers, which are not served")
        if (count := source.settings.get("num_nextn_predict_layers") or 1) > 1:
            logger.info("%s: the first of %d MTP layers drafts every token", source.path, count)
        self._hidden_first = projections[0].endswith("input_proj.weight")
        self._target_norm = [lm.get_decoder().norm]  # in a list, because it is the target's

    def feature(self, taps: Sequence[Tensor]) -> Tensor:
        normed: Tensor = self._target_norm[0](taps[0])
        return normed

    def absorb(self, token_ids: Tensor, positions: Tensor, context: AttentionContext) -> None:
        """Write keys and values by the attention's whole forward, which alone computes latent keys."""

        def write(layer: int, query: Tensor, key: Tensor, value: Tensor, _: AttentionParams) -> Tensor:
            context.write(layer, key, value)
            return query.new_zeros(query.shape[1], query.shape[0], value.shape[-1])

        hidden, rotary = self._projected(token_ids, positions, context)
        normed, writer = self.mtp_block.input_layernorm(hidden), SimpleNamespace(attend=write)
        self.mtp_block.self_attn(normed, position_embeddings=rotary, attention_mask=None, paged=writer)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor, paged: AttentionContext, **_: object
    ) -> HeadOutput:
        hidden, rotary = self._projected(input_ids, position_ids, paged)
        hidden = self.mtp_block(hidden, position_embeddings=rotary, attention_mask=None, paged=paged)
        states = self.norm(hidden[:, logits_to_keep])
        paged.write_states(states[0], logits_to_keep)
        return HeadOutput(self.vocab_logits(states))

    def _projected(self, token_ids: Tensor, positions: Tensor, context: AttentionContext) -> tuple[Tensor, Rotary]:
        embedded = self.embed_tokens(token_ids)
        states = context.read_states(of_parents=True).unsqueeze(0).to(embedded.dtype)
        parts = [self.hnorm(states), self.enorm(embedded)]
        layers: Any = self.config.layers
        kinds = [kind for kind in getattr(layers, "layer_types", None) or () if kind in layers.rope_parameters]
        rotary = self.rotary_emb(embedded, positions, *kinds)  # some families rotate each type of layer in its own way
        return self.eh_proj(torch.cat(parts if self._hidden_first else parts[::-1], -1)), rotary


class _Names(FileNames):
    def parameter(self, name: str) -> str:
        """Return a tensor's parameter; "" for tensors that are the target's, or copies of them."""
        renamed = super().parameter(name)
        return renamed if renamed.partition(".")[0] in _PUBLISHED else ""
