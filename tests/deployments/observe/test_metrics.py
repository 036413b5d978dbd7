"""The text of `/metrics`, and what vLLM's published Grafana dashboards query, and which of it is there.

The names are those of the queries in vLLM's repository, at commit 0b9faa4: `prometheus_grafana/grafana.json` and
`dashboards/grafana/*.json` under `examples/observability`.

Series have a label `replica` instead of `engine`; with all engines, `engine=~"..."` selects series without `engine`.
"""

import re
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from deployments.observe.metrics import IngressMetrics, ReplicaMetrics, RouterMetrics, exposition
from engine.config import EngineConfig, ModelInfo
from engine.hybrids.state_slots import StateSlots
from tests.deployments.fakes import Rig, generation, rounds_of

HISTOGRAMS = """
e2e_request_latency_seconds inter_token_latency_seconds iteration_tokens_total request_decode_time_seconds
request_generation_tokens request_max_num_generation_tokens request_prefill_kv_computed_tokens
request_prefill_time_seconds request_prompt_tokens request_queue_time_seconds
request_time_per_output_token_seconds time_to_first_token_seconds
"""
COUNTERS_AND_GAUGES = """
cache_config_info engine_sleep_state generation_tokens_total kv_cache_usage_perc num_preemptions_total
num_requests_running num_requests_waiting num_requests_waiting_by_reason prefix_cache_hits_total
prefix_cache_queries_total prompt_tokens_by_source_total prompt_tokens_cached_by_source_total
prompt_tokens_cached_total prompt_tokens_total request_success_total spec_decode_num_accepted_tokens_per_pos_total
spec_decode_num_accepted_tokens_total spec_decode_num_draft_tokens_total spec_decode_num_drafts_total
"""
ABSENT = {
    r"http_request": "Serve's own exporter counts HTTP requests (ray_serve_num_http_requests)",
    r"process_": "one scrape answers for many processes; Ray's own exporter has them by process",
    r"vllm:lora_": "there are no adapters",
    r"vllm:(sleep_mode|rl_weight)": "an engine neither sleeps nor changes its weights",
    r"vllm:estimated_": "vLLM has them only with --enable-mfu-metrics; a bench computes the roofline here",
    r"vllm:kv_block_": "vLLM has them only with --kv-cache-metrics",
    r"vllm:mm_cache": "models take text only",
    r"vllm:(external_prefix|nixl|kv_offload|simple_kv|num_requests_kv_fetch)": "KV blocks never leave their device",
}
"""Why a name that dashboards query is not there, by a pattern of its start."""


SLOS = {
    "time_to_first_token_seconds": "0.1 0.25 0.5 0.75 1.0 2.5 5.0 10.0",
    "request_time_per_output_token_seconds": "0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.5",
}
"""Grafana's variables select a bucket by its exact bound."""
LABELS = {
    "num_requests_waiting_by_reason": ("reason", {"capacity"}),
    "prompt_tokens_by_source_total": ("source", {"local_compute", "local_cache_hit"}),
    "prompt_tokens_cached_by_source_total": ("source", {"device"}),
    "spec_decode_num_accepted_tokens_per_pos_total": ("position", {"0", "1", "2"}),
    "request_success_total": ("finished_reason", {"length"}),
    "engine_sleep_state": ("sleep_state", {"awake", "weights_offloaded", "discard_all"}),
    "cache_config_info": ("block_size", {"16"}),
}


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    await rig.loop.stop()


async def serve(rig: Rig, n: int, max_tokens: int) -> None:
    async for _ in rounds_of(rig.loop, generation(n=n, max_tokens=max_tokens, seed=1)):
        pass


def shown(metrics: RouterMetrics) -> dict[str, float]:
    """The value of each series, by its name and the values of its own labels."""
    text = exposition([ReplicaMetrics("a", metrics.collect())], "tiny").decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert all((sample.labels.pop("model_name"), sample.labels.pop("replica")) == ("tiny", "a") for sample in samples)
    return {" ".join([sample.name, *sample.labels.values()]).partition(":")[2]: sample.value for sample in samples}


async def test_every_name_label_and_bound_that_dashboards_query_is_there_or_has_a_reason(rig: Rig) -> None:
    await serve(rig, n=2, max_tokens=8)
    rig.engine.stats.observe_draft(3, 2)
    replicas = [ReplicaMetrics("router", rig.metrics.collect()), ReplicaMetrics("ingress", IngressMetrics().collect())]
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(exposition(replicas, "tiny").decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    histograms = {f"{name}_{suffix}" for name in HISTOGRAMS.split() for suffix in ("bucket", "sum", "count")}
    assert {f"vllm:{name}" for name in (*histograms, *COUNTERS_AND_GAUGES.split())} <= found.keys()
    assert [name for name in found for prefix in ABSENT if re.match(prefix, name)] == []
    for name, (label, values) in LABELS.items():
        assert {labels[label] for labels in found[f"vllm:{name}"]} == values
    for name, bounds in SLOS.items():
        assert {*bounds.split()} <= {labels["le"] for labels in found[f"vllm:{name}_bucket"]}


async def test_requests_are_counted_by_what_they_ask_for_and_how_long_they_get(rig: Rig) -> None:
    await serve(rig, n=1, max_tokens=8)
    await serve(rig, n=3, max_tokens=2)
    left = rounds_of(rig.loop, generation(max_tokens=100))
    await anext(left)
    await left.aclose()
    expected = {"prompt_tokens_total": 15, "engine_sleep_state awake": 1}  # else a status board says the model is down
    expected |= {"request_success_total abort": 1, "e2e_request_latency_seconds_count": 4}
    for name, total, count in (
        ("params_n", 1 + 3 + 1, 3),
        ("params_max_tokens", 8 + 2 + 100, 3),
        ("max_num_generation_tokens", 8 + 2, 2),
        ("generation_tokens", 8 + 3 * 2, 4),
    ):
        expected |= {f"request_{name}_sum": total, f"request_{name}_count": count}
    assert expected.items() <= shown(rig.metrics).items()


async def test_what_drafts_state_slots_and_draft_workers_do_is_shown_where_they_are(rig: Rig) -> None:
    plain = shown(rig.metrics)
    assert not [name for name in plain if name.startswith(("state_slot", "feature", "draft_problem", "draft_learning"))]
    info = ModelInfo("tiny", 64, 64, [], 0, "float32", "cpu", state_chunk=8)
    rig.engine.scheduler.extras = StateSlots(EngineConfig(num_states=4), info)
    rig.engine.add("held", [1, 2, 3], generation().params)
    await rig.engine.step()
    rig.engine.planner.num_draft_tokens = 3
    rig.engine.stats.num_rounds_by_length[3, "trial"] += 1
    rig.engine.stats.observe_draft(4, 1, "sql")
    rig.engine.planner.num_tokens_by_draft[1, "accepted"] += 2
    rig.engine.config = replace(rig.engine.config, num_drafts=2)
    rig.remote_drafter.fallbacks["absent"] = 3
    rig.remote_drafter.features = {"bytes": 4096, "waited": 2}
    rig.remote_drafter.unprepared = {"compiled": 2}
    swaps = {"taken": 3, "dropped": 2, "undone": 1}
    rig.remote_drafter.learning = {"tokens": 640, "steps": 1, **swaps, "accepted_before": 1.5, "accepted_after": 2.0}
    watched = RouterMetrics(rig.engine, rig.remote_drafter, rig.remote_verifier, has_draft=True)
    watched.watch_draft()
    assert {
        "state_slot_usage_perc": 1 / 4,
        "num_speculative_tokens": 3,
        "rounds_by_draft_length_total 3 trial": 1,
        "adapter_draft_tokens_total sql verified": 4,
        "adapter_draft_tokens_total sql accepted": 1,
        "draft_tokens_total 1 accepted": 2,
        "drafter_fallbacks_total absent": 3,
        "feature_bytes_total": 4096,
        "feature_waited_total": 2,
        "unprepared_total compiled draft": 2,
        "draft_learning_tokens_total": 640,
        "draft_learning_swaps_total undone": 1,
        "draft_learning_accepted_tokens learned": 2.0,
        "draft_problem unused": 0,
    }.items() <= shown(watched).items()


def test_a_family_has_one_header_whatever_the_number_of_replicas() -> None:
    replicas = [ReplicaMetrics(name, IngressMetrics().collect()) for name in ("a", "b")]
    text = exposition(replicas, "tiny").decode()
    assert text.count("# TYPE paceline:resubmissions_total counter") == 1
