from prometheus_client.parser import text_string_to_metric_families

from cluster.remote import Calls
from deployments.metrics import IngressMetrics, ReplicaMetrics, RoundTimes, RouterMetrics, exposition
from tests.deployments.fakes import Rig, generation


def alone(metrics: RouterMetrics | IngressMetrics) -> bytes:
    return exposition([ReplicaMetrics("a", metrics.collect())])


def values(text: bytes, replica: str = "a") -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels.get("position") or sample.labels.get("finished_reason") or ""): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if "bucket" not in sample.name and sample.labels["replica"] == replica
    }


async def test_replicas_keep_their_samples_apart() -> None:
    rigs = {"a": Rig(), "b": Rig()}
    for rig in rigs.values():
        async for _ in rig.loop.generate(generation()):
            pass
        rig.engine.stats.observe_draft(3, 2)
    rigs["a"].engine.add("held", [1, 2, 3], generation().params)
    await rigs["a"].engine.step()
    text = exposition([ReplicaMetrics(name, rig.metrics.collect()) for name, rig in rigs.items()])
    samples = {name: values(text, replica=name) for name in rigs}
    for name, num_tokens, num_running in (("a", 9, 1), ("b", 8, 0)):
        assert samples[name]["vllm:generation_tokens_total", ""] == num_tokens
        assert samples[name]["vllm:request_success_total", "length"] == 1
        assert samples[name]["vllm:num_requests_running", ""] == num_running
        assert samples[name]["vllm:spec_decode_num_draft_tokens_total", ""] == 3
        accepted = [samples[name]["vllm:spec_decode_num_accepted_tokens_per_pos_total", str(i)] for i in range(3)]
        assert accepted == [1, 1, 0]
        assert samples[name]["vllm:kv_cache_usage_perc", ""] == num_running / rigs[name].engine.num_blocks
        assert samples[name]["vllm:e2e_request_latency_seconds_count", ""] == 1
        await rigs[name].loop.stop()


def test_a_family_has_one_header_whatever_the_number_of_replicas() -> None:
    replicas = [ReplicaMetrics(name, IngressMetrics("tiny").collect()) for name in ("a", "b")]
    text = exposition(replicas).decode()
    assert text.count("# TYPE paceline:resubmissions_total counter") == 1


async def test_a_client_that_left_is_counted_but_not_timed() -> None:
    rig = Rig()
    stream = rig.loop.generate(generation(max_tokens=100))
    await anext(stream)
    await stream.aclose()
    samples = values(alone(rig.metrics))
    assert samples["vllm:request_success_total", "abort"] == 1
    assert ("vllm:e2e_request_latency_seconds_count", "") not in samples
    await rig.loop.stop()


async def test_draft_lengths_are_counted_with_their_reasons() -> None:
    rig = Rig()
    async for _ in rig.loop.generate(generation()):
        pass
    rig.engine.goodput.num_draft_tokens = 3
    rig.engine.stats.observe_round(3, "trial")
    text = alone(rig.metrics).decode()
    labels = 'model_name="tiny",num_draft_tokens="3",reason="trial",replica="a"'
    assert 'paceline:num_speculative_tokens{model_name="tiny",replica="a"} 3.0' in text
    assert f"paceline:rounds_by_draft_length_total{{{labels}}} 1.0" in text
    assert sum(rig.engine.stats.num_rounds_by_length.values()) == rig.engine.stats.num_rounds
    await rig.loop.stop()


async def test_times_of_rounds_are_counted_by_phase_and_waits_by_outcome() -> None:
    rig = Rig()
    target = Calls(4.0, 3.0)
    for times, is_prefill in (
        (RoundTimes(8.0, Calls(2.0, 1.0, num_hits=1), target, 0.5), False),
        (RoundTimes(8.0, Calls(2.0, 1.0, num_hits=1), target, 0.5), False),
        (RoundTimes(8.0, Calls(3.0, 1.0, num_misses=1), target, 0.5), False),
        (RoundTimes(20.0, Calls(2.0, 1.0), target, 0.5), True),
    ):
        rig.metrics.observe_round(times, is_prefill=is_prefill)
    lines = alone(rig.metrics).decode().splitlines()
    totals = {
        name: (decode, prefill)
        for name, decode, prefill in (
            ("rounds", 3.0, 1.0),
            ("round_seconds", 24.0, 20.0),
            ("draft_wait_seconds", 7.0, 2.0),
            ("draft_compute_seconds", 3.0, 1.0),
            ("target_wait_seconds", 12.0, 4.0),
            ("target_compute_seconds", 9.0, 3.0),
            ("delivery_seconds", 1.5, 0.5),
        )
    }
    for name, (decode, prefill) in totals.items():
        assert f'paceline:{name}_total{{model_name="tiny",phase="decode",replica="a"}} {decode}' in lines
        assert f'paceline:{name}_total{{model_name="tiny",phase="prefill",replica="a"}} {prefill}' in lines
    for outcome, count, seconds in (("hit", 2.0, 4.0), ("miss", 1.0, 3.0)):
        labels = f'{{model_name="tiny",outcome="{outcome}",replica="a"}}'
        assert f"paceline:run_ahead_wait_seconds_count{labels} {count}" in lines
        assert f"paceline:run_ahead_wait_seconds_sum{labels} {seconds}" in lines
    await rig.loop.stop()


async def test_fallbacks_are_counted_by_reason() -> None:
    class Absent:
        fallbacks = {"absent": 3}  # noqa: RUF012

        async def propose(self, rows):
            return []

        def release(self, request_id):
            pass

    rig = Rig(drafter=Absent())
    text = alone(rig.metrics).decode()
    assert 'paceline:drafter_fallbacks_total{model_name="tiny",reason="absent",replica="a"} 3.0' in text
    await rig.loop.stop()


def test_no_replica_is_no_metric() -> None:
    assert exposition([]) == b""


def test_resubmissions_are_counted_by_reason() -> None:
    metrics = IngressMetrics("tiny")
    for reason in ("router_lost", "target_lost", "router_lost"):
        metrics.observe_resubmission(reason)
    text = alone(metrics).decode()
    assert 'paceline:resubmissions_total{model_name="tiny",reason="router_lost",replica="a"} 2.0' in text
    assert 'paceline:resubmissions_total{model_name="tiny",reason="target_lost",replica="a"} 1.0' in text
