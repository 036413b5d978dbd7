"""By rules that share no noise, texts with a head have the target's law, whatever the head drafts."""

from collections import Counter
from dataclasses import replace

import pytest

from engine.drafting.registry import METHODS
from engine.execution.batch import ForwardRow, build
from engine.laws import p_value
from engine.params import SamplingParams
from engine.protocols import Request
from engine.sampling.logits import Run, shape
from engine.verification.rule import RULES
from tests.engine.heads.cold_starts import backend_of_kind
from tests.engine.running import SAMPLING, make_engine, run

# --- Law --------------------------------------------------------------------------------------------------------------

PROMPT = [31, 4, 15, 9, 26]
LENGTH = 3
LAW = SamplingParams(logit_bias=dict.fromkeys((2, 3, 4, 5), 60.0), max_tokens=LENGTH + 2, ignore_eos=True)
"""Four tokens are possible, so that a head without training drafts some that are accepted."""


def joint_law(backend):
    """The law of the first three tokens."""
    law = {(): 1.0}
    for _ in range(LENGTH):
        rows = [ForwardRow([*PROMPT, *tokens], 0, [1 + i], 1) for i, tokens in enumerate(law)]
        logits = backend.run(build(rows, backend.allocate_kv(1 + len(rows), 16))).logits
        runs = [Run(Request("", [*PROMPT, *tokens], len(PROMPT), LAW), [0], [[]], ()) for tokens in law]
        probs = shape(logits.clone(), runs).softmax(-1)[:, 2:6].tolist()
        law = {
            (*tokens, token): weight * prob
            for (tokens, weight), row in zip(law.items(), probs, strict=True)
            for token, prob in enumerate(row, start=2)
        }
    return law


@pytest.mark.parametrize(("kind", "spoiled"), [("eagle3", "few tokens"), ("dspark", "")])
@pytest.mark.parametrize("verification", [name for name in METHODS["head"].rules if not RULES[name].shares_noise])
def test_three_tokens_have_the_targets_joint_law(verification, spoiled, kind, target_path):
    """A head of chains and one of blocks; at 1e-5 each, a false alarm of all has probability below 1e-4."""
    backend = backend_of_kind(target_path, kind, spoiled)
    engine = make_engine(backend, drafting="head", verification=verification, **SAMPLING)
    texts = run(engine, [(PROMPT, replace(LAW, seed=seed)) for seed in range(1000)])
    counts = Counter(tuple(text[:LENGTH]) for text in texts.values())
    assert p_value(counts, joint_law(backend)) > 1e-5
    assert 0.05 < engine.stats.num_accepted_tokens / engine.stats.num_draft_tokens < 0.95
