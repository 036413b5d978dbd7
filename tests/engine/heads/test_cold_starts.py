"""A head drafts after any history what it drafts after a cold start: acceptance does not depend on what is cached."""

from dataclasses import replace

import pytest
import torch

from engine.params import SamplingParams
from tests.engine.conftest import VOCAB
from tests.engine.heads.cold_starts import BLOCK, CASES, KINDS, Recorder
from tests.engine.heads.tiny_heads import backend_with_head
from tests.engine.running import make_engine, run
from tests.engine.test_exactness import varied_requests

pytestmark = pytest.mark.parametrize(("kind", "method"), CASES)
PROMPT = torch.randint(2, VOCAB, (41,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def backends(target_path):
    return {kind: backend_with_head(target_path, make_config()) for kind, make_config in KINDS.items()}


@pytest.fixture
def start(kind, method, backends, monkeypatch):
    """Makes an engine that drafts with a head, and the recorder of its drafts."""

    def start(**settings):
        settings = {"drafting": method, "num_speculative_tokens": 8, "block_size": BLOCK} | settings
        engine = make_engine(backends[kind], **settings)
        return engine, Recorder(engine, monkeypatch)

    return start


@pytest.fixture(scope="module")
def requests():
    return [
        (prompt, replace(params, num_speculative_tokens=0) if i % 7 == 6 else params)
        for i, (prompt, params) in enumerate(varied_requests(8))
    ]


@pytest.fixture(scope="module")
def plain(target, requests):
    return run(make_engine(target, num_speculative_tokens=0), requests)


@pytest.mark.parametrize(
    "settings",
    [{"num_blocks": 40, "max_num_seqs": 8}, {"max_num_batched_tokens": 12, "max_num_seqs": 2}],
    ids=["preempted", "chunked"],
)
def test_drafts_and_caches_are_those_of_a_cold_start(settings, start, requests, plain):
    """Requests start while others draft, and every seventh one never does."""
    engine, recorder = start(**settings)
    assert run(engine, requests) == plain
    recorder.check(20)
    assert engine.stats.num_accepted_tokens > 0
    if settings.get("num_blocks"):
        assert engine.stats.num_preemptions > 0


@pytest.mark.parametrize(
    ("num_shared", "has_drafts"),
    [(3, False), (4, True), (5, False), (39, True), (41, False)],
)
def test_a_cached_prefix_gives_the_drafts_of_a_cold_one(num_shared, has_drafts, start):
    """Hits of none and nearly all of a prompt, at block edges, before and after them."""
    engine, recorder = start()
    params = SamplingParams(temperature=0.7, seed=2, max_tokens=8, ignore_eos=True)
    first = [*PROMPT[:num_shared], *(7 - token % 3 for token in PROMPT[num_shared:])]
    run(engine, [(first, replace(params, num_speculative_tokens=4 if has_drafts else 0))])
    recorder.drafts.clear()
    hits = engine.stats.num_prefix_hits
    run(engine, [(PROMPT, params)])
    assert engine.stats.num_prefix_hits - hits == min(num_shared, 40) // BLOCK * BLOCK
    recorder.check(2)
