from prometheus_client.parser import text_string_to_metric_families

from cluster.remote import Calls
from deployments.metrics import RoundTimes, exposition
from tests.deployments.fakes import Rig, generation


def values(text: bytes) -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels.get("position") or sample.labels.get("finished_reason") or ""): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if "bucket" not in sample.name
    }


async def test_replicas_add_up_and_shares_are_averaged() -> None:
    rigs = [Rig(), Rig()]
    for rig in rigs:
        async for _ in rig.loop.generate(generation()):
            pass
        rig.engine.stats.observe_draft(3, 2)
    rigs[0].engine.add("held", [1, 2, 3], generation().params)
    await rigs[0].engine.step()
    samples = values(exposition([rig.metrics.collect() for rig in rigs]))
    assert samples["vllm:generation_tokens_total", ""] == 17
    assert samples["vllm:request_success_total", "length"] == 2
    assert samples["vllm:num_requests_running", ""] == 1
    assert samples["vllm:spec_decode_num_draft_tokens_total", ""] == 6
    assert [samples["vllm:spec_decode_num_accepted_tokens_per_pos_total", str(i)] for i in range(3)] == [2, 2, 0]
    assert samples["vllm:kv_cache_usage_perc", ""] == 0.5 / rigs[0].engine.num_blocks
    assert samples["vllm:e2e_request_latency_seconds_count", ""] == 2
    for rig in rigs:
        await rig.loop.stop()


async def test_a_client_that_left_is_counted_but_not_timed() -> None:
    rig = Rig()
    stream = rig.loop.generate(generation(max_tokens=100))
    await anext(stream)
    await stream.aclose()
    samples = values(exposition([rig.metrics.collect()]))
    assert samples["vllm:request_success_total", "abort"] == 1
    assert ("vllm:e2e_request_latency_seconds_count", "") not in samples
    await rig.loop.stop()


async def test_draft_lengths_are_counted_with_their_reasons() -> None:
    rigs = [Rig(), Rig()]
    for rig in rigs:
        async for _ in rig.loop.generate(generation()):
            pass
    rigs[0].engine.goodput.num_draft_tokens, rigs[1].engine.goodput.num_draft_tokens = 3, 0
    rigs[0].engine.stats.observe_round(3, "trial")
    text = exposition([rig.metrics.collect() for rig in rigs]).decode()
    assert 'paceline:num_speculative_tokens{model_name="tiny"} 1.5' in text
    assert 'paceline:rounds_by_draft_length_total{model_name="tiny",num_draft_tokens="3",reason="trial"} 1.0' in text
    others = sum(count for (k, _), count in rigs[1].engine.stats.num_rounds_by_length.items())
    assert others == rigs[1].engine.stats.num_rounds
    for rig in rigs:
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
    lines = exposition([rig.metrics.collect()]).decode().splitlines()
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
        assert f'paceline:{name}_total{{model_name="tiny",phase="decode"}} {decode}' in lines
        assert f'paceline:{name}_total{{model_name="tiny",phase="prefill"}} {prefill}' in lines
    for outcome, count, seconds in (("hit", 2.0, 4.0), ("miss", 1.0, 3.0)):
        labels = f'{{model_name="tiny",outcome="{outcome}"}}'
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
    text = exposition([rig.metrics.collect()]).decode()
    assert 'paceline:drafter_fallbacks_total{model_name="tiny",reason="absent"} 3.0' in text
    await rig.loop.stop()


def test_no_replica_is_no_metric() -> None:
    assert exposition([]) == b""
