"""Tensor parallelism: ranks in threads, which communicate by gloo, against the whole model."""

import pytest
import torch
import transformers

from engine.errors import ModelError
from engine.execution.batch import ForwardRow, build
from engine.models.causal_lm import Shard
from engine.models.shards import RowLinear
from engine.params import SamplingParams
from engine.protocols import run_in_process
from engine.verification.verifier import ModelVerifier
from tests.engine.ranks import AbsentOthers, gloo_reducers, on_ranks
from tests.engine.running import drafters, make_engine, run
from tests.engine.tiny import GEMMA4, SIZES, backend_of, save

LAYERS_DIFFER = "gemma4, shared keys, two sizes"
FAMILIES = {
    "llama": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied head": ("LlamaConfig", {"tie_word_embeddings": True}),
    LAYERS_DIFFER: ("Gemma4TextConfig", GEMMA4),
}


def save_family(name, path, **changes):
    cls, extra = FAMILIES[name]
    return save(getattr(transformers, cls)(**{**SIZES, **extra, **changes}), path, factor=3.0)


def load_ranks(path, world_size, **settings):
    reducers = gloo_reducers(world_size)
    return on_ranks(lambda one: backend_of(path, Shard(one.rank, world_size, one), **settings), reducers), reducers


def logits_of(models):
    """A prompt, then a chain and a tree: one logit matrix per rank."""
    prompt, chain, tree = list(range(5, 28)), [3, 9, 4], [8, 2, 6]

    def compute(model):
        kv = model.allocate_kv(9, 8)
        first = model.run(build([ForwardRow(prompt, 0, [1, 2, 3, 4], 23)], kv)).logits
        rows = [
            ForwardRow([prompt[-1], *chain], 22, [1, 2, 3, 4], 4),
            ForwardRow([7, 7, *tree], 0, [5], 4, parents=[-1, -1, 1]),
        ]
        return torch.cat([first, model.run(build(rows, kv)).logits])

    return on_ranks(compute, models)


class Ranks:
    """A verifier over ranks in threads, of which the first decides; every one is given the same rows."""

    def __init__(self, verifiers):
        self._verifiers = verifiers

    async def verify(self, rows):
        def verify(rank):
            return run_in_process(self._verifiers[rank].verify(rows, decides=rank == 0))

        verdicts, *others = on_ranks(verify, range(len(self._verifiers)))
        assert others == [[]] * len(others)
        return verdicts

    def release(self, request_id):
        for verifier in self._verifiers:
            verifier.release(request_id)


def test_every_rank_keeps_the_path_that_the_first_one_accepted(target_path):
    """Else half of the heads would attend to the branch that was rejected."""
    requests = [
        ([3 + i, 9, 4], SamplingParams(temperature=0.5 * (i % 2), seed=i, max_tokens=30, ignore_eos=True))
        for i in range(8)
    ]
    whole = backend_of(target_path)
    expected = run(make_engine(whole, num_speculative_tokens=0), requests)
    models, _ = load_ranks(target_path, 2)
    trees = drafters(whole, whole)["trees by the target itself"]
    engine = make_engine(models[0], trees, num_speculative_tokens=8)
    engine.verifier = Ranks([engine.verifier, ModelVerifier(models[1], engine.config)])
    assert run(engine, requests) == expected
    assert engine.stats.num_accepted_tokens > 8 * 10


@pytest.mark.parametrize(
    ("params", "settings"),
    [({}, {}), ({"top_p": 0.9}, {}), ({"logprobs": 1}, {}), ({}, {"verification": "rejection"})],
    ids=["coupled", "shaped", "logprobs", "rejection"],
)
def test_ranks_give_one_ranks_text(params, settings, target_path):
    requests = [
        ([3 + i, 9, 4], SamplingParams(temperature=0.5 * (i % 2), seed=i, max_tokens=12, ignore_eos=True, **params))
        for i in range(4)
    ]
    settings = {"num_speculative_tokens": 3, "drafting": "self", "self_draft_layers": 1} | settings
    engine = make_engine(backend_of(target_path), **settings)
    expected = run(engine, requests)
    models, _ = load_ranks(target_path, 2)
    engines = on_ranks(lambda model: make_engine(model, **settings), models)
    ranks = engines[0]
    ranks.verifier = Ranks([one.verifier for one in engines])
    assert run(ranks, requests) == expected
    assert ranks.stats.num_accepted_tokens == engine.stats.num_accepted_tokens > 0


def test_heads_that_cannot_be_shared_evenly_are_refused(tmp_path):
    one_head_in_some_layers = {"num_global_key_value_heads": 1}
    for name, changes in (("llama", {"num_key_value_heads": 1}), (LAYERS_DIFFER, one_head_in_some_layers)):
        save_family(name, tmp_path, **changes)
        with pytest.raises(ModelError, match="1 key/value heads, not divisible by tensor_parallel_size 2"):
            backend_of(tmp_path, Shard(0, 2, AbsentOthers()))


def test_styles_that_are_not_supported_are_refused(tmp_path, monkeypatch):
    plan = transformers.LlamaConfig.base_model_tp_plan | {"layers.*.mlp.up_proj": "sequence_parallel"}
    monkeypatch.setattr(transformers.LlamaConfig, "base_model_tp_plan", plan)
    save_family("llama", tmp_path)
    with pytest.raises(ModelError, match="tensor parallel plan needs"):
        backend_of(tmp_path, Shard(0, 2, AbsentOthers()))


class Scaling:
    """Stands for a world: its sum is a multiple."""

    def __init__(self, factor):
        self.factor = factor

    def sum(self, partial):
        assert partial.dtype == torch.float32
        return partial * self.factor


def test_a_row_linear_sums_in_float32_and_rounds_once_before_its_bias():
    layer = RowLinear(2, 1).to(torch.bfloat16)
    layer.reducer = Scaling(1 + 2.0**-9)
    layer.weight.data[:], layer.bias.data[:] = torch.tensor([[0.5, 0.5]]), 2.0**-8
    x = torch.tensor([[1.0, 1.0]], dtype=torch.bfloat16)
    with torch.inference_mode():
        assert layer(x).dtype == torch.bfloat16
        assert layer.reducer.sum((x @ layer.weight.T).float()).item() == 1 + 2.0**-9
        assert layer(x).item() == 1.0  # each addend is half of the last bit or less; their sum would not be
