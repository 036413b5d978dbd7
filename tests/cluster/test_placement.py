"""What a group asks Ray for."""

from dataclasses import replace

import pytest

from cluster.config import GroupConfig
from cluster.placement import DRAFT_BUNDLE, placement_bundles, settle, target_bundle
from engine.config import EngineConfig, ModelConfig

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


def test_a_method_that_runs_in_the_router_gets_no_draft_worker():
    """Nor does the draft model, which it does not load, take half of the only GPU."""
    config = replace(AUTO, engine=EngineConfig(drafting="none"))
    bundles = placement_bundles(config, num_gpus=1)
    assert [bundle.get("GPU", 0) for bundle in bundles] == [0, 1]
    assert target_bundle(config, 0) == 1
    assert settle(config, bundles, num_cores=8).run_ahead == "off"


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


def test_a_pinned_group_does_not_run_ahead_by_itself():
    config = replace(AUTO, target=replace(AUTO.target, pinned=True))
    assert settle(config, placement_bundles(config, num_gpus=0), num_cores=8).run_ahead == "off"


def test_models_that_compute_at_once_share_out_the_cores():
    config = replace(AUTO, tensor_parallel_size=2)
    bundles = placement_bundles(config, num_gpus=0)
    settled = settle(config, bundles, num_cores=8)
    assert settled.draft is not None
    assert (settled.draft.num_threads, settled.target.num_threads) == (2, 3)
    own = replace(config, target=ModelConfig("target", num_threads=5))
    assert settle(own, bundles, num_cores=8).target.num_threads == 5
    assert settle(replace(config, run_ahead="off"), bundles, num_cores=8).target.num_threads is None
