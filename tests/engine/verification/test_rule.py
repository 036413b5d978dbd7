"""The registry of rules, and what drafters and verifiers may rely on in each of them."""

from typing import get_args

import pytest
import torch

from engine.config import EngineConfig, Verification
from engine.errors import ConfigError
from engine.params import SamplingParams
from engine.protocols import Request, chain
from engine.sampling.logits import Run
from engine.verification.rule import RULES, rule_of
from tests.examples import rule as example

VOCAB = 6


def decide(rule, logits, drafts, *, drawn=None, temperature=0.0):
    params = SamplingParams(temperature=temperature, seed=7)
    runs = [
        Run(Request(str(i), [1, 2], 1, params), list(range(1 + len(draft.token_ids)))) for i, draft in enumerate(drafts)
    ]
    return rule.decide(logits.clone(), runs, drafts, drawn)


def rows(*tokens):
    """Logits whose argmax in each row is the given token."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB).float() * 9


def test_the_configuration_offers_the_rules_of_the_registry():
    assert get_args(Verification) == tuple(RULES)
    assert EngineConfig().verification in RULES


@pytest.mark.parametrize("name", RULES)
def test_every_rule_decides_each_request_of_a_batch_by_its_own_rows(name):
    logits = rows(3, 4, 5, 2, 1)
    drafts = [chain([3, 4]), chain([5])]
    assert decide(RULES[name], logits, drafts) == [([3, 4, 5], [0, 1]), ([2], [])]


def test_a_rule_elsewhere_is_named_by_its_import_path():
    assert rule_of("block") is RULES["block"]
    assert rule_of("tests.examples.rule:RULE") is example.RULE


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("tests.nowhere:RULE", "cannot be imported: No module named 'tests.nowhere'"),
        ("tests.examples.rule:OTHER", "cannot be imported: .* has no attribute 'OTHER'"),
        ("tests.examples.rule:accept", "which is <function accept .* it must be an engine.verification.rule.Rule"),
    ],
)
def test_a_path_without_a_rule_is_refused(path, message):
    with pytest.raises(ConfigError, match=f"verification is {path!r}, .*{message}"):
        rule_of(path)
