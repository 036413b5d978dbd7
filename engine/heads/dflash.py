"""DFlashHead: predicts a block of masked places in one pass.

In DFlash (Chen et al., arXiv:2602.06036), keys and values of the context are projections of each token's own feature.
DSpark (arXiv:2607.05147) adds a bias by the token drawn before a place. Its confidence head is not read: it predicts
the overlap of two distributions, not whether draws under shared noise agree.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

from engine.heads.config import HeadConfig
from engine.heads.head import Head, HeadOutput, keys_and_values
from engine.models.layers.layer_attention import ATTENTION_NAME, AttentionContext


class DFlashHead(Head):
    """Drafts a block whose places see one another; in a layer with a window they attend causally by default.

    num_unread: a block's places before the first that predicts; markov_head: None if logits ignore the token before.
    """

    drafts_blocks: ClassVar[bool] = True
    attends_from: int = 0

    def __init__(self, config: HeadConfig, embed_tokens: nn.Module, lm_head: nn.Module, first_layer: int) -> None:
        super().__init__(config, embed_tokens, lm_head, first_layer)
        layers: Any = config.layers
        self.num_unread = int(not config.sample_from_anchor)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        layers._attn_implementation = ATTENTION_NAME
        self.fc = nn.Linear(len(config.taps) * config.target_hidden_size, layers.hidden_size, bias=config.fc_bias)
        self.hidden_norm = Qwen3RMSNorm(layers.hidden_size, layers.rms_norm_eps)
        self.layers = nn.ModuleList([Qwen3DecoderLayer(layers, index) for index in range(layers.num_hidden_layers)])
        self.norm = Qwen3RMSNorm(layers.hidden_size, layers.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(layers)
        for index, layer in enumerate(self.layers, first_layer):
            attention: Any = layer.self_attn
            attention.layer_idx, attention.attends_from = index, self.attends_from
            attention.sees_row = attention.sliding_window is None or config.sliding_window_non_causal

    def feature(self, taps: Sequence[Tensor]) -> Tensor:
        result: Tensor = self.hidden_norm(self.fc(torch.cat(list(taps), -1)))
        return result

    def absorb(self, token_ids: Tensor, positions: Tensor, context: AttentionContext) -> None:
        features = context.read_states(of_parents=False).unsqueeze(0).to(self.norm.weight.dtype)
        rotary = self.rotary_emb(features, positions)
        for layer in self.layers:
            attention: Any = layer.self_attn
            context.write(attention.layer_idx, *keys_and_values(attention, features, rotary))

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor, paged: AttentionContext, **_: object
    ) -> HeadOutput:
        if not len(logits_to_keep):
            return self.absorbed(input_ids, position_ids, paged)
        hidden = self.embed_tokens(input_ids)
        rotary = self.rotary_emb(hidden, position_ids)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=rotary, paged=paged)
        hidden = self.norm(hidden[:, logits_to_keep])
        if self.markov_head is not None and self.markov_head.reads_hidden:
            paged.write_states(hidden[0], logits_to_keep)  # the verification overwrites them
        return HeadOutput(self.vocab_logits(hidden))


class MarkovHead(nn.Module):
    """The bias of a place's logits by the token drawn before it: low-rank, gated by the place, or recurrent."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        rank, hidden = config.markov_rank, config.layers.hidden_size
        self._type = config.markov_head_type
        self.reads_hidden = self._type != "vanilla"
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if self._type == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif self._type == "rnn":
            self.joint_proj = nn.Linear(hidden + 2 * rank, 3 * rank)

    def forward(self, previous: Tensor, hidden: Any, state: Any) -> tuple[Tensor, Any]:
        """Return the bias, [n, draft_vocab_size], and the next state, [n, rank] or None.

        previous: [n] target tokens; hidden: [n, hidden] of the places, if `reads_hidden`; state: None at first places.
        """
        embedded = self.markov_w1(previous)
        if self._type == "gated":
            embedded = embedded * self.gate_proj(torch.cat([hidden, embedded], -1)).sigmoid()
        elif self._type == "rnn":
            state = torch.zeros_like(embedded) if state is None else state
            gate, candidate, output = self.joint_proj(torch.cat([state, embedded, hidden], -1)).chunk(3, -1)
            state = torch.lerp(candidate.tanh(), state.to(candidate.dtype), gate.sigmoid())
            embedded = output.tanh()
        return self.markov_w2(embedded), state
