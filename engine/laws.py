"""check_rule and check_drafter: whether a rule or a drafter of your own leaves the distribution of texts unchanged.

An engine generates 700 short texts from a target with a known law (distribution of texts). The frequencies of the first
three tokens are compared with their joint law; the first token alone would not show a wrong bonus. This detects a bias
of about 20 %, or of 1 % in a token that the target never draws. For a rule made by `decide_by`, the law of a round's
first token is averaged over all drafts and evenly spread coins (Rao-Blackwell), which detects a total variation of
0.4 %.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from engine.config import EngineConfig, ModelInfo
from engine.engine import Engine
from engine.errors import DrafterError, PacelineError
from engine.params import SamplingParams
from engine.protocols import Draft, Drafter, NoDrafter, ProposeRow, Verdict, VerifyRow, chain, run_in_process
from engine.sampling import noise
from engine.sampling.logits import Run, draw
from engine.verification.decider import paths
from engine.verification.draft_rows import Accept, decide_by
from engine.verification.rule import RULES, Rule

_VOCAB, _LENGTH, _NUM_DRAFTED, _NUM_TEXTS = 4, 3, 3, 700
_PROMPT = [0, 1, 2, 3, 1, 2]
_LEAST_P_VALUE = 1e-7
"""A correct rule or drafter fails by chance once in ten million comparisons."""
_NUM_TOSSES, _MOST_APART = 8192, 0.003
"""Rounds to average, and the largest total variation of a correct rule with that many coins."""
_NEVER = 3
"""The token that `check_rule` lets the target never draw."""


class LawError(PacelineError):
    """Texts do not have the target's law, or depend on drafts although the rule forbids it."""


def check_rule(rule: Rule) -> None:
    """Raise LawError unless texts have the target's law under a rule, whatever law the drafts have."""
    target, draft_law = _random_law(1), _random_law(2)
    for source, law in {"the target's law": target, "another law": draft_law, "no law at all": None}.items():
        _compare(_texts(target, rule, _LawDrafter(law, rule)), target, f"with drafts from {source}")
    target[..., _NEVER], draft_law[..., _NEVER] = 0, 9
    target, draft_law = target / target.sum(-1, keepdim=True), draft_law / draft_law.sum(-1, keepdim=True)
    _compare(_texts(target, rule, _LawDrafter(draft_law, rule)), target, "with drafts that the target never draws")
    if isinstance(rule.decide, partial) and rule.decide.func is decide_by:
        _check_round(rule.decide.args[0], [-1, -1] if rule.independent_siblings else [-1, 0])


def check_drafter(
    make: Callable[[EngineConfig], Drafter], rules: Sequence[str] = ("coupled", "rejection", "block")
) -> None:
    """Raise LawError unless a drafter leaves the texts' law unchanged; with the coupled rule, the texts themselves.

    Args:
        make: returns the drafter, given the configuration; a class will do.
    """
    target, plain = _random_law(1), _texts(_random_law(1), RULES["coupled"], NoDrafter())
    for name in rules:
        try:
            texts = _texts(target, RULES[name], make(_config(name)))
        except DrafterError as error:
            raise LawError(f"the drafter is wrong, here with verification={name}: {error}") from error
        if RULES[name].shares_noise and texts != plain:
            raise LawError(f"a text depends on its drafts, with verification={name}")
        _compare(texts, target, f"with verification={name}")


def p_value(counts: Mapping[Hashable, int], law: Mapping[Hashable, float]) -> float:
    """Return the chi-square p-value of counts against a law, rare outcomes merged; 0 if the law forbids a count."""
    if not all(law[outcome] > 0 for outcome in counts):
        return 0.0
    total = sum(counts.values())
    rare = [outcome for outcome, prob in law.items() if prob * total < 5]
    cells = [(counts.get(outcome, 0), prob * total) for outcome, prob in law.items() if outcome not in rare]
    expected = sum(law[outcome] for outcome in rare) * total
    if expected > 1:
        cells.append((sum(counts.get(outcome, 0) for outcome in rare), expected))
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    degrees = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, torch.tensor(statistic / 2, dtype=torch.float64)))


def _random_law(seed: int) -> Tensor:
    """Return the law of the next token given the last two, [vocab, vocab, vocab]."""
    weights = torch.rand(_VOCAB, _VOCAB, _VOCAB, generator=torch.Generator().manual_seed(seed)) + 0.02
    return weights / weights.sum(-1, keepdim=True)


def _check_round(accept: Accept, parents: Sequence[int]) -> None:
    target = _random_law(1)
    draft_law, count = (-12 * target).softmax(-1), _NUM_TOSSES // _VOCAB ** len(parents)
    # Evenly spread points in two dimensions: multiples of powers of 1 / phi, where phi ** 3 = phi + 1.
    coins = torch.arange(1, count + 1, dtype=torch.float64).unsqueeze(-1) * 1.3247179572 ** -torch.tensor([1.0, 2.0])
    emitted = torch.zeros(_VOCAB)
    for number, tokens in enumerate(itertools.product(range(_VOCAB), repeat=len(parents))):
        drafted = Draft(list(tokens), list(parents))
        ends = [tuple([*_PROMPT, *path][-2:]) for path in paths(drafted)]
        rows = [draft_law[ends[parent + 1]].tolist() for parent in parents]
        weight = math.prod(row[token] for row, token in zip(rows, tokens, strict=True)) / count
        draft = replace(drafted, top_ids=[[*range(_VOCAB)]] * len(rows), top_probs=rows)
        probs, tossed = torch.stack([target[end] for end in ends]), (coins + 0.618 * number).frac().flatten().float()
        accepted, laws = accept(probs.repeat(count, 1), tossed, [draft] * count)
        for path, law in zip(accepted, laws, strict=True):
            emitted += weight * (torch.eye(_VOCAB)[tokens[path[0]]] if path else law / law.sum())
    if (apart := float((emitted - target[tuple(_PROMPT[-2:])]).abs().sum() / 2)) > _MOST_APART:
        raise LawError(f"a round's first token does not have the target's law: their total variation is {apart:.1%}")


def _config(verification: str = "coupled") -> EngineConfig:
    return EngineConfig(
        num_speculative_tokens=_NUM_DRAFTED,
        speculation="fixed",
        verification=verification,
        max_num_seqs=_NUM_TEXTS,
        max_num_batched_tokens=10**6,
        max_queued_requests=_NUM_TEXTS,
        num_blocks=_NUM_TEXTS,
    )


def _texts(target: Tensor, rule: Rule, drafter: Drafter) -> list[list[int]]:
    info, verifier = ModelInfo("law", _VOCAB, 64, [], 0, "float32", "cpu"), _LawVerifier(target, rule)
    engine = Engine(_config(), info, drafter=drafter, verifier=verifier, num_blocks=_NUM_TEXTS)
    texts: dict[str, list[int]] = {str(seed): [] for seed in range(_NUM_TEXTS)}
    for seed, name in enumerate(texts):
        # Two tokens more, so that the last compared token is drafted, too.
        engine.add(name, _PROMPT, SamplingParams(seed=seed, max_tokens=_LENGTH + 2, ignore_eos=True))
    while engine.has_work:
        for output in run_in_process(engine.step()):
            texts[output.request_id] += output.token_ids
    return [text[:_LENGTH] for text in texts.values()]


def _compare(texts: Sequence[Sequence[int]], target: Tensor, case: str) -> None:
    law: dict[Hashable, float] = {}
    for tokens in itertools.product(range(_VOCAB), repeat=_LENGTH):
        text = [*_PROMPT[-2:], *tokens]
        law[tokens] = math.prod(float(target[text[i], text[i + 1], token]) for i, token in enumerate(tokens))
    counts: Counter[Hashable] = Counter(map(tuple, texts))
    if (value := p_value(counts, law)) < _LEAST_P_VALUE:
        worst = max(law, key=lambda tokens: abs(counts[tokens] / len(texts) - law[tokens]))
        raise LawError(
            f"texts do not have the target's law {case}: {counts[worst] / len(texts):.1%} of {len(texts):,} begin with "
            f"the tokens {worst}, {law[worst]:.1%} should (p = {value:.0e} over all)"
        )


class _LawVerifier:
    def __init__(self, law: Tensor, rule: Rule) -> None:
        self._law, self._rule = law, rule

    async def verify(self, rows: Sequence[VerifyRow]) -> list[Verdict]:
        texts = [[*row.request.token_ids[-2:], *path] for row in rows for path in paths(row.draft)]
        logits = self._law[[text[-2] for text in texts], [text[-1] for text in texts]].log()
        runs = [Run(row.request, list(map(len, paths(row.draft)))) for row in rows]
        decisions = self._rule.decide(logits, runs, [row.draft for row in rows], None)
        return [Verdict(*decision, draft=row.draft) for row, decision in zip(rows, decisions, strict=True)]

    def release(self, request_id: str) -> None:
        """Do nothing: no request is held."""


class _LawDrafter(NoDrafter):
    """Samples chains from a law; without a law, it always drafts the same tokens."""

    def __init__(self, law: Tensor | None, rule: Rule) -> None:
        self._law, self._rule = law, rule

    async def propose(self, rows: Sequence[ProposeRow]) -> list[Draft]:
        chains: list[list[int]] = [[] for _ in rows]
        probs: list[list[list[float]]] = [[] for _ in rows]
        stream = noise.TARGET_STREAM if self._rule.shares_noise else noise.DRAFT_STREAM
        seeds = [noise.round_seed(row.request.params.seed or 0, len(row.request.token_ids)) for row in rows]
        for depth in range(_NUM_DRAFTED):
            ends = [[*row.request.token_ids, *drafted][-2:] for row, drafted in zip(rows, chains, strict=True)]
            sure = torch.eye(_VOCAB)[depth].expand(_VOCAB, _VOCAB, _VOCAB)
            law = (sure if self._law is None else self._law)[[end[0] for end in ends], [end[1] for end in ends]]
            runs = [Run(row.request, [depth], seeds=[seed]) for row, seed in zip(rows, seeds, strict=True)]
            for i, token in enumerate(draw(law.log(), runs, stream).tolist()):
                chains[i].append(token)
                probs[i].append(law[i].tolist())
        return [
            replace(chain(drafted[:n]), top_ids=[[*range(_VOCAB)]] * n, top_probs=laws[:n])
            for drafted, laws, n in zip(chains, probs, (row.num_draft_tokens for row in rows), strict=True)
        ]
