"""Tensor parallelism: ranks in threads, summed by a plain Python collective, against the whole model."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.errors import ModelError
from engine.execution.batch import ForwardRow, build
from engine.models.causal_lm import Shard
from engine.params import SamplingParams
from engine.protocols import NO_DRAFT, Draft, run_in_process
from engine.verification.verifier import ModelVerifier
from tests.engine.running import make_engine, run
from tests.engine.tiny import SIZES, backend_of, save

GEMMA3 = {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES = {
    "llama": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "llama, tied head": ("LlamaConfig", {"tie_word_embeddings": True}),
    "gemma, scaled embeddings": ("GemmaConfig", {"head_dim": 16}),
    "gemma3, two rotary bases": ("Gemma3TextConfig", GEMMA3),
}


class Collective:
    """Sums over threads: every rank puts its part, waits for the others, and takes the sum."""

    def __init__(self, world_size):
        self.parts = [None] * world_size
        self.barrier = threading.Barrier(world_size, timeout=60)
        self.calls = 0

    def all_reduce(self, rank):
        def reduce(part):
            self.parts[rank] = part.clone()
            self.barrier.wait()
            part.copy_(sum(self.parts))
            self.calls += rank == 0
            self.barrier.wait()
            return part

        return reduce


def save_family(name, path, **changes):
    cls, extra = FAMILIES[name]
    return save(getattr(transformers, cls)(**{**SIZES, **extra, **changes}), path, factor=3.0)


def load_ranks(path, world_size):
    collective = Collective(world_size)
    shards = [Shard(rank, world_size, collective.all_reduce(rank)) for rank in range(world_size)]
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(lambda shard: backend_of(path, shard), shards)), collective


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

    with ThreadPoolExecutor(len(models)) as pool:
        return list(pool.map(compute, models))


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_compute_the_whole_models_logits(name, tmp_path):
    save_family(name, tmp_path)
    ranks, _ = load_ranks(tmp_path, 2)
    (whole,) = logits_of([backend_of(tmp_path)])
    for logits in logits_of(ranks):
        assert (logits - whole).abs().max() < 1e-4


class Ranks:
    """A verifier over ranks in threads, of which the first decides; every one is given the same rows."""

    def __init__(self, verifiers):
        self._verifiers = verifiers
        self._pool = ThreadPoolExecutor(len(verifiers))

    async def verify(self, rows):
        def verify(rank):
            return run_in_process(self._verifiers[rank].verify(rows, decides=rank == 0))

        verdicts, *others = self._pool.map(verify, range(len(self._verifiers)))
        assert others == [[]] * len(others)
        return verdicts

    def release(self, request_id):
        for verifier in self._verifiers:
            verifier.release(request_id)


class SecondBranchDrafter:
    """Knows the texts, and hides what comes next behind a branch that is wrong."""

    def __init__(self, texts):
        self._texts = texts

    async def propose(self, rows):
        return [
            self._tree(self._texts[row.request.request_id], len(row.request.token_ids), row.num_draft_tokens)
            for row in rows
        ]

    def _tree(self, text, length, num_nodes):
        right = text[length : length + num_nodes - 1]
        return (
            Draft([(right[0] + 1) % SIZES["vocab_size"], *right], [-1, -1, *range(1, len(right))])
            if right
            else NO_DRAFT
        )

    def release(self, request_id):
        pass


def test_every_rank_keeps_the_path_that_the_first_one_accepted(target_path):
    """Else half of the heads would attend to the branch that was rejected."""
    requests = [
        ([3 + i, 9, 4], SamplingParams(temperature=0.5 * (i % 2), seed=i, max_tokens=30, ignore_eos=True))
        for i in range(8)
    ]
    expected = run(make_engine(backend_of(target_path), num_speculative_tokens=0), requests)
    texts = {name: [*requests[int(name)][0], *tokens] for name, tokens in expected.items()}
    models, _ = load_ranks(target_path, 2)
    engine = make_engine(models[0], lambda _: SecondBranchDrafter(texts), num_speculative_tokens=4)
    engine.verifier = Ranks([engine.verifier, ModelVerifier(models[1], engine.config)])
    assert run(engine, requests) == expected
    assert engine.stats.num_accepted_tokens > 8 * 20


def test_every_rank_computes_the_same_bits(tmp_path):
    """Else ranks that draw for themselves could part ways; rank 0 decides all the same."""
    save_family("llama", tmp_path)
    first, second = logits_of(load_ranks(tmp_path, 2)[0])
    assert torch.equal(first, second)


def test_a_rank_holds_half_of_every_sliced_layer_and_sums_twice_a_layer(tmp_path):
    save_family("llama", tmp_path)
    backends, collective = load_ranks(tmp_path, 2)
    ranks = [backend.model for backend in backends]
    whole = backend_of(tmp_path).model
    assert [rank.kv_shape for rank in ranks] == [(2, 1, 8, 8)] * 2
    assert whole.kv_shape == (2, 2, 8, 8)
    sliced = [name for name, _ in whole.module.named_parameters() if "_proj" in name and name.endswith("weight")]
    assert len(sliced) == 2 * 4  # two layers, each q/k/v, o, gate/up and down
    for rank in ranks:
        for name in sliced:
            assert rank.module.get_parameter(name).numel() * 2 == whole.module.get_parameter(name).numel()
    before = collective.calls
    logits_of(backends)
    assert collective.calls - before == 2 * 2 * 2  # passes, layers, row-wise projections


def test_weights_spread_over_several_files_are_found(tmp_path):
    cls, extra = FAMILIES["qwen3"]
    torch.manual_seed(0)
    config = getattr(transformers, cls)(**{**SIZES, **extra})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ranks, _ = load_ranks(tmp_path, 2)
    (whole,) = logits_of([backend_of(tmp_path)])
    assert (logits_of(ranks)[0] - whole).abs().max() < 1e-4


def test_heads_that_cannot_be_shared_evenly_are_refused(tmp_path):
    save_family("llama", tmp_path, num_key_value_heads=1)
    with pytest.raises(ModelError, match="1 key/value heads, not divisible by tensor_parallel_size 2"):
        backend_of(tmp_path, Shard(0, 2, lambda x: x))


def test_styles_that_are_not_supported_are_refused(tmp_path, monkeypatch):
    plan = transformers.LlamaConfig.base_model_tp_plan | {"layers.*.mlp.up_proj": "packed_colwise"}
    monkeypatch.setattr(transformers.LlamaConfig, "base_model_tp_plan", plan)
    save_family("llama", tmp_path)
    with pytest.raises(ModelError, match="tensor parallel plan needs"):
        backend_of(tmp_path, Shard(0, 2, lambda x: x))


def test_a_file_that_lacks_a_weight_is_refused(tmp_path):
    save_family("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lacks the weights model\.layers\.1\.mlp\.up_proj\.weight"):
        backend_of(tmp_path, Shard(0, 2, lambda x: x))
