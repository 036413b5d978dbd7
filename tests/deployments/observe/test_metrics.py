"""The text of `/metrics`, and what vLLM's published Grafana dashboards query, and which of it is there.

The names are those of the queries in vLLM's repository, at commit 0b9faa4: `prometheus_grafana/grafana.json` and
`dashboards/grafana/*.json` under `examples/observability`.

Series have a label `replica` instead of `engine`; with all engines, `engine=~"..."` selects series without `engine`.
"""

import re
from collections.abc import AsyncIterator
from typing import Any

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


def text_of(metrics: RouterMetrics | IngressMetrics) -> str:
    return exposition([ReplicaMetrics("a", metrics.collect())], "tiny").decode()


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    await rig.loop.stop()


async def serve(rig: Rig, **fields: Any) -> None:
    async for _ in rounds_of(rig.loop, generation(**fields)):
        pass


async def leave(rig: Rig) -> None:
    """Abort a request after its first round."""
    stream = rounds_of(rig.loop, generation(max_tokens=100))
    await anext(stream)
    await stream.aclose()


async def samples(rig: Rig) -> dict[str, list[dict[str, str]]]:
    """The labels of each sample's series after a request, by its name."""
    await serve(rig, n=2, seed=1)
    rig.engine.stats.observe_draft(3, 2)
    replicas = [ReplicaMetrics("router", rig.metrics.collect()), ReplicaMetrics("ingress", IngressMetrics().collect())]
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(exposition(replicas, "tiny").decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


async def test_every_name_that_dashboards_query_is_there_or_has_a_reason(rig: Rig) -> None:
    found = await samples(rig)
    histograms = {f"{name}_{suffix}" for name in HISTOGRAMS.split() for suffix in ("bucket", "sum", "count")}
    assert {f"vllm:{name}" for name in (*histograms, *COUNTERS_AND_GAUGES.split())} <= found.keys()
    assert [name for name in found for prefix in ABSENT if re.match(prefix, name)] == []


async def test_labels_that_queries_select_are_there(rig: Rig) -> None:
    found = await samples(rig)

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


async def test_the_slos_that_dashboards_offer_are_bounds(rig: Rig) -> None:
    """Grafana's variables select a bucket by its exact bound."""
    found = await samples(rig)
    for name, slos in {
        "vllm:time_to_first_token_seconds_bucket": {"0.1", "0.25", "0.5", "0.75", "1.0", "2.5", "5.0", "10.0"},
        "vllm:request_time_per_output_token_seconds_bucket": {
            *["0.025", "0.05", "0.075", "0.1", "0.15", "0.2", "0.3", "0.5"]
        },
    }.items():
        assert slos <= {labels["le"] for labels in found[name]}


async def test_requests_are_counted_by_what_they_ask_for_and_how_long_they_get(rig: Rig) -> None:
    for n, max_tokens in ((1, 8), (3, 2)):
        await serve(rig, n=n, max_tokens=max_tokens, seed=1)
    await leave(rig)
    lines = text_of(rig.metrics).splitlines()
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


def values(text: str, replica: str = "a") -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels.get("position") or sample.labels.get("finished_reason") or ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "bucket" not in sample.name and sample.labels["replica"] == replica
    }


async def test_replicas_keep_their_samples_apart() -> None:
    rigs = {"a": Rig(), "b": Rig()}
    for rig in rigs.values():
        await serve(rig)
        rig.engine.stats.observe_draft(3, 2)
    rigs["a"].engine.add("held", [1, 2, 3], generation().params)
    await rigs["a"].engine.step()
    text = exposition([ReplicaMetrics(name, rig.metrics.collect()) for name, rig in rigs.items()], "tiny").decode()
    samples = {name: values(text, replica=name) for name in rigs}
    for name, num_tokens, num_running in (("a", 9, 1), ("b", 8, 0)):
        assert samples[name]["vllm:generation_tokens_total", ""] == num_tokens
        assert samples[name]["vllm:request_success_total", "length"] == 1
        assert samples[name]["vllm:num_requests_running", ""] == num_running
        assert samples[name]["vllm:spec_decode_num_draft_tokens_total", ""] == 3
        accepted = [samples[name]["vllm:spec_decode_num_accepted_tokens_per_pos_total", str(i)] for i in range(3)]
        assert accepted == [1, 1, 0]
        assert (
            samples[name]["vllm:kv_cache_usage_perc", ""] == num_running / rigs[name].engine.scheduler.pool.num_blocks
        )
        assert samples[name]["vllm:e2e_request_latency_seconds_count", ""] == 1
        await rigs[name].loop.stop()


async def test_a_target_with_linear_layers_tells_how_many_state_slots_are_in_use(rig: Rig) -> None:
    name = "paceline:state_slot_usage_perc"
    assert name not in text_of(rig.metrics)
    info = ModelInfo("tiny", 64, 64, [], 0, "float32", "cpu", state_chunk=8)
    rig.engine.scheduler.extras = StateSlots(EngineConfig(num_states=4), info)
    rig.engine.add("held", [1, 2, 3], generation().params)
    await rig.engine.step()
    text = text_of(rig.metrics)
    assert values(text, replica="a")[name, ""] == 1 / 4


def test_a_family_has_one_header_whatever_the_number_of_replicas() -> None:
    replicas = [ReplicaMetrics(name, IngressMetrics().collect()) for name in ("a", "b")]
    text = exposition(replicas, "tiny").decode()
    assert text.count("# TYPE paceline:resubmissions_total counter") == 1


async def test_a_client_that_left_is_counted_but_not_timed(rig: Rig) -> None:
    await leave(rig)
    samples = values(text_of(rig.metrics))
    assert samples["vllm:request_success_total", "abort"] == 1
    assert samples["vllm:e2e_request_latency_seconds_count", ""] == 0


async def test_draft_lengths_are_counted_with_their_reasons(rig: Rig) -> None:
    await serve(rig)
    rig.engine.planner.num_draft_tokens = 3
    rig.engine.stats.num_rounds_by_length[3, "trial"] += 1
    text = text_of(rig.metrics)
    labels = 'model_name="tiny",num_draft_tokens="3",reason="trial",replica="a"'
    assert 'paceline:num_speculative_tokens{model_name="tiny",replica="a"} 3.0' in text
    assert f"paceline:rounds_by_draft_length_total{{{labels}}} 1.0" in text


async def test_waits_for_drafts_are_told_apart_by_outcome(rig: Rig) -> None:
    calls = rig.remote_drafter.calls
    for wait_s, num_hits, num_misses in ((2.0, 1, 0), (2.0, 1, 0), (3.0, 0, 1), (9.0, 0, 0)):
        before = rig.metrics.calls()
        calls.wait_s, calls.num_hits, calls.num_misses = (
            calls.wait_s + wait_s,
            calls.num_hits + num_hits,
            calls.num_misses + num_misses,
        )
        rig.metrics.observe_round(before, round_s=10.0, delivery_s=0.5, is_prefill=False)
    text = text_of(rig.metrics)
    for outcome, count, seconds in (("hit", 2.0, 4.0), ("miss", 1.0, 3.0)):
        labels = f'{{model_name="tiny",outcome="{outcome}",replica="a"}}'
        assert f"paceline:run_ahead_wait_seconds_count{labels} {count}" in text
        assert f"paceline:run_ahead_wait_seconds_sum{labels} {seconds}" in text


@pytest.mark.parametrize(
    ("counter", "counts", "lines"),
    [
        ("fallbacks", {"absent": 3}, [("drafter_fallbacks_total", 'reason="absent",', 3.0)]),
        (
            "features",
            {"bytes": 4096, "waited": 2},
            [("feature_bytes_total", "", 4096.0), ("feature_waited_total", "", 2.0)],
        ),
        ("unprepared", {"compiled": 2}, [("unprepared_total", 'process="draft",', 2.0)]),
    ],
)
async def test_what_the_draft_worker_counts_is_shown(rig: Rig, counter: str, counts: Any, lines: Any) -> None:
    assert "paceline:feature" not in text_of(rig.metrics)
    setattr(rig.remote_drafter, counter, counts)
    kind = 'kind="compiled",' if counter == "unprepared" else ""
    for name, label, value in lines:
        labels = f'{kind}model_name="tiny",{label}replica="a"'
        assert f"paceline:{name}{{{labels}}} {value}\n" in text_of(rig.metrics)


async def test_what_is_wrong_with_a_draft_is_a_gauge_where_one_is_loaded(rig: Rig) -> None:
    assert "draft_problem" not in text_of(rig.metrics)
    watched = RouterMetrics(rig.engine, rig.remote_drafter, rig.remote_verifier, has_draft=True)
    watched.watch_draft()
    assert 'paceline:draft_problem{model_name="tiny",problem="unused",replica="a"} 0.0' in text_of(watched)
