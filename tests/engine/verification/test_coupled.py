"""The coupled rule by exact enumeration: every way the target's draws can fall, for every kind of draft."""

import itertools
from dataclasses import replace

import pytest
import torch

from engine.params import SamplingParams
from engine.protocols import NO_DRAFT, Draft, Request, chain
from engine.sampling.logits import Run, needs_shaping, noised, shape
from engine.verification.coupled import decide, walk
from tests.engine.laws import VOCAB, K, completed, joint, random_tables, total_variation
from tests.engine.verification.enumeration import context_of


def emitted_law(target, draft):
    """The joint law of K + 1 tokens: a round whose draws are enumerated, then the target alone.

    Draws after equal contexts are one draw: the noise knows the position and the token, not the node.
    """
    contexts = [context_of(draft, node) for node in range(-1, len(draft.token_ids))]
    distinct = sorted(set(contexts))
    heads = []
    for draws in itertools.product(range(VOCAB), repeat=len(distinct)):
        drawn = dict(zip(distinct, draws, strict=True))
        weight = float(torch.stack([target[c][token] for c, token in drawn.items()]).prod())
        head, path = walk(draft, [drawn[context] for context in contexts])
        assert len(head) == len(path) + 1
        heads.append((tuple(head), weight))
    return completed(heads, target)


TREES = {
    "empty": NO_DRAFT,
    "siblings": Draft([0, 1, 2], [-1, -1, -1]),
    "equal siblings": Draft([1, 1, 0, 2], [-1, -1, 0, 1]),
    "two paths": Draft([0, 1, 2, 2, 0], [-1, -1, 0, 1, 3]),
    "deep second path": Draft([0, 1, 1, 2], [-1, -1, 1, 2]),
}


@pytest.mark.parametrize("zeros", [False, True], ids=["all tokens possible", "some tokens impossible"])
def test_the_joint_law_is_the_targets_for_every_chain(zeros):
    target = random_tables(1, zeros=zeros)
    for tokens in itertools.product(range(VOCAB), repeat=K):
        assert total_variation(emitted_law(target, chain(list(tokens))), joint(target)) < 1e-12


@pytest.mark.parametrize("name", TREES)
def test_the_joint_law_is_the_targets_for_trees(name):
    target = random_tables(2)
    assert total_variation(emitted_law(target, TREES[name]), joint(target)) < 1e-12


SHAPED = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=0.8, repetition_penalty=1.7, frequency_penalty=0.9, min_tokens=6),
    SamplingParams(top_p=0.6, logit_bias={3: 1.5}),
]


@pytest.mark.parametrize("draws_in_pass", [False, True])
def test_an_audited_text_is_committed_and_its_differences_are_those_of_one_token_after_the_other(draws_in_pass):
    """Each row's scores are made here from the text before it, without a draft."""
    generator = torch.Generator().manual_seed(5)
    prompt, output, texts = [3, 4], [2, 2, 5], [[5, 2, 2, 7, 6], [7], [6, 6, 5, 2], [2, 3, 3]]
    params = [replace(one, audits=True, seed=nth) for nth, one in enumerate(SHAPED)]
    requests = [Request(str(nth), prompt + output, len(prompt), one) for nth, one in enumerate(params)]
    drafts = [chain(text) for text in texts]
    runs = [
        Run(request, [*range(1 + len(text))], [text[:end] for end in range(1 + len(text))], end_ids=[1])
        for request, text in zip(requests, texts, strict=True)
    ]
    logits = 2 * torch.randn(sum(len(run.depths) for run in runs), 9, generator=generator)
    expected, drawn, row = [], [], 0
    for request, text in zip(requests, texts, strict=True):
        found = []
        for end in range(1 + len(text)):
            before = replace(request, token_ids=[*request.token_ids, *text[:end]])
            alone = [Run(before, [0], [[]], end_ids=[1])]
            scores = noised(shape(logits[row : row + 1].clone(), alone), alone)[0]
            drawn.append(int(scores.argmax()))
            if end < len(text) and drawn[-1] != text[end]:
                found.append((len(output) + end, drawn[-1], float(scores.max() - scores[text[end]])))
            row += 1
        expected.append(found)
    unshaped = [token if not needs_shaping(run.params) else 0 for run, token in rows_of(runs, drawn)]
    decisions = decide(logits.clone(), runs, drafts, unshaped if draws_in_pass else None)
    assert decisions == [(text, [*range(len(text) - 1)]) for text in texts]
    assert [len(run.differences) for run in runs] == [len(found) for found in expected]
    assert all(expected), "every request has differences"
    for run, found in zip(runs, expected, strict=True):
        for difference, entry in zip(run.differences, found, strict=True):
            assert difference == pytest.approx(entry)


def rows_of(runs, drawn):
    """Pairs of each row's run and token."""
    return zip([run for run in runs for _ in run.depths], drawn, strict=True)
