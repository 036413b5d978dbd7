"""What a group asks Ray for."""

import os
from dataclasses import replace

import pytest
import ray
from ray import PlacementGroupID
from ray.util.placement_group import PlacementGroup

from cluster.config import GroupConfig
from cluster.placement import (
    PlacementError,
    count_cores,
    draft_options,
    label_selectors,
    placement_bundles,
    pool_options,
    rank_beside_draft,
    rank_options,
    settle_shared,
    share_cores,
    shares_gpu,
)
from engine.config import EngineConfig, ModelConfig

AUTO = GroupConfig(ModelConfig("target"), ModelConfig("draft"))
UNDRAFTED, POOLED = replace(AUTO, draft=None), replace(AUTO, draft_pool=True)
CUDA, CPU = ModelConfig("model", device="cuda"), ModelConfig("model", device="cpu")
BIG, SMALL = {"pool": "big"}, {"pool": "small"}


def ranks(size: int, config: GroupConfig = AUTO) -> GroupConfig:
    return replace(config, tensor_parallel_size=size)


def placed(config: GroupConfig, *, num_gpus: int) -> PlacementGroup:
    return PlacementGroup(PlacementGroupID.from_random(), placement_bundles(config, num_gpus=num_gpus))


@pytest.mark.parametrize(
    ("config", "num_gpus", "expected"),
    [
        (ranks(4), 0, [0, 0]),
        (AUTO, 1, [1]),  # which the draft shares
        (AUTO, 2, [1, 1]),
        (ranks(2), 2, [2]),
        (ranks(2), 3, [1, 2]),
        (UNDRAFTED, 1, [1]),
        (POOLED, 0, [0]),
        (POOLED, 1, [1]),
        (replace(AUTO, engine=EngineConfig(drafting="none")), 1, [1]),
        (GroupConfig(CUDA, CPU), 0, [0, 1]),  # named devices wait for nodes that are yet to join
        (GroupConfig(CUDA, CUDA, tensor_parallel_size=4), 2, [1, 4]),
    ],
)
def test_each_worker_has_a_gpu_and_the_draft_shares_one_if_none_is_left(config, num_gpus, expected):
    bundles = placement_bundles(config, num_gpus=num_gpus)
    assert [bundle.get("GPU", 0) for bundle in bundles] == [0, *expected]
    assert sum(bundle["CPU"] for bundle in bundles) <= 0.9
    if config.draft_pool:
        assert not shares_gpu(config, bundles)
        assert rank_beside_draft(config, placed(config, num_gpus=num_gpus)) is None


def test_too_few_gpus_are_refused_with_both_numbers():
    with pytest.raises(PlacementError, match=r"target needs 4 GPUs, but the cluster has 2; device=cuda would wait"):
        placement_bundles(ranks(4), num_gpus=2)
    apart = replace(AUTO, target_label_selector=BIG, draft_label_selector=SMALL)
    with pytest.raises(PlacementError, match="target needs 1 GPUs and the draft 1, but the cluster has 1"):
        placement_bundles(apart, num_gpus=1)


@pytest.mark.parametrize(
    ("size", "num_gpus", "expected"),
    [(1, 0, (0, [0])), (1, 1, (0.5, [0.5])), (2, 2, (0.5, [0.5, 1])), (2, 3, (1, [1, 1]))],
)
def test_each_worker_takes_its_share_of_its_bundle(size, num_gpus, expected):
    config = ranks(size)
    group = placed(config, num_gpus=num_gpus)
    draft, ranks_options = draft_options(config, group), [rank_options(config, group, rank) for rank in range(size)]
    assert (draft["num_gpus"], [options["num_gpus"] for options in ranks_options]) == expected
    for options in (draft, *ranks_options):
        variables = options["runtime_env"]["env_vars"]
        assert variables.get("CUDA_VISIBLE_DEVICES") == (None if options["num_gpus"] else "")
        assert variables["OMP_WAIT_POLICY"] == "PASSIVE"
        sees_others = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES" in variables
        assert sees_others == (options is not draft and size > 1 and options["num_gpus"] > 0)


@pytest.mark.parametrize("size", [3, 7])
def test_the_ranks_fit_into_their_bundle_in_units_of_ray(size):
    group = placed(ranks(size), num_gpus=0)
    units = [round(rank_options(ranks(size), group, rank)["num_cpus"] * 1e4) for rank in range(size)]
    assert sum(units) <= round(group.bundle_specs[-1]["CPU"] * 1e4)


@pytest.mark.parametrize(
    ("target", "draft", "num_gpus", "expected"),
    [
        (BIG, SMALL, 0, [BIG, SMALL, BIG]),  # the Router goes where the target goes
        (BIG, None, 0, [BIG, BIG]),
        (BIG, {}, 1, [BIG, BIG]),  # one node can have the labels of both, so they share its GPU
        (BIG, BIG, 1, [BIG, BIG]),
        (BIG, SMALL, 2, [BIG, SMALL, BIG]),
    ],
)
def test_each_bundle_goes_to_a_node_with_the_labels_of_its_workers(target, draft, num_gpus, expected):
    config = AUTO if draft is not None else UNDRAFTED
    config = replace(config, target_label_selector=target, draft_label_selector=draft or {})
    assert label_selectors(config, placement_bundles(config, num_gpus=num_gpus)) == expected


@pytest.mark.parametrize(("device", "num_gpus", "expected"), [("auto", 0, 0), ("auto", 1, 1), ("cuda", 0, 1)])
def test_a_draft_worker_of_a_pool_has_a_gpu_of_its_own(device, num_gpus, expected):
    config = replace(AUTO, draft=ModelConfig("draft", device=device), draft_label_selector=SMALL)
    options = pool_options(config, num_gpus=num_gpus)
    assert (options["num_gpus"], options["num_cpus"], options["label_selector"]) == (expected, 0.2, SMALL)
    variables = options["runtime_env"]["env_vars"]
    assert variables["OMP_WAIT_POLICY"] == "PASSIVE"
    assert variables.get("CUDA_VISIBLE_DEVICES") == (None if expected else "")


@pytest.mark.parametrize(
    ("run_ahead", "has_gpu", "num_cores", "expected"),
    [("auto", False, 2, "off"), ("auto", False, 3, "on"), ("auto", True, 1, "on"), ("off", True, 9, "off")],
)
def test_a_draft_worker_of_several_groups_runs_ahead_where_it_has_cores_of_its_own(
    run_ahead, has_gpu, num_cores, expected
):
    config = replace(AUTO, run_ahead=run_ahead)
    settled = settle_shared(config, has_gpu=has_gpu, num_cores=num_cores)
    assert settled == replace(config, run_ahead=expected, draft=replace(config.draft, num_threads=1))


def tree(verification: str) -> GroupConfig:
    return replace(AUTO, engine=EngineConfig(drafting="tree", verification=verification))


@pytest.mark.parametrize(
    ("config", "num_gpus", "num_cores", "expected"),
    [
        (AUTO, 0, 2, "off"),
        (AUTO, 0, 3, "on"),
        (ranks(4), 0, 5, "off"),
        (ranks(4), 0, 6, "on"),
        (AUTO, 1, 64, "off"),
        (AUTO, 2, 2, "on"),
        (ranks(4), 4, 64, "off"),
        (POOLED, 0, 2, "on"),
        (UNDRAFTED, 0, 8, "off"),
        (replace(AUTO, run_ahead="on"), 0, 2, "on"),
        (replace(AUTO, run_ahead="off"), 2, 8, "off"),
        (tree("coupled"), 0, 8, "on"),
        (tree("rejection"), 0, 8, "off"),  # where draft and target share no noise
    ],
)
def test_the_draft_runs_ahead_where_it_takes_nothing_from_the_target(config, num_gpus, num_cores, expected):
    settled = share_cores(config, placement_bundles(config, num_gpus=num_gpus), num_cores=num_cores)
    assert settled.run_ahead == expected


@pytest.mark.parametrize(
    ("run_ahead", "size", "set_threads", "expected"),
    [("on", 2, None, (1, 3)), ("off", 2, None, (1, 4)), ("on", 1, None, (1, 7)), ("on", 1, 5, (5, 5))],
)
def test_the_draft_has_one_core_and_the_target_those_that_it_leaves(run_ahead, size, set_threads, expected):
    """Where they take turns, it leaves all of them; numbers from the configuration are taken."""
    models = (ModelConfig(name, num_threads=set_threads) for name in ("target", "draft"))
    config = GroupConfig(*models, tensor_parallel_size=size, run_ahead=run_ahead)
    settled = share_cores(config, placement_bundles(config, num_gpus=0), num_cores=8)
    assert settled.draft is not None
    assert (settled.draft.num_threads, settled.target.num_threads) == expected


@pytest.mark.parametrize(
    ("node", "resources", "expected"),
    [("a", {"CPU": 2.0}, 2), ("a", {"CPU": 64.0}, 4), ("a", {"CPU": 0.5}, 1), ("a", {}, 4), ("b", {"CPU": 2.0}, 4)],
)
def test_cores_are_those_that_both_ray_and_the_system_allow(node, resources, expected, monkeypatch):
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": "a", "Resources": resources}])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 5, 7}, raising=False)
    assert count_cores(node) == expected


@pytest.mark.parametrize(
    ("config", "num_gpus", "nodes", "expected"),
    [
        (AUTO, 0, "aaa", 0),
        (ranks(2), 0, "aba", None),
        (ranks(2), 2, "aa", 0),
        (AUTO, 2, "aaa", None),
        (UNDRAFTED, 0, "aa", None),
    ],
)
def test_the_rank_beside_the_draft_has_its_device(config, num_gpus, nodes, expected, monkeypatch):
    table = {"bundles_to_node_id": dict(enumerate(nodes))}
    monkeypatch.setattr("cluster.placement.placement_group_table", lambda _: table)
    assert rank_beside_draft(config, placed(config, num_gpus=num_gpus)) == expected
