"""An engine over a target and a head on a draft worker, with the messages of both and features over real sockets."""

import contextlib
import itertools
import sys
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from cluster.remote_drafter import RemoteDrafter
from cluster.remote_verifier import RemoteVerifier
from cluster.transport import Connector, Endpoint
from cluster.workers.draft_queue import DraftQueue
from cluster.workers.features import FeatureSource, receiver
from cluster.workers.responder import TargetResponder
from engine.config import EngineConfig, Execution, ModelConfig
from engine.drafting.assembly import assemble
from engine.drafting.learning import lessons
from engine.drafting.learning.head_learner import HeadLearner
from engine.drafting.learning.learner import Weights
from engine.drafting.learning.lessons import lessons_of
from engine.drafting.learning.study import Study
from engine.drafting.model.feature_store import FeatureStore
from engine.engine import Engine
from engine.models.registry import open_model
from engine.params import SamplingParams
from engine.protocols import DeferringDrafter
from tests.cluster.fakes import FakeLink, queue_worker
from tests.cluster.wire import NODE_ID, serving
from tests.engine.drafting.learning.texts import changed
from tests.engine.heads.saved_heads import CONFIGS, save_head
from tests.models import save_llama
from tests.waiting import wait_for

ENGINE = EngineConfig(
    num_speculative_tokens=3,
    max_num_seqs=4,
    num_blocks=24,
    block_size=4,
    speculation="fixed",
    max_num_batched_tokens=32,
)
PROMPTS = {"a": [5, 9, 2], "b": [7] * 20, "c": list(range(2, 25)), "d": [7] * 20}
TEMPERATURES = {"a": 0.0, "b": 3.0, "c": 6.0, "d": 0.8}
Text = dict[str, list[int]]


def sized(engine: EngineConfig, execution: Execution) -> EngineConfig:
    """The settings of an engine; vLLM's kernels for CPUs take no smaller blocks."""
    return replace(engine, num_blocks=4, block_size=32) if execution == "vllm" else engine


class Swaps(Study):
    """Changes the weights whenever nothing waits, and learns nothing."""

    def __init__(self, learner: HeadLearner) -> None:
        super().__init__(learner)
        self._kinds = itertools.cycle([changed(learner.loaded, scale) for scale in (0.1, 1.0, 0.0)])

    def taken(self) -> Weights:
        self.counts["taken"] += 1
        return next(self._kinds)


class Group:
    """The two workers in this process; each can be replaced by a new one."""

    def __init__(
        self, target: ModelConfig, *, run_ahead: bool = False, swaps: bool = False, engine: EngineConfig = ENGINE
    ) -> None:
        self.target, self.engine_config = target, replace(sized(engine, target.execution), drafting="head_worker")
        self.run_ahead, self.swaps = run_ahead, swaps
        self.drafter = RemoteDrafter(timeout_s=30.0)
        self.verifier = RemoteVerifier(timeout_s=30.0)
        self.features = FeatureStore()
        self.study: Swaps | None = None
        self._stack = contextlib.ExitStack()

    async def start(self) -> "Group":
        self.start_target()
        await self.start_draft()
        return self

    def start_target(self) -> None:
        sys.modules.pop("llvmlite.binding.ffi", None)  # vLLM reads all modules, and fails at this one
        model = assemble(open_model(self.target), None, self.engine_config).load_verifier()
        self.source = FeatureSource(model, Connector(NODE_ID), version=1)
        responder = TargetResponder(self.source, rank=0, capacity=16, version=1)

        def answer(request):
            reply = responder.answer(request)
            responder.work()
            return reply

        self.info, self.num_blocks = model.backend.info, model.num_blocks
        self.verifier.vocab_size = self.drafter.vocab_size = self.info.vocab_size
        self.verifier.connect([FakeLink(answer)])

    async def start_draft(self) -> None:
        self.features = FeatureStore(5.0)
        self.features.put("another request", 0, 0, memoryview(b""), dtype="float32", row_bytes=128)  # so drafts wait
        source = open_model(replace(self.target, head_only=True, execution="torch"))
        engine = replace(self.engine_config, num_blocks=64)
        [draft] = assemble(open_model(self.target), source, engine).load_drafts(
            run_ahead=self.run_ahead, features=self.features
        )
        if self.swaps:
            self.study = Swaps(HeadLearner(draft.backend, engine.num_speculative_tokens))
        self.draft_info = draft.backend.info
        self.link = FakeLink(queue_worker(DraftQueue([draft], engine, capacity=16, is_shared=False, study=self.study)))
        self.drafter.connect(self.link, [].append)
        await self.introduce()

    async def introduce(self) -> None:
        server = self._stack.enter_context(serving(self.source.identity, receiver(self.features, "1/")))
        self.source.connect(server.endpoint)
        await wait_for(lambda: self.source.has_room)

    def kill_draft(self) -> None:
        self.drafter.disconnect()
        self.link.close()
        self._stack.close()

    def engine(self) -> Engine:
        return Engine(
            self.engine_config,
            self.info,
            drafter=self.drafter,
            verifier=self.verifier,
            num_blocks=self.num_blocks,
            overlaps=("ahead",) if self.run_ahead else (),
        )


def submit(engine: Engine) -> Text:
    for name in PROMPTS:
        params = SamplingParams(
            temperature=TEMPERATURES[name], seed=4, max_tokens=25, ignore_eos=True, learning_group=""
        )
        engine.add(name, PROMPTS[name], params)
    return {name: [] for name in PROMPTS}


async def run(engine: Engine, text: Text, rounds: int = 1000) -> Text:
    while engine.has_work and rounds:
        for output in await engine.step():
            text[output.request_id] += output.token_ids
        rounds -= 1
    return text


@pytest.fixture(scope="module", params=CONFIGS)
def target(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, execution: Execution
) -> ModelConfig:
    folder = tmp_path_factory.mktemp("models")
    path = save_llama(folder / "target", seed=1, head_dim=32 if execution == "vllm" else None)
    config = ModelConfig(str(path), dtype="float32", device="cpu", execution=execution)
    return replace(config, head=save_head(folder / request.param, path, request.param))


@pytest.fixture(scope="module")
async def beside(target: ModelConfig, execution: Execution) -> tuple[Text, object]:
    """The text of a head in the target's process, and its engine's counters."""
    config = replace(sized(ENGINE, execution), drafting="head")
    model = assemble(open_model(replace(target, execution="torch")), None, config).load_verifier()
    engine = Engine(config, model.backend.info, drafter=DeferringDrafter(), verifier=model, num_blocks=model.num_blocks)
    text = await run(engine, submit(engine))
    return text, engine.stats


@pytest.fixture
async def group(target: ModelConfig) -> AsyncIterator[Group]:
    group = await Group(target).start()
    yield group
    group.kill_draft()


async def test_a_head_on_a_draft_worker_drafts_what_it_drafts_in_the_targets_process(group, beside):
    """Prompts in chunks, two that share a prefix, preemptions: every draft is the same."""
    engine = group.engine()
    text = await run(engine, submit(engine))
    assert text == beside[0]
    assert engine.stats.num_preemptions > 0
    assert engine.stats.num_prefix_hits > 0 or group.target.execution == "vllm"
    assert engine.stats == beside[1]
    assert group.drafter.features["missing"] == 0
    assert group.draft_info.name == group.target.head
    assert group.draft_info.num_parameters > 0
    assert group.drafter.features["bytes"] > 80 * 32 * 4


async def test_a_draft_worker_that_dies_and_comes_back_drafts_from_replayed_features(group, beside):
    engine = group.engine()
    text = await run(engine, submit(engine), 8)
    group.kill_draft()
    await run(engine, text, 2)
    before = engine.stats.num_drafts
    await group.start_draft()
    group.features._patience_s = 0.1  # for the first round, in which nothing can come
    await run(engine, text, 1)
    await wait_for(lambda: group.features.counts["bytes"])
    await run(engine, text, 2)
    assert engine.stats.num_drafts > before
    assert await run(engine, text) == beside[0]


async def test_a_target_that_dies_computes_its_features_again(group, beside):
    engine = group.engine()
    text = await run(engine, submit(engine), 8)
    group.verifier.disconnect("killed")
    engine.reset()
    group.start_target()
    await group.introduce()
    before = engine.stats.num_drafts
    assert await run(engine, text) == beside[0]
    assert engine.stats.num_drafts > before + 10
    assert group.features.counts["missing"] < 3


async def test_features_that_never_come_cost_their_drafts_and_one_wait(group, beside):
    group.features._patience_s = 0.01
    group.source.connect(Endpoint("elsewhere", "", "127.0.0.1", 9, group.source.identity))
    engine = group.engine()
    assert await run(engine, submit(engine)) == beside[0]
    assert engine.stats.num_drafts == 0
    assert group.features.counts["waited"] == 1
    assert group.features.counts["missing"] > 50


@pytest.mark.parametrize("target", ["eagle3"], indirect=True)
async def test_a_head_that_runs_ahead_on_its_own_states_changes_no_text(target, beside):
    group = await Group(target, run_ahead=True).start()
    engine = group.engine()
    text = await run(engine, submit(engine))
    group.kill_draft()
    assert text == beside[0]
    assert group.drafter.run_ahead.hits > 10
    assert engine.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("run_ahead", [False, True])
async def test_no_swap_changes_a_text_and_ended_texts_teach_with_their_features(target, beside, run_ahead, monkeypatch):
    group = await Group(target, run_ahead=run_ahead, swaps=True).start()
    engine = group.engine()
    text = await run(engine, submit(engine))
    missing, study = group.drafter.features["missing"], group.study
    engine.add("last", [3, 4], SamplingParams(max_tokens=5))  # which tells the worker what has ended
    await run(engine, {"last": []})
    group.kill_draft()
    assert text == beside[0]
    assert missing == 0 or run_ahead
    assert study.counts["taken"] > 10
    assert engine.stats.num_draft_tokens > engine.stats.num_accepted_tokens > 0
    assert len(study.inbox) == 4
    for request, features in study.inbox:
        (lesson,) = lessons_of(request, features)
        assert len(lesson.token_ids) - 4 <= 1 + len(lesson.features) <= len(lesson.token_ids)
    monkeypatch.setattr(lessons, "STEP_TOKENS", 20)
    assert [*study.work()]
    assert study.counts["steps"] > 0
