"""The attention parameters of a model's layers, and the attention function that transformers calls.

The function's name is not in transformers' mask registry, so that transformers builds no mask itself.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from engine.errors import ModelError

ATTENTION_NAME = "paceline"
_SUPPORTED = {
    *("paged", "sliding_window", "softcap", "s_aux", "dropout", "logit_indices"),
    *("masking", "position_ids", "is_causal", "use_cache", "output_attentions", "output_router_logits"),
}


class KVShape(NamedTuple):
    """The size of a KV cache per token: layers, key/value heads, and the sizes of keys and values.

    Values of size 0 are not stored: they are the keys themselves, as in latent attention.

    Attributes:
        layers: those with keys and values of their own.
        each: heads and sizes of every layer, if they differ; the others are then those of the largest layer.
    """

    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    each: tuple[tuple[int, int, int], ...] = ()

    @property
    def sizes(self) -> tuple[tuple[int, int, int], ...]:
        """Heads and sizes of every layer."""
        return self.each or (self[1:4],) * self.layers

    @property
    def token_numbers(self) -> int:
        """How many numbers a token's keys and values have in all layers."""
        return sum(heads * (key_dim + value_dim) for heads, key_dim, value_dim in self.sizes)


class AttentionParams(NamedTuple):
    """How a layer attends.

    Attributes:
        window: length of a sliding window; None for full attention.
        scaling: factor of the dot products; None for 1 / sqrt(head_dim).
        softcap: bound on the scores, `softcap * tanh(score / softcap)` (Gemma 2, arXiv:2408.00118, section 2).
        sinks: [heads] an extra score per head, without a value (gpt-oss; Xiao et al., arXiv:2309.17453).
        masking: returns the additive mask [rows, heads or 1, length or 1, context], given a group, the queries and the
            block size, in place of the group's own.
        first: places before it are not attended to; a token at one of them attends to itself.
        sees_row: every token attends to all places up to the end of its row, not only up to its own.
        chunk: a token attends to those positions only that are in its own chunk of so many.
        temperature: (length, strength): queries are multiplied by `1 + strength * log(1 + (position + 1) // length)`.
        is_shared: the layer's keys and values are in the cache already.
    """

    window: int | None = None
    scaling: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    masking: Callable[[Any, Tensor, int], Tensor] | None = None
    first: int = 0
    sees_row: bool = False
    chunk: int | None = None
    temperature: tuple[float, float] | None = None
    is_shared: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether torch's operator suffices: a softmax of scaled dot products."""
        return self.softcap is None and self.sinks is None


class AttentionContext(Protocol):
    """The access of attention functions and heads to the cache in one forward pass; backends implement it.

    Attributes:
        taps: the outputs of tapped layers, [1, tokens, width] each, by the number of layers before them.
    """

    taps: dict[int, Tensor]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Write a layer's new keys and values to their slots, then attend.

        Args:
            query: [heads, tokens, key_dim].
            key, value: [kv_heads, tokens, key_dim or value_dim].

        Returns:
            [tokens, heads, value_dim].
        """
        ...

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write a layer's new keys and values to their slots, and do not attend; shapes as in `attend`."""
        ...

    def read_states(self, *, of_parents: bool) -> Tensor:
        """Return the state of each token or of the token before it, [tokens, state_size].

        The token before a draft's node is its parent. What a context's first token gets is finite and means nothing.
        """
        ...

    def write_states(self, states: Tensor, tokens: Tensor | None = None) -> None:
        """Write states [n, state_size] of the tokens with these indices in the pass; None: of all, -1: of none."""
        ...


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Write keys and values to their slots, then attend; transformers calls this in every layer.

    Args:
        query: [1, heads, tokens, key_dim].
        key, value: [1, kv_heads, tokens, key_dim or value_dim].
        kwargs: `masking` is that of `AttentionParams`.

    Returns:
        [1, tokens, heads, value_dim], and None for the attention weights.

    Raises:
        ModelError: the layer needs an attention feature that is not supported.
    """
    unsupported = sorted(name for name in kwargs.keys() - _SUPPORTED if kwargs[name] is not None)
    if unsupported or attention_mask is not None or kwargs.get("dropout"):
        raise ModelError(f"attention with {', '.join(unsupported) or 'a mask or dropout'} is not supported")
    if "paged" not in kwargs:
        raise ModelError("its layers do not pass keyword arguments on to their attention")
    context: AttentionContext = kwargs["paged"]
    # Not made an int: while layers are compiled, their index is symbolic.
    layer: int = getattr(module, "kv_layer", module.layer_idx)  # type: ignore[arg-type]
    params = AttentionParams(
        kwargs.get("sliding_window") or getattr(module, "window", None),
        scaling,
        kwargs.get("softcap"),
        kwargs.get("s_aux"),
        masking=kwargs.get("masking"),
        first=getattr(module, "attends_from", 0),
        sees_row=getattr(module, "sees_row", False),
        chunk=getattr(module, "chunk", None),
        temperature=getattr(module, "temperature", None),
        is_shared=getattr(module, "is_kv_shared_layer", False),
    )
    query, latents = query[0], getattr(module, "latents", None)
    if latents is not None:
        query = latents.query(query)
    output = context.attend(layer, query, key[0], value[0], params)
    if latents is not None:
        output = latents.output(output)
    # Contiguous, because some models view it as [1, tokens, heads * value_dim].
    return output.unsqueeze(0).contiguous(), None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
