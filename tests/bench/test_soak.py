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
        run = Soak(url, 10.0, lambda: {"here": process.memory_full_info().uss})
        await run.run(16)
        assert run.failures() == []
        assert rig.engine.num_free_blocks == rig.engine.num_blocks
    answers = {kind: sum(count for (own, _), count in run.answers.items() if own == kind) for kind, _ in run.answers}
    assert all(answers[kind] > 20 for kind in ("good", "bad", "abandoned")), answers
    assert run.answers["abandoned", 0] > 0
    # A slope needs minutes; what comes and goes with the allocator is 10 MiB.
    sizes = [size["here"] for _, size in run.memory]
    assert sizes[-1] - sizes[len(sizes) // 2] < 64 * 2**20


async def test_what_goes_wrong_is_noticed(model_dir: Path) -> None:  # noqa: F811
    """Statuses that were not expected, and a request that is still there."""
    config = AppConfig(target_model=str(model_dir), served_model_name="tiny", limits=Limits(max_n=1))
    with serving(config, model_dir) as (url, _):
        run = Soak(url, 1.0, dict)
        await run.run(4)
        assert any("'n': 2" in failure and failure.endswith("400") for failure in run.failures())
        run.gauges["vllm:num_requests_running"] = 1.0
        assert "vllm:num_requests_running is 1.0 at the end" in run.failures()


def test_growth_is_that_of_the_second_half_and_of_the_named_processes():
    run = Soak("", 120.0, dict)
    # 6 MiB a minute after a steep first half, a peak that passes, and a process that nobody asked for.
    for second in range(120):
        grown = 500 - second if second < 60 else 400 + second / 10 + (100 if second == 90 else 0)
        run.memory.append((float(second), {"Router": int(grown * 2**20), "Ray": second * 2**30}))
    assert run.mib_per_minute("Router", "Ingress") == pytest.approx(6.0, abs=0.1)
