"""What a group asks Ray for."""

import os
from dataclasses import replace

import pytest
import ray
from ray import PlacementGroupID
from ray.util.placement_group import PlacementGroup

from cluster.config import GroupConfig
from cluster.placement import (
    Bundle,
    PlacementError,
    count_cores,
    draft_options,
    label_selectors,
    placement_bundles,
    pool_options,
    rank_beside_draft,
    rank_options,
    settle,
    settle_shared,
    shares_gpu,
)
from engine.config import EngineConfig, ModelConfig

AUTO = GroupConfig(ModelConfig("target"), ModelConfig("draft"))


def gpus(bundles: list[Bundle]) -> list[float]:
    return [bundle.get("GPU", 0) for bundle in bundles]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_group_on_cpu_fits_a_laptop(size):
    bundles = placement_bundles(replace(AUTO, tensor_parallel_size=size), num_gpus=0)
    assert len(bundles) == 3
    assert sum(bundle["CPU"] for bundle in bundles) <= 0.9
    assert not any("GPU" in bundle for bundle in bundles)


@pytest.mark.parametrize(
    ("size", "has_draft", "num_gpus", "expected"),
    [
        (1, True, 0, [0, 0]),
        (1, True, 1, [1]),
        (1, True, 2, [1, 1]),
        (2, True, 2, [2]),
        (2, True, 3, [1, 2]),
        (1, False, 1, [1]),
    ],
)
def test_each_worker_has_a_gpu_and_the_draft_shares_one_if_none_is_left(size, has_draft, num_gpus, expected):
    config = replace(AUTO, tensor_parallel_size=size, draft=AUTO.draft if has_draft else None)
    bundles = placement_bundles(config, num_gpus=num_gpus)
    assert gpus(bundles) == [0, *expected]
    assert sum(gpus(bundles)) <= num_gpus


@pytest.mark.parametrize("num_gpus", [0, 2])
def test_a_device_that_is_named_is_requested_whatever_the_cluster_has(num_gpus):
    config = GroupConfig(ModelConfig("target", device="cuda"), ModelConfig("draft", device="cpu"))
    assert gpus(placement_bundles(config, num_gpus=num_gpus)) == [0, 0, 1]
    config = replace(config, draft=ModelConfig("draft", device="cuda"), tensor_parallel_size=4)
    assert gpus(placement_bundles(config, num_gpus=num_gpus)) == [0, 1, 4]


def test_too_few_gpus_are_refused_with_both_numbers():
    with pytest.raises(PlacementError, match=r"target needs 4 GPUs, but the cluster has 2; device=cuda would wait"):
        placement_bundles(replace(AUTO, tensor_parallel_size=4), num_gpus=2)
    apart = replace(AUTO, target_label_selector={"pool": "big"}, draft_label_selector={"pool": "small"})
    with pytest.raises(PlacementError, match="target needs 1 GPUs and the draft 1, but the cluster has 1"):
        placement_bundles(apart, num_gpus=1)


def placed(config: GroupConfig, *, num_gpus: int) -> PlacementGroup:
    return PlacementGroup(PlacementGroupID.from_random(), placement_bundles(config, num_gpus=num_gpus))


@pytest.mark.parametrize(
    ("size", "num_gpus", "expected"),
    [(1, 0, (0, [0])), (2, 0, (0, [0, 0])), (1, 1, (0.5, [0.5])), (2, 2, (0.5, [0.5, 1])), (2, 3, (1, [1, 1]))],
)
def test_each_worker_takes_its_share_of_its_bundle(size, num_gpus, expected):
    config = replace(AUTO, tensor_parallel_size=size)
    group = placed(config, num_gpus=num_gpus)
    draft, ranks = draft_options(config, group), [rank_options(config, group, rank) for rank in range(size)]
    assert (draft["num_gpus"], [rank["num_gpus"] for rank in ranks]) == expected
    for options in (draft, *ranks):
        variables = options["runtime_env"]["env_vars"]
        assert variables.get("CUDA_VISIBLE_DEVICES") == (None if options["num_gpus"] else "")
        assert variables["OMP_WAIT_POLICY"] == "PASSIVE"
        sees_others = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES" in variables
        assert sees_others == (options is not draft and size > 1 and options["num_gpus"] > 0)


@pytest.mark.parametrize("size", [1, 3, 6, 7, 8])
def test_the_ranks_fit_into_their_bundle_in_units_of_ray(size):
    config = replace(AUTO, tensor_parallel_size=size)
    group = placed(config, num_gpus=0)
    units = [round(rank_options(config, group, rank)["num_cpus"] * 1e4) for rank in range(size)]
    assert sum(units) <= round(group.bundle_specs[-1]["CPU"] * 1e4)


def test_the_router_goes_where_the_target_goes():
    big, small = {"pool": "big"}, {"pool": "small"}
    config = replace(AUTO, target_label_selector=big, draft_label_selector=small)
    assert label_selectors(config, placement_bundles(config, num_gpus=0)) == [big, small, big]
    alone = replace(config, draft=None)
    assert label_selectors(alone, placement_bundles(alone, num_gpus=0)) == [big, big]


@pytest.mark.parametrize(("draft", "shares"), [({}, True), ({"pool": "big"}, True), ({"pool": "small"}, False)])
def test_models_share_a_gpu_where_one_node_can_have_the_labels_of_both(draft, shares):
    target = {"pool": "big"}
    on_cuda = {"target": ModelConfig("target", device="cuda"), "draft": ModelConfig("draft", device="cuda")}
    config = GroupConfig(**on_cuda, target_label_selector=target, draft_label_selector=draft)
    bundles = placement_bundles(config, num_gpus=1)
    assert shares_gpu(config, bundles) == shares
    assert label_selectors(config, bundles) == [target] * 2 if shares else [target, draft, target]


def test_a_method_that_runs_in_the_router_gets_no_draft_worker():
    """Nor does the draft model, which it does not load, take half of the only GPU."""
    config = replace(AUTO, engine=EngineConfig(drafting="none"))
    bundles = placement_bundles(config, num_gpus=1)
    assert [bundle.get("GPU", 0) for bundle in bundles] == [0, 1]
    assert settle(config, bundles, num_cores=8).run_ahead == "off"


@pytest.mark.parametrize(("num_gpus", "expected"), [(0, [0, 0]), (1, [0, 1]), (2, [0, 1])])
def test_a_group_that_leases_its_draft_has_no_bundle_for_it(num_gpus, expected):
    """With one GPU, the target has it alone."""
    config = replace(AUTO, draft_pool=True, target_label_selector={"pool": "big"}, draft_label_selector={"pool": "b"})
    bundles = placement_bundles(config, num_gpus=num_gpus)
    assert gpus(bundles) == expected
    assert bundles[1]["CPU"] == 0.4
    assert not shares_gpu(config, bundles)
    assert label_selectors(config, bundles) == [{"pool": "big"}] * 2
    assert rank_beside_draft(config, placed(config, num_gpus=num_gpus)) is None
    assert rank_options(config, placed(config, num_gpus=num_gpus), 0)["num_gpus"] == expected[1]


@pytest.mark.parametrize(
    ("device", "num_gpus", "expected"), [("auto", 0, 0), ("auto", 1, 1), ("cuda", 0, 1), ("cpu", 9, 0)]
)
def test_a_draft_worker_of_a_pool_has_a_gpu_of_its_own(device, num_gpus, expected):
    config = replace(AUTO, draft=ModelConfig("draft", device=device), draft_label_selector={"pool": "small"})
    options = pool_options(config, num_gpus=num_gpus)
    assert (options["num_gpus"], options["num_cpus"], options["label_selector"]) == (expected, 0.2, {"pool": "small"})
    variables = options["runtime_env"]["env_vars"]
    assert (variables["OMP_WAIT_POLICY"], variables.get("CUDA_VISIBLE_DEVICES")) == (
        "PASSIVE",
        None if expected else "",
    )


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


def test_a_leased_draft_runs_ahead_of_a_target_that_has_all_cores():
    config = replace(AUTO, draft_pool=True)
    settled = settle(config, placement_bundles(config, num_gpus=0), num_cores=2)
    assert (settled.run_ahead, settled.target.num_threads) == ("on", 2)
    assert settle(config, placement_bundles(config, num_gpus=2), num_cores=2).run_ahead == "on"


@pytest.mark.parametrize(
    ("size", "num_gpus", "num_cores", "expected"),
    [
        (1, 0, 2, "off"),
        (1, 0, 3, "on"),
        (4, 0, 5, "off"),
        (4, 0, 6, "on"),
        (1, 1, 64, "off"),
        (1, 2, 2, "on"),
        (4, 4, 64, "off"),
        (4, 5, 2, "on"),
    ],
)
def test_the_draft_runs_ahead_where_it_takes_nothing_from_the_target(size, num_gpus, num_cores, expected):
    config = replace(AUTO, tensor_parallel_size=size)
    bundles = placement_bundles(config, num_gpus=num_gpus)
    assert settle(config, bundles, num_cores=num_cores).run_ahead == expected
    assert settle(replace(config, run_ahead="off"), bundles, num_cores=num_cores).run_ahead == "off"
    assert settle(replace(config, run_ahead="on"), bundles, num_cores=num_cores).run_ahead == "on"
    assert settle(replace(config, draft=None), bundles, num_cores=num_cores).run_ahead == "off"


@pytest.mark.parametrize(("verification", "expected"), [("coupled", "on"), ("rejection", "off")])
def test_trees_run_ahead_where_draft_and_target_share_their_noise(verification, expected):
    config = replace(AUTO, engine=EngineConfig(drafting="tree", verification=verification))
    assert settle(config, placement_bundles(config, num_gpus=0), num_cores=8).run_ahead == expected


@pytest.mark.parametrize(
    ("run_ahead", "size", "expected"), [("on", 2, (1, 3)), ("off", 2, (1, 4)), ("on", 1, (1, 7)), ("off", 1, (1, 8))]
)
def test_the_draft_has_one_core_and_the_target_those_that_it_leaves(run_ahead, size, expected):
    """Where they take turns, it leaves all of them."""
    config = replace(AUTO, tensor_parallel_size=size, run_ahead=run_ahead)
    settled = settle(config, placement_bundles(config, num_gpus=0), num_cores=8)
    assert settled.draft is not None
    assert (settled.draft.num_threads, settled.target.num_threads) == expected


def test_a_number_of_threads_from_the_configuration_is_taken():
    config = replace(AUTO, target=ModelConfig("target", num_threads=5), draft=ModelConfig("draft", num_threads=2))
    settled = settle(config, placement_bundles(config, num_gpus=0), num_cores=8)
    assert settled.draft is not None
    assert (settled.draft.num_threads, settled.target.num_threads) == (2, 5)


@pytest.mark.parametrize(
    ("node", "resources", "expected"),
    [("a", {"CPU": 2.0}, 2), ("a", {"CPU": 64.0}, 4), ("a", {"CPU": 0.5}, 1), ("a", {}, 4), ("b", {"CPU": 2.0}, 4)],
)
def test_cores_are_those_that_both_ray_and_the_system_allow(node, resources, expected, monkeypatch):
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": "a", "Resources": resources}])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 5, 7}, raising=False)
    assert count_cores(node) == expected
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert count_cores(node) == expected


@pytest.mark.parametrize(
    ("size", "num_gpus", "nodes", "expected"),
    [(1, 0, "aaa", 0), (2, 0, "aba", None), (1, 1, "aa", 0), (2, 2, "aa", 0), (1, 2, "aaa", None)],
)
def test_the_rank_beside_the_draft_has_its_device(size, num_gpus, nodes, expected, monkeypatch):
    config = replace(AUTO, tensor_parallel_size=size)
    bundles = placement_bundles(config, num_gpus=num_gpus)
    assert len(bundles) == len(nodes)
    table = {"bundles_to_node_id": dict(enumerate(nodes))}
    monkeypatch.setattr("cluster.placement.placement_group_table", lambda _: table)
    group = PlacementGroup(PlacementGroupID.from_random(), bundles)
    assert rank_beside_draft(config, group) == expected
    assert rank_beside_draft(replace(config, draft=None), group) is None
