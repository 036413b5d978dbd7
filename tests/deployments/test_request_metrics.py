"""What vLLM's published Grafana dashboards query, and which of it there is here.

The names are those of the queries in vLLM's repository, at commit 0b9faa4: `prometheus_grafana/grafana.json` and
`dashboards/grafana/*.json` under `examples/observability`.

Series have a label `replica` instead of `engine`; with all engines, `engine=~"..."` selects series without `engine`.
"""

import re

from prometheus_client.parser import text_string_to_metric_families

from deployments.metrics import IngressMetrics, ReplicaMetrics, exposition
from tests.deployments.fakes import Rig, generation


def histogram(*names: str) -> set[str]:
    return {f"{name}_{suffix}" for name in names for suffix in ("bucket", "sum", "count")}


DASHBOARDS = {
    "grafana.json": histogram(
        "vllm:e2e_request_latency_seconds", "vllm:inter_token_latency_seconds", "vllm:time_to_first_token_seconds"
    )
    | {
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:request_prompt_tokens_bucket",
        "vllm:request_generation_tokens_bucket",
        "vllm:request_success_total",
        "vllm:request_queue_time_seconds_sum",
        "vllm:request_prefill_time_seconds_sum",
        "vllm:request_decode_time_seconds_sum",
        "vllm:request_max_num_generation_tokens_sum",
    },
    "performance_statistics.json": histogram(
        "vllm:e2e_request_latency_seconds", "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
    )
    | {"vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:iteration_tokens_total_count"},
    "query_statistics.json": {
        "vllm:e2e_request_latency_seconds_bucket",
        "vllm:request_prompt_tokens_bucket",
        "vllm:request_success_total",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
    },
    "vllm_service_status.json": {
        "vllm:engine_sleep_state",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:generation_tokens_total",
        "vllm:num_requests_running",
        "vllm:request_success_total",
    },
    "vllm_overview.json": histogram(
        "vllm:time_to_first_token_seconds",
        "vllm:inter_token_latency_seconds",
        "vllm:request_time_per_output_token_seconds",
        "vllm:e2e_request_latency_seconds",
        "vllm:request_queue_time_seconds",
        "vllm:request_prompt_tokens",
        "vllm:request_generation_tokens",
        "vllm:iteration_tokens_total",
    )
    | {
        "vllm:request_prefill_time_seconds_sum",
        "vllm:request_prefill_time_seconds_count",
        "vllm:request_decode_time_seconds_sum",
        "vllm:request_decode_time_seconds_count",
        "vllm:request_success_total",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:num_requests_waiting_by_reason",
        "vllm:kv_cache_usage_perc",
        "vllm:num_preemptions_total",
        "vllm:prefix_cache_hits_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prompt_tokens_by_source_total",
        "vllm:external_prefix_cache_hits_total",
        "vllm:external_prefix_cache_queries_total",
        "vllm:mm_cache_hits_total",
        "vllm:mm_cache_queries_total",
        "http_requests_total",
        "http_request_duration_seconds_sum",
        "http_request_duration_seconds_count",
    },
    "vllm_instances.json": histogram(
        "vllm:sleep_mode_operation_duration_seconds", "vllm:rl_weight_update_operation_duration_seconds"
    )
    | {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:num_requests_waiting_by_reason",
        "vllm:kv_cache_usage_perc",
        "vllm:request_success_total",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:e2e_request_latency_seconds_bucket",
        "vllm:request_queue_time_seconds_sum",
        "vllm:request_queue_time_seconds_count",
        "vllm:iteration_tokens_total_sum",
        "vllm:iteration_tokens_total_count",
        "vllm:num_preemptions_total",
        "vllm:prefix_cache_hits_total",
        "vllm:prefix_cache_queries_total",
        "vllm:cache_config_info",
        "vllm:lora_requests_info",
        "vllm:engine_sleep_state",
        "vllm:estimated_flops_per_gpu_total",
        "vllm:estimated_read_bytes_per_gpu_total",
        "vllm:estimated_write_bytes_per_gpu_total",
        "process_start_time_seconds",
        "process_cpu_seconds_total",
        "process_resident_memory_bytes",
        "process_open_fds",
        "process_max_fds",
    },
    "vllm_kv_cache.json": histogram(
        "vllm:kv_block_lifetime_seconds",
        "vllm:kv_block_idle_before_evict_seconds",
        "vllm:kv_block_reuse_gap_seconds",
        "vllm:nixl_xfer_time_seconds",
        "vllm:nixl_bytes_transferred",
        "vllm:nixl_post_time_seconds",
        "vllm:nixl_num_descriptors",
    )
    | {
        "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_hits_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prompt_tokens_cached_total",
        "vllm:prompt_tokens_total",
        "vllm:prompt_tokens_by_source_total",
        "vllm:prompt_tokens_cached_by_source_total",
        "vllm:num_preemptions_total",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting_by_reason",
        "vllm:request_prompt_tokens_sum",
        "vllm:request_prompt_tokens_count",
        "vllm:request_prefill_kv_computed_tokens_sum",
        "vllm:request_prefill_kv_computed_tokens_count",
        "vllm:external_prefix_cache_hits_total",
        "vllm:external_prefix_cache_queries_total",
        "vllm:mm_cache_hits_total",
        "vllm:mm_cache_queries_total",
        "vllm:num_requests_kv_fetch_by_stage",
        "vllm:nixl_num_failed_transfers_total",
        "vllm:nixl_num_failed_notifications_total",
        "vllm:nixl_num_kv_expired_reqs_total",
        "vllm:nixl_num_notifications_after_expiry_total",
        "vllm:kv_offload_load_bytes_total",
        "vllm:kv_offload_store_bytes_total",
        "vllm:kv_offload_load_time_total",
        "vllm:kv_offload_store_time_total",
        "vllm:kv_offload_load_size_sum",
        "vllm:kv_offload_load_size_count",
        "vllm:kv_offload_store_size_sum",
        "vllm:kv_offload_store_size_count",
        "vllm:kv_offload_lookup_sync_delay_seconds_bucket",
        "vllm:kv_offload_lookup_async_delay_seconds_bucket",
        "vllm:kv_offload_cpu_cache_usage_perc",
        "vllm:kv_offload_cpu_cache_write_usage_perc",
        "vllm:kv_offload_cpu_cache_read_usage_perc",
        "vllm:kv_offload_allocation_failure_total",
        "vllm:kv_offload_stores_skipped_total",
        "vllm:simple_kv_offload_save_outcomes_total",
        "vllm:simple_kv_offload_load_blocks_total",
        "vllm:simple_kv_offload_used_blocks",
        "vllm:simple_kv_offload_pending_store_blocks",
    },
    "vllm_speculative_decoding.json": histogram("vllm:inter_token_latency_seconds")
    | {
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "vllm:generation_tokens_total",
    },
}

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
"""The names that there are not, by how they begin, and why."""

QUERIED = set[str]().union(*DASHBOARDS.values())


async def samples() -> dict[str, list[dict[str, str]]]:
    """The labels of each sample's series after a request, by its name."""
    rig = Rig()
    async for _ in rig.loop.generate(generation(n=2, seed=1)):
        pass
    rig.engine.stats.observe_draft(3, 2)
    replicas = [
        ReplicaMetrics("router", rig.metrics.collect()),
        ReplicaMetrics("ingress", IngressMetrics("t").collect()),
    ]
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(exposition(replicas).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    await rig.loop.stop()
    return found


def reasons(name: str) -> list[str]:
    return [reason for prefix, reason in ABSENT.items() if re.match(prefix, name)]


async def test_every_name_that_dashboards_query_is_there_or_has_a_reason() -> None:
    found = await samples()
    assert {name for name in QUERIED if name not in found and not reasons(name)} == set()


async def test_the_reasons_are_of_names_that_are_queried_and_not_there() -> None:
    found = await samples()
    assert [name for name in found if reasons(name)] == []
    assert [prefix for prefix in ABSENT if not any(re.match(prefix, name) for name in QUERIED)] == []


async def test_labels_that_queries_select_are_there() -> None:
    found = await samples()

    def values(name: str, label: str) -> set[str]:
        return {labels[label] for labels in found[name]}

    assert values("vllm:num_requests_waiting_by_reason", "reason") == {"capacity"}
    assert values("vllm:prompt_tokens_by_source_total", "source") == {"local_compute", "local_cache_hit"}
    assert values("vllm:prompt_tokens_cached_by_source_total", "source") == {"device"}
    assert values("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position") == {"0", "1", "2"}
    assert values("vllm:request_success_total", "finished_reason") == {"length"}
    assert values("vllm:engine_sleep_state", "sleep_state") == {"awake", "weights_offloaded", "discard_all"}
    (info,) = found["vllm:cache_config_info"]
    assert (info["block_size"], info["num_gpu_blocks"], info["enable_prefix_caching"]) == ("16", "256", "True")


async def test_the_slos_that_dashboards_offer_are_bounds() -> None:
    """Grafana's variables select a bucket by its exact bound."""
    found = await samples()
    for name, slos in {
        "vllm:time_to_first_token_seconds_bucket": {"0.1", "0.25", "0.5", "0.75", "1.0", "2.5", "5.0", "10.0"},
        "vllm:request_time_per_output_token_seconds_bucket": {
            "0.025",
            "0.05",
            "0.075",
            "0.1",
            "0.15",
            "0.2",
            "0.3",
            "0.5",
        },
    }.items():
        assert slos <= {labels["le"] for labels in found[name]}


async def test_requests_are_counted_by_what_they_ask_for_and_how_long_they_get() -> None:
    rig = Rig()
    for n, max_tokens in ((1, 8), (3, 2)):
        async for _ in rig.loop.generate(generation(n=n, max_tokens=max_tokens, seed=1)):
            pass
    stream = rig.loop.generate(generation(max_tokens=100))
    await anext(stream)
    await stream.aclose()
    lines = exposition([ReplicaMetrics("a", rig.metrics.collect())]).decode().splitlines()
    labels = '{model_name="tiny",replica="a"}'
    for name, total, count in (
        ("request_params_n", 1 + 3 + 1, 3),
        ("request_params_max_tokens", 8 + 2 + 100, 3),
        ("request_max_num_generation_tokens", 8 + 2, 2),
        ("request_generation_tokens", 8 + 3 * 2, 4),
    ):
        assert f"vllm:{name}_sum{labels} {float(total)}" in lines
        assert f"vllm:{name}_count{labels} {float(count)}" in lines
    assert f"vllm:prompt_tokens_total{labels} 15.0" in lines
    awake = '{model_name="tiny",replica="a",sleep_state="awake"}'
    assert f"vllm:engine_sleep_state{awake} 1.0" in lines  # else a status board says that the model is down
    await rig.loop.stop()
