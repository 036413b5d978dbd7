"""ModelVerifier row by row: who gets tokens, which log probabilities, and whose keys and values are kept."""

import pytest
import torch

from engine.config import EngineConfig
from engine.params import SamplingParams
from engine.protocols import NO_DRAFT, Draft, Request, Verdict, VerifyRow, chain, run_in_process
from engine.verification.decider import paths
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


def test_an_unfinished_prompt_gets_no_tokens_and_its_last_chunk_gets_one(model):
    verifier = make_verifier(model)
    others = make_row([6, 6, 1], first_block=20)
    unfinished, beside = verify(verifier, make_row(PROMPT, length=5), others)
    assert unfinished == Verdict()
    assert beside.token_ids == greedy(model, [6, 6, 1], 1)
    (verdict,) = verify(verifier, make_row(PROMPT, start=5))
    assert verdict == Verdict(greedy(model, PROMPT, 1))


def exact_logprobs(model, token_ids, token):
    law = model.law(token_ids).log()
    return float(law[token]), int((law > law[token]).sum()) + 1, law.topk(2)


def check_logprobs(model, token_ids, token, found):
    logprob, rank, top = exact_logprobs(model, token_ids, token)
    assert found.logprob == pytest.approx(logprob, abs=1e-5)
    assert found.rank == rank
    assert found.top_ids == top.indices.tolist()
    assert found.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-5)


def test_a_prompts_log_probabilities_come_chunk_by_chunk_for_each_token_but_the_first(model):
    verifier = make_verifier(model)
    params = SamplingParams(temperature=0, prompt_logprobs=2)
    beside = make_row([6, 6, 1], first_block=20, draft=chain(greedy(model, [6, 6, 1], 2)))
    found = []
    for start, length in ((0, 4), (4, 1), (5, 4)):
        verdict, other = verify(verifier, make_row(PROMPT, params, start=start, length=length), beside)
        found += verdict.prompt_logprobs
        assert verdict.token_ids == (greedy(model, PROMPT, 1) if start == 5 else [])
        assert (other.token_ids, other.path) == (greedy(model, [6, 6, 1], 3), [0, 1])
    assert len(found) == len(PROMPT) - 1
    for place, logprobs in enumerate(found, start=1):
        check_logprobs(model, PROMPT[:place], PROMPT[place], logprobs)


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


def test_rows_that_need_shaping_have_the_tokens_of_their_parameters_beside_rows_that_the_pass_draws(model):
    params = [one for pair in zip(SHAPED, (PLAIN * 3)[: len(SHAPED)], strict=True) for one in pair]
    prompts = texts(len(params))
    expected = [expected_tokens(model, prompt, one)[:3] for prompt, one in zip(prompts, params, strict=True)]
    rows = [
        make_row(prompt, one, first_block=1 + 4 * nth, draft=chain(tokens[:2]))
        for nth, (prompt, one, tokens) in enumerate(zip(prompts, params, expected, strict=True))
    ]
    verdicts = verify(make_verifier(model), *rows)
    (draws,) = model.draws
    assert draws is not None, "the pass drew nothing"
    assert [verdict.token_ids for verdict in verdicts] == expected


def test_rows_that_need_no_shaping_take_what_the_pass_drew():
    class Stubborn(RecordingModel):
        def run(self, batch, draws=None):
            output = super().run(batch, draws)
            return output._replace(tokens=torch.full_like(output.tokens, 10))

    model = Stubborn()
    rows = [make_row([3, 4], one, first_block=first) for one, first in ((PLAIN[0], 1), (SHAPED[3], 10), (GREEDY, 20))]
    drawn, shaped, likeliest = (verdict.token_ids for verdict in verify(make_verifier(model), *rows))
    assert (drawn, likeliest) == ([10], [10])
    assert shaped == expected_tokens(model, [3, 4], SHAPED[3])[:1] != [10]


@pytest.mark.parametrize("settings", [{"verification": "rejection"}, {}], ids=["rejection", "a prompt's logprobs"])
def test_where_more_than_tokens_is_needed_the_pass_does_not_draw(settings, model):
    params = SamplingParams(temperature=0, prompt_logprobs=0 if not settings else None)
    (verdict,) = verify(make_verifier(model, **settings), make_row(PROMPT, params))
    assert verdict.token_ids == greedy(model, PROMPT, 1)
    assert model.draws == [None]


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


def test_chains_move_nothing_and_ranks_share_nothing(model):
    draft = chain(greedy(model, PROMPT, 2))
    verify(make_verifier(model), make_row(PROMPT, draft=draft))
    assert model.shared is None


def test_paths_lead_from_the_tip_to_every_node():
    assert paths(NO_DRAFT) == [[]]
    assert paths(Draft([5, 6, 7, 8], [-1, 0, -1, 1])) == [[], [5], [5, 6], [7], [5, 6, 8]]


def test_an_ended_requests_matcher_is_released(model):
    released = []

    class ReleasedGrammars:
        release = staticmethod(released.append)

    verifier = ModelVerifier(model, EngineConfig(num_blocks=1), ReleasedGrammars())
    verifier.release("a")
    make_verifier(model).release("b")
    assert released == ["a"]


@pytest.mark.parametrize("params", [GREEDY, SHAPED[0]], ids=["drawn in the pass", "drawn from logits"])
def test_a_device_that_computes_while_the_host_goes_on_decides_the_same(params, model):
    rows = [make_row([3, 4, 5], params, first_block=1), make_row([6, 7], params, first_block=10)]
    assert verify(make_verifier(LateModel(model)), *rows) == verify(make_verifier(model), *rows)


@pytest.mark.parametrize(
    ("settings", "needs_logits"),
    [({}, False), ({"temperature": 0.7}, False), ({"top_k": 2}, True), ({"logprobs": 0}, True)],
)
def test_logits_are_read_only_for_parameters_and_log_probabilities(settings, needs_logits, model):
    row = make_row([3, 4, 5], SamplingParams(**settings), draft=chain([2]))
    verify(make_verifier(model), row, make_row([6], first_block=9))
    assert model.needs_logits == [needs_logits]
