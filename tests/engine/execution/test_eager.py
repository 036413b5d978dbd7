"""Eager passes: the logits of transformers' own forward for every family, and tokens by temperature and noise."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from engine.errors import ModelError
from engine.execution.batch import ForwardRow, build
from engine.execution.eager import EagerBackend
from engine.models.causal_lm import Shard
from engine.models.families import REFUSED
from engine.protocols import Draft
from engine.sampling import noise
from engine.sampling.noise import Draws
from engine.verification.decider import paths
from tests.engine.tiny import EXPERTS, GEMMA4, HEADS, LATENT, LLAMA4, SHARED, SIZES, model_of, save

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


DEEPSEEK = EXPERTS | LATENT
FAMILIES = {  # of each feature of attention one; test_zoo has every family
    "qwen2, half sliding": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "gemma2, capped scores, half sliding": (
        "Gemma2Config",
        {
            **HEADS,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "attn_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 16,
        },
    ),
    "gpt-oss, sinks, half sliding": (
        "GptOssConfig",
        {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    ),
    "deepseek v3, latent attention": ("DeepseekV3Config", DEEPSEEK),
    "gemma 3n, shared keys": ("Gemma3nTextConfig", SHARED | {"intermediate_size": [64] * 6, "laurel_rank": 4}),
    "gemma 4, shared keys, two sizes": ("Gemma4TextConfig", GEMMA4),
    "llama 4, chunks, tuned temperatures, mixture": ("Llama4TextConfig", LLAMA4),
    "granite": ("GraniteConfig", {"logits_scaling": 4.0, "attention_multiplier": 0.3, "embedding_multiplier": 2.0}),
}


def family(name):
    cls, extra = FAMILIES[name]
    return getattr(transformers, cls)(**{**SIZES, **extra})


def load(path, **settings):
    return EagerBackend(model_of(path, **settings))


@pytest.fixture(scope="module")
def eager(target_path):
    return load(target_path)


def reference(path):
    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()

    def logits(token_ids):
        with torch.no_grad():
            return module(torch.tensor([token_ids])).logits[0]

    return logits


@pytest.mark.parametrize("name", FAMILIES)
def test_one_batch_of_every_kind_of_row_computes_transformers_own_logits(name, tmp_path):
    """Prompts, chunks, single tokens, chains and trees, in blocks that are dirty and out of order."""
    config = family(name)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        pytest.skip(f"transformers {transformers.__version__} cannot map {config.model_type}")
    save(config, tmp_path, factor=3.0)
    expect, backend = reference(tmp_path), load(tmp_path)
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(2, 64, (6, 48), generator=generator).tolist()
    order = (torch.randperm(6 * 8, generator=generator) + 1).view(6, 8).tolist()
    kv = backend.allocate_kv(49, 8)
    for cache in (*kv.keys, *kv.values):
        cache.normal_(std=30.0, generator=generator)
    done = [17, 33, 12, 25]
    backend.run(build([ForwardRow(text[i][:n], 0, order[i], 0) for i, n in enumerate(done)], kv))
    tree = [-1, 0, -1, 2, 2, 4]
    drafted = text[3][40:46]
    rows = [
        ForwardRow(text[0][17:40], 17, order[0], 23),
        ForwardRow(text[1][33:34], 33, order[1], 1),
        ForwardRow(text[2][12:16], 12, order[2], 4),
        ForwardRow([*text[3][25:27], *drafted], 25, order[3], 8, parents=tree),
        ForwardRow(text[4][:5], 0, order[4], 5),
        ForwardRow(text[5][:20], 0, order[5], 2),
    ]
    logits = backend.run(build(rows, kv)).logits
    wanted = [
        expect(text[0][:40])[17:],
        expect(text[1][:34])[33:],
        expect(text[2][:16])[12:],
        expect(text[3][:27])[25:],
        *(expect([*text[3][:27], *path])[-1:] for path in paths(Draft(drafted, tree))[1:]),
        expect(text[4][:5]),
        expect(text[5][:20])[18:],
    ]
    assert logits.dtype == torch.float32
    assert (logits - torch.cat(wanted)).abs().max() < 1e-4


def test_an_accepted_path_of_a_tree_counts_as_context_after_it_was_moved(eager):
    """The keys of a node carry the rotary position of its depth, so moving them is all there is to do."""
    kv, blocks = eager.allocate_kv(8, 4), [5, 2, 7]
    prompt, drafted, parents = [9, 4, 30, 7, 8], [11, 12, 13, 14], [-1, -1, 1, 2]
    eager.run(build([ForwardRow([*prompt, *drafted], 0, blocks, 0, parents=parents)], kv))
    slots = [kv.slot(blocks, place) for place in range(5, 9)]
    kv.move(slots[1:], slots[:3])
    moved = eager.run(build([ForwardRow([40], 8, blocks, 1)], kv)).logits
    straight = eager.allocate_kv(8, 4)
    whole = eager.run(build([ForwardRow([*prompt, 12, 13, 14, 40], 0, blocks, 1)], straight)).logits
    assert (moved - whole).abs().max() < 1e-5


ROWS = [
    ForwardRow([9, 4, 30], 0, [1], 1),
    ForwardRow([7, 8, 11, 12], 0, [2], 3, parents=[-1, -1]),
    ForwardRow([5], 0, [3], 1),
]


def run(backend, draws=None):
    return backend.run(build(ROWS, backend.allocate_kv(4, 16)), draws)


def test_without_draws_every_token_is_the_likeliest(eager):
    logits, scores, tokens = run(eager)
    assert logits.shape == (5, SIZES["vocab_size"])
    assert torch.equal(scores, logits)
    assert torch.equal(tokens, logits.argmax(-1))


def test_a_drawn_token_has_the_highest_logit_over_temperature_plus_noise(eager):
    """Rows 0 and 4 are greedy, 1 and 3 share their noise, as two branches at one position do."""
    keys = noise.keys([3, 8], [20, 21], noise.TARGET_STREAM, CPU)
    temperatures = torch.tensor([[1.0], [0.5], [3.0], [2.0], [1.0]])
    drawn = run(eager, Draws(temperatures, keys, torch.tensor([0, 2, 1, 2, 0])))
    gumbel = noise.plain_gumbel(keys, torch.arange(SIZES["vocab_size"], dtype=torch.int32))
    logits = run(eager).logits
    expected = [
        logits[0],
        logits[1] / 0.5 + gumbel[1],
        logits[2] / 3.0 + gumbel[0],
        logits[3] / 2.0 + gumbel[1],
        logits[4],
    ]
    assert torch.allclose(drawn.scores, torch.stack(expected), atol=1e-5)
    assert torch.equal(drawn.tokens, drawn.scores.argmax(-1))
    assert not torch.equal(drawn.tokens, logits.argmax(-1))
    assert torch.equal(drawn.logits, logits), "drawing changed the logits"


def test_logits_of_16_bit_models_are_float32_and_their_caches_16_bit(target_path):
    backend = load(target_path, dtype="bfloat16")
    assert backend.info.dtype == "bfloat16"
    assert run(backend).logits.dtype == torch.float32
    assert {cache.dtype for cache in backend.allocate_kv(2, 16).keys} == {torch.bfloat16}


def test_a_model_by_itself_has_no_reducer_and_a_rank_closes_its_own(target_path):
    model = model_of(target_path)
    backend = EagerBackend(model)
    assert backend.reducer is None
    backend.close()
    closed = []
    model.shard = Shard(0, 1, SimpleNamespace(close=lambda: closed.append(True)))
    backend = EagerBackend(model)
    assert backend.reducer is model.shard.reducer
    backend.close()
    assert closed == [True]


def test_a_model_whose_layers_attend_twice_is_refused_before_the_first_round(tmp_path, monkeypatch):
    monkeypatch.delitem(REFUSED, "diffllama")
    save(transformers.DiffLlamaConfig(**SIZES | HEADS), tmp_path)
    with pytest.raises(ModelError, match="not every layer attends once"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("tried to allocate 2 GiB"), "does not fit into the memory of cpu: tried to allocate 2"),
        (RuntimeError("shapes differ"), "cannot be run with paged attention: shapes differ"),
    ],
)
def test_a_trial_that_runs_out_of_memory_does_not_blame_the_architecture(error, reason, target_path, monkeypatch):
    def fail(*_):
        raise error

    model = model_of(target_path)
    monkeypatch.setattr("engine.models.causal_lm.forward", fail)
    with pytest.raises(ModelError, match=reason):
        EagerBackend(model)


def test_a_gpu_is_busy_until_its_stream_has_no_work(target, monkeypatch):
    stream = SimpleNamespace(query=lambda: not work, synchronize=lambda: work.clear())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: {GPU: stream}[device])
    backend = EagerBackend(target.model)
    backend.device = GPU
    work = ["a pass"]
    assert backend.is_busy
    backend.wait()
    assert not backend.is_busy
