"""Eager passes: the logits of transformers' own forward for every family, and tokens by temperature and noise."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from engine.errors import ModelError
from engine.execution.batch import ForwardRow, build
from engine.execution.eager import EagerBackend
from engine.models.families import REFUSED
from engine.protocols import Draft
from engine.sampling import noise
from engine.sampling.noise import Draws
from engine.verification.decider import paths
from tests.engine.tiny import EXPERTS, GEMMA4, HEADS, LATENT, LLAMA4, SIZES, model_of, save

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


DEEPSEEK = EXPERTS | LATENT
FAMILIES = {  # of each feature of attention one; test_zoo has every family
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
    "gemma 4, shared keys, two sizes": ("Gemma4TextConfig", GEMMA4),
    "llama 4, chunks, tuned temperatures, mixture": ("Llama4TextConfig", LLAMA4),
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
    """Prompts, chunks, single tokens, long chains and large trees, in blocks that are dirty and out of order."""
    config = family(name)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        pytest.skip(f"transformers {transformers.__version__} cannot map {config.model_type}")
    save(config, tmp_path, factor=3.0)
    expect, backend = reference(tmp_path), load(tmp_path)
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(2, 64, (6, 80), generator=generator).tolist()
    order = (torch.randperm(6 * 10, generator=generator) + 1).view(6, 10).tolist()
    kv = backend.allocate_kv(61, 8)
    for cache in (*kv.keys, *kv.values):
        cache.normal_(std=30.0, generator=generator)
    done = [17, 33, 12, 25]
    backend.run(build([ForwardRow(text[i][:n], 0, order[i], 0) for i, n in enumerate(done)], kv))
    tree = [-1, 0, -1, *(int(torch.randint(0, node, (), generator=generator)) for node in range(3, 40))]
    drafted = text[3][40:80]
    rows = [
        ForwardRow(text[0][17:40], 17, order[0], 23),
        ForwardRow(text[1][33:34], 33, order[1], 1),
        ForwardRow(text[2][12:53], 12, order[2], 41),
        ForwardRow([*text[3][25:27], *drafted], 25, order[3], 42, parents=tree),
        ForwardRow(text[4][:5], 0, order[4], 5),
        ForwardRow(text[5][:70], 0, order[5], 2),
    ]
    logits = backend.run(build(rows, kv)).logits
    wanted = [
        expect(text[0][:40])[17:],
        expect(text[1][:34])[33:],
        expect(text[2][:53])[12:],
        expect(text[3][:27])[25:],
        *(expect([*text[3][:27], *path])[-1:] for path in paths(Draft(drafted, tree))[1:]),
        expect(text[4][:5]),
        expect(text[5][:70])[68:],
    ]
    assert logits.dtype == torch.float32
    assert (logits - torch.cat(wanted)).abs().max() < 1e-4


ROWS = [
    ForwardRow([9, 4, 30], 0, [1], 1),
    ForwardRow([7, 8, 11, 12], 0, [2], 3, parents=[-1, -1]),
    ForwardRow([5], 0, [3], 1),
]


def run(backend, draws=None):
    return backend.run(build(ROWS, backend.allocate_kv(4, 16)), draws)


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
    assert torch.equal(run(eager).tokens, logits.argmax(-1))


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
