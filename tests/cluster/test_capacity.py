"""How many groups fit on nodes, and what is said of one that does not."""

from dataclasses import replace

import pytest
import ray

from cluster import capacity
from cluster.capacity import Node, Slot, cluster_nodes, free_nodes, missing, place_groups, pool_slot, slots
from cluster.config import GroupConfig
from cluster.placement import placement_bundles
from engine.config import ModelConfig

AUTO = GroupConfig(ModelConfig("target"), ModelConfig("draft"))
APART = replace(AUTO, target_label_selector={"gpu": "H100"}, draft_label_selector={"gpu": "L4"})


def node(num_cpus: float, num_gpus: float = 0, **labels: str) -> Node:
    return Node({"CPU": num_cpus, "GPU": num_gpus}, labels)


def group(config: GroupConfig, num_gpus: int) -> list[Slot]:
    return slots(config, placement_bundles(config, num_gpus=num_gpus))


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
def test_groups_fit_as_long_as_every_bundle_finds_a_node(nodes, num_gpus, expected):
    named = {str(index): resources for index, resources in enumerate(nodes)}
    assert place_groups(group(AUTO, num_gpus), named, limit=10)[0] == expected


def test_bundles_with_labels_choose_first():
    nodes = {"a": node(8, 2, gpu="H100"), "b": node(8, 1, gpu="L4")}
    config = replace(AUTO, draft_label_selector={"gpu": "L4"})
    count, free = place_groups(group(config, 3), nodes, limit=10)
    assert count == 1
    assert free["b"].resources["GPU"] == 0
    assert nodes["b"].resources["GPU"] == 1


def test_ranks_need_one_node():
    nodes = {"a": node(8, 2), "b": node(8, 2), "c": node(8, 1)}
    four = replace(AUTO, tensor_parallel_size=4)
    assert place_groups(group(four, 5), nodes, limit=1)[0] == 0
    assert place_groups(group(four, 5), nodes | {"d": node(8, 4)}, limit=1)[0] == 1


def test_a_bundle_without_room_says_what_each_node_lacks():
    nodes = {"a": node(8, 1, gpu="H100"), "b": node(8, 1, gpu="A100")}
    assert missing(group(APART, 2), nodes) == [
        "no node has room for the draft, which needs 0.2 CPU, 1 GPU, label gpu=L4: "
        "a lacks 1 GPU, label gpu=L4; b lacks label gpu=L4"
    ]
    assert missing(group(AUTO, 2), nodes) == []
    assert missing(group(AUTO, 2), {})[0].endswith("there is no node")


def test_a_pooled_group_leaves_its_drafts_gpu_to_the_pool():
    pooled = replace(APART, draft_pool=True)
    assert [slot.name for slot in group(pooled, 2)] == ["the target", "the Router replica"]
    nodes = {"a": node(64, 4, gpu="H100"), "b": node(8, 1, gpu="L4")}
    assert place_groups(group(pooled, 5), nodes, limit=9)[0] == 4
    slot = pool_slot(pooled, num_gpus=5)
    count, free = place_groups([slot], nodes, limit=9)
    assert (count, free["b"].resources["GPU"]) == (1, 0)
    assert missing([slot], free)[0].startswith(
        "no node has room for a draft worker of the pool, which needs 0.2 CPU, 1 GPU"
    )
    assert place_groups([pool_slot(pooled, num_gpus=0)], {"c": Node({"CPU": 0.5}, {"gpu": "L4"})}, limit=9)[0] == 2


def test_nodes_that_have_left_have_no_resources(monkeypatch):
    living = {"NodeManagerAddress": "10.0.0.1", "NodeID": "abcdef0123", "Alive": True}
    nodes = [
        {**living, "Resources": {"CPU": 2.0}, "Labels": {"pool": "big"}},
        {**living, "NodeID": "0123abcdef", "Alive": False, "Resources": {}, "Labels": {}},
    ]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(capacity, "available_resources_per_node", lambda: {"abcdef0123": {"CPU": 0.5}})
    assert cluster_nodes() == {"10.0.0.1 (abcdef01)": Node({"CPU": 2.0}, {"pool": "big"})}
    assert free_nodes() == {"10.0.0.1 (abcdef01)": Node({"CPU": 0.5}, {"pool": "big"})}
