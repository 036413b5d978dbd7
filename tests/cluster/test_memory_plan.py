"""The memory plan of a group: made once, when all workers have surveyed their devices."""

import asyncio

import pytest

from cluster.memory_plan import MemoryPlan, plan_devices
from engine.config import EngineConfig
from engine.errors import ModelError
from engine.execution.memory import Footprint, Survey

CONFIG = EngineConfig(max_num_seqs=10**6, memory_fraction=1.0, num_speculative_tokens=0)


def located(node, device, free, *, weights=100, token_bytes=1):
    return (node, Survey(device, free, Footprint("model", weights, 0, token_bytes, 16)))


def test_workers_on_different_devices_do_not_share_memory():
    surveys = {"target": [located("a", "gpu0", 1700)], "draft": [located("a", "gpu1", 900)]}
    assert plan_devices(surveys, CONFIG) == {"target": 100, "draft": 50}


def test_the_same_device_on_two_nodes_is_two_devices():
    surveys = {"target": [located("a", "cpu", 1700)], "draft": [located("b", "cpu", 900)]}
    assert plan_devices(surveys, CONFIG) == {"target": 100, "draft": 50}


def test_draft_and_target_share_a_device_by_tokens():
    """Both hold as many; the weights of both come first, and the lesser of two readings of free memory counts."""
    surveys = {
        "target": [located("a", "gpu0", 1800, weights=100, token_bytes=3)],
        "draft": [located("a", "gpu0", 1900, weights=100, token_bytes=1)],
    }
    assert plan_devices(surveys, CONFIG) == {"target": 25, "draft": 25}


def test_ranks_have_the_blocks_of_the_tightest_device():
    surveys = {"target": [located("a", "gpu0", 1700), located("a", "gpu1", 900)]}
    assert plan_devices(surveys, CONFIG) == {"target": 50}


async def test_no_worker_loads_before_all_have_surveyed_and_a_restart_needs_no_survey():
    plan = MemoryPlan(CONFIG, ["target", "draft"])
    target = asyncio.create_task(plan.join("target", [located("a", "cpu", 1800)]))
    await asyncio.sleep(0)
    assert not plan.is_made
    assert await plan.join("draft", [located("a", "cpu", 1800)]) == 50
    assert await target == 50
    assert plan.is_made
    assert await plan.join("target") == 50


async def test_models_that_do_not_fit_are_refused():
    plan = MemoryPlan(CONFIG, ["target"])
    with pytest.raises(ModelError, match="are free"):
        await plan.join("target", [located("a", "cpu", 90)])


async def test_a_number_from_the_configuration_needs_no_survey():
    plan = MemoryPlan(EngineConfig(num_blocks=7), ["target", "draft"])
    assert plan.is_made
    assert await plan.join("draft") == 7
