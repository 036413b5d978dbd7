"""The soak at its shortest, on an engine in this process; and it would notice."""

import os
from pathlib import Path

import psutil
import pytest

from deployments.config import AppConfig, Limits
from tests.bench.soak import Soak
from tests.deployments.conftest import model_dir, tokenizer  # noqa: F401
from tests.deployments.serving import serving


@pytest.mark.slow
async def test_ten_seconds_leave_nothing_behind(model_dir: Path) -> None:  # noqa: F811
    config = AppConfig(target_model=str(model_dir), served_model_name="tiny")
    process = psutil.Process(os.getpid())
    with serving(config, model_dir) as (url, rig):
        run = Soak(url, 10.0, lambda: process.memory_full_info().uss)
        await run.run(16)
        assert run.failures() == []
        assert rig.engine.num_free_blocks == rig.engine.num_blocks
    answers = {kind: sum(count for (own, _), count in run.answers.items() if own == kind) for kind, _ in run.answers}
    assert all(answers[kind] > 20 for kind in ("good", "bad", "abandoned")), answers
    assert run.answers["abandoned", 0] > 0
    # A slope needs minutes; what comes and goes with the allocator is 10 MiB.
    assert run.memory[-1][1] - run.memory[len(run.memory) // 2][1] < 64 * 2**20


async def test_what_goes_wrong_is_noticed(model_dir: Path) -> None:  # noqa: F811
    """Statuses that were not expected, and a request that is still there."""
    config = AppConfig(target_model=str(model_dir), served_model_name="tiny", limits=Limits(max_n=1))
    with serving(config, model_dir) as (url, _):
        run = Soak(url, 1.0, lambda: 0)
        await run.run(4)
        assert any("'n': 2" in failure and failure.endswith("400") for failure in run.failures())
        run.gauges["vllm:num_requests_running"] = 1.0
        assert "vllm:num_requests_running is 1.0 at the end" in run.failures()
