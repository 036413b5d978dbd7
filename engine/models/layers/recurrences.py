"""Recurrences: how a token changes a linear layer's matrices, and transformers' functions for many tokens.

A matrix is S [rows, columns] per head. Gated delta rules (Yang et al., arXiv:2412.06464, section 3; per channel: Kimi
Linear, arXiv:2510.26692, section 3) have rows of key size and columns of value size. Mamba 2 (Dao and Gu,
arXiv:2405.21060, section 6) has rows of input size and columns of B's size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional

from engine.models.layers.layer_state import Recurrence, Update


@dataclass(frozen=True)
class GatedDelta(Recurrence):
    """S' = d S + k (x) b (v - (d S)^T k), output S'^T q; inputs q, k, v, log d and b; d is per head or per row."""

    chunk: int = 64

    def sizes(self, inputs: Sequence[Tensor]) -> tuple[int, int, int, int, int]:
        _, key, value, decay, _ = inputs
        heads, rows, columns = value.shape[1], key.shape[2], value.shape[2]
        return heads, rows, columns, heads, rows if decay.dim() == value.dim() else 1

    def update(self, state: Tensor, inputs: Sequence[Tensor]) -> Update:
        _, key, value, decay, beta = inputs
        key = _unit_vectors(key, state.shape[1])
        factors = decay.float().exp().reshape(*state.shape[:2], -1)
        known = (state * (factors * key).unsqueeze(-1)).sum(-2)
        return Update(factors, key, (value.float() - known) * beta.float().unsqueeze(-1))

    def output(self, state: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        query = _unit_vectors(inputs[0], state.shape[1]) * inputs[0].shape[-1] ** -0.5
        output: Tensor = (state * query.unsqueeze(-1)).sum(-2)
        return output.to(inputs[0].dtype)

    def _scan_chunk(self, state: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        query, key, value, decay, beta = inputs
        flags = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        return self.by_chunk(query, key, value, g=decay, beta=beta, initial_state=state, **flags)


@dataclass(frozen=True)
class Mamba2(Recurrence):
    """S' = exp(t A) S + t x (x) B, output S' C + D x; inputs x, t before its bias, B and C.

    t is softplus(t + bias) within `limits`, in the model's dtype as in transformers. a, d, bias: [heads].
    """

    a: Tensor
    d: Tensor
    bias: Tensor
    limits: tuple[float, float]

    def sizes(self, inputs: Sequence[Tensor]) -> tuple[int, int, int, int, int]:
        x, _, b, _ = inputs
        return x.shape[1], x.shape[2], b.shape[2], b.shape[1], 1

    def update(self, state: Tensor, inputs: Sequence[Tensor]) -> Update:
        x, step, b, _ = inputs
        step = functional.softplus(step + self.bias.to(step.dtype)).clamp(*self.limits).float().unsqueeze(-1)
        return Update((step * self.a.float().unsqueeze(-1)).exp(), x.float() * step, b.float())

    def output(self, state: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """Return the outputs of tokens, in float32; see `Recurrence.output`."""
        x, _, _, c = inputs
        c = c.float().repeat_interleave(x.shape[1] // c.shape[1], dim=1)
        return (state * c.unsqueeze(-2)).sum(-1) + self.d.float().unsqueeze(-1) * x.float()

    def _scan_chunk(self, state: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        x, step, b, c = inputs
        fixed: dict[str, Any] = {"chunk_size": self.chunk, "D": self.d, "dt_bias": self.bias, "dt_limit": self.limits}
        flags = {"dt_softplus": True, "return_final_states": True}
        return self.by_chunk(x, step, self.a, b, c, initial_states=state, **fixed, **flags)


def _unit_vectors(vectors: Tensor, heads: int) -> Tensor:
    """[n, groups, size] -> [n, heads, size]."""
    vectors = vectors.float()
    vectors = vectors * (vectors.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    return vectors.repeat_interleave(heads // vectors.shape[1], dim=1)
