"""A model with linear layers in the engine: its text is that of each request by itself, computed token by token."""

import random

import pytest
from transformers import BambaConfig

from engine.config import EngineConfig
from engine.drafting.copying.ngram import NgramDrafter
from engine.drafting.model.draft_cache import DraftCache
from engine.heads.head import head_model
from engine.params import SamplingParams
from tests.engine.heads.cold_starts import KINDS
from tests.engine.heads.tiny_heads import backend_with_head
from tests.engine.hybrids.models import HYBRIDS
from tests.engine.running import chains, make_engine, run
from tests.engine.tiny import SIZES, backend_of, save
from tests.fakes import TreeDrafter

CHUNK = HYBRIDS["Bamba"]["mamba_chunk_size"]
BAMBA = SIZES | HYBRIDS["Bamba"] | {"num_hidden_layers": 2, "attn_layer_indices": [1]}
"""Linear layers of Mamba 2; how other recurrences compute is tested by themselves."""


def make_requests():
    """Texts that share prefixes of different lengths, and that branch inside chunks and blocks."""
    rng = random.Random(0)
    shared = [rng.randrange(2, 64) for _ in range(70)]
    lengths = [(3, 1), (20, 5), (40, 9), (64, 1), (64, 7), (41, 9), (65, 1)]
    return [
        (
            shared[:length] + [rng.randrange(2, 64) for _ in range(rest)],
            SamplingParams(max_tokens=6 + 5 * i, temperature=float(i % 2), seed=i, ignore_eos=True),
        )
        for i, (length, rest) in enumerate(lengths)
    ]


REQUESTS = make_requests()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save(BambaConfig(**BAMBA), tmp_path_factory.mktemp("bamba"))


@pytest.fixture(scope="module")
def backend(path):
    return backend_of(path)


def engine_of(backend, drafter=None, **settings):
    defaults = {"block_size": 4, "max_num_seqs": 4, "state_chunk": CHUNK}
    return make_engine(backend, drafter, **defaults | settings)


@pytest.fixture(scope="module")
def expected(backend):
    alone = {"num_states": 1, "num_speculative_tokens": 0, "enable_prefix_caching": False}
    return {str(i): run(engine_of(backend, **alone), [request])["0"] for i, request in enumerate(REQUESTS)}


@pytest.mark.parametrize(
    ("draft", "k", "settings"),
    [
        ("none", 0, {"num_states": 5, "num_blocks": 50, "max_num_batched_tokens": 7}),
        ("itself", 4, {"num_states": 12, "max_num_batched_tokens": 50}),
        ("n-grams", 8, {"num_states": 6, "num_blocks": 45}),
        ("trees", 5, {"num_states": 12, "num_blocks": 60}),
    ],
)
def test_the_text_is_the_same_whatever_is_drafted_cached_and_preempted(draft, k, settings, backend, expected):
    drafters = {
        "itself": chains(backend),
        "n-grams": lambda _: NgramDrafter(),
        "trees": lambda _: TreeDrafter(range(64)),
    }
    engine = engine_of(backend, drafters.get(draft), num_speculative_tokens=k, **settings)
    assert run(engine, REQUESTS[:3], late=REQUESTS[3:]) == expected
    assert engine.stats.num_prefix_hits > 0
    assert (engine.stats.num_preemptions > 0) == ("num_blocks" in settings)
    assert (engine.stats.num_accepted_tokens > 0) == (draft == "itself") or draft not in ("itself", "none")


def test_a_draft_has_the_planned_slots(backend):
    config = EngineConfig(num_blocks=10, num_states=3, max_num_seqs=8)
    assert len(DraftCache(backend, config).kv.extras.layers[0].matrices) == 1 + 3


@pytest.mark.parametrize(("kind", "method"), [("dflash", "head"), ("eagle3", "head"), ("eagle3", "head_tree")])
def test_a_head_drafts_without_states_of_its_own(kind, method, path, expected):
    backend = backend_with_head(path, KINDS[kind]())
    assert not head_model(backend.model).state_shapes
    engine = engine_of(backend, drafting=method, num_speculative_tokens=4, num_states=6)
    assert run(engine, REQUESTS[:3], late=REQUESTS[3:]) == expected
    assert engine.stats.num_draft_tokens > 0


def test_a_lost_memory_changes_no_text(backend, expected):
    def lose(engine, rounds):
        if rounds % 5 == 4:
            for layer in engine.verifier.kv.extras.layers:
                for tensor in (layer.inputs, layer.matrices, *layer.updates):
                    tensor[1:] = 7.0  # slot 0 is the empty context
            engine.reset()

    engine = engine_of(backend, chains(backend), num_speculative_tokens=3, num_states=12)
    assert run(engine, REQUESTS, between=lose) == expected
