"""Rounds on a fake GPU: every text is the CPU's, and the list of what makes the host wait is the expected one."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig

from engine.config import EngineConfig
from engine.drafting.model.chain_drafter import ModelDrafter
from engine.drafting.model.draft_cache import DraftCache
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.model.translated import TranslatedBackend
from engine.drafting.run_ahead import shared_pass
from engine.drafting.run_ahead.chains import RunAheadDrafter
from engine.execution.kv_tensors import KVTensors
from engine.execution.registry import make_backend
from engine.heads.tapped import with_head
from engine.models.layers.layer_attention import KVShape
from engine.params import SamplingParams
from engine.protocols import ProposeRow, Request, run_in_process
from tests.engine.grammars import GRAMMARS
from tests.engine.heads.tiny_heads import head_config, random_head
from tests.engine.running import make_engine, run, run_outputs
from tests.engine.tiny import SIZES, model_of, save, source_of
from tests.fakes import InterruptedDrafter, TreeDrafter

pytest.importorskip("triton", reason="the kernels need triton")
from engine.execution.cuda import cuda_backend
from engine.execution.cuda.chain_pass import ChainShape
from engine.execution.cuda.kernels import triton_attention
from engine.execution.cuda.static_pass import Shape
from tests.engine.execution.cuda.fake_cuda import DEVICE, fake_gpu, move_to_gpu
from tests.engine.execution.cuda.recorders import CallRecorder

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted where there is no GPU")

PLAIN = SamplingParams(temperature=0.8, seed=1)
PARAMS = {
    "drawn": PLAIN,
    "top-p": replace(PLAIN, top_p=0.5),
    "grammar": replace(PLAIN, grammar=GRAMMARS["regex"]),
}
DRAFTERS = {
    "no draft": lambda draft: None,
    "head": lambda draft: None,
    "chain": lambda draft: lambda config: ModelDrafter(draft, config),
    "tree": lambda draft: lambda config: TreeDrafter(range(2, 40), seed=1),
    "running ahead": lambda draft: lambda config: InterruptedDrafter(RunAheadDrafter(draft, config), seed=3),
}
VERIFIED = ["synchronize in eager", "tolist in verifier"]
CHAIN = ["synchronize in eager"]
DRAFTED = ["synchronize in eager", "tolist in token_drawer"]
RANKED = ["tolist in next_tokens"] * 2
SHAPED = ["tolist in coupled"]
WAITS = {
    "drawn, no draft": VERIFIED,
    "drawn, chain": [*CHAIN, *VERIFIED],
    "drawn, head": [*CHAIN, *VERIFIED],
    "top-p, head": [*CHAIN, *VERIFIED, *SHAPED],
    "drawn, tree": VERIFIED,
    "drawn, running ahead": [*CHAIN, *RANKED, *VERIFIED],
    "top-p, chain": [*CHAIN, *VERIFIED, *SHAPED],
    "grammar, chain": ["synchronize in eager", *DRAFTED, *DRAFTED, *VERIFIED, *SHAPED],
}
"""What makes the host wait for the device in a round, and in which file; a new entry costs every round its time."""


RECORDER = CallRecorder(is_warm=True)


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda forward, **_: forward)
    monkeypatch.setattr(cuda_backend, "GraphRecorder", lambda _: RECORDER)
    monkeypatch.setattr(triton_attention, "NUM_PARTS", 2)
    monkeypatch.setattr(triton_attention, "MAX_SPLIT_LENGTH", 0)  # one kernel less to interpret
    monkeypatch.setattr(cuda_backend, "_kinds_of_passes", lambda *_, **__: [])
    monkeypatch.setattr(cuda_backend, "prompt_shapes", lambda _: [])
    with fake_gpu(monkeypatch) as gpu:
        yield gpu


SHAPES = {
    "no draft": [Shape(2, 1, 0)],
    "chain": [Shape(2, 3, 0)],
    "head": [Shape(2, 3, 0)],
    "tree": [Shape(2, 3, 4)],
    "running ahead": [Shape(2, 9, 4), Shape(2, 3, 0)],
}


def backend_of(path, *, gpu, invariant=True, has_head=False):
    model = model_of(path)
    if has_head:
        model = with_head(model, random_head(model, head_config(taps=(1,))))
    if gpu is not None:
        move_to_gpu(model.module)
        model.device = DEVICE
    return make_backend(model, source_of(path, compile="off" if gpu is None else "auto"), invariant=invariant)


def rounds(paths, make_grammars, params, drafter, *, gpu=None):
    """Generate two texts; return them, and the waits of each round."""
    has_head = drafter == "head"
    target, draft = (
        backend_of(path, gpu=gpu, invariant=is_target, has_head=has_head and is_target)
        for path, is_target in zip(paths, (True, False), strict=True)
    )
    drafting = DRAFTERS[drafter](DraftModel(draft, grammars=make_grammars()))
    settings = {"num_blocks": 12, "num_speculative_tokens": 2, "max_num_seqs": 2}
    settings |= {"drafting": "head"} if has_head else {}
    engine = make_engine(target, drafting, grammars=make_grammars(), **settings)

    def chain(num_ranked):
        return ChainShape(Shape(2, 3, 0), 2, num_ranked, params == "top-p")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cuda_backend, "shapes", lambda *_: SHAPES[drafter])
        patched.setattr(cuda_backend, "chain_shapes", lambda _, steps, num_ranked: [chain(num_ranked)])
        target.warm_up()
        if drafter in ("chain", "running ahead"):
            draft.warm_up()
    waits = []
    outputs = run_outputs(
        engine,
        [([5, 6], replace(PARAMS[params], max_tokens=4, seed=seed)) for seed in (1, 2)],
        between=lambda *_: gpu is not None and waits.append(gpu.read_waits()),
    )
    return [[token for output in each for token in output.token_ids] for each in outputs.values()], waits


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    sizes = SIZES | {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    return [save(LlamaConfig(**sizes), folder / str(seed), seed=seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def expected(paths, make_grammars):
    """The texts of the CPU."""
    return {params: rounds(paths, make_grammars, params, "no draft")[0] for params in PARAMS}


@pytest.mark.slow
@pytest.mark.parametrize("case", WAITS)
def test_texts_are_the_cpus_and_the_waits_of_a_round_are_known(case, paths, make_grammars, expected, gpu):
    params, drafter = case.split(", ")
    num_replays = RECORDER.num_replays
    texts, waits = rounds(paths, make_grammars, params, drafter, gpu=gpu)
    assert texts == expected[params]
    assert RECORDER.num_replays > num_replays
    assert waits[1] == WAITS[case]


@pytest.mark.slow
def test_a_draft_with_another_tokenizer_drafts_as_it_does_on_a_cpu(paths, gpu):
    """Its token ids come from the host in a round's first pass, and from the device in later ones."""
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))

    def drafted(gpu):
        target, draft = (
            backend_of(path, gpu=gpu, invariant=invariant) for path, invariant in zip(paths, (True, False), strict=True)
        )
        backend = TranslatedBackend(draft, target.info, order, torch.arange(2, 50))
        drafting = DRAFTERS["running ahead"](DraftModel(backend, 64))
        engine = make_engine(target, drafting, num_blocks=12, num_speculative_tokens=2, max_num_seqs=2)
        texts = run(engine, [([5, 6], replace(PLAIN, max_tokens=4, seed=seed)) for seed in (1, 2)])
        return texts, engine.stats.num_draft_tokens, engine.stats.num_accepted_tokens

    assert drafted(gpu) == (expected := drafted(None))
    assert min(expected[1:]) > 0


@pytest.mark.slow
def test_groups_of_a_pool_at_different_steps_share_their_passes(paths, gpu):
    """The token ids of a group's first pass are the host's, and in later passes the device's."""

    def drafted(gpu):
        backend = backend_of(paths[1], gpu=gpu, invariant=False)
        config = EngineConfig(num_blocks=40, num_speculative_tokens=2)
        draft = DraftModel(backend, 64, cache=DraftCache(backend, config))
        early, late = (RunAheadDrafter(draft, config) for _ in range(2))
        for number, (drafter, num_passes) in enumerate([(early, 2), (late, 1)]):
            params = replace(PLAIN, seed=number)
            request = Request(str(number), [5, 6, 7 + number], 3, params)
            run_in_process(drafter.propose([ProposeRow(request, 2)]))
            for _ in range(num_passes):
                shared_pass.advance_together([drafter], 100)
        shared_pass.advance_together([late, early], 100)
        branches = [drafter._branches for drafter in (early, late)]
        return [[chain.token_ids for chain in one.chains([(one.contexts[0], i) for i in range(4)])] for one in branches]

    assert drafted(gpu) == drafted(None)


def test_moved_entries_arrive_and_the_host_waits_for_nothing(gpu):
    kv = KVTensors(KVShape(2, 1, 2, 2), 2, 16, torch.empty(0, device=DEVICE))
    kv.keys[1][1, 5] = 3.0
    kv.move([21], [30])
    assert gpu.read_waits() == []
    assert kv.keys[1][1, 14].tolist() == [[3.0, 3.0]]
