"""ModelVerifier row by row: who gets tokens, which log probabilities, and whose keys and values are kept."""

import pytest
import torch

from engine.config import EngineConfig
from engine.params import SamplingParams
from engine.protocols import NO_DRAFT, Draft, Request, VerifyRow, chain, run_in_process
from engine.verification.verifier import ModelVerifier
from tests.engine.running import expected_tokens
from tests.fakes import ContextModel, LateModel

VOCAB, EOS, BLOCK = 12, 0, 4
GREEDY = SamplingParams(temperature=0)


class RecordingModel(ContextModel):
    """Notes what its passes draw with, and what its rank shares with the others."""

    def __init__(self, first_rank=None):
        """Make a model by itself, or a rank whose sums are those of it and of a first rank."""
        laws = torch.rand(101, VOCAB, generator=torch.Generator().manual_seed(0)) ** 4
        super().__init__(laws / laws.sum(-1, keepdim=True), [EOS])
        self.first_rank = first_rank
        self.reducer = self
        self.draws = []
        self.needs_logits = []
        self.shared = None

    def run(self, batch, draws=None):
        self.draws.append(draws)
        self.needs_logits.append(batch.needs_logits)
        return super().run(batch, draws)

    def sum(self, partial):
        self.shared = partial.clone()
        return partial if self.first_rank is None else partial + self.first_rank.shared


@pytest.fixture
def model():
    return RecordingModel()


def make_verifier(model, **settings):
    return ModelVerifier(model, EngineConfig(num_blocks=80, block_size=BLOCK, **settings))


def verify(verifier, *rows, **options):
    return run_in_process(verifier.verify(rows, **options))


def make_row(token_ids, params=GREEDY, *, start=0, length=None, first_block=1, draft=NO_DRAFT, prompt_length=None):
    """A row that computes its tokens up to the tip unless `length` says otherwise, in blocks of its own."""
    request = Request("", list(token_ids), prompt_length or len(token_ids), params)
    length = len(token_ids) - start if length is None else length
    return VerifyRow(request, start, length, range(first_block + 3, first_block - 1, -1), draft)


def greedy(model, token_ids, count):
    return expected_tokens(model, token_ids, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))


PROMPT = [3, 9, 4, 7, 1, 8, 2, 5, 11]


def exact_logprobs(model, token_ids, token):
    law = model.law(token_ids).log()
    return float(law[token]), int((law > law[token]).sum()) + 1, law.topk(2)


def check_logprobs(model, token_ids, token, found):
    logprob, rank, top = exact_logprobs(model, token_ids, token)
    assert found.logprob == pytest.approx(logprob, abs=1e-5)
    assert found.rank == rank
    assert found.top_ids == top.indices.tolist()
    assert found.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-5)


def test_log_probabilities_are_of_every_committed_token_before_any_shaping(model):
    params = SamplingParams(temperature=0.3, seed=5, logit_bias={2: 4.0}, logprobs=2, max_tokens=3, ignore_eos=True)
    right = expected_tokens(model, PROMPT, params)
    draft = Draft([(right[0] + 1) % VOCAB, right[0], right[1]], [-1, -1, 1])
    rows = make_row(PROMPT, params, draft=draft), make_row([6, 6, 1], first_block=20)
    verdict, other = verify(make_verifier(model), *rows)
    assert (verdict.token_ids, verdict.path) == (right, [1, 2])
    assert verdict.logprobs is not None
    assert other.logprobs is None
    for nth, (token, found) in enumerate(zip(right, verdict.logprobs, strict=True)):
        check_logprobs(model, PROMPT + right[:nth], token, found)


def endless(**settings):
    return SamplingParams(ignore_eos=True, **settings)


SHAPED = [
    endless(temperature=0.9, seed=1, top_p=0.4),
    endless(temperature=1.3, seed=2, top_k=2),
    endless(temperature=1.5, seed=3, min_p=0.9),
    endless(temperature=0.8, seed=4, logit_bias={7: 9.0}),
    endless(temperature=0, logit_bias={7: 9.0}),
    endless(temperature=0.7, seed=5, presence_penalty=2.0, repetition_penalty=3.0),
    endless(temperature=0.7, seed=6, min_tokens=16, stop_token_ids=[3, 7]),
]
PLAIN = [endless(temperature=0.6, seed=7), endless(temperature=0), endless(temperature=1.0, seed=8)]


def texts(count):
    generator = torch.Generator().manual_seed(2)
    return torch.randint(1, VOCAB, (count, 4), generator=generator).tolist()


@pytest.mark.parametrize(
    ("params", "settings", "needs_logits"),
    [
        ({}, {}, False),
        ({"top_p": 0.5}, {}, True),
        ({"logprobs": 0}, {}, True),
        ({"prompt_logprobs": 0}, {}, True),
        ({}, {"verification": "rejection"}, True),
    ],
    ids=["coupled", "shaped", "logprobs", "a prompt's logprobs", "rejection"],
)
def test_all_ranks_draw_alike_and_say_alike_whether_they_need_logits(params, settings, needs_logits, model):
    second = RecordingModel(first_rank=model)
    rows = [make_row(PROMPT, PLAIN[0]), make_row([3, 4], SamplingParams(seed=5, **params), first_block=10)]
    for rank, decides in ((model, True), (second, False)):
        verify(make_verifier(rank, **settings), *rows, decides=decides)
        assert rank.needs_logits == [needs_logits]
    (first,), (other,) = model.draws, second.draws
    assert (first is None) == (other is None) == ("verification" in settings or "prompt_logprobs" in params)
    if first is not None:
        for name in ("temperatures", "keys", "rows"):
            assert torch.equal(getattr(first, name), getattr(other, name))


def branching_rows(model):
    """A tree whose second branch is right, a chain, and a tree of which nothing is right."""
    right = greedy(model, PROMPT, 4)
    wrong = [(right[0] + shift) % VOCAB for shift in (1, 2)]
    tree = Draft([wrong[0], right[0], wrong[1], right[1], right[2]], [-1, -1, 0, 1, 3])
    other = greedy(model, [6, 6, 1], 2)
    text = [2, 7]
    return right, [
        make_row(PROMPT, draft=tree),
        make_row([6, 6, 1], first_block=12, draft=chain(other)),
        make_row(text, first_block=24, draft=Draft([(greedy(model, text, 1)[0] + 1) % VOCAB] * 2, [-1, -1])),
    ]


def test_the_accepted_path_of_a_tree_is_context_in_the_next_round(model):
    verifier = make_verifier(model)
    right, rows = branching_rows(model)
    accepted, _, rejected = verify(verifier, *rows)
    assert (accepted.token_ids, accepted.path) == (right, [1, 3, 4])
    assert rejected.path == []
    longer = [*PROMPT, *right]
    (verdict,) = verify(verifier, make_row(longer, start=len(longer) - 1))
    assert verdict.token_ids == greedy(model, longer, 1)


def test_a_rank_that_does_not_decide_answers_nothing_and_keeps_the_paths_of_the_one_that_does(model):
    second = RecordingModel(first_rank=model)
    verifiers = [make_verifier(model), make_verifier(second)]
    _, rows = branching_rows(model)
    assert len(verify(verifiers[0], *rows)) == 3
    assert verify(verifiers[1], *rows, decides=False) == []
    assert second.shared.tolist() == [[0] * 5] * 2, "it adds empty paths, for the drafts that branch"
    assert model.shared.tolist() == [[2, 4, 5, 0, 0], [0] * 5]
    (entries,), (others,) = (verifier._kv.keys for verifier in verifiers)
    assert torch.equal(entries[1:], others[1:])


@pytest.mark.parametrize("params", [GREEDY, SHAPED[0]], ids=["drawn in the pass", "drawn from logits"])
def test_a_device_that_computes_while_the_host_goes_on_decides_the_same(params, model):
    rows = [make_row([3, 4, 5], params, first_block=1), make_row([6, 7], params, first_block=10)]
    assert verify(make_verifier(LateModel(model)), *rows) == verify(make_verifier(model), *rows)
