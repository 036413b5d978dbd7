"""The heart: what the engine emits is the target's own text, token for token or in law.

Mutants of the verification rules and the draft protocol, and the test that fails for each (tried by hand on a copy):

| mutant | caught by |
|---|---|
| rejection: cumprod -> cumsum (accepts after a rejection) | test_three_tokens_have_the_targets_joint_law |
| rejection: residual without the subtraction | test_three_tokens_have_the_targets_joint_law |
| rejection: bonus drawn from the row before | test_three_tokens_have_the_targets_joint_law |
| rejection: draft_probs taken as 1 | test_three_tokens_have_the_targets_joint_law |
| coupled: walk returns the draft's next token, not the one drawn | test_coupled_text_does_not_depend_on_the_draft |
| logits: penalties ignore the draft's path | test_coupled_text_does_not_depend_on_the_draft |
| logits: noise position ignores the depth | test_coupled_text_does_not_depend_on_the_draft |
| logits: min_tokens ignores the depth | test_coupled_text_does_not_depend_on_the_draft |
| scheduler: num_computed without the accepted tokens | test_coupled_text_does_not_depend_on_the_draft |
| verifier: an accepted path off the chain is not moved | test_coupled_text_does_not_depend_on_the_draft |
| sequence: tokens after end-of-text are kept | test_coupled_text_does_not_depend_on_the_draft |
| drafter: rejected tokens stay in its prefix | test_a_target_that_drafts_for_itself_is_always_right |
"""

import itertools
import math

import pytest
import torch
from scipy.stats import chi2

from engine.config import EngineConfig
from engine.draft import NoDrafter
from engine.drafters.model import ModelDrafter
from engine.engine import Engine
from engine.llm import run_in_process
from engine.sampling import SamplingParams
from engine.verifier import ModelVerifier
from tests.engine.conftest import VOCAB
from tests.fakes import ConstantDrafter, ForgetfulDrafter, MarkovModel, TreeDrafter


def make_engine(model, drafter=None, **settings):
    config = EngineConfig(**{"num_blocks": 3000, "max_num_seqs": 64, "max_queued_requests": 10**6, **settings})
    verifier = ModelVerifier(model, config)
    return Engine(
        config,
        drafter=NoDrafter() if drafter is None else drafter(config),
        verifier=verifier,
        num_blocks=verifier.num_blocks,
        vocab_size=model.info.vocab_size,
        max_model_len=model.info.max_model_len,
        eos_token_ids=model.info.eos_token_ids,
    )


def run(engine, requests, *, between=None):
    """Generate everything; returns the tokens per request."""
    for i, (prompt, params) in enumerate(requests):
        engine.add(str(i), prompt, params)
    tokens = {str(i): [] for i in range(len(requests))}
    for rounds in itertools.count():
        if not engine.has_work:
            break
        for output in run_in_process(engine.step()):
            tokens[output.request_id] += output.token_ids
        if between is not None:
            between(engine, rounds)
    assert engine.num_free_blocks == engine.num_blocks
    return tokens


# --- Equality: the coupled rule -------------------------------------------------------------------------------------


def varied_requests(count=200):
    """Prompts of 3 to 60 tokens, every sampling parameter on somewhere, each at three temperatures."""
    generator = torch.Generator().manual_seed(0)
    requests = []
    for i in range(count):
        length = 3 + int(torch.randint(58, (1,), generator=generator))
        prompt = torch.randint(2, VOCAB, (length,), generator=generator).tolist()
        for temperature in (0.0, 0.7, 1.0):
            params = SamplingParams(
                temperature=temperature,
                seed=i,
                max_tokens=12,
                num_speculative_tokens=1 + i % 8,
                top_p=0.9 if i % 3 == 0 else 1.0,
                top_k=10 if i % 4 == 0 else 0,
                min_p=0.05 if i % 5 == 0 else 0.0,
                repetition_penalty=1.3 if i % 6 == 0 else 1.0,
                presence_penalty=0.5 if i % 7 == 0 else 0.0,
                frequency_penalty=0.7 if i % 7 == 1 else 0.0,
                logit_bias={5: 3.0, 1: 4.0} if i % 8 in (0, 1, 2) else {},
                min_tokens=6 if i % 16 in (1, 2) else 0,
                stop_token_ids=[9, 10, 11] if i % 9 == 0 else [],
                ignore_eos=i % 10 == 0,
            )
            requests.append((prompt, params))
    return requests


@pytest.fixture(scope="module")
def requests():
    return varied_requests()


@pytest.fixture(scope="module")
def plain(target, requests):
    """The text without speculation."""
    return run(make_engine(target, num_speculative_tokens=0), requests)


DRAFTERS = {
    "the target itself": lambda target, _: lambda config: ModelDrafter(target, config),
    "a random draft": lambda _, draft: lambda config: ModelDrafter(draft, config),
    "always wrong": lambda *_: lambda _: ConstantDrafter(0),
    "trees": lambda *_: lambda _: TreeDrafter(range(2, 20)),
    "forgetful": lambda target, _: lambda config: ForgetfulDrafter(ModelDrafter(target, config)),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_coupled_text_does_not_depend_on_the_draft(name, target, draft, requests, plain):
    engine = make_engine(target, DRAFTERS[name](target, draft), num_speculative_tokens=8)
    assert run(engine, requests) == plain
    if name != "always wrong":
        assert engine.stats.num_accepted_tokens > 0


def test_some_requests_end_early(requests, plain):
    """Else the equality above would not have seen an end inside an accepted run."""
    lengths = [len(tokens) for tokens in plain.values()]
    assert sum(length < 12 for length in lengths) > 20


@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 12, "max_num_seqs": 8},
        {"max_num_batched_tokens": 24},
        {"enable_prefix_caching": False},
        {"block_size": 4},
    ],
    ids=["preempted", "chunked", "unshared", "small blocks"],
)
def test_text_does_not_depend_on_scheduling(settings, target, requests, plain):
    engine = make_engine(target, lambda config: ModelDrafter(target, config), num_speculative_tokens=4, **settings)
    some = requests[:90]
    assert run(engine, some) == {str(i): plain[str(i)] for i in range(len(some))}
    if "num_blocks" in settings:
        assert engine.stats.num_preemptions > 0


def test_text_survives_the_loss_of_the_targets_memory(target, requests, plain):
    engine = make_engine(target, lambda config: ModelDrafter(target, config), num_speculative_tokens=4)

    def lose(engine, rounds):
        if rounds % 3 == 2:
            for cache in (*engine.verifier._kv.keys, *engine.verifier._kv.values):
                cache.fill_(7.0)
            engine.reset()

    some = requests[:60]
    assert run(engine, some, between=lose) == {str(i): plain[str(i)] for i in range(len(some))}


def test_a_target_that_drafts_for_itself_is_always_right(target):
    prompts = [[2 + i, 3, 5, 7 + i] for i in range(20)]
    requests = [
        (p, SamplingParams(temperature=0.9, seed=i, max_tokens=40, ignore_eos=True)) for i, p in enumerate(prompts)
    ]
    engine = make_engine(
        target, lambda config: ForgetfulDrafter(ModelDrafter(target, config)), num_speculative_tokens=4
    )
    run(engine, requests)
    assert engine.stats.acceptance_rate == 1.0


def test_what_a_rejected_token_left_behind_is_never_read(target, requests, plain):
    """Blocks go back dirty; poisoned between rounds, nothing that is attended to may change."""
    engine = make_engine(
        target, lambda _: TreeDrafter(range(2, 20)), num_speculative_tokens=8, enable_prefix_caching=False
    )

    def poison(engine, _):
        free = torch.tensor(list(engine.scheduler.pool._free))
        for cache in (*engine.verifier._kv.keys, *engine.verifier._kv.values):
            cache[free] = 50.0

    some = requests[:60]
    assert run(engine, some, between=poison) == {str(i): plain[str(i)] for i in range(len(some))}


# --- Law: both rules ------------------------------------------------------------------------------------------------

TRANSITIONS = torch.tensor(
    [
        [0.50, 0.20, 0.15, 0.10, 0.05],
        [0.05, 0.45, 0.10, 0.25, 0.15],
        [0.30, 0.05, 0.35, 0.10, 0.20],
        [0.20, 0.20, 0.20, 0.30, 0.10],
        [0.02, 0.28, 0.30, 0.05, 0.35],
    ]
)
UNLIKE = TRANSITIONS.flip(1)
LAWS = {
    "plain": SamplingParams(max_tokens=4),
    "warm": SamplingParams(max_tokens=4, temperature=0.6),
    "top_p": SamplingParams(max_tokens=4, top_p=0.72),
    "top_k": SamplingParams(max_tokens=4, top_k=3, temperature=1.4),
    "penalties": SamplingParams(max_tokens=4, repetition_penalty=1.5, presence_penalty=0.6, frequency_penalty=0.5),
    "min_p and bias": SamplingParams(max_tokens=4, min_p=0.3, logit_bias={2: 1.0}),
}
# One token, so that the first round already verifies a draft of three.
PROMPT = [1]
SAMPLES = 3000


def next_law(tokens, params):
    """The law of the next token, written down again without tensors."""
    logits = [math.log(p) for p in TRANSITIONS[tokens[-1]].tolist()]
    output = tokens[len(PROMPT) :]
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    for token in range(5):
        if token in tokens and params.repetition_penalty != 1:
            factor = params.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        count = output.count(token)
        logits[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    weights = [math.exp(logit / params.temperature) for logit in logits]
    weights = [w if w >= params.min_p * max(weights) else 0.0 for w in weights]
    order = sorted(range(5), key=lambda token: -weights[token])
    if params.top_k:
        weights = [w if token in order[: params.top_k] else 0.0 for token, w in enumerate(weights)]
    total, before, kept = sum(weights), 0.0, [0.0] * 5
    for token in order:
        if before < params.top_p:
            kept[token] = weights[token]
        before += weights[token] / total
    return [w / sum(kept) for w in kept]


def joint_law(params):
    law = {}
    for tokens in itertools.product(range(5), repeat=3):
        prob = 1.0
        for i, token in enumerate(tokens):
            prob *= next_law([*PROMPT, *tokens[:i]], params)[token]
        law[tokens] = prob
    return law


def p_value(counts, law, samples):
    """Chi-square with rare outcomes put together; an impossible one is a failure by itself."""
    assert all(law[tokens] > 0 for tokens in counts)
    rare = [tokens for tokens, prob in law.items() if prob * samples < 5]
    cells = [(counts.get(t, 0), p * samples) for t, p in law.items() if t not in rare]
    expected = sum(law[t] for t in rare) * samples
    if expected > 1:
        cells.append((sum(counts.get(t, 0) for t in rare), expected))
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    return chi2.sf(statistic, len(cells) - 1)


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
@pytest.mark.parametrize("draft", ["itself", "unlike", "forgetful"])
@pytest.mark.parametrize("name", LAWS)
def test_three_tokens_have_the_targets_joint_law(name, draft, verification):
    """36 tests of 3,000 samples, 108,000 in all; at 1e-5 each, a false alarm has probability below 4e-4."""
    target = MarkovModel(TRANSITIONS)
    drafter_model = target if draft == "itself" else MarkovModel(UNLIKE)

    def make(config):
        drafter = ModelDrafter(drafter_model, config)
        # Rows of a batch get drafts of different lengths, none included.
        return Cutting(drafter) if draft == "forgetful" else drafter

    engine = make_engine(
        target,
        make,
        verification=verification,
        num_speculative_tokens=3,
        max_num_seqs=1000,
        max_num_batched_tokens=10**6,
        num_blocks=1100,
    )
    params = LAWS[name]
    requests = [(PROMPT, SamplingParams(**{**as_dict(params), "seed": seed})) for seed in range(SAMPLES)]
    counts = {}
    for tokens in run(engine, requests).values():
        first = tuple(tokens[:3])
        counts[first] = counts.get(first, 0) + 1
    assert p_value(counts, joint_law(params), SAMPLES) > 1e-5


class Cutting(ForgetfulDrafter):
    """Cuts sparse rows too."""

    async def propose(self, rows):
        drafts = await self.drafter.propose(rows)
        cut = []
        for draft in drafts:
            n = self.random.choice([0, 1, 2, 8])
            ids = None if draft.top_ids is None else draft.top_ids[:n]
            probs = None if draft.top_probs is None else draft.top_probs[:n]
            cut.append(type(draft)(draft.token_ids[:n], draft.parents[:n], ids, probs))
        return cut


def as_dict(params):
    return {name: getattr(params, name) for name in SamplingParams.__slots__}
