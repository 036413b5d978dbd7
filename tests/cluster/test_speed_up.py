"""What drafts bring by the roofline: rounds by hand, and pairs that are refused, warned of or let pass."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest

from cluster import speed_up
from cluster.config import GroupConfig
from cluster.speed_up import Pair, check_placed, judge
from engine.config import EngineConfig, ModelConfig
from engine.errors import ConfigError
from engine.execution.roofline import PASS_S, Hardware, Model, Placed
from tests.published import LLAMA_1B, LLAMA_8B, LLAMA_70B, published

MS = 1e-3
K4 = EngineConfig(num_speculative_tokens=4)
GROUP = GroupConfig(ModelConfig("target"), ModelConfig("draft"), K4, "on", tensor_parallel_size=4)
APART, SHARED = {"is_apart": True, "num_added": 1}, {"is_apart": False, "num_added": 0}


def passes_of(read_ms, token_ms):
    """A model whose pass takes `read_ms`, or `token_ms` for each of its tokens, if that is more."""
    weights = 1e9
    bytes_per_s = 2 * weights / (read_ms * MS - PASS_S)
    flops = 2 * weights / (token_ms * MS) if token_ms else 1e30
    return Placed(Model(weights, 0.0, 1, 0, 0), Hardware(bytes_per_s, flops, 1.0, 0.0))


FEW = Pair(passes_of(10.0, 0.0), passes_of(1.0, 0.0))
"""10 ms of reading weights, and a draft of 1 ms."""


def test_a_round_lasts_for_what_does_not_overlap():
    assert FEW.round_s(8, 4) == pytest.approx(14 * MS)
    assert FEW.round_s(8, 4, hit_rate=1.0) == pytest.approx(10 * MS)
    assert FEW.round_s(1, 12, hit_rate=1.0) == pytest.approx(13 * MS)  # 12, and the guess of the token after them
    assert FEW.round_s(1, 4, hit_rate=0.9) == pytest.approx((0.9 * 10 + 0.1 * 14) * MS)
    assert FEW.round_s(2, 4, hit_rate=0.5) == pytest.approx((0.25 * 10 + 0.75 * 14) * MS)


def test_a_pool_drafts_for_the_rows_of_all_groups_together():
    pool = Pair(passes_of(10.0, 0.0), passes_of(1.0, 0.05))
    assert pool.round_s(8, 4) == pytest.approx(14 * MS, rel=1e-2)
    assert pool.round_s(8, 4, together=5) == pytest.approx((10 + 4 * 2) * MS, rel=1e-2)


def test_the_best_length_and_overlap_count():
    assert FEW.speed_up(1, 1.0, [4], 0.0) == pytest.approx(5 * 10 / 14)
    assert FEW.speed_up(1, 1.0, [4], 1.0) == pytest.approx(5.0)
    assert FEW.speed_up(1, 0.5, [2], 0.0) == pytest.approx(1.75 * 10 / 12)
    assert FEW.speed_up(1, 0.5, [1, 2, 3, 4], 0.0) == pytest.approx(1.75 * 10 / 12)
    slow = Pair(passes_of(1.0, 0.0), passes_of(10.0, 0.0))  # a guess of the token after a draft takes 10 ms more
    assert slow.speed_up(1, 1.0, [1], 1.0) == slow.speed_up(1, 1.0, [1], 0.0) == pytest.approx(2 / 11)


def sources(tmp_path, target, draft, **options):
    return published(tmp_path / "target", target), published(tmp_path / "draft", draft, **options)


def test_a_small_draft_on_a_fast_gpu_passes_in_silence(tmp_path):
    models = sources(tmp_path, LLAMA_70B, LLAMA_1B)
    assert judge(GROUP, *models, "H100", "H100", **APART) == ""
    assert judge(replace(GROUP, run_ahead="off"), *models, "H100", "A100", **APART) == ""


def test_a_draft_on_an_l4_beside_70b_on_four_h100_is_warned_of_with_the_figures(tmp_path):
    """9.3 ms a draft token and 14.5 a pass: k = 1 gains 1.1 in turn, 1.2 of 8 requests, for 1.25 times the GPUs."""
    warning = judge(GROUP, *sources(tmp_path, LLAMA_70B, LLAMA_1B), "H100", "L4", **APART)
    assert "4 draft tokens of" in warning
    assert "take 37.2 ms on L4, and a pass of" in warning
    assert "14.5 ms on 4 x H100; at 80% acceptance text comes at best 1.36 with 1, 1.16 with 8 requests" in warning
    assert warning.endswith("for 1.25 times the GPUs")


def test_a_draft_that_no_acceptance_repays_is_refused_with_the_figures(tmp_path):
    models = sources(tmp_path, LLAMA_8B, LLAMA_1B)
    with pytest.raises(ConfigError, match=r"37.2 ms on L4.* 5.0 ms on 1 x H100; text would come 0.70 times as fast"):
        judge(replace(GROUP, tensor_parallel_size=1), *models, "H100", "L4", **APART)
    # Half of the bytes, and it may break even.
    smaller = sources(tmp_path, LLAMA_8B, LLAMA_1B, quantization="int4")
    assert "hardly pay" in judge(replace(GROUP, tensor_parallel_size=1), *smaller, "H100", "L4", **APART)


def test_what_may_be_drafted_decides(tmp_path):
    """A fixed length cannot be shortened, and a draft on the target's GPU hides nothing and adds no GPU."""
    models = sources(tmp_path, LLAMA_70B, LLAMA_8B)
    assert judge(GROUP, *models, "H100", "H100", **APART) == ""
    eight = replace(GROUP, run_ahead="off", engine=EngineConfig(num_speculative_tokens=8))
    fixed = replace(eight, engine=replace(eight.engine, speculation="fixed"))
    assert judge(eight, *models, "H100", "H100", **APART) == ""
    assert "1.14 with 1, 1.10 with 8" in judge(fixed, *models, "H100", "H100", **APART)
    assert judge(GROUP, *models, "H100", "H100", **SHARED) == ""
    beside = judge(fixed, *models, "H100", "A100", **SHARED)
    assert beside.endswith("for 1.00 times the GPUs")


@pytest.mark.parametrize("gpus", [("", "H100"), ("H100", ""), ("H100", "MI300X")])
def test_nothing_is_said_of_unknown_devices(gpus, tmp_path):
    assert judge(GROUP, *sources(tmp_path, LLAMA_8B, LLAMA_8B), *gpus, **APART) == ""


def test_the_gpus_are_those_of_the_nodes_of_the_bundles(tmp_path, monkeypatch, caplog):
    types = {"a": "H100", "b": "L4", "c": "H100"}
    nodes = [
        {"NodeID": name, "Labels": {speed_up.ACCELERATOR: gpu}, "Alive": name != "c"} for name, gpu in types.items()
    ]
    monkeypatch.setattr(speed_up.ray, "nodes", lambda: nodes)
    placed_on = {"bundles_to_node_id": {0: "a", 1: "b", 2: "a"}}
    monkeypatch.setattr(speed_up, "placement_group_table", lambda _: placed_on)
    on_gpus = SimpleNamespace(bundle_specs=[{"CPU": 0.1}, {"CPU": 0.2, "GPU": 1.0}, {"CPU": 0.4, "GPU": 4.0}])
    caplog.set_level(logging.WARNING, "cluster.speed_up")
    check_placed(GROUP, on_gpus, *sources(tmp_path, LLAMA_70B, LLAMA_1B))
    (record,) = caplog.records
    assert "on L4" in record.message
    with pytest.raises(ConfigError, match="cannot pay"):
        check_placed(replace(GROUP, tensor_parallel_size=1), on_gpus, *sources(tmp_path, LLAMA_8B, LLAMA_1B))
    caplog.clear()
    # Bundles without a GPU are on CPUs, whatever else their node has; a lost node has no GPU; one GPU for both will do.
    on_cpus = SimpleNamespace(bundle_specs=[{"CPU": 0.1}, {"CPU": 0.2}, {"CPU": 0.4, "GPU": 4.0}])
    check_placed(GROUP, on_cpus, *sources(tmp_path, LLAMA_8B, LLAMA_8B))
    placed_on["bundles_to_node_id"] = {0: "a", 1: "c", 2: "a"}
    check_placed(GROUP, on_gpus, *sources(tmp_path, LLAMA_8B, LLAMA_8B))
    shared = SimpleNamespace(bundle_specs=[{"CPU": 0.1}, {"CPU": 0.6, "GPU": 4.0}])
    placed_on["bundles_to_node_id"] = {0: "a", 1: "a"}
    check_placed(GROUP, shared, *sources(tmp_path, LLAMA_70B, LLAMA_1B))
    assert caplog.records == []


def test_a_pools_gpus_are_those_of_the_nodes_that_the_draft_may_be_on(tmp_path, monkeypatch, caplog):
    """The group has no GPU for it, so only a slower text is warned of: 70B with a 1B draft on an L4 is not."""
    labels = [{speed_up.ACCELERATOR: "H100"}, {speed_up.ACCELERATOR: "L4", "pool": "draft"}, {"pool": "draft"}]
    nodes = [{"NodeID": str(number), "Labels": one, "Alive": True} for number, one in enumerate(labels)]
    monkeypatch.setattr(speed_up.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(speed_up, "placement_group_table", lambda _: {"bundles_to_node_id": {0: "0", 1: "0"}})
    monkeypatch.setattr(speed_up, "shares_gpu", lambda *_: False)
    group = SimpleNamespace(bundle_specs=[{"CPU": 0.1}, {"CPU": 0.4, "GPU": 4.0}])
    caplog.set_level(logging.WARNING, "cluster.speed_up")
    pooled = replace(GROUP, draft_label_selector={"pool": "draft"})
    check_placed(pooled, group, *sources(tmp_path, LLAMA_70B, LLAMA_1B))
    small, models = replace(pooled, tensor_parallel_size=1), sources(tmp_path, LLAMA_8B, LLAMA_1B)
    with pytest.raises(ConfigError, match="on L4"):
        check_placed(small, group, *models)
    with pytest.raises(ConfigError, match="on L4"):
        check_placed(replace(small, draft_label_selector={"pool": "in(draft,other)"}), group, *models)
    check_placed(replace(small, draft_label_selector={}), group, *models)  # it may be on either
    assert caplog.records == []
