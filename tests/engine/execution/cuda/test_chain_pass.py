"""A chain that is drawn by one recording has the tokens of a chain that is drawn pass by pass.

The recording is computed on the CPU with interpreted kernels, by a recorder that calls.
"""

import itertools
import random

import pytest
import torch
from transformers import LlamaConfig

from engine.config import EngineConfig, ModelConfig
from engine.drafting.in_target.target_chains import TargetChainDrafter
from engine.drafting.model.chain_drafter import ModelDrafter
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.run_ahead.chains import RunAheadDrafter
from engine.execution.batch import ForwardRow, build
from engine.execution.eager import EagerBackend
from engine.heads.head import head_model
from engine.heads.tapped import with_head
from engine.params import SamplingParams
from engine.protocols import Draft, ProposeRow, Request, VerifyRow, run_in_process
from tests.engine.heads.tiny_heads import head_config, random_head
from tests.engine.tiny import SIZES, model_of, save

pytest.importorskip("triton", reason="the kernels need triton")
from engine.execution.cuda.chain_pass import STEPS, ChainShape, chain_shape, chain_shapes
from engine.execution.cuda.cuda_backend import CudaBackend
from engine.execution.cuda.graphs import Graphs, shapes, table_width
from engine.execution.cuda.kernels import triton_attention
from tests.engine.execution.cuda.recorders import CallRecorder

BLOCK = 4
PARAMS = {
    "greedy": {"temperature": 0},
    "0.7": {"temperature": 0.7},
    "1": {"temperature": 1},
    "top_p": {"temperature": 1.5, "top_p": 0.6},
    "top_k and min_p": {"temperature": 2, "top_k": 7, "min_p": 0.05},
    "penalties": {"temperature": 0, "repetition_penalty": 1.6, "presence_penalty": 1, "frequency_penalty": 1.5}
    | {"logit_bias": {9: 90.0, 10: 90.0, 11: 90.0}},  # without penalties, one of these would be drawn again and again
    "biases": {"temperature": 1, "logit_bias": {3: 9.0, 5: 8.5, 1: 9.5}, "min_tokens": 5, "stop_token_ids": [5, 1]},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    small = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    return model_of(save(LlamaConfig(**SIZES | small), tmp_path_factory.mktemp("model")))


@pytest.fixture
def recorded(model, monkeypatch):
    """A backend with graphs that are called instead of recorded, and the shapes of their chains."""
    monkeypatch.setattr(triton_attention, "MAX_SPLIT_LENGTH", 0)  # one kernel less to interpret
    return CudaBackend(model, ModelConfig("tiny", compile="auto"), EngineConfig())


def drafter_of(backend, make=ModelDrafter, **settings):
    config = EngineConfig(num_blocks=40, block_size=BLOCK, **settings)
    drafter = make(DraftModel(backend), config)
    kv = drafter.cache.kv
    if isinstance(backend, CudaBackend):
        kv.graphs = EagerGraphs(
            backend.model, kv, CallRecorder(is_warm=True), shapes(config), table_width(config, 1000)
        )
    return drafter


class EagerGraphs(Graphs):
    """Records a chain when it comes for the first time."""

    def draw_chain(self, chain):
        if (shape := chain_shape(chain)) is not None and shape not in self._recorded:
            self.record(shape)
        return super().draw_chain(chain)

    def run(self, batch, draws):
        return None


def requests_of(names, seed=0):
    chance = random.Random(seed)
    return [
        Request(
            str(i),
            [chance.randrange(4, 60) for _ in range(1 + i % 3)],
            1 + i // 2,
            SamplingParams(seed=i, **PARAMS[name] | {"max_tokens": 60}),
        )
        for i, name in enumerate(names)
    ]


def propose(drafter, requests, counts):
    rows = [ProposeRow(request.copy(), count) for request, count in zip(requests, counts, strict=True)]
    return [draft.token_ids for draft in run_in_process(drafter.propose(rows))]


def chains_of(drafter):
    return [shape for shape in drafter.cache.kv.graphs._recorded if isinstance(shape, ChainShape)]


CASES = [
    (["1"], 1, False),
    (["greedy", "0.7", "1"], 3, False),
    (["top_k and min_p", "1"], 4, True),
    (["top_p", "penalties", "greedy"], 3, True),
    (["biases"], 3, True),
]


@pytest.mark.parametrize(("names", "k", "shaped"), CASES)
def test_a_recorded_chain_is_the_one_that_is_drawn_pass_by_pass(names, k, shaped, model, recorded):
    """Over rounds that commit some draft tokens and others, so that 1 to 3 tokens are missing in the next."""
    requests = requests_of(names)
    drafter, other = drafter_of(recorded), drafter_of(EagerBackend(model))
    for round_number in range(3):
        counts = [max(1, k - (i + round_number) % 2) for i in range(len(names))]
        drafts = propose(drafter, requests, counts)
        assert drafts == propose(other, requests, counts)
        assert [len(draft) for draft in drafts] == counts
        for i, (request, draft) in enumerate(zip(requests, drafts, strict=True)):
            kept = draft[: (i + round_number) % (k + 1)]
            request.token_ids.extend([*kept, 7 + i + round_number, 9][: len(kept) + 1 + (i + round_number) % 2])
    for cache, expected in zip(drafter.cache.kv.keys, other.cache.kv.keys, strict=True):
        for prefix in drafter.cache.prefixes.values():  # in blocks that both gave out alike
            slots = [drafter.cache.kv.slot(prefix.block_ids, place) for place in range(len(prefix.token_ids))]
            flat, right = (one.view(-1, *one.shape[2:])[slots] for one in (cache, expected))
            torch.testing.assert_close(flat, right, atol=1e-4, rtol=1e-4)
    assert {(shape.steps, shape.is_shaped) for shape in chains_of(drafter)} <= {
        (next(steps for steps in STEPS if steps >= n), shaped) for n in (k, k - 1)
    }
    assert bool(chains_of(drafter)) == (k > 1)


@torch.inference_mode()
def test_a_recorded_chain_of_a_head_is_the_one_that_is_drawn_pass_by_pass(model):
    """Rows of one and two missing tokens; each pass reads the state that the pass before it has written."""
    config = EngineConfig(num_blocks=40, block_size=BLOCK)
    with_one = with_head(model, random_head(model, head_config(taps=(1,))))
    settings, recorder = ModelConfig("tiny", compile="auto"), CallRecorder(is_warm=True)
    found = []
    for backend in (CudaBackend(with_one, settings, config, recorder=recorder), EagerBackend(with_one)):
        kv = backend.allocate_kv(40, BLOCK)
        drafter = TargetChainDrafter(head_model, config, backend, kv)
        assert drafter._draws_chains == isinstance(backend, CudaBackend)
        if isinstance(backend, CudaBackend):
            (other,) = backend._beside
            drafter._kv.graphs = EagerGraphs(other.model, drafter._kv, recorder, shapes(config), 16)
        rows = []
        for i, (request, missing) in enumerate(
            zip(requests_of(["0.7", "greedy", "1"], seed=5), (1, 2, 1), strict=True)
        ):
            request.token_ids[:] = [3, 5, 8, 9, 4 + i, 7]
            start, blocks = len(request.token_ids) - missing, [*range(1 + 10 * i, 11 + 10 * i)]
            backend.run(build([ForwardRow(request.token_ids[:start], 0, blocks, 1)], kv))
            rows.append(VerifyRow(request, start, missing, blocks, Draft(num_deferred=4)))
        found.append([row.draft.token_ids for row in drafter.draft(rows, decides=True)])
    assert found[0] == found[1]
    assert recorder.num_replays == 1
    assert len({tuple(draft) for draft in found[0]}) == 3


def test_a_chain_ranks_what_its_passes_would_rank(model, recorded):
    """So that the tokens which may follow each number of accepted ones are foreseen alike."""
    requests = requests_of(["1", "0.7"])
    drafter, other = drafter_of(recorded, RunAheadDrafter), drafter_of(EagerBackend(model), RunAheadDrafter)
    drafter._drawer._num_ranked = other._drawer._num_ranked = 10  # as on a GPU
    drafter._drawer._draws_chains = True
    assert propose(drafter, requests, [3, 3]) == propose(other, requests, [3, 3])
    assert [shape.num_ranked for shape in chains_of(drafter)] == [10]
    for context, expected in zip(drafter._contexts.values(), other._contexts.values(), strict=True):
        for (ranking, row), (right, right_row) in zip(context.chain.rankings, expected.chain.rankings, strict=True):
            torch.testing.assert_close(ranking.scores[row], right.scores[right_row], atol=1e-4, rtol=1e-4)
            assert torch.equal(ranking.token_ids[row], right.token_ids[right_row])


@pytest.mark.parametrize(
    ("num_missing", "params", "settings"),
    [(2, {}, {"verification": "rejection"}), (2, {"logit_bias": {4: -9.0, 5: 1.0, 6: 2.0}}, {}), (7, {}, {})],
)
def test_what_a_recording_cannot_draw_is_drawn_pass_by_pass(
    num_missing, params, settings, model, recorded, monkeypatch
):
    """A rule that judges by the draft's distribution needs it whole; a row has room for so many biases and tokens."""
    monkeypatch.setattr("engine.sampling.row_shaping.MAX_BIASED", 2)
    row = Request("a", [9, 8, 5, 5, 5, 5, 5][:num_missing], num_missing, SamplingParams(temperature=0, **params))
    expected = propose(drafter_of(EagerBackend(model), **settings), [row], [2])
    assert propose(drafter := drafter_of(recorded, **settings), [row], [2]) == expected
    assert chains_of(drafter) == []


@pytest.mark.parametrize(("k", "steps"), [(1, set()), (2, {2}), (4, {2, 3, 4}), (5, {2, 3, 4, 6})])
def test_the_chains_of_all_numbers_of_requests_are_planned(k, steps):
    planned = chain_shapes(5, k, 10)
    assert {shape.steps for shape in planned} == steps
    assert {(shape.first.rows, shape.is_shaped) for shape in planned} == set(
        itertools.product((2, 4, 8) if steps else (), (False, True))
    )
