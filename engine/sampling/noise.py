"""Counter-based Gumbel noise of (seed, stream, position, token id), the same on every device and in every batch.

The idea is from Daliri, Musco and Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding":
when draft and target add the same noise to their own logits and take the argmax, they agree with probability at least
(1 - TV) / (1 + TV), and exchange nothing but token ids. The noise is a hash without any state, so a round that is
repeated or batched differently draws the same numbers.

The integer hash is exact everywhere. Its last step, two logarithms, may differ by an ulp between devices.
"""

import functools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Draws at one position need independent streams: draft sampling and acceptance in one stream would bias the output.
TARGET_STREAM = 0
"""The target's own draw; the coupled drafter uses it too."""
DRAFT_STREAM = 1
"""The drafter's sampling under rules that need draft rows; drawn anew in every round, see `round_seed`."""
ACCEPT_STREAM = 2
"""The coins of these rules; drawn anew in every round."""
RESIDUAL_STREAM = 3
"""The recovered and bonus tokens of these rules; drawn anew in every round."""

_implementations: dict[str, Callable[[Tensor, Tensor], Tensor]] = {}
"""Faster implementations for a whole vocabulary, by device type."""
_MASK64 = (1 << 64) - 1


@dataclass(slots=True)
class Draws:
    """What a forward pass needs to draw tokens for rows that only have a temperature and a seed.

    Attributes:
        temperatures: [n, 1] float32, 1 for greedy rows.
        keys: [m, 2] int32, from `keys`, for the rows that are not greedy.
        rows: [n] int64, the index of each row's key + 1; 0 is greedy.
    """

    temperatures: Tensor
    keys: Tensor
    rows: Tensor


def noised_logits(logits: Tensor, draws: Draws) -> Tensor:
    """Return logits over temperature plus noise, [n, vocab]; the argmax is the drawn token. logits: [n, vocab]."""
    if not len(draws.keys):
        return logits  # all greedy
    token_ids = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
    return _add_noise(logits, draws.temperatures, gumbel(draws.keys, token_ids), draws.rows)


def scores(logits: Tensor, temperatures: Tensor, keys: Tensor, rows: Tensor) -> Tensor:
    """Return the same as `noised_logits`, from tensors alone and without branches, for tracing."""
    token_ids = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
    return _add_noise(logits, temperatures, plain_gumbel(keys, token_ids), rows)


def _add_noise(logits: Tensor, temperatures: Tensor, gumbel_noise: Tensor, rows: Tensor) -> Tensor:
    no_noise = torch.zeros_like(logits[:1])
    return logits / temperatures + torch.cat([no_noise, gumbel_noise])[rows]


def keys(seeds: Sequence[int], positions: Sequence[int], stream: int, device: torch.device) -> Tensor:
    """Return the hash keys of (seed, position) pairs: [n, 2] int32."""
    keys = [
        _splitmix64((_hashed_seed(seed) + position * 4 + stream) & _MASK64)
        for seed, position in zip(seeds, positions, strict=True)
    ]
    if not keys:
        return torch.empty(0, 2, dtype=torch.int32, device=device)
    # The low word comes first: torch runs on little-endian machines only.
    return torch.frombuffer(array("Q", keys), dtype=torch.int32).view(-1, 2).to(device)


def round_seed(seed: int, tip: int, lane: int = 0) -> int:
    """Return the seed of draws that belong to one round: a draft's tokens, the coins, the token after them.

    A rule may look at draft tokens and coins beyond those that it commits: block verification decides about a token by
    all that follow it. So does a draft that runs ahead: it predicts recovered tokens at all positions, and whether the
    next round finds its draft prepared depends on that. The next round draws at the same positions again, and would be
    biased if it drew the same numbers.

    Args:
        tip: how many tokens were committed before the round.
        lane: tells draws apart that one round makes at one position.
    """
    return _splitmix64(_hashed_seed(seed) ^ _splitmix64((tip << 8) + lane))


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Return standard Gumbel noise, float32, finite.

    Args:
        keys: [n, 2] int32, from `keys`.
        token_ids: [vocab] or [n, m] int32 ids to compute noise for.

    Returns:
        [n, vocab] or [n, m].
    """
    implementation = _implementations.get(keys.device.type)
    if implementation is not None and token_ids.dim() == 1:
        return implementation(keys, token_ids)
    return plain_gumbel(keys, token_ids)


def plain_gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Return the same as `gumbel`, by torch operators on any device."""
    return -torch.log(-torch.log1p(-uniform(keys, token_ids)))


def implement(device_type: str, implementation: Callable[[Tensor, Tensor], Tensor] | None) -> None:
    """Set the implementation of `gumbel` for a device type; None restores `plain_gumbel`.

    Args:
        implementation: takes keys [n, 2] and token ids [vocab] and returns what `plain_gumbel` does.
    """
    if implementation is None:
        _implementations.pop(device_type, None)
    else:
        _implementations[device_type] = implementation


def uniform(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Return uniform numbers in (0, 1), float32; shapes as in `gumbel`.

    Resolution is 2^-31 near 0. Values are clamped below 1, because exactly 1.0 would give infinite noise.
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
