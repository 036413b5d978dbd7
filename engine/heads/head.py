"""Head: the base class of trained heads, small models that draft from the outputs of a target's layers.

All that a head keeps of a context is in the target's KV cache: its keys and values in layers after the target's, and
one state per token. A committed token's state is its feature, made from tapped outputs in every pass of the target.
While drafting, a head writes its own states over those of the tokens that it reads; the verification overwrites them.
So a rejected draft leaves no trace, and whatever shares, moves or frees the target's blocks serves the head, too.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from engine.heads.config import HeadConfig
from engine.models.causal_lm import CausalLM, kv_shape
from engine.models.layers.layer_attention import AttentionContext, KVShape
from engine.models.source import ModelSource

NEVER = -1e30
"""Logit of tokens that a head cannot draft: probability 0, but finite."""
Rotary = tuple[Tensor, Tensor]
"""Cosines and sines of a pass's positions."""


class HeadOutput(NamedTuple):
    """What `Head.forward` returns; logits: [1, n, vocab]."""

    logits: Tensor


class Head(nn.Module):
    """A trained head over the cache of its target.

    Attributes:
        embed_tokens, lm_head: its own, or the target's.
        num_tokens: only ids of logits below it are drafted; the target's tokenizer has no others.
        target_ids: [draft vocabulary] the target's id of each draft token; None if all are the same.
    """

    drafts_blocks: ClassVar[bool] = False  # one pass drafts several tokens
    calls_inside_layers: ClassVar[bool] = True  # and not only its layers, of which each may be compiled as a whole
    attends_from: int = 1  # place 0 is empty if a place combines a token with the feature of the token before
    keeps_kv: bool = True  # False in a target whose head runs in a draft worker

    def __init__(self, config: HeadConfig, embed_tokens: nn.Module, lm_head: nn.Module, first_layer: int) -> None:
        """Store what a head may share with its target; `first_layer` is the index of its first layer in the cache."""
        super().__init__()
        self.config = config
        self.first_layer = first_layer
        self.embed_tokens, self.lm_head = embed_tokens, lm_head
        self.num_tokens = config.vocab_size
        self.target_ids: Tensor | None
        self.register_buffer("target_ids", None, persistent=False)

    @property
    def kv_shape(self) -> KVShape:
        """Keys and values that it caches per token."""
        shape = kv_shape(self.config.layers, 1)
        return shape if self.keeps_kv else shape._replace(layers=0)

    @property
    def state_size(self) -> int:
        """The number of values in a token's state."""
        return int(self.config.layers.hidden_size)

    def feature(self, taps: Sequence[Tensor]) -> Tensor:
        """Return each token's feature, [tokens, state_size], given the tapped outputs [tokens, width]."""
        raise NotImplementedError

    def absorb(self, token_ids: Tensor, positions: Tensor, context: AttentionContext) -> None:
        """Write the keys and values of a pass's tokens, [1, tokens], whose features are cached."""
        raise NotImplementedError

    def absorbed(self, token_ids: Tensor, positions: Tensor, context: AttentionContext) -> HeadOutput:
        """Absorb in a pass of the head alone; its passes that need no logits do so if it drafts blocks."""
        self.absorb(token_ids, positions, context)
        return HeadOutput(token_ids.new_empty(1, 0, self.config.vocab_size))

    def attach(self, lm: nn.Module, source: ModelSource) -> None:
        """Take what the head needs of the target's module; raise ModelError if files do not fit. Weights come later."""

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def vocab_logits(self, hidden: Tensor) -> Tensor:
        """Return logits in the order of the target's vocabulary, [..., vocab]."""
        logits: Tensor = self.lm_head(hidden)
        if self.config.logit_scale != 1:
            logits = logits * self.config.logit_scale
        if (cap := self.config.logit_cap) is not None:
            logits = cap * (logits / cap).tanh()
        if self.target_ids is not None:
            full = logits.new_full((*logits.shape[:-1], self.config.vocab_size), NEVER)
            logits = full.index_copy(-1, self.target_ids, logits)
        if self.num_tokens < self.config.vocab_size:
            logits[..., self.num_tokens :] = NEVER
        return logits


def keys_and_values(attention: Any, hidden: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
    """Return the keys and values of [1, tokens, width] hidden states, [kv_heads, tokens, head_dim] each."""
    shape = (*hidden.shape[:-1], -1, attention.head_dim)
    key, value = (projection(hidden).view(shape) for projection in (attention.k_proj, attention.v_proj))
    if hasattr(attention, "k_norm"):
        key = attention.k_norm(key)
    key = key.transpose(1, 2)
    _, key = apply_rotary_pos_emb(key, key, *rotary)
    return key[0], value.transpose(1, 2)[0]


def head_model(model: CausalLM) -> CausalLM:
    """Return the head that is loaded with a model, as a model over the same cache."""
    head = getattr(model.module, "head", None)
    assert isinstance(head, Head), "no head is loaded"
    return without_target(model, head)


def without_target(model: CausalLM, head: Head, **facts: Any) -> CausalLM:
    """Return a head as a model by itself, whole on every rank; `facts` are fields of its info unlike the target's."""
    num_parameters = sum(parameter.numel() for parameter in head.parameters())
    info = replace(model.info, num_parameters=num_parameters, state_chunk=0, **facts)
    return replace(model, module=head, head=head, info=info, shard=None, state_shapes=())
