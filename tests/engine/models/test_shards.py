"""Tensor parallelism: ranks in threads, which communicate by gloo, against the whole model."""

import pytest
import torch
import transformers

from engine.errors import ModelError
from engine.execution.batch import ForwardRow, build
from engine.models.causal_lm import Shard
from engine.models.layers.layer_attention import KVShape
from engine.params import SamplingParams
from engine.protocols import NO_DRAFT, Draft, run_in_process
from engine.sampling import noise
from engine.sampling.noise import Draws
from engine.verification.verifier import ModelVerifier
from tests.engine.ranks import AbsentOthers, gloo_reducers, on_ranks
from tests.engine.running import make_engine, run
from tests.engine.tiny import GEMMA4, SIZES, backend_of, save

GEMMA3 = {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES = {
    "llama": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "llama, tied head": ("LlamaConfig", {"tie_word_embeddings": True}),
    "gemma, scaled embeddings": ("GemmaConfig", {"head_dim": 16}),
    "gemma3, two rotary bases": ("Gemma3TextConfig", GEMMA3),
    "gemma4, shared keys, two sizes": ("Gemma4TextConfig", GEMMA4 | {"num_global_key_value_heads": 2}),
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


@pytest.mark.parametrize(("name", "world_size"), [*((name, 2) for name in FAMILIES), ("llama", 4)])
def test_ranks_compute_the_whole_models_logits(name, world_size, tmp_path):
    save_family(name, tmp_path, num_key_value_heads=max(2, world_size))
    ranks, _ = load_ranks(tmp_path, world_size)
    (whole,) = logits_of([backend_of(tmp_path)])
    for logits in logits_of(ranks):
        assert (logits - whole).abs().max() < 1e-4


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


def drawn_of(models, *, needs_logits):
    """Three rows, of which the first is greedy, drawn with the noise of their keys."""
    keys = noise.keys([5, 6], [3, 3], noise.TARGET_STREAM, torch.device("cpu"))

    def compute(model):
        batch = build([ForwardRow([7, 9, 30, 2, 8], 0, [1], 3)], model.allocate_kv(2, 8))
        batch.needs_logits = needs_logits
        return model.run(batch, Draws(torch.tensor([[1.0], [4.0], [9.0]]), keys, torch.tensor([0, 1, 2])))

    return on_ranks(compute, models)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", ["llama", "llama, tied head"])
def test_each_rank_computes_a_slice_of_the_vocabulary_and_all_draw_the_whole_models_tokens(name, world_size, tmp_path):
    save_family(name, tmp_path, num_key_value_heads=4)
    ranks, reducers = load_ranks(tmp_path, world_size)
    whole = backend_of(tmp_path)
    (expected,) = drawn_of([whole], needs_logits=True)
    assert len(set(expected.tokens.tolist())) > 1
    for output in drawn_of(ranks, needs_logits=False):
        assert output.logits.shape == output.scores.shape == (3, 64 // world_size)
        assert torch.equal(output.tokens, expected.tokens)
    assert {reducer.num_gathers for reducer in reducers} == {0}
    for output in drawn_of(ranks, needs_logits=True):
        torch.testing.assert_close(tuple(output), tuple(expected))
    for rank, backend in enumerate(ranks):
        head, embeddings = backend.model.module.lm_head, backend.model.module.model.embed_tokens.weight
        first = rank * 64 // world_size
        assert torch.equal(head.weight, whole.model.module.lm_head.weight[first : first + 64 // world_size])
        is_shared = head.weight.untyped_storage().data_ptr() == embeddings.untyped_storage().data_ptr()
        assert is_shared == ("tied" in name)
        assert embeddings.shape == (64, 32)


@pytest.mark.parametrize("name", ["llama", "llama, tied head"])
def test_a_vocabulary_that_cannot_be_shared_evenly_is_whole_on_every_rank(name, tmp_path):
    save_family(name, tmp_path, vocab_size=63)
    ranks, reducers = load_ranks(tmp_path, 2)
    (expected,) = drawn_of([backend_of(tmp_path)], needs_logits=False)
    for output in drawn_of(ranks, needs_logits=False):
        torch.testing.assert_close(tuple(output), tuple(expected))
    assert ranks[1].model.vocab_slice == range(63)
    assert {reducer.num_gathers for reducer in reducers} == {0}


@pytest.mark.parametrize(
    ("params", "settings", "gathers"),
    [
        ({}, {}, False),
        ({"top_p": 0.9}, {}, True),
        ({"logprobs": 1}, {}, True),
        ({}, {"verification": "rejection"}, True),
    ],
    ids=["coupled", "shaped", "logprobs", "rejection"],
)
def test_ranks_give_one_ranks_text_and_gather_logits_only_if_they_are_read(params, settings, gathers, target_path):
    requests = [
        ([3 + i, 9, 4], SamplingParams(temperature=0.5 * (i % 2), seed=i, max_tokens=12, ignore_eos=True, **params))
        for i in range(4)
    ]
    settings = {"num_speculative_tokens": 3, "drafting": "self", "self_draft_layers": 1} | settings
    engine = make_engine(backend_of(target_path), **settings)
    expected = run(engine, requests)
    models, reducers = load_ranks(target_path, 2)
    engines = on_ranks(lambda model: make_engine(model, **settings), models)
    ranks = engines[0]
    ranks.verifier = Ranks([one.verifier for one in engines])
    assert run(ranks, requests) == expected
    assert ranks.stats.num_accepted_tokens == engine.stats.num_accepted_tokens > 0
    assert [reducer.num_gathers > 0 for reducer in reducers] == [gathers] * 2


def test_a_rank_holds_half_of_every_sliced_layer_and_sums_twice_a_layer(tmp_path):
    save_family("llama", tmp_path)
    backends, reducers = load_ranks(tmp_path, 2)
    ranks = [backend.model for backend in backends]
    whole = backend_of(tmp_path).model
    assert [rank.kv_shape for rank in ranks] == [KVShape(2, 1, 8, 8)] * 2
    assert whole.kv_shape == KVShape(2, 2, 8, 8)
    sliced = [name for name, _ in whole.module.named_parameters() if "_proj" in name and name.endswith("weight")]
    assert len(sliced) == 2 * 4  # two layers, each q/k/v, o, gate/up and down
    for rank in ranks:
        for name in sliced:
            assert rank.module.get_parameter(name).numel() * 2 == whole.module.get_parameter(name).numel()
    for reducer in reducers:
        reducer.sums.clear()
    logits_of(backends)
    assert [len(reducer.sums) for reducer in reducers] == [2 * 2 * 2] * 2  # passes, layers, row-wise projections


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
        backend_of(tmp_path, Shard(0, 2, AbsentOthers()))


def test_styles_that_are_not_supported_are_refused(tmp_path, monkeypatch):
    plan = transformers.LlamaConfig.base_model_tp_plan | {"layers.*.mlp.up_proj": "packed_colwise"}
    monkeypatch.setattr(transformers.LlamaConfig, "base_model_tp_plan", plan)
    save_family("llama", tmp_path)
    with pytest.raises(ModelError, match="tensor parallel plan needs"):
        backend_of(tmp_path, Shard(0, 2, AbsentOthers()))
