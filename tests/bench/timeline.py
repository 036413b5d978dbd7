"""Timeline: when the target and the draft of a running-ahead pair computed, recorded from real rounds, as a picture.

Draft and target are processes of their own, on a core each, behind the sockets and responders of the served
application; this process is the Router. All three read one clock, the machine's.
"""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.console import Console

from cluster.protocol.messages import AnyReply, AnyRequest
from cluster.remote import RemoteDrafter, RemoteVerifier
from cluster.transport import Connector, Endpoint, listen
from cluster.workers.responder import DraftResponder, TargetResponder
from engine.config import EngineConfig, ModelConfig, ModelInfo, make_pair
from engine.drafting.run_ahead.drafter import RunAheadDrafter
from engine.engine import Engine
from engine.execution.backend import Backend
from engine.execution.memory import plan_kv_blocks
from engine.execution.registry import load_backend, survey
from engine.sampling.params import SamplingParams
from engine.stats import RunAheadStats
from engine.verification.verifier import ModelVerifier
from tests.bench.pictures import STYLE, save
from tests.bench.workload import Workload

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

Pipe: TypeAlias = "Connection[Any, Any]"

HOST = "127.0.0.1"
NODE_ID = "this node"
TIMEOUT_S = 60.0
NUM_STREAMS = 4
TEMPERATURE = 0.7
SHOWN_ROUNDS = 12
COLOURS = {"verify": "#6f8296", "hit": "#2e9b62", "miss": "#d9722e", "ahead": "#8fc1d6"}
LABELS = {
    "verify": "target verifies",
    "hit": "draft was ready",
    "miss": "draft was not: drafted while the target waits",
    "ahead": "draft runs ahead",
}


class Span(NamedTuple):
    """Some computing, from and to in seconds of the machine's clock; `kind` is one of COLOURS."""

    kind: str
    started_s: float
    ended_s: float


class Peer(NamedTuple):
    """Where a worker listens, and what it has loaded."""

    endpoint: Endpoint
    info: ModelInfo
    num_blocks: int


@rc_context(STYLE)
def timeline(workload: Workload, png: Path, console: Console) -> None:
    """Record some streams, one after the other, and draw a few rounds of them."""
    spans, stats = record(workload)
    shown = _typical(spans)
    first = shown[0].started_s
    figure = Figure(figsize=(9, 2), layout="constrained")
    draw(figure.subplots(), shown, first)
    save(figure, png)
    num_rounds = stats.hits + sum(stats.misses.values())
    console.print(
        f"{png}: {SHOWN_ROUNDS} of {num_rounds} rounds at T = {TEMPERATURE}, hit rate {stats.hits / num_rounds:.2f}"
    )


def _typical(spans: list[Span]) -> list[Span]:
    """Return some rounds in a row: of all such stretches that hold a hit and a miss, the one of median length."""
    starts = [i for i, span in enumerate(spans) if span.kind == "verify"]
    stretches = [spans[i:j] for i, j in zip(starts, starts[SHOWN_ROUNDS:], strict=False)]
    able = [part for part in stretches if {"hit", "miss"} <= {span.kind for span in part}] or stretches
    able.sort(key=lambda part: part[-1].ended_s - part[0].started_s)
    return able[len(able) // 2]


def draw(axes: Axes, spans: list[Span], first_s: float) -> None:
    """Draw a lane per process."""
    for span in spans:
        left, width = (span.started_s - first_s) * 1e3, (span.ended_s - span.started_s) * 1e3
        lane = 1 if span.kind == "verify" else 0
        axes.broken_barh([(left, width)], (lane - 0.35, 0.7), color=COLOURS[span.kind])
    axes.set_yticks([0, 1], ["draft", "target"])
    axes.set_xlabel("milliseconds")
    axes.spines["left"].set_visible(False)
    axes.legend(
        handles=[Patch(color=COLOURS[kind], label=label) for kind, label in LABELS.items()],
        ncols=4,
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
    )


def record(workload: Workload) -> tuple[list[Span], RunAheadStats]:
    """Run some streams one after the other; returns what was computed when, and what running ahead was worth."""
    config = _with_planned_blocks(
        EngineConfig(num_speculative_tokens=workload.num_speculative_tokens, speculation="fixed", max_num_seqs=1),
        workload,
    )
    connector = Connector(NODE_ID)
    context = get_context("spawn")
    cores = sorted(os.sched_getaffinity(0))
    pipes, processes = [], []
    for serve, core in ((_serve_draft, cores[0]), (_serve_target, cores[-1])):
        here, there = context.Pipe()
        process = context.Process(target=serve, args=(there, connector.identity, workload, config, core), daemon=True)
        process.start()
        pipes.append(here)
        processes.append(process)
    try:
        peers = [pipe.recv() for pipe in pipes]
        asyncio.run(_run(workload, config, connector, *peers))
        for pipe in pipes:
            pipe.send("stop")
        (draft_spans, stats), (target_spans, _) = (pipe.recv() for pipe in pipes)
    finally:
        for process in processes:
            process.terminate()
            process.join()
    return sorted(draft_spans + target_spans, key=lambda span: span.started_s), stats


def _with_planned_blocks(config: EngineConfig, workload: Workload) -> EngineConfig:
    surveys = [survey(model, config) for model in _models(workload)]
    footprints = [found.footprint for found in surveys]
    blocks = plan_kv_blocks(surveys[0].free_bytes, footprints, config, device=surveys[0].device)
    return replace(config, num_blocks=blocks)


async def _run(workload: Workload, config: EngineConfig, connector: Connector, draft: Peer, target: Peer) -> None:
    drafter = RemoteDrafter(vocab_size=target.info.vocab_size, timeout_s=TIMEOUT_S, prepares=True)
    draft_link = connector.connect(draft.endpoint, version=1)
    drafter.connect(draft_link)
    verifier = RemoteVerifier(vocab_size=target.info.vocab_size, timeout_s=TIMEOUT_S)
    target_link = connector.connect(target.endpoint, version=1, on_break=verifier.disconnect)
    verifier.connect([target_link])
    engine = Engine(
        config,
        drafter=drafter,
        verifier=verifier,
        num_blocks=target.num_blocks,
        vocab_size=target.info.vocab_size,
        max_model_len=target.info.max_model_len,
    )
    for number, prompt in enumerate(workload.prompts[:NUM_STREAMS]):
        params = SamplingParams(temperature=TEMPERATURE, seed=number, max_tokens=workload.num_tokens, ignore_eos=True)
        engine.add(str(number), prompt, params)
        while engine.has_work:
            await engine.step()
    if drafter.fallbacks:
        raise RuntimeError(f"the draft worker failed: {dict(drafter.fallbacks)}")
    for link in (draft_link, target_link):
        link.close()


def _serve_draft(pipe: Pipe, client_identity: str, workload: Workload, config: EngineConfig, core: int) -> None:
    backend = _load(_models(workload)[1], core)
    drafter = RunAheadDrafter(backend, config)
    backend.warm_up()
    responder = DraftResponder(drafter, capacity=4, version=1)
    spans: list[Span] = []

    def answer(request: AnyRequest) -> AnyReply | None:
        num_hits, num_misses, started = drafter.stats.hits, sum(drafter.stats.misses.values()), time.monotonic()
        reply = responder.answer(request)
        if drafter.stats.hits > num_hits:
            spans.append(Span("hit", started, time.monotonic()))
        elif sum(drafter.stats.misses.values()) > num_misses:  # a round with a prompt, or a last one, needs no draft
            spans.append(Span("miss", started, time.monotonic()))
        return reply

    def work() -> bool:
        started = time.monotonic()
        is_more = responder.work()
        if is_more:
            spans.append(Span("ahead", started, time.monotonic()))
        return is_more

    _serve(pipe, client_identity, answer, work, backend.info, 0)
    pipe.send((spans, drafter.stats))


def _serve_target(pipe: Pipe, client_identity: str, workload: Workload, config: EngineConfig, core: int) -> None:
    backend = _load(_models(workload)[0], core)
    verifier = ModelVerifier(backend, config)
    backend.warm_up()
    responder = TargetResponder(verifier, rank=0, capacity=4, version=1)
    spans: list[Span] = []

    def answer(request: AnyRequest) -> AnyReply | None:
        started = time.monotonic()
        reply = responder.answer(request)
        spans.append(Span("verify", started, time.monotonic()))
        return reply

    _serve(pipe, client_identity, answer, lambda: False, backend.info, verifier.num_blocks)
    pipe.send((spans, None))


def _serve(
    pipe: Pipe,
    client_identity: str,
    answer: Callable[[AnyRequest], AnyReply | None],
    work: Callable[[], bool],
    info: ModelInfo,
    num_blocks: int,
) -> None:
    """Serve until the other end of the pipe says so."""
    server = listen(HOST, node_id=NODE_ID, client_identity=client_identity)

    def wait() -> None:
        pipe.recv()
        server.close()

    Thread(target=wait, daemon=True).start()
    pipe.send(Peer(server.endpoint, info, num_blocks))
    server.serve(answer, work)


def _load(model: ModelConfig, core: int) -> Backend:
    os.sched_setaffinity(0, {core})
    return load_backend(replace(model, num_threads=1))


def _models(workload: Workload) -> tuple[ModelConfig, ModelConfig]:
    """Return the target and the draft, each on its own part of a pair of paced devices."""
    pair = make_pair(
        target_model=workload.target,
        draft_model=workload.draft,
        dtype=workload.dtype,
        device=workload.device,
        compile=workload.compile,
    )
    assert pair.draft is not None
    return pair.target, pair.draft
