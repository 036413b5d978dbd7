"""Counter-based Gumbel noise of (seed, stream, position, token id), the same on every device and in every batch.

If draft and target take the argmax of their logits plus the same noise, they agree with probability at least
(1 - TV) / (1 + TV), and exchange only token ids (Daliri, Musco and Suresh, "Coupling without Communication and
Drafter-Invariant Speculative Decoding"). The noise is a stateless hash, so a repeated or rebatched round draws the same
numbers. The integer hash is exact everywhere; its two logarithms may differ by an ulp between devices.
"""

import functools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TARGET_STREAM, DRAFT_STREAM, ACCEPT_STREAM, RESIDUAL_STREAM = range(4)
"""Independent streams of the draws at one position; a shared stream would bias the output.

The target and the coupled drafter draw from the first. Under rules with draft rows, the others are for draft tokens,
coins, and recovered and bonus tokens, drawn anew in every round; see `round_seed`.
"""

IMPLEMENTATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {}
"""Faster implementations of `gumbel` over a whole vocabulary, by device type."""
_MASK64 = (1 << 64) - 1


@dataclass(slots=True)
class Draws:
    """Temperatures and noise of a forward pass that draws tokens itself, for rows that need no shaping."""

    temperatures: Tensor  # [n, 1] float32, 1 for greedy rows
    keys: Tensor  # [m, 2] int32 from `keys`, for rows that are not greedy
    rows: Tensor  # [n] int64, the index of each row's key + 1; 0 is greedy

    def to(self, device: torch.device) -> "Draws":
        return Draws(*(tensor.to(device, non_blocking=True) for tensor in (self.temperatures, self.keys, self.rows)))

    def row_keys(self) -> Tensor:
        """Return every row's key, [n, 2] int32; a greedy row's is arbitrary."""
        return self.keys[(self.rows - 1).clamp(min=0)] if len(self.keys) else self.keys.new_zeros(len(self.rows), 2)


def keys(seeds: Sequence[int], positions: Sequence[int], stream: int, device: torch.device) -> Tensor:
    """Return the hash keys of (seed, position) pairs: [n, 2] int32."""
    keys = [
        _splitmix64((_hashed_seed(seed) + position * 4 + stream) & _MASK64)
        for seed, position in zip(seeds, positions, strict=True)
    ]
    if not keys:
        return torch.empty(0, 2, dtype=torch.int32, device=device)
    # The low word comes first: torch runs on little-endian machines only.
    return torch.frombuffer(array("Q", keys), dtype=torch.int32).view(-1, 2).to(device, non_blocking=True)


def round_seed(seed: int, tip: int, lane: int = 0) -> int:
    """Return the seed of one round's draws: draft tokens, coins, and the token after them.

    Rules and run-ahead look at draws beyond the tokens that they commit; reusing these in the next round would bias it.
    `tip`: tokens committed before the round; `lane` distinguishes draws at one position in one round.
    """
    return _splitmix64(_hashed_seed(seed) ^ _splitmix64((tip << 8) + lane))


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Return finite float32 Gumbel noise, [n, vocab] or [n, m], for [n, 2] `keys` and [vocab] or [n, m] int32 ids."""
    implementation = IMPLEMENTATIONS.get(keys.device.type) if token_ids.dim() == 1 else None
    return (implementation or plain_gumbel)(keys, token_ids)


def plain_gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Return what `gumbel` does, by torch operators on any device."""
    return -torch.log(-torch.log1p(-uniform(keys, token_ids)))


def noised_logits(logits: Tensor, draws: Draws) -> Tensor:
    """Return logits / temperature + noise, [n, vocab]."""
    if not len(draws.keys):
        return logits  # all greedy
    return scores(logits, draws.temperatures, draws.keys, draws.rows, gumbel)


def scores(
    logits: Tensor,
    temperatures: Tensor,
    keys: Tensor,
    rows: Tensor,
    noise_of: Callable[[Tensor, Tensor], Tensor] = plain_gumbel,
) -> Tensor:
    """Return what `noised_logits` does, from tensors alone and without branches, for tracing."""
    token_ids = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
    no_noise = torch.zeros_like(logits[:1])
    return logits / temperatures + torch.cat([no_noise, noise_of(keys, token_ids)])[rows]


def uniform(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Return uniform float32 numbers in (0, 1), of resolution 2^-31 near 0; shapes as in `gumbel`.

    They are clamped below 1, because exactly 1.0 would give infinite noise.
    """
    low, high = keys[:, :1], keys[:, 1:]
    # The murmur3 finaliser with the second key word between its two multiplications. torch has no unsigned shift.
    x = token_ids.to(torch.int32) ^ low
    x ^= (x >> 16) & 0xFFFF
    x *= -2048144789  # 0x85EBCA6B
    x ^= high
    x ^= (x >> 13) & 0x7FFFF
    x *= -1028477387  # 0xC2B2AE35
    x ^= (x >> 16) & 0xFFFF
    x >>= 1
    x &= 0x7FFFFFFF
    return x.to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


@functools.lru_cache(4096)
def _hashed_seed(seed: int) -> int:
    return _splitmix64(seed & _MASK64)
