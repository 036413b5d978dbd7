"""The heart: what the engine emits is the target's own text, token for token or in law.

Mutants, and the test that failed for each when it was tried:

| mutant | caught by |
|---|---|
| rejection: a token is accepted after a rejected one | test_three_tokens_have_the_targets_joint_law |
| rejection: residual without the subtraction | test_three_tokens_have_the_targets_joint_law |
| rejection: bonus drawn from the row before | test_three_tokens_have_the_targets_joint_law |
| rejection: draft_probs taken as 1 | test_three_tokens_have_the_targets_joint_law |
| coupled: walk returns the draft's next token, not the one drawn | test_nothing_changes_what_a_client_sees |
| logits: penalties ignore the draft's path | test_nothing_changes_what_a_client_sees |
| logits: noise position ignores the depth | test_nothing_changes_what_a_client_sees |
| logits: min_tokens ignores the depth | test_nothing_changes_what_a_client_sees |
| verifier: an accepted path off the chain is not moved | test_nothing_changes_what_a_client_sees |
| sequence: tokens after end-of-text are kept | test_nothing_changes_what_a_client_sees |
| attention: padding overwrites a request's first entry | test_nothing_changes_what_a_client_sees |
| batch: a node sees its siblings | test_nothing_changes_what_a_client_sees |
| scheduler: accepted tokens are computed again | test_what_a_pass_draws_is_what_would_be_drawn_outside |
| noise: a pass draws with another row's noise | test_what_a_pass_draws_is_what_would_be_drawn_outside |
| noise: later steps draw with the first one's | test_what_a_pass_draws_is_what_would_be_drawn_outside |
| verifier: shaped rows keep what the pass drew | test_what_a_pass_draws_is_what_would_be_drawn_outside |
"""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch

from cluster.protocol.messages import Drafts, decode_reply, encode
from engine.drafting.copying.combined import CombinedDrafter
from engine.drafting.copying.ngram import NgramDrafter
from engine.drafting.copying.suffix import SuffixDrafter
from engine.drafting.model.chain_drafter import ModelDrafter
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.model.several import SeveralDrafters
from engine.drafting.registry import METHODS
from engine.drafting.run_ahead.chains import RunAheadDrafter
from engine.laws import p_value
from engine.params import SamplingParams
from engine.protocols import NO_DRAFT
from engine.sampling import noise
from engine.sampling.logits import Run, gumbel_rows
from engine.verification.rule import RULES
from tests.engine.conftest import VOCAB
from tests.engine.drafting.proposing import context_model as wide_model
from tests.engine.laws import Decisions, shaped_law
from tests.engine.running import SAMPLING, chains, drafters, expected_tokens, make_engine, run
from tests.fakes import ContextModel, CuttingDrafter, InterruptedDrafter


def varied_requests(count=120):
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


# --- Law: both rules ------------------------------------------------------------------------------------------------


def context_model(seed):
    """Nine laws over five tokens; which one holds depends on every token before."""
    weights = torch.randn(9, 5, generator=torch.Generator().manual_seed(seed))
    return ContextModel(weights.softmax(-1))


TARGET, UNLIKE = context_model(1), context_model(2)
LAWS = {
    "plain": SamplingParams(),
    "warm": SamplingParams(temperature=0.6),
    "top_p": SamplingParams(top_p=0.72),
    "top_k": SamplingParams(top_k=3, temperature=1.4),
    "penalties": SamplingParams(repetition_penalty=1.5, presence_penalty=0.6, frequency_penalty=0.5),
    "min_p and bias": SamplingParams(min_p=0.3, logit_bias={2: 1.0}),
}


@pytest.mark.parametrize("drafter", [None, "the target itself", "running ahead", "trees"])
@pytest.mark.parametrize("names", [("plain", "warm"), LAWS], ids=["plain", "mixed"])
def test_what_a_pass_draws_is_what_would_be_drawn_outside(names, drafter):
    """Greedy, warm and shaped requests in one batch."""
    params = [*(LAWS[name] for name in names), SamplingParams(temperature=0)]
    requests = [
        ([i % 5, i % 3, 1], replace(params[i % len(params)], seed=i, max_tokens=20 + i % 7, ignore_eos=True))
        for i in range(56)
    ]
    expected = {str(i): expected_tokens(TARGET, *request) for i, request in enumerate(requests)}
    engine = make_engine(TARGET, drafters(TARGET, None, tokens=range(5)).get(drafter), num_speculative_tokens=4)
    assert run(engine, requests) == expected
    if drafter == "the target itself":
        assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens > 0
        assert engine.stats.num_rounds_by_length.total() == 6  # the prompts, and then five tokens a round


DRAFTS = {
    "unlike": chains(UNLIKE),
    "mixed": lambda config: CuttingDrafter(ModelDrafter(DraftModel(TARGET), config)),
    "n-grams": lambda _: NgramDrafter(),
    "model and copies": lambda config: CombinedDrafter(
        ModelDrafter(DraftModel(UNLIKE), config), SuffixDrafter(remembers_outputs=False)
    ),
    "ahead": lambda config: InterruptedDrafter(RunAheadDrafter(DraftModel(UNLIKE), config)),
    "several": lambda config: SeveralDrafters([chains(model)(config) for model in (UNLIKE, TARGET)]),
    "trees": lambda config: CuttingDrafter(METHODS["tree"].make(config, DraftModel(UNLIKE, 5))),
}
VERIFIED = [
    *zip((name for name in DRAFTS if name != "trees"), itertools.cycle(("block", "rejection"))),
    *(("trees", rule) for rule in METHODS["tree"].rules if rule != "coupled"),
]
"""Each kind of draft by one rule of chains, as every decision of each rule is checked, and `check_rule` checks it."""
PROMPT = [3, 1, 4, 1, 0, 2, 2]
SAMPLES = 1000
LENGTH = 3


def joint_law(params):
    """The law of the first three tokens, by the model's own tables."""
    law = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for tokens, weight in law.items():
            committed = [*PROMPT, *tokens]
            next_law = shaped_law(TARGET.law(committed).log().tolist(), params, committed, len(PROMPT))
            longer |= {(*tokens, token): weight * prob for token, prob in enumerate(next_law)}
        law = longer
    return law


def check_law(engine, name="penalties", num_samples=SAMPLES):
    """Assert that the first three tokens of an engine's texts have the target's joint law, at 1e-5."""
    params = replace(LAWS[name], max_tokens=LENGTH + 2, ignore_eos=True)
    texts = run(engine, [(PROMPT, replace(params, seed=seed)) for seed in range(num_samples)])
    counts = Counter(tuple(text[:LENGTH]) for text in texts.values())
    assert p_value(counts, joint_law(LAWS[name])) > 1e-5


class OverTheWire(CuttingDrafter):
    """Serialises proposals as a draft worker's reply does, and cuts them to any length."""

    async def propose(self, rows):
        return decode_reply(encode(Drafts(1, 1, 0.0, await super().propose(rows)))).drafts


@pytest.mark.parametrize(
    ("drafting", "verification"),
    [("model", "rejection"), ("model", "block"), ("tree", "rejection"), ("tree", "k_sequential")],
)
def test_every_decision_is_made_by_the_laws_themselves(drafting, verification, monkeypatch):
    """Wrong drafts of up to 6 tokens, cut at `TOP_M`, of requests that are shaped, preempted, resumed or greedy."""
    target, unlike = (wide_model(seed, sharpness=1) for seed in (1, 2))
    decisions = Decisions(monkeypatch, verification, target)
    engine = make_engine(
        target,
        lambda config: OverTheWire(METHODS[drafting].make(config, DraftModel(unlike, VOCAB))),
        verification=verification,
        num_speculative_tokens=6,
        block_size=4,
        num_blocks=24,
        max_num_batched_tokens=60,
    )
    others = [
        SamplingParams(temperature=0),
        SamplingParams(min_tokens=5, stop_token_ids=[3, 4, 5, 6]),
        SamplingParams(top_k=9),
    ]
    params = [*LAWS.values(), *others]
    requests = [(PROMPT, replace(params[i % len(params)], seed=i, max_tokens=14)) for i in range(36)]
    for i, (prompt, one) in enumerate(requests[:9]):
        engine.add(f"resumed {i}", prompt, replace(one, ignore_eos=True), output_token_ids=[7, 9, 8])
    run(engine, requests)
    assert engine.stats.num_preemptions > 0
    assert engine.stats.num_accepted_tokens > 20
    assert decisions.num_nodes > 500
    assert decisions.deepest == 6 or drafting == "tree"
    assert decisions.most_cut > 100


@pytest.mark.parametrize(("draft", "verification"), VERIFIED)
def test_three_tokens_have_the_targets_joint_law(draft, verification):
    """1,000 samples of the law that depends most on what was committed: they show a bias of some 20 %."""
    num_drafts = 2 if draft == "several" else 1
    engine = make_engine(TARGET, DRAFTS[draft], **SAMPLING, verification=verification, num_drafts=num_drafts)
    check_law(engine)
    used = {index for index, _ in engine.planner.num_tokens_by_draft}
    assert used == {*range(num_drafts)}


class ForesightedDrafter:
    """Drafts only after rounds in whose noise, as running ahead ranks tokens by it, the second token was to be 0."""

    def __init__(self, drafter):
        self.drafter = drafter
        self.foreseen = {}

    async def propose(self, rows):
        drafts = await self.drafter.propose(rows)
        chosen = [
            draft if self.foreseen.get(row.request.request_id) else NO_DRAFT
            for row, draft in zip(rows, drafts, strict=True)
        ]
        for row in rows:
            ahead = [Run(row.request, [1])]
            scores = gumbel_rows(ahead, torch.zeros(1, 5), noise.RESIDUAL_STREAM)
            self.foreseen[row.request.request_id] = int(scores.argmax()) == 0
        return chosen

    def release(self, request_id):
        self.drafter.release(request_id)


def test_what_running_ahead_sees_of_a_round_says_nothing_about_the_next():
    """Which verdicts are prepared, and so how long the next draft is, depends on noise that this round looks at.

    All rules that need draft rows draw that noise alike.
    """
    engine = make_engine(
        TARGET, lambda config: ForesightedDrafter(chains(UNLIKE)(config)), **SAMPLING, verification="rejection"
    )
    check_law(engine, "plain")


@pytest.mark.parametrize("verification", RULES)
def test_a_draft_with_the_targets_own_law_is_always_right_whatever_the_parameters(verification):
    """All laws in one batch, with a sixth of the samples each."""
    engine = make_engine(TARGET, chains(TARGET), **SAMPLING, verification=verification)
    # A few more: the last ones are never drafted, and a draft of one token shows nothing of what follows a rejection.
    params = [replace(law, max_tokens=LENGTH + 2, ignore_eos=True) for law in LAWS.values()]
    requests = [(PROMPT, replace(params[seed % len(params)], seed=seed)) for seed in range(SAMPLES)]
    texts = list(run(engine, requests).values())
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens > 0
    for nth, params in enumerate(LAWS.values()):
        counts = Counter(tuple(text[:LENGTH]) for text in texts[nth :: len(LAWS)])
        assert p_value(counts, joint_law(params)) > 1e-5
