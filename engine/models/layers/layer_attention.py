"""The attention parameters of a model's layers, and the attention function that transformers calls without a mask."""

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
    """The size of a KV cache per token."""

    layers: int  # only layers with their own keys and values
    kv_heads: int
    key_dim: int
    value_dim: int  # 0 if the keys serve as values, as in latent attention
    each: tuple[tuple[int, int, int], ...] = ()  # by layer, if they differ; above are then the largest layer's

    @property
    def sizes(self) -> tuple[tuple[int, int, int], ...]:
        return self.each or (self[1:4],) * self.layers

    @property
    def token_numbers(self) -> int:
        return sum(heads * (key_dim + value_dim) for heads, key_dim, value_dim in self.sizes)


class AttentionParams(NamedTuple):
    """How a layer attends.

    `masking` returns the additive mask [rows, heads or 1, length or 1, context], given a group, the queries and the
    block size, in place of the group's own mask.
    With `temperature` (length, strength), queries are multiplied by `1 + strength * log(1 + (position + 1) // length)`.
    """

    window: int | None = None  # length of a sliding window; None for full attention
    scaling: float | None = None  # factor of the dot products; None for 1 / sqrt(head_dim)
    softcap: float | None = None  # bounds a score as `softcap * tanh(score / softcap)` (arXiv:2408.00118, section 2)
    sinks: Tensor | None = None  # [heads] an extra score per head, without a value (arXiv:2309.17453)
    masking: Callable[[Any, Tensor, int], Tensor] | None = None
    first: int = 0  # earlier places are attended to by their own tokens only
    sees_row: bool = False  # every token attends to its whole row, also to later places
    chunk: int | None = None  # a token attends only within its own chunk of so many positions
    temperature: tuple[float, float] | None = None
    is_shared: bool = False  # the layer's keys and values are in the cache already

    @property
    def is_plain(self) -> bool:
        """Whether torch's operator suffices: a softmax of scaled dot products."""
        return self.softcap is None and self.sinks is None


class AttentionContext(Protocol):
    """Access of layers to the cache in one forward pass; backends implement it.

    taps: outputs of some layers, [1, tokens, width] each, by the number of layers up to there.
    """

    taps: dict[int, Tensor]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Tensor:
        """Write a layer's new keys and values to their slots, then attend; returns [tokens, heads, value_dim].

        query: [heads, tokens, key_dim]; key, value: [kv_heads, tokens, key_dim or value_dim].
        """
        ...

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write a layer's new keys and values to their slots, without attending; shapes as in `attend`."""
        ...

    def read_states(self, *, of_parents: bool) -> Tensor:
        """Return the tokens' or their parents' states, [tokens, state_size]; a first token gets an arbitrary state."""
        ...

    def write_states(self, states: Tensor, tokens: Tensor | None = None) -> None:
        """Write states [n, state_size] of the pass's tokens with these indices; None: all tokens, -1: skipped."""
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
    """Write keys and values to their slots, then attend; raise ModelError if the layer needs an unsupported feature.

    transformers calls this in every layer. query: [1, heads, tokens, key_dim]; key, value: [1, kv_heads, tokens, dim];
    `masking` in kwargs: see `AttentionParams`. Returns [1, tokens, heads, value_dim], and None for the weights.
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
