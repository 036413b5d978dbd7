"""A worker in a process of its own: what it is asked, what it answers, how it ends."""

import signal
from pathlib import Path

import psutil
import pytest

from tests.bench import worker
from tests.bench.worker import WorkerProcess
from tests.bench.workload import Workload


def test_a_peer_runs_in_the_environment_that_it_was_installed_in(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = tmp_path / "python"
    peers.write_text(f'#!/bin/sh\nhead -n 1 > {tmp_path}/workload\necho "$@" >&2\nexit 1\n')
    peers.chmod(0o700)
    monkeypatch.setattr(worker, "PEERS_PYTHON", peers)
    with pytest.raises(RuntimeError, match=r"bench.worker vllm-plain"):
        WorkerProcess("vllm-plain", workload)
    assert Workload.from_json((tmp_path / "workload").read_text()) == workload


def test_a_worker_process_runs_what_it_is_asked_for_until_nobody_asks(workload: Workload) -> None:
    before = psutil.Process().children()
    process = WorkerProcess("engine-speculative", workload)
    try:
        (child,) = set(psutil.Process().children()) - set(before)
        assert process.draft_lengths == [workload.num_speculative_tokens]
        for cell in workload.cells:
            (batch,) = process.run(cell, 1)
            assert len(batch.timelines) == cell.batch_size
            assert batch.speculation.num_rounds > 0
        process.hang_up()
        assert child.wait(60) == 0
    finally:
        process.close()


def test_a_worker_process_that_fails_says_why(workload: Workload) -> None:
    process = WorkerProcess("engine-plain", workload)
    try:
        with pytest.raises(RuntimeError, match=r"(?s)engine-plain failed.*IndexError"):
            process.run(workload.cells[0], 1000)
    finally:
        process.close()


def test_a_terminated_worker_process_still_closes_its_method(workload: Workload) -> None:
    before = psutil.Process().children()
    process = WorkerProcess("engine-plain", workload)
    try:
        (child,) = set(psutil.Process().children()) - set(before)
        child.terminate()
        assert child.wait(60) == 128 + signal.SIGTERM
    finally:
        process.close()
