"""Proposals of a drafter, and models that show what it computes."""

import torch

from engine.params import SamplingParams
from engine.protocols import ProposeRow, Request, run_in_process
from tests.engine.conftest import VOCAB
from tests.fakes import ContextModel

GREEDY = SamplingParams(temperature=0)


def context_model(seed, sharpness=3):
    """Many laws: each token of the context decides which one holds, so a wrong entry shows."""
    weights = sharpness * torch.randn(101, VOCAB, generator=torch.Generator().manual_seed(seed))
    return ContextModel(weights.softmax(-1), [1])


def row(token_ids, k=4, *, name="a", params=GREEDY):
    return ProposeRow(Request(name, list(token_ids), 3, params), k)


def propose(drafter, *rows):
    return run_in_process(drafter.propose(rows))


def finish(drafter):
    """Let a drafter run ahead until it has nothing more to do."""
    while drafter.advance():
        pass


class Advanced:
    """Lets a drafter run ahead for so many passes after each proposal."""

    def __init__(self, drafter, num_passes):
        self.drafter, self.num_passes = drafter, num_passes

    async def propose(self, rows):
        drafts = await self.drafter.propose(rows)
        for _ in range(self.num_passes):
            if not self.drafter.advance():
                break
        return drafts

    def release(self, request_id):
        self.drafter.release(request_id)


class Counting:
    """A model that counts its forward passes and their tokens."""

    def __init__(self, model):
        self._wrapped = model
        self.passes = []

    def __getattr__(self, name):
        return getattr(self._wrapped, name)

    def run(self, batch, draws=None):
        self.passes.append(batch.token_ids.numel())
        return self._wrapped.run(batch, draws)


class Failing(Counting):
    """A context model that fails after `num_left` more passes, once: the pass ends halfway, with wrong entries."""

    num_left = -1

    def run(self, batch, draws=None):
        self.num_left -= 1
        output = super().run(batch, draws)
        if self.num_left == -1:
            batch.paged.kv.keys[0].view(-1)[batch.paged.slots] = 7
            raise RuntimeError("out of memory")
        return output
