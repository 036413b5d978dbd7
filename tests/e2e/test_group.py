"""A speculation group of real processes on a local Ray cluster: the engine's text does not depend on who lives."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import ray
import torch

from cluster.config import GroupConfig
from cluster.group import SpeculationGroup
from engine.config import EngineConfig, ModelConfig
from engine.engine import Engine
from engine.errors import ModelMismatchError, TargetError
from engine.execution.registry import load_backend
from engine.protocols import NoDrafter
from engine.sampling.params import SamplingParams
from engine.verification.verifier import ModelVerifier
from tests.cluster.models import save_llama
from tests.faults.server import title_of

pytestmark = pytest.mark.e2e

ENGINE = EngineConfig(num_speculative_tokens=3, max_num_seqs=4, num_blocks=64)
PROMPTS = [[5, 9, 2], [7] * 20, list(range(2, 40))]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=11, max_tokens=60, ignore_eos=True),
    SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=0.5, seed=3, max_tokens=60, ignore_eos=True),
]

Text = dict[str, list[int]]


@dataclass
class Generation:
    """One engine, its requests, and what it has committed."""

    engine: Engine
    text: Text

    async def step(self) -> None:
        for output in await self.engine.step():
            self.text[output.request_id] += output.token_ids

    async def run(self, until: Callable[[], bool] = lambda: False) -> None:
        while self.engine.has_work and not until():
            await self.step()

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.text.values()))


def submit(engine: Engine) -> Generation:
    for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add(str(i), prompt, params)
    return Generation(engine, {str(i): [] for i in range(len(PROMPTS))})


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> GroupConfig:
    folder = tmp_path_factory.mktemp("models")
    return GroupConfig(
        target=model_config(save_llama(folder / "target", seed=1)),
        draft=model_config(save_llama(folder / "draft", seed=1, noise=0.02)),
        engine=ENGINE,
        verify_timeout_s=30,
        start_timeout_s=120,
    )


def model_config(path: Path) -> ModelConfig:
    return ModelConfig(str(path), dtype="float32", device="cpu", num_threads=1)


@pytest.fixture(scope="module")
async def expected(config: GroupConfig) -> Text:
    return await text_of_one_process(config)


async def text_of_one_process(config: GroupConfig) -> Text:
    """Return the target's own text, in one process and without drafts."""
    torch.set_num_threads(1)
    model = load_backend(config.target)
    verifier = ModelVerifier(model, ENGINE)
    generation = submit(
        Engine(
            ENGINE,
            drafter=NoDrafter(),
            verifier=verifier,
            num_blocks=verifier.num_blocks,
            vocab_size=model.info.vocab_size,
            max_model_len=model.info.max_model_len,
        )
    )
    await generation.run()
    return generation.text


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80 * 2**20,
        logging_level="WARNING",
    )
    yield
    ray.shutdown()


@asynccontextmanager
async def running(config: GroupConfig) -> AsyncIterator[SpeculationGroup]:
    group = await SpeculationGroup.start(config)
    try:
        yield group
    finally:
        pids = group.process_ids.values()
        await group.stop()
        await wait_for(lambda: not any(map(is_alive, pids)))


@pytest.fixture(scope="module")
async def group(config: GroupConfig) -> AsyncIterator[SpeculationGroup]:
    """A draft and two ranks, which tests share, because starting processes takes seconds."""
    config = replace(config, tensor_parallel_size=2, draft_timeout_s=2.0, hang_timeout_s=5.0)
    async with running(config) as group:
        yield group


def generate(group: SpeculationGroup) -> Generation:
    return submit(
        Engine(
            group.config.engine,
            drafter=group.drafter,
            verifier=group.verifier,
            num_blocks=group.num_blocks,
            vocab_size=group.target_info.vocab_size,
            max_model_len=group.target_info.max_model_len,
        )
    )


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0]
    except (FileNotFoundError, ProcessLookupError):  # the latter while it ends
        return False
    return state != "Z"


async def wait_for(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.05)


async def test_two_ranks_write_the_text_of_one_process(group: SpeculationGroup, expected: Text) -> None:
    generation = generate(group)
    assert group.is_available
    await generation.run()
    assert generation.text == expected
    assert generation.engine.stats.num_accepted_tokens > 0
    assert group.target_info.num_parameters > 0
    assert set(group.process_ids) == {"draft", *(f"target-{rank}" for rank in range(group.config.tensor_parallel_size))}


async def test_a_killed_draft_leaves_the_text_alone_and_comes_back(group: SpeculationGroup, expected: Text) -> None:
    generation = generate(group)
    await generation.run(until=lambda: generation.num_tokens > 60)
    first, fallbacks = group.process_ids["draft"], sum(group.drafter.fallbacks.values())
    os.kill(first, signal.SIGKILL)
    await generation.run()
    assert generation.text == expected
    assert sum(group.drafter.fallbacks.values()) > fallbacks
    await wait_for(lambda: group.process_ids.get("draft", first) != first)
    again = submit(generation.engine)
    num_drafts = generation.engine.stats.num_drafts
    await again.run()
    assert again.text == expected
    assert generation.engine.stats.num_drafts > num_drafts


async def test_a_stopped_draft_costs_one_deadline_and_comes_back(group: SpeculationGroup, expected: Text) -> None:
    generation, timeouts = generate(group), group.drafter.fallbacks["timeout"]
    await generation.run(until=lambda: generation.num_tokens > 60)
    os.kill(group.process_ids["draft"], signal.SIGSTOP)
    try:
        await generation.run()
    finally:
        os.kill(group.process_ids["draft"], signal.SIGCONT)
    assert generation.text == expected
    assert group.drafter.fallbacks["timeout"] == timeouts + 1
    await wait_for(lambda: group.drafter.is_available)


async def test_a_killed_rank_fails_the_round_and_recovery_goes_on_with_the_text(
    group: SpeculationGroup, expected: Text
) -> None:
    """Rank 1; test_app.py kills a target that is rank 0 alone."""
    generation = generate(group)
    await generation.run(until=lambda: generation.num_tokens > 40)
    before = group.process_ids
    os.kill(before["target-1"], signal.SIGKILL)
    with pytest.raises(TargetError):
        await generation.run()
    assert not group.is_available
    generation.engine.reset()
    await group.recover()
    assert group.is_available
    assert not is_alive(before["target-0"])
    assert not is_alive(before["target-1"])
    await generation.run()
    assert generation.text == expected


async def test_a_stopped_rank_is_lost_after_the_configured_time(group: SpeculationGroup, expected: Text) -> None:
    generation = generate(group)
    await generation.run(until=lambda: generation.num_tokens > 40)
    stopped = group.process_ids["target-1"]
    os.kill(stopped, signal.SIGSTOP)
    async with asyncio.timeout(group.config.hang_timeout_s + 5):
        with pytest.raises(TargetError, match="did not answer for"):
            await generation.run()
    generation.engine.reset()
    await group.recover()
    assert not is_alive(stopped)
    await generation.run()
    assert generation.text == expected


@pytest.mark.parametrize(
    ("victim", "num_workers", "report"),
    [("DraftWorker", 1, "Draft worker did not start"), ("TargetWorker", 2, "The target did not survive start 1 of 5")],
)
@pytest.mark.parametrize("fault", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
async def test_workers_that_are_killed_or_hang_while_the_group_starts_are_started_again(
    config: GroupConfig,
    expected: Text,
    victim: str,
    num_workers: int,
    report: str,
    fault: signal.Signals,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With trees that grow on while the target verifies, because this group is not shared."""
    others = worker_ids(victim)  # of a group that tests share
    trees = replace(config.engine, drafting="tree")
    config = replace(config, tensor_parallel_size=num_workers, hang_timeout_s=5.0, engine=trees, run_ahead="on")
    starting = asyncio.create_task(SpeculationGroup.start(config))
    await wait_for(lambda: len(worker_ids(victim) - others) == num_workers)
    first = worker_ids(victim) - others
    os.kill(max(first), fault)
    group = await starting
    try:
        generation = generate(group)
        await generation.run()
        assert generation.text == expected
        await wait_for(lambda: report in caplog.text and "draft" in group.process_ids)
        await wait_for(lambda: not any(map(is_alive, first)))
        again = submit(generation.engine)
        await again.run()
        assert again.text == expected
        assert generation.engine.stats.num_accepted_tokens > 0
        assert group.drafter.run_ahead.hits > 0
    finally:
        await group.stop()


def worker_ids(class_name: str) -> set[int]:
    """Return the process ids of this cluster's workers of a class; Ray puts it into their titles."""
    return {process.pid for process in psutil.Process().children(recursive=True) if class_name in title_of(process)}


@pytest.mark.long
async def test_models_that_do_not_share_a_vocabulary_are_refused(config: GroupConfig, tmp_path: Path) -> None:
    other = model_config(save_llama(tmp_path / "other", seed=4, vocab_size=70))
    with pytest.raises(ModelMismatchError):
        await SpeculationGroup.start(replace(config, draft=other))


@pytest.mark.long
async def test_without_a_draft_there_is_no_draft_worker(config: GroupConfig, expected: Text) -> None:
    async with running(replace(config, draft=None)) as group:
        generation = generate(group)
        await generation.run()
        assert generation.text == expected
        assert set(group.process_ids) == {"target-0"}


@pytest.mark.long
async def test_two_ranks_draft_for_themselves(config: GroupConfig, expected: Text) -> None:
    engine = replace(config.engine, drafting="self", self_draft_layers=1)
    async with running(replace(config, draft=None, tensor_parallel_size=2, engine=engine)) as group:
        generation = generate(group)
        await generation.run()
        assert generation.text == expected
        assert generation.engine.stats.num_accepted_tokens > 0
        assert set(group.process_ids) == {"target-0", "target-1"}
