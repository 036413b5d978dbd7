"""A speculation group of real processes on a Ray cluster: the engine's text does not depend on who lives."""

import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import ray
from ray.util.placement_group import placement_group_table

from cluster.config import GroupConfig
from cluster.group import SpeculationGroup
from cluster.placement import PlacementError
from engine.errors import ModelMismatchError, TargetError
from tests.cluster.fakes import process_ids
from tests.e2e.groups.generation import generate, is_alive, model_config, running
from tests.engine.targets import alternate
from tests.models import save_llama
from tests.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
async def group(config: GroupConfig) -> AsyncIterator[SpeculationGroup]:
    """A draft and two ranks, which tests share, because starting processes takes seconds."""
    config = replace(config, tensor_parallel_size=2, hang_timeout_s=5.0)
    async with running(config) as group:
        yield group


def nodes_of_bundles() -> list[tuple[str, str]]:
    """Return the pool and the node of every bundle of the one group that is placed."""
    pools = {node["NodeID"]: node["Labels"]["pool"] for node in ray.nodes()}
    [placed] = [entry for entry in placement_group_table().values() if entry["state"] == "CREATED"]
    return [(pools[node], node) for _, node in sorted(placed["bundles_to_node_id"].items())]


async def test_two_ranks_on_one_node_and_a_draft_on_another_write_the_text_of_one_process(group, expected):
    router, draft, target = nodes_of_bundles()
    assert (router[0], draft[0], target[0]) == ("target", "draft", "target")
    generation = generate(group)
    assert group.is_available
    await generation.run()
    assert generation.text == expected
    assert generation.engine.stats.num_accepted_tokens > 0
    assert group.target_info.num_parameters > 0
    assert set(process_ids(group)) == {"draft", "target-0", "target-1"}


async def test_a_stopped_draft_costs_one_deadline_and_comes_back(group, expected):
    generation, timeouts = generate(group), group.remote_drafter.fallbacks["timeout"]
    await generation.run(until=lambda: generation.num_tokens > 60)
    stopped = process_ids(group)["draft"]
    os.kill(stopped, signal.SIGSTOP)
    try:
        await generation.run()
    finally:
        with contextlib.suppress(ProcessLookupError):  # replaced, if the run took longer than `hang_timeout_s`
            os.kill(stopped, signal.SIGCONT)
    assert generation.text == expected
    assert group.remote_drafter.fallbacks["timeout"] == timeouts + 1
    await wait_for(lambda: group.remote_drafter.is_available)


async def test_with_two_rounds_in_flight_the_text_is_the_same_whoever_is_killed_or_hangs(group, expected):
    """Rank 1; tests/e2e/served kills a target that is rank 0 alone."""
    generation = generate(group, speculation="fixed")
    alternate(generation.engine)
    await generation.run(until=lambda: generation.num_tokens > 30)
    assert generation.engine._rounds.is_in_flight
    before = process_ids(group)
    os.kill(before["target-1"], signal.SIGKILL)
    with pytest.raises(TargetError):
        await generation.run()
    assert not group.is_available
    generation.engine.reset()
    await group.recover()
    assert group.is_available
    assert not any(is_alive(before[f"target-{rank}"]) for rank in range(2))
    await wait_for(lambda: group.remote_drafter.is_available)
    await generation.run(until=lambda: generation.num_tokens > 70)
    stopped, timeouts = process_ids(group)["draft"], group.remote_drafter.fallbacks["timeout"]
    os.kill(stopped, signal.SIGSTOP)
    await generation.run(until=lambda: group.remote_drafter.fallbacks["timeout"] > timeouts)
    assert generation.engine._rounds.is_in_flight
    os.kill(stopped, signal.SIGKILL)
    await generation.run()
    assert generation.text == expected
    await wait_for(lambda: process_ids(group).get("draft", stopped) != stopped)
    again = generate(group, speculation="fixed")
    alternate(again.engine)
    await again.run()
    assert again.text == expected
    assert again.engine.stats.num_accepted_tokens > 0


async def test_a_placement_that_cannot_be_met_says_which_bundle_is_missing_what(config):
    nowhere = replace(config, draft_label_selector={"pool": "nowhere"}, start_timeout_s=3.0)
    with pytest.raises(PlacementError) as caught:
        await SpeculationGroup.start(nowhere)
    message = str(caught.value)
    assert "no node has room for the draft, which needs 0.2 CPU, label pool=nowhere: " in message
    assert message.count("label pool=nowhere") == 1 + 2  # of the draft, and of each node
    assert "the target" not in message


@pytest.mark.long
async def test_models_with_few_tokens_in_common_are_refused(config, tmp_path):
    other = model_config(save_llama(tmp_path / "other", seed=4, vocab_size=200))
    with pytest.raises(ModelMismatchError):
        await SpeculationGroup.start(replace(config, draft=other))


@pytest.mark.long
async def test_two_ranks_draft_for_themselves(config, expected):
    engine = replace(config.engine, drafting="self", self_draft_layers=1)
    async with running(replace(config, draft=None, tensor_parallel_size=2, engine=engine)) as group:
        generation = generate(group)
        await generation.run()
        assert generation.text == expected
        assert generation.engine.stats.num_accepted_tokens > 0
        assert set(process_ids(group)) == {"target-0", "target-1"}
