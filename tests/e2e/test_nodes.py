"""A speculation group over three nodes, which are processes of this machine: where workers go, and the same text."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from cluster.config import GroupConfig
from cluster.group import SpeculationGroup
from cluster.placement import PlacementError
from tests.cluster.models import save_llama
from tests.e2e.test_group import ENGINE, generate, model_config, running, text_of_one_process

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]

STORE_BYTES = 80 * 2**20


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """A head for one draft, and two nodes for targets."""
    cluster = Cluster()
    for pool in ("draft", "target", "target"):
        cluster.add_node(num_cpus=1, labels={"pool": pool}, object_store_memory=STORE_BYTES, include_dashboard=False)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, logging_level="WARNING")
    yield
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> GroupConfig:
    folder = tmp_path_factory.mktemp("models")
    return GroupConfig(
        target=model_config(save_llama(folder / "target", seed=1)),
        draft=model_config(save_llama(folder / "draft", seed=1, noise=0.02)),
        engine=ENGINE,
        tensor_parallel_size=2,
        target_label_selector={"pool": "target"},
        draft_label_selector={"pool": "draft"},
        start_timeout_s=120,
    )


def nodes_of_bundles() -> list[tuple[str, str]]:
    """Return the pool and the node of every bundle of the one group that is placed."""
    pools = {node["NodeID"]: node["Labels"]["pool"] for node in ray.nodes()}
    [placed] = [entry for entry in placement_group_table().values() if entry["state"] == "CREATED"]
    return [(pools[node], node) for _, node in sorted(placed["bundles_to_node_id"].items())]


async def test_the_ranks_share_a_node_and_the_draft_is_on_another(config: GroupConfig) -> None:
    async with running(config) as group:
        router, draft, target = nodes_of_bundles()
        assert (router[0], draft[0], target[0]) == ("target", "draft", "target")
        generation = generate(group)
        await generation.run()
    assert generation.text == await text_of_one_process(config)
    assert generation.engine.stats.num_accepted_tokens > 0


async def test_ranks_on_two_nodes_write_the_same_text(config: GroupConfig, caplog: pytest.LogCaptureFixture) -> None:
    # Takes so much of every node that none has room for all ranks.
    taken = placement_group([{"CPU": 0.65}] * 3, strategy="STRICT_SPREAD")
    assert taken.wait(30)
    try:
        async with running(replace(config, target_nodes=2)) as group:
            generation = generate(group)
            await generation.run()
    finally:
        remove_placement_group(taken)
    assert "The target's 2 ranks are on 2 nodes" in caplog.text
    assert generation.text == await text_of_one_process(config)


async def test_a_placement_that_cannot_be_met_says_which_bundle_is_missing_what(config: GroupConfig) -> None:
    nowhere = replace(config, draft_label_selector={"pool": "nowhere"}, start_timeout_s=3.0)
    with pytest.raises(PlacementError) as caught:
        await SpeculationGroup.start(nowhere)
    message = str(caught.value)
    assert "no node has room for the draft, which needs 0.2 CPU, label pool=nowhere: " in message
    assert message.count("lacks label pool=nowhere") == 3
    assert "the target" not in message
