"""Ended requests with texts that a model draws."""

from dataclasses import replace

import torch

from engine.config import EngineConfig
from engine.drafting.learning.lessons import lessons_of
from engine.drafting.model.chain_drafter import ModelDrafter
from engine.drafting.model.draft_model import DraftModel
from engine.params import SamplingParams
from engine.protocols import ProposeRow, Request, run_in_process

PARAMS = SamplingParams(temperature=0.7, seed=5, ignore_eos=True, learning_group="")


def ended(name="a", *, num_tokens=40, prompt=(3, 4, 5), **params) -> Request:
    """A text of no law."""
    tokens = [*prompt, *(2 + i % 50 for i in range(num_tokens))]
    return Request(name, tokens, len(prompt), replace(PARAMS, **params))


def drawn(backend, count=1, *, num_tokens=60, **params) -> list[Request]:
    """Texts that a model draws, with seeds and prompts of their own."""
    config = EngineConfig(num_blocks=1000, block_size=16, num_speculative_tokens=64)
    drafter = ModelDrafter(DraftModel(backend), config)
    params = [replace(PARAMS, seed=5 + i, **params) for i in range(count)]
    requests = [Request(str(i), [3, 4, 5 + i % 50], 3, sampling) for i, sampling in enumerate(params)]
    for batch in (requests[first : first + 32] for first in range(0, count, 32)):
        while left := min(64, num_tokens - batch[0].num_output_tokens):
            drafts = run_in_process(drafter.propose([ProposeRow(request, left) for request in batch]))
            for request, draft in zip(batch, drafts, strict=True):
                request.token_ids.extend(draft.token_ids)
        for request in batch:
            drafter.release(request.request_id)
    return requests


def lessons(requests):
    return [lesson for request in requests for lesson in lessons_of(request)]


def changed(weights, scale, seed=0):
    """Other weights: matrices with noise."""
    chance = torch.Generator().manual_seed(seed)
    return {
        name: weight + scale * weight.std() * torch.randn(weight.shape, generator=chance) * (weight.ndim == 2)
        for name, weight in weights.items()
    }
