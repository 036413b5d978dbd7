"""What a group asks Ray for."""

import os
from dataclasses import replace

import pytest
import ray

from cluster.config import GroupConfig
from cluster.placement import DRAFT_BUNDLE, count_cores, placement_bundles, settle, target_bundle
from engine.config import ModelConfig

AUTO = GroupConfig(ModelConfig("target"), ModelConfig("draft"))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_group_on_cpu_fits_a_laptop(size):
    bundles = placement_bundles(replace(AUTO, tensor_parallel_size=size), num_gpus=0)
    assert len(bundles) == 2 + size
    assert sum(bundle["CPU"] for bundle in bundles) <= 0.9
    assert not any("GPU" in bundle for bundle in bundles)


def test_every_worker_has_a_gpu_where_there_are_enough():
    bundles = placement_bundles(replace(AUTO, tensor_parallel_size=2), num_gpus=8)
    assert [bundle.get("GPU", 0) for bundle in bundles] == [0, 1, 1, 1]


def test_a_single_gpu_is_shared():
    assert [bundle.get("GPU", 0) for bundle in placement_bundles(AUTO, num_gpus=1)] == [0, 0.5, 0.5]


def test_a_device_that_is_named_is_asked_for():
    config = GroupConfig(ModelConfig("target", device="cuda"), ModelConfig("draft", device="cpu"))
    assert [bundle.get("GPU", 0) for bundle in placement_bundles(config, num_gpus=0)] == [0, 0, 1]


def test_draft_and_target_may_need_different_accelerators():
    config = replace(AUTO, target_accelerator_type="H100", draft_accelerator_type="L4")
    bundles = placement_bundles(config, num_gpus=8)
    assert "accelerator_type:L4" in bundles[DRAFT_BUNDLE]
    assert "accelerator_type:H100" in bundles[target_bundle(config, 0)]


def test_the_indices_name_the_bundles():
    config = replace(AUTO, tensor_parallel_size=2)
    assert [DRAFT_BUNDLE, target_bundle(config, 0), target_bundle(config, 1)] == [1, 2, 3]
    assert target_bundle(replace(config, draft=None), 0) == 1
    assert len(placement_bundles(replace(config, draft=None), num_gpus=0)) == 3


@pytest.mark.parametrize(
    ("size", "num_gpus", "num_cores", "expected"),
    [(1, 0, 2, "off"), (1, 0, 3, "on"), (4, 0, 5, "off"), (4, 0, 6, "on"), (1, 1, 64, "off"), (1, 2, 2, "on")],
    ids=["two cores", "three", "ranks on five", "ranks on six", "one GPU", "two GPUs"],
)
def test_the_draft_runs_ahead_where_it_takes_nothing_from_the_target(size, num_gpus, num_cores, expected):
    config = replace(AUTO, tensor_parallel_size=size)
    bundles = placement_bundles(config, num_gpus=num_gpus)
    assert settle(config, bundles, num_cores=num_cores).run_ahead == expected
    assert settle(replace(config, run_ahead="off"), bundles, num_cores=num_cores).run_ahead == "off"
    assert settle(replace(config, run_ahead="on"), bundles, num_cores=num_cores).run_ahead == "on"
    assert settle(replace(config, draft=None), bundles, num_cores=num_cores).run_ahead == "off"


def test_models_that_compute_at_once_share_out_the_cores():
    config = replace(AUTO, tensor_parallel_size=2)
    bundles = placement_bundles(config, num_gpus=0)
    settled = settle(config, bundles, num_cores=8)
    assert settled.draft is not None
    assert (settled.draft.num_threads, settled.target.num_threads) == (2, 3)
    own = replace(config, target=ModelConfig("target", num_threads=5))
    assert settle(own, bundles, num_cores=8).target.num_threads == 5
    assert settle(replace(config, run_ahead="off"), bundles, num_cores=8).target.num_threads is None


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
