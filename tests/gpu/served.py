"""Served rounds without Ray: Router, draft and target are processes, joined by the real transport.

Models are random, so the rule accepts each draft token with a probability of 0.75, by a hash of its position. In the
last arm both models are the draft's, so that a draft that runs ahead is right.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from cluster.remote_drafter import RemoteDrafter
from cluster.remote_verifier import RemoteVerifier
from cluster.transport import Connector, Server
from cluster.workers.draft_queue import DraftQueue
from cluster.workers.responder import TargetResponder
from engine.config import EngineConfig
from engine.drafting.model.draft_model import DraftModel
from engine.engine import Engine
from engine.params import SamplingParams
from engine.protocols import Draft, Drafter, NoDrafter
from engine.sampling.logits import Run
from engine.sampling.noise import round_seed
from engine.stats.preparation import PREPARATION
from engine.verification import coupled
from engine.verification.rule import Rule
from engine.verification.verifier import ModelVerifier
from tests.gpu.passes import make_backend
from tests.gpu.processes import start

ACCEPTANCE = 0.75
_NUM_WARM = 20
_NODE = "one node"


def _decide(
    logits: Tensor, runs: Sequence[Run], drafts: Sequence[Draft], drawn: list[int] | None
) -> list[tuple[list[int], list[int]]]:
    """Accept draft tokens by a hash of their positions, whatever the target drew; see `rule.Decide`."""
    decisions = []
    for run, draft, (tokens, _) in zip(runs, drafts, coupled.decide(logits, runs, drafts, drawn), strict=True):
        tip, path = len(run.request.token_ids), list[int]()
        while len(path) < len(draft.token_ids) and round_seed(7, tip + len(path)) % 1000 < 1000 * ACCEPTANCE:
            path.append(len(path))
        decisions.append(([*(draft.token_ids[node] for node in path), tokens[-1]], path))
    return decisions


FORCED = Rule(_decide, shares_noise=True)


def served(device: str, shapes: tuple[str, str], *, num_rounds: int, prompt_length: int) -> Iterator[dict[str, Any]]:
    """Yield what rounds of one request cost: without drafts, with k = 4, running ahead, and that with equal models."""
    forced = f"{__name__}:FORCED"
    for arm, pair, k, run_ahead, rule in (
        ("off", shapes, 0, False, "coupled"),
        ("k = 4", shapes, 4, False, forced),
        ("k = 4, running ahead", shapes, 4, True, forced),
        ("k = 4, running ahead, equal models", (shapes[1], shapes[1]), 4, True, "coupled"),
    ):
        length = prompt_length + 5 * (num_rounds + _NUM_WARM)
        config = EngineConfig(
            num_blocks=2 * (length // 16 + 16), num_speculative_tokens=k or 4, max_num_seqs=1, verification=rule,
            speculation="fixed" if k else "off",
        )  # fmt: skip
        connector = Connector(_NODE)
        workers = []
        for is_target, shape in zip((True, False), pair, strict=True):
            if is_target or k:
                workers.append(start(device, work, is_target, device, shape, config, run_ahead, connector.identity))
        reading: dict[str, Any] = {"arm": arm, "rounds": num_rounds}
        reading |= asyncio.run(
            _route(connector, [ours for _, ours in workers], config, run_ahead, prompt_length, length)
        )
        for name, (process, ours) in zip(("target", "draft"), workers, strict=False):
            ours.send("end")
            reading[f"{name}_prepared_in_rounds"] = ours.recv()
            process.join()
        yield reading


def work(
    connection: Connection, is_target: bool, device: str, shape: str, config: EngineConfig, run_ahead: bool, client: str
) -> None:
    """Load a model in this thread and serve it in another, as Ray's actors do."""
    backend: Any = make_backend(shape, device, config, invariant=is_target)
    server = Server("127.0.0.1", _NODE)
    if is_target:
        responder = TargetResponder(ModelVerifier(backend, config), rank=0, capacity=4, version=1)
        listener, work = server.listen(client, responder.answer), responder.work
    else:
        queue = DraftQueue([DraftModel(backend, run_ahead=run_ahead)], config, capacity=4, is_shared=False)
        listener = server.listen(client, lambda request: queue.submit(1, request, listener.send))
        work = queue.step
    backend.warm_up()
    connection.send((listener.endpoint, backend.info))
    serving = Thread(target=server.serve, args=(work,))
    serving.start()
    assert connection.recv() == "warm"
    before = _preparations()
    assert connection.recv() == "end"
    server.close()
    serving.join()
    connection.send({name: count - before.get(name, 0) for name, count in _preparations().items()})


async def _route(
    connector: Connector, workers: list[Connection], config: EngineConfig, run_ahead: bool, prompt: int, length: int
) -> dict[str, Any]:
    loaded = [connection.recv() for connection in workers]
    links = [connector.connect(endpoint, version=1) for endpoint, _ in loaded]
    info = loaded[0][1]
    verifier = RemoteVerifier(vocab_size=info.vocab_size, timeout_s=60.0)
    verifier.connect(links[:1])
    drafter: Drafter = NoDrafter()
    remote = RemoteDrafter(vocab_size=info.vocab_size, timeout_s=60.0)
    if len(links) > 1:
        remote.connect(links[1], [].append)
        drafter = remote
    assert config.num_blocks is not None
    engine = Engine(
        config,
        info,
        drafter=drafter,
        verifier=verifier,
        num_blocks=config.num_blocks + 1,
        overlaps=("ahead",) if run_ahead else (),
    )
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=length - prompt, ignore_eos=True)
    engine.add("0", [i % 1000 for i in range(1, prompt + 1)], params)
    rounds: list[tuple[float, ...]] = []
    first = None
    while engine.has_work and len(rounds) < (length - prompt) // 5:
        if len(rounds) == _NUM_WARM:
            first = remote.run_ahead
            for connection in workers:
                connection.send("warm")
        started, counts = time.perf_counter(), _seconds(verifier, remote)
        num_tokens = sum(len(output.token_ids) for output in await engine.step())
        seconds = time.perf_counter() - started
        rounds.append((seconds, num_tokens, *(b - a for a, b in zip(counts, _seconds(verifier, remote), strict=True))))
    for link in links:
        link.close()
    steady = torch.tensor(rounds[_NUM_WARM:], dtype=torch.float64)
    mean = (steady.mean(0) * 1e3).tolist()
    p50, p99 = torch.quantile(steady[:, 0], torch.tensor([0.5, 0.99], dtype=torch.float64)).tolist()
    (round_ms, tokens, target_wait, target_ms, draft_wait, draft_ms) = mean
    reading = {
        "round_ms": round(round_ms, 3),
        "p50_ms": round(p50 * 1e3, 3),
        "p99_ms": round(p99 * 1e3, 3),
        "tokens_per_round": round(tokens / 1e3, 2),
        "target_ms": round(target_ms, 3),
        "draft_ms": round(draft_ms, 3),
        "transport_ms": round(target_wait - target_ms + draft_wait - draft_ms, 3),
        "router_ms": round(round_ms - target_wait - draft_wait, 3),
        "fallbacks": dict(remote.fallbacks),
    }
    if remote.run_ahead is not None and first is not None:
        then, now = asdict(first), asdict(remote.run_ahead)
        reading["run_ahead"] = {name: now[name] for name in now if now[name] != then[name]}
    return reading


def _seconds(verifier: RemoteVerifier, drafter: RemoteDrafter) -> tuple[float, ...]:
    calls = (verifier.calls, drafter.calls)
    return tuple(seconds for one in calls for seconds in (one.wait_s, one.compute_s))


def _preparations() -> dict[str, int]:
    """Return how many layers and kernels were compiled in rounds."""
    return dict(PREPARATION.counts)
