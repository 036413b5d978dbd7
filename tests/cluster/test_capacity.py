"""How many groups fit on nodes, and what is said of one that does not."""

from dataclasses import replace

import pytest
import ray

from cluster.capacity import Resources, bundle_name, cluster_nodes, missing, place_groups
from cluster.config import GroupConfig
from cluster.placement import placement_bundles
from engine.config import ModelConfig

AUTO = GroupConfig(ModelConfig("target"), ModelConfig("draft"))
APART = replace(AUTO, target_accelerator_type="H100", draft_accelerator_type="L4")


def node(num_cpus: float, num_gpus: float = 0, accelerator: str = "") -> Resources:
    return {"CPU": num_cpus, "GPU": num_gpus} | ({f"accelerator_type:{accelerator}": 1.0} if accelerator else {})


@pytest.mark.parametrize(
    ("nodes", "num_gpus", "expected"),
    [
        ([node(0.6)], 0, 0),
        ([node(2)], 0, 2),
        ([node(1.3), node(1.3)], 0, 3),
        ([node(0.4), node(0.4)], 0, 1),
        ([node(64, 4)], 4, 2),
        ([node(64, 1)], 1, 1),
        ([node(64, 3), node(64, 3)], 6, 3),
    ],
    ids=["too small", "by CPUs", "split", "split only", "by GPUs", "shared GPU", "GPUs of two nodes"],
)
def test_groups_fit_as_long_as_every_bundle_finds_a_node(nodes: list[Resources], num_gpus: int, expected: int) -> None:
    named = {str(index): resources for index, resources in enumerate(nodes)}
    assert place_groups(placement_bundles(AUTO, num_gpus=num_gpus), named, limit=10)[0] == expected


def test_bundles_with_an_accelerator_type_choose_first() -> None:
    nodes = {"a": node(8, 2, "H100"), "b": node(8, 1, "L4")}
    bundles = placement_bundles(replace(AUTO, draft_accelerator_type="L4"), num_gpus=3)
    count, free = place_groups(bundles, nodes, limit=10)
    assert count == 1
    assert free["b"]["GPU"] == 0
    assert nodes["b"]["GPU"] == 1


def test_a_bundle_without_room_says_what_each_node_lacks() -> None:
    nodes = {"a": node(8, 1, "H100"), "b": node(8, 1, "A100")}
    sentences = missing(APART, placement_bundles(APART, num_gpus=2), nodes)
    assert sentences == [
        "no node has room for the draft, which needs 0.2 CPU, 1 GPU, accelerator_type:L4: "
        "a lacks 1 GPU, accelerator_type:L4; b lacks accelerator_type:L4"
    ]
    assert missing(AUTO, placement_bundles(AUTO, num_gpus=2), nodes) == []
    assert missing(AUTO, placement_bundles(AUTO, num_gpus=2), {})[0].endswith("there is no node")


def test_bundles_are_named_after_what_fills_them() -> None:
    two = replace(AUTO, tensor_parallel_size=2)
    assert [bundle_name(two, index) for index in range(4)] == [
        "the Router replica",
        "the draft",
        "target rank 0",
        "target rank 1",
    ]
    assert [bundle_name(replace(AUTO, draft=None), index) for index in range(2)] == ["the Router replica", "the target"]


def test_nodes_that_have_left_have_no_resources(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        {"NodeManagerAddress": "10.0.0.1", "NodeID": "abcdef0123", "Alive": True, "Resources": {"CPU": 2.0}},
        {"NodeManagerAddress": "10.0.0.2", "NodeID": "0123abcdef", "Alive": False, "Resources": {}},
    ]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    assert cluster_nodes() == {"10.0.0.1 (abcdef01)": {"CPU": 2.0}}
