"""check_rule and check_drafter: right ones pass, wrong ones fail with the figures."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from engine import check_drafter, check_rule
from engine.drafting.copying.ngram import NgramDrafter
from engine.laws import LawError, _check_round, _LawDrafter, _random_law, p_value
from engine.protocols import NoDrafter
from engine.verification import rejection
from engine.verification.draft_rows import decide_by, first_rows
from engine.verification.rule import RULES, Rule


@pytest.mark.parametrize("name", RULES)
def test_every_rule_of_the_registry_passes(name):
    check_rule(RULES[name])


def evened(draft):
    """A draft whose tokens claim to be sampled from even distributions."""
    return replace(draft, top_probs=[[1 / len(ids)] * len(ids) for ids in draft.top_ids])


@pytest.mark.parametrize(
    "accept",
    [
        lambda target_probs, coins, drafts: rejection.accept(target_probs, 0 * coins, drafts),
        lambda target_probs, coins, drafts: rejection.accept(target_probs, coins, list(map(evened, drafts))),
    ],
    ids=["accepts all", "takes the drafts' law for another"],
)
def test_a_rule_that_changes_the_law_fails(accept):
    with pytest.raises(LawError, match=r"law with drafts from .*: [\d.]+ ?% of [\d,]+ begin with the tokens \(\d"):
        check_rule(Rule(partial(decide_by, accept), needs_draft_rows=True))


@pytest.mark.parametrize("name", ["coupled", "rejection"])
def test_a_rule_that_commits_the_drafts_first_token_in_one_round_of_a_hundred_fails(name):
    def decide(logits, runs, drafts, drawn):
        decisions = RULES[name].decide(logits, runs, drafts, drawn)
        return [
            (draft.token_ids[:1], []) if draft.token_ids and chance.random() < 0.01 else decision
            for draft, decision in zip(drafts, decisions, strict=True)
        ]

    chance = random.Random(1)
    with pytest.raises(LawError, match="with drafts that the target never draws"):
        check_rule(replace(RULES[name], decide=decide))


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.needs_draft_rows])
@pytest.mark.parametrize("bias", ["mixed", "coins"])
def test_a_rule_whose_law_is_one_percent_anothers_or_whose_coins_are_slightly_low_fails(name, bias):
    (right,) = RULES[name].decide.args

    def accept(target_probs, coins, drafts):
        if bias == "coins":
            return right(target_probs, 0.97 * coins, drafts)
        probs = target_probs.clone()
        for row, draft in zip(first_rows(drafts), drafts, strict=True):
            if draft.token_ids:
                probs[row] *= 0.99
                probs[row, draft.top_ids[0]] += 0.01 * torch.tensor(draft.top_probs[0])
        return right(probs, coins, drafts)

    parents = [-1, -1] if RULES[name].independent_siblings else [-1, 0]
    with pytest.raises(LawError, match="a round's first token does not have the target's law: their total variation"):
        _check_round(accept, parents)


def test_a_drafter_passes_under_all_rules():
    check_drafter(lambda _: NgramDrafter())


class Wrong(NoDrafter):
    """Passes drafts on with something wrong about them."""

    def __init__(self, change, config):
        self.change, self.drafter = change, _LawDrafter(_random_law(2), RULES[config.verification])

    async def propose(self, rows):
        return [self.change(draft) for draft in await self.drafter.propose(rows)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (evened, "with verification=rejection: .* begin with"),
        (
            lambda draft: replace(draft, parents=[]),
            "the drafter is wrong, here with verification=coupled: .* 0 parents",
        ),
    ],
    ids=["wrong distributions", "no tree"],
)
def test_a_drafter_that_changes_the_law_fails(change, message):
    with pytest.raises(LawError, match=message):
        check_drafter(partial(Wrong, change))


def test_counts_by_the_law_are_likely_and_others_are_not():
    law = {"a": 0.5, "b": 0.3, "c": 0.2, "d": 0.0}
    assert p_value({"a": 500, "b": 300, "c": 200}, law) == 1
    assert p_value({"a": 530, "b": 290, "c": 180}, law) == pytest.approx(0.126607)
    assert p_value({"a": 600, "b": 300, "c": 100}, law) < 1e-12
    assert p_value({"d": 1}, law) == 0
