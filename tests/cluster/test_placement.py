"""What a group asks Ray for."""

from dataclasses import replace

import pytest

from cluster.config import GroupConfig
from cluster.placement import DRAFT_BUNDLE, placement_bundles, target_bundle
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
