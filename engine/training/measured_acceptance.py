"""Acceptance: how many draft tokens the coupled rule accepts, on text that the target generates.

The target continues each prompt with the engine's noise. The draft then reads that text and draws at every position
with the same noise. A draft token is accepted if both drew the same token; the first difference ends the round. Up to
there, the draft's context equals the target's text, so one pass of the draft decides all rounds, for every k.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Self

import torch
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from engine.config import ModelConfig
from engine.errors import ModelMismatchError
from engine.models.registry import open_model
from engine.models.shared_tokens import shared_tokens
from engine.sampling import noise

TEMPERATURES = (0.0, 0.7, 1.0)
CONTINUATION_TOKENS = 128


def check_same_vocabulary(target_folder: Path, draft_folder: Path) -> None:
    """Raise ModelMismatchError unless two tokenizers give every token the same id; padding may differ."""
    target, draft = (open_model(ModelConfig(str(folder))) for folder in (target_folder, draft_folder))
    if shared_tokens(target, draft) is not None:
        raise ModelMismatchError(f"the draft {draft_folder} has other token ids than the target {target_folder}")


@dataclass(frozen=True)
class Acceptance:
    """Accepted lengths of drafts, by continuation and by place; `reach` tokens are judged after each place."""

    lengths: Sequence[Sequence[int]]
    reach: int = 1

    @classmethod
    def of_agreements(cls, agreements: Sequence[Sequence[bool]]) -> Self:
        """Return the acceptance of drafts that agree with each continuation at these places."""
        runs = [accumulate(reversed(row), lambda run, agrees: (run + 1) * agrees, initial=0) for row in agreements]
        return cls([[*run][:0:-1] for run in runs])

    def accepted_lengths(self, k: int) -> list[int]:
        """Return the accepted draft tokens of each round, except for a last round that the end of the text cuts."""
        accepted = []
        for row in self.lengths:
            start = 0
            while start < min(len(row), len(row) + self.reach - k):
                accepted.append(min(k, row[start]))
                start += accepted[-1] + 1
        return accepted

    def per_position(self, k: int) -> list[float]:
        """Return the share of drafts whose tokens 1 to i were all accepted, for i = 1 to k."""
        accepted = self.accepted_lengths(k)
        return [sum(kept > i for kept in accepted) / max(1, len(accepted)) for i in range(k)]

    def mean_acceptance_length(self, k: int) -> float:
        return 1.0 + sum(self.per_position(k))


def acceptance_table(measured: Mapping[float, Acceptance], k: int, title: str) -> Table:
    """Return acceptance by position and mean acceptance length for each temperature."""
    table = Table(title=title)
    for heading in ("temperature", *(f"position {i}" for i in range(1, k + 1)), "mean acceptance length"):
        table.add_column(heading, justify="right")
    for temperature, acceptance in measured.items():
        rates = [f"{rate:.3f}" for rate in acceptance.per_position(k)]
        table.add_row(f"{temperature:g}", *rates, f"{acceptance.mean_acceptance_length(k):.2f}")
    return table


@dataclass(frozen=True)
class Continuations:
    """The target's continuations of some prompts at one temperature, up to `eos_token_id`.

    Attributes:
        token_ids: [prompts, length] prompts padded on the left, then the continuations.
        mask: [prompts, length] 0 for padding, else 1.
        num_new: number of columns that the target generated.
    """

    token_ids: Tensor
    mask: Tensor
    num_new: int
    temperature: float
    eos_token_id: int | None

    @torch.inference_mode()
    def acceptance(self, draft: PreTrainedModel) -> Acceptance:
        """Run a draft over the text, and compare its draws with the target's."""
        rows = []
        for seed, (ids, begin, end) in enumerate(self.texts()):
            logits = draft(input_ids=ids[None, :-1].to(draft.device), use_cache=False).logits[0, begin - 1 :]
            drawn = draw(logits, self.temperature, [seed] * (len(ids) - begin), range(begin, len(ids)))
            rows.append((drawn.to(ids.device) == ids[begin:]).tolist()[: end - begin])
        return Acceptance.of_agreements(rows)

    def texts(self) -> Iterator[tuple[Tensor, int, int]]:
        """Yield each prompt's token ids with its continuation, and where the continuation begins and ends."""
        for padded, mask in zip(self.token_ids, self.mask, strict=True):
            ids = padded[mask.bool()]
            begin = len(ids) - self.num_new
            text = ids[begin:].tolist()
            length = text.index(self.eos_token_id) + 1 if self.eos_token_id in text else len(text)
            yield ids, begin, begin + length


def draw(logits: Tensor, temperature: float, seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Draw a token per row with the engine's noise, [n] from [n, vocab]."""
    if temperature == 0:
        return logits.argmax(-1)
    keys = noise.keys(seeds, positions, noise.TARGET_STREAM, logits.device)
    token_ids = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
    return (logits.float() / temperature + noise.gumbel(keys, token_ids)).argmax(-1)


@torch.inference_mode()
def continue_prompts(
    target: PreTrainedModel, prompts: Sequence[list[int]], num_new: int, temperature: float, first_seed: int = 0
) -> Continuations:
    """Continue prompts of any lengths with the target in one batch; row i draws with seed `first_seed + i`."""
    width = max(map(len, prompts))
    token_ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=target.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=target.device)
    seeds = range(first_seed, first_seed + len(prompts))
    step_ids, cache = token_ids, None
    for _ in range(num_new):
        positions = mask.cumsum(-1).sub(1).clamp_min(0)
        out = target(
            input_ids=step_ids,
            attention_mask=mask,
            position_ids=positions[:, -step_ids.shape[1] :],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = out.past_key_values
        step_ids = draw(out.logits[:, -1], temperature, seeds, mask.sum(-1).tolist())[:, None]
        token_ids = torch.cat([token_ids, step_ids], -1)
        mask = torch.cat([mask, torch.ones_like(step_ids)], -1)
    eos = target.config.eos_token_id
    return Continuations(token_ids, mask, num_new, temperature, eos if isinstance(eos, int) else None)
