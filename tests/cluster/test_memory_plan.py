"""The memory plan of a group: made once for each role, and without the draft worker for the target."""

import asyncio
from dataclasses import replace

from cluster.memory_plan import MemoryPlan, plan_devices
from engine.config import EngineConfig
from engine.execution.memory import CacheSize, Footprint, Survey

CONFIG = EngineConfig(max_num_seqs=10**6, memory_fraction=1.0, num_speculative_tokens=0)


def located(node, device, free, *, weights=100, token_bytes=1, state_bytes=0):
    return (node, Survey(device, free, Footprint("model", weights, 0, token_bytes, 16, state_bytes)))


def size(num_blocks, config=CONFIG):
    return CacheSize(num_blocks, 2 * config.max_num_seqs + 4)


def test_the_same_device_on_two_nodes_is_two_devices():
    surveys = {"target": [located("a", "cpu", 1700)], "draft": [located("b", "cpu", 900)]}
    assert plan_devices(surveys, CONFIG) == {"target": size(100), "draft": size(50)}


def test_draft_and_target_share_a_device_by_tokens():
    """Both hold as many; the weights of both come first, and the lesser of two readings of free memory counts."""
    surveys = {
        "target": [located("a", "gpu0", 1800, weights=100, token_bytes=3)],
        "draft": [located("a", "gpu0", 1900, weights=100, token_bytes=1)],
    }
    assert plan_devices(surveys, CONFIG) == {"target": size(25), "draft": size(25)}


def test_ranks_have_the_blocks_of_the_tightest_device():
    surveys = {"target": [located("a", "gpu0", 1700), located("a", "gpu1", 900)]}
    assert plan_devices(surveys, CONFIG) == {"target": size(50)}


def test_ranks_have_the_state_slots_of_the_device_with_the_fewest():
    surveys = {"target": [located("a", f"gpu{i}", free, state_bytes=10) for i, free in enumerate((350, 300))]}
    config = EngineConfig(max_num_seqs=9, memory_fraction=1.0, num_speculative_tokens=0)
    assert plan_devices(surveys, config) == {"target": CacheSize(6, 10)}


async def test_a_draft_of_a_longer_context_gets_blocks_for_that_of_the_target():
    plan, needs = MemoryPlan(CONFIG), located("a", "gpu1", 100 + 64)[1]
    draft = ("a", replace(needs, footprint=replace(needs.footprint, max_model_len=2**20)))
    plan.plan_target([located("a", "gpu0", 1700)], [])
    assert await plan.plan_draft([draft]) == size(4)


async def test_a_draft_beside_the_target_waits_for_the_plan_and_gets_its_share_of_it():
    """Its own reading of free memory does not count: ranks may have loaded by then."""
    plan = MemoryPlan(CONFIG)
    draft = asyncio.create_task(plan.plan_draft([located("a", "cpu", 900)]))
    await asyncio.sleep(0)
    assert not draft.done()
    assert plan.plan_target([located("a", "cpu", 1800)], [located("a", "cpu", 1800)]) == size(50)
    assert await draft == size(50)


async def test_a_restart_needs_no_survey():
    plan = MemoryPlan(CONFIG)
    plan.plan_target([located("a", "cpu", 1800)], [located("a", "cpu", 1800)])
    assert plan.plan_target([], []) == await plan.plan_draft([]) == size(50)


async def test_a_number_from_the_configuration_needs_no_survey():
    config = EngineConfig(num_blocks=7)
    plan = MemoryPlan(config)
    assert plan.knows("target")
    assert plan.knows("draft")
    assert plan.plan_target([], []) == await plan.plan_draft([]) == size(7, config)


async def test_a_draft_that_learns_has_room_for_its_optimiser_wherever_it_is():
    learning = replace(CONFIG, num_speculative_tokens=0)
    target, draft = located("a", "gpu0", 2900, weights=100), located("a", "gpu0", 2900, weights=100)
    together = MemoryPlan(learning, "on")
    assert together.plan_target([target], [draft]) == size(2900 - 17 * 100 >> 5)
    apart = MemoryPlan(learning, "on")
    apart.plan_target([located("b", "gpu0", 10**6)], [])
    assert await apart.plan_draft([draft]) == size(2900 - 16 * 100 >> 4)
