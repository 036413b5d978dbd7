"""Proposals of a drafter, and models that show what it computes."""

import torch

from engine.params import SamplingParams
from engine.protocols import ProposeRow, Request, run_in_process
from engine.sampling.logits import Run, noised, shape
from engine.verification.decider import paths
from tests.engine.conftest import VOCAB
from tests.fakes import ContextModel, run_ahead

GREEDY = SamplingParams(temperature=0)
PARAMS = {
    "greedy": GREEDY,
    "noise": SamplingParams(temperature=0.8, seed=3),
    "penalties": SamplingParams(temperature=0.8, seed=3, presence_penalty=2.0, frequency_penalty=1.0, top_k=20),
}


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
    while run_ahead(drafter):
        pass


def scores_after(model, text, drafted, params):
    """What draft and target score the next token by, from the law itself."""
    run = Run(Request("a", text, 3, params), [len(drafted)], [drafted], model.info.eos_token_ids)
    return noised(shape(model.law([*text, *drafted]).log().unsqueeze(0), [run]), [run])[0]


def check(draft, text, params, model):
    """Assert that the children of every node are the tokens with the highest scores there, the best first."""
    before = paths(draft)
    for parent in range(-1, len(draft.token_ids)):
        children = [t for t, p in zip(draft.token_ids, draft.parents, strict=True) if p == parent]
        if children:
            expected = scores_after(model, text, before[parent + 1], params).topk(3).indices.tolist()
            assert children == expected[: len(children)]


def target_path(text, draft, params, model):
    """What a target that is `model` commits: the nodes on its path, and the token after them."""
    node, tokens = -1, []
    while True:
        tokens.append(int(scores_after(model, text, tokens, params).argmax()))
        pairs = enumerate(zip(draft.parents, draft.token_ids, strict=True))
        node = next((child for child, edge in pairs if edge == (node, tokens[-1])), None)
        if node is None:
            return tokens


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
