"""A worker in a process of its own: what it is asked, what it answers, how it ends."""

import psutil

from tests.bench.worker import WorkerProcess
from tests.bench.workload import Workload


def test_a_worker_process_runs_what_it_is_asked_for_until_nobody_asks(workload: Workload) -> None:
    before = psutil.Process().children()
    process = WorkerProcess("engine-speculative", workload)
    try:
        (child,) = set(psutil.Process().children()) - set(before)
        assert process.draft_lengths == [workload.num_speculative_tokens]
        for cell in workload.cells:
            (batch,) = process.run(cell, 1)
            assert len(batch.timelines) == cell.batch_size
            assert batch.split is not None
        process.hang_up()
        assert child.wait(60) == 0
    finally:
        process.close()
