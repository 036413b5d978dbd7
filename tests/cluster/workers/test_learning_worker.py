"""A draft worker that learns, in a process of its own: a hundred swaps under load, and its loss at bad moments."""

import asyncio
import itertools
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import safetensors.torch

from cluster.config import GroupConfig
from cluster.remote_drafter import RemoteDrafter
from cluster.round_times import DraftTimes
from cluster.transport import Connector
from cluster.workers.draft_worker import DraftWorker
from engine.config import BUNDLED_DRAFT, BUNDLED_TARGET, EngineConfig, ModelConfig
from engine.drafting.assembly import assemble
from engine.drafting.learning import lessons, study
from engine.engine import Engine
from engine.execution.cpu.compilation import packages
from engine.models.registry import open_model
from engine.params import SamplingParams
from engine.protocols import NoDrafter
from tests.cluster.wire import NODE_ID
from tests.engine.drafting.learning.texts import changed
from tests.models import save_llama

NUM_STREAMS = 8
ENGINE = EngineConfig(
    num_speculative_tokens=3, max_num_seqs=NUM_STREAMS, block_size=4, num_blocks=600, speculation="fixed"
)
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([__name__])


def serve(config: GroupConfig, identity: str, fault: str, connection) -> None:
    """Serve a lease in this process; it learns, swaps good and bad weights again and again, and one moment is fatal."""
    study.os.sched_setscheduler = lambda *_: None  # a busy machine would let it wait
    lessons.STEP_TOKENS = 1
    worker = DraftWorker(config, "worker 1", node=("127.0.0.1", NODE_ID))
    worker.load()
    (backend,), learned, learner = worker._backends, worker._study, worker._study._learner
    if config.draft.compile == "auto":
        backend.compile()
    kinds = itertools.cycle([changed(learner.loaded, 1.0), learner.loaded])
    taken = learned.taken

    def take():
        if worker.num_proposals >= 2 * learned.counts["taken"]:
            learned.offer = next(kinds)
        return taken()

    def die(*_: object) -> None:
        if config.draft_learning_path.exists():
            os.kill(os.getpid(), signal.SIGKILL)

    def save_half(weights, path, metadata) -> None:
        is_whole = not config.draft_learning_path.exists()
        path.write_bytes(safetensors.torch.save(weights, metadata)[: None if is_whole else 1000])
        die()

    learned.taken = take
    if fault == "learns":
        learner.end_step = die
    elif fault == "swaps":
        assign = backend.assign
        backend.assign = lambda weights: (assign(dict([*weights.items()][:5])), die(), assign(weights))
    elif fault == "writes":
        safetensors.torch.save_file = save_half
    connection.send((worker.lease(identity, NUM_STREAMS), learned.offer is not None))
    worker.serve()


class Rounds:
    """Rounds of eight streams with a target in this process, and all texts that were written."""

    def __init__(self, config: GroupConfig) -> None:
        self.config = config
        self.verifier = assemble(open_model(config.target), None, config.engine).load_verifier()
        self.vocab_size = self.verifier.backend.info.vocab_size
        self.drafter = RemoteDrafter(vocab_size=self.vocab_size, timeout_s=60.0)
        self.failures: list[str] = []
        self.texts: dict[str, list[int]] = {}
        self.engine = self._make_engine(self.drafter)

    @asynccontextmanager
    async def worker(self, fault: str = "", **settings: object) -> AsyncIterator[tuple[object, bool]]:
        """Start a worker and draft with it; yields its process, and whether it has read what was learned."""
        connector, (mine, its) = Connector(NODE_ID), CONTEXT.Pipe()
        config = replace(self.config, draft_learning="on", draft_learning_share=1.0, **settings)
        process = CONTEXT.Process(target=serve, args=(config, connector.identity, fault, its))
        process.start()
        lease, has_read = await asyncio.to_thread(mine.recv)
        link = connector.connect(lease.endpoint, version=lease.version, on_break=self.failures.append)
        self.drafter.connect(link, self.failures.append)
        try:
            yield process, has_read
        finally:
            link.close()
            process.kill()
            process.join()

    async def run(self, until) -> None:
        """Run until something holds; a text that ends is followed by the next one."""
        while not until():
            while self.engine.num_requests < NUM_STREAMS:
                self._add(self.engine, str(len(self.texts)), self.texts)
            await self._step(self.engine, self.texts)

    async def plain(self) -> dict[str, list[int]]:
        """Write the same texts without a draft, as far as they went."""
        engine, texts = self._make_engine(NoDrafter()), dict[str, list[int]]()
        for name in self.texts:
            self._add(engine, name, texts)
        while engine.has_work:
            await self._step(engine, texts)
        return {name: ids[: len(self.texts[name])] for name, ids in texts.items()}

    def _make_engine(self, drafter) -> Engine:
        config = replace(self.config.engine, max_queued_requests=10**6)
        overlaps = ["ahead"] if drafter is self.drafter and self.config.run_ahead == "on" else []
        info, verifier = self.verifier.backend.info, self.verifier
        return Engine(
            config, info, drafter=drafter, verifier=verifier, num_blocks=verifier.num_blocks, overlaps=overlaps
        )

    def _add(self, engine: Engine, name: str, texts: dict[str, list[int]]) -> None:
        seed = int(name)
        params = SamplingParams(
            temperature=0.7 * (seed % 4 > 0), seed=seed, max_tokens=16, ignore_eos=True, learning_group=""
        )
        engine.add(name, [5, 6 + seed % 50, 7], params)
        texts[name] = []

    async def _step(self, engine: Engine, texts: dict[str, list[int]]) -> None:
        for output in await engine.step():
            texts[output.request_id] += output.token_ids


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """On a busy machine, no draft is late."""
    monkeypatch.setattr(DraftTimes, "least_s", 60.0)


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> GroupConfig:
    """A target, and a draft that nearly agrees with it."""
    folder = tmp_path_factory.mktemp("models")
    target, draft = (
        ModelConfig(str(save_llama(folder / name, seed=1, noise=noise)), dtype="float32", device="cpu", num_threads=1)
        for name, noise in (("target", 0.0), ("draft", 0.02))
    )
    return GroupConfig(target, draft, replace(ENGINE, drafting="model"), run_ahead="off")


@pytest.fixture(scope="module")
def bundled(config) -> GroupConfig:
    target, draft = replace(config.target, path=str(BUNDLED_TARGET)), replace(config.draft, path=str(BUNDLED_DRAFT))
    return replace(config, target=target, draft=replace(draft, compile="auto"))


COMPILED = [
    pytest.mark.long,
    pytest.mark.skipif(not packages.has_compiler(), reason="there is no C++ compiler"),
]


@pytest.mark.parametrize("run_ahead", ["off", "on"])
@pytest.mark.parametrize("pair", ["config", pytest.param("bundled", marks=COMPILED)])
async def test_a_hundred_swaps_under_load_fail_no_round_and_change_no_text(pair, run_ahead, request):
    rounds = Rounds(replace(request.getfixturevalue(pair), run_ahead=run_ahead))
    async with rounds.worker():
        await rounds.run(lambda: rounds.failures or rounds.drafter.learning.get("taken", 0) >= 100)
        assert (rounds.failures, rounds.drafter.fallbacks) == ([], {})
        stats = rounds.engine.stats
        assert stats.num_draft_tokens > stats.num_accepted_tokens > 0.1 * stats.num_draft_tokens
        assert run_ahead == "off" or rounds.drafter.run_ahead.hits
    assert await rounds.plain() == rounds.texts


@pytest.mark.parametrize("fault", ["learns", "swaps", "writes"])
async def test_the_death_of_a_worker_costs_neither_texts_nor_what_was_learned(fault, config, tmp_path):
    """It dies while it learns, swaps or writes; the next worker reads the file, and clears what is unfinished."""
    path, rounds = tmp_path / "learned", Rounds(config)
    async with rounds.worker(fault, draft_learning_path=path) as (process, has_read):
        assert not has_read
        await rounds.run(lambda: not process.is_alive())
        assert rounds.failures
    async with rounds.worker(draft_learning_path=path) as (_, has_read):
        assert has_read
        before, written = rounds.engine.stats.num_accepted_tokens, path.stat().st_mtime_ns
        await rounds.run(lambda: path.stat().st_mtime_ns > written)
        assert rounds.engine.stats.num_accepted_tokens > before
    assert await rounds.plain() == rounds.texts
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
