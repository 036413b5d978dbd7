"""Prometheus metrics: the counters of a Router and of an Ingress, and what `/metrics` shows of all of them.

Names are vLLM's, so that its dashboards and load tools work. The usual queries:

    acceptance rate          rate(vllm:spec_decode_num_accepted_tokens_total[1m])
                               / rate(vllm:spec_decode_num_draft_tokens_total[1m])
    mean acceptance length   1 + rate(vllm:spec_decode_num_accepted_tokens_total[1m])
                               / rate(vllm:spec_decode_num_drafts_total[1m])
    acceptance at position   rate(vllm:spec_decode_num_accepted_tokens_per_pos_total[1m])
                               / ignoring(position) group_left rate(vllm:spec_decode_num_drafts_total[1m])
    tokens per second        rate(vllm:generation_tokens_total[1m])
    overhead of a round      (rate(paceline:round_seconds_total[1m]) - rate(paceline:draft_compute_seconds_total[1m])
                               - rate(paceline:target_compute_seconds_total[1m])) / rate(paceline:rounds_total[1m])
    waiting for a draft      rate(paceline:run_ahead_wait_seconds_sum[1m])
                               / rate(paceline:run_ahead_wait_seconds_count[1m]), by outcome: hit or miss
    prefix cache hit rate    rate(vllm:prefix_cache_hits_total[1m]) / rate(vllm:prefix_cache_queries_total[1m])
    median time to first     histogram_quantile(0.5, rate(vllm:time_to_first_token_seconds_bucket[1m]))

Every sample has a label `replica`, Serve's name of the Router or Ingress that counted it, and any Ingress answers for
all, so scrape one address, such as that of a load balancer. The queries above are for each replica; for all together,
write `sum without (replica) (rate(...))`.

Counters of rounds and of their times have a label `phase`: prefill where prompts were computed, else decode.

Ray's nodes export the same figures, each those of its own replicas and up to 15 s later: see `ray_exporter`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.remote import Calls
from deployments.request_metrics import RequestMetrics
from engine.engine import Engine

if TYPE_CHECKING:
    from engine.stats import RunAheadStats

LATENCY_BUCKETS_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Where the time of a round went, in seconds.

    Attributes:
        round_s: the whole round, delivery included.
        draft, target: what it waited for the draft worker and for the target, and what they computed.
        delivery_s: giving the tokens to the streams, and letting other tasks run.
    """

    round_s: float
    draft: Calls
    target: Calls
    delivery_s: float


class RouterMetrics:
    """The metrics of one Router replica."""

    def __init__(self, model_name: str, engine: Engine, drafter: object) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(model_name, engine, drafter))
        self.requests = RequestMetrics(model_name, engine)
        self._registry.register(self.requests)
        self._success = Counter(
            "vllm:request_success",
            "Finished sequences by reason.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._recoveries = _counter(
            "paceline:target_recoveries", "Times the target ranks were restarted.", model_name, self._registry
        )
        self._rounds = self._by_phase("rounds", "Finished rounds.")
        self._round_s = self._by_phase("round_seconds", "Time of rounds, delivery included.")
        self._draft_s = self._by_phase("draft_compute_seconds", "Time the draft worker computed.")
        self._draft_wait_s = self._by_phase("draft_wait_seconds", "Time rounds waited for their drafts.")
        self._target_s = self._by_phase("target_compute_seconds", "Time the target's first rank computed.")
        self._target_wait_s = self._by_phase("target_wait_seconds", "Time rounds waited for their verdicts.")
        self._delivery_s = self._by_phase(
            "delivery_seconds", "Time rounds took to give their tokens to the streams, and for other tasks to run."
        )
        self._run_ahead_wait_s = Summary(
            "paceline:run_ahead_wait_seconds",
            "Time rounds waited for the drafts of a worker that runs ahead; hit: those of all rows were prepared.",
            ["model_name", "outcome"],
            registry=self._registry,
        )
        self._first_token = _latency("vllm:time_to_first_token_seconds", "Arrival to first token.", self._registry)
        self._whole = _latency("vllm:e2e_request_latency_seconds", "Arrival to last token.", self._registry)
        self._model_name = model_name

    def observe_first_token(self, latency_s: float) -> None:
        """Count the time to a request's first token."""
        self._first_token.labels(self._model_name).observe(latency_s)

    def observe_finished(self, reason: str, latency_s: float) -> None:
        """Count a sequence that ended: stop, length or abort."""
        self._success.labels(self._model_name, reason).inc()
        if reason != "abort":
            self._whole.labels(self._model_name).observe(latency_s)

    def observe_round(self, times: RoundTimes, *, is_prefill: bool) -> None:
        """Count a round, which is one of prefill if it computed prompts."""
        labels = self._model_name, "prefill" if is_prefill else "decode"
        self._rounds.labels(*labels).inc()
        self._round_s.labels(*labels).inc(times.round_s)
        self._draft_wait_s.labels(*labels).inc(times.draft.wait_s)
        self._draft_s.labels(*labels).inc(times.draft.compute_s)
        self._target_wait_s.labels(*labels).inc(times.target.wait_s)
        self._target_s.labels(*labels).inc(times.target.compute_s)
        self._delivery_s.labels(*labels).inc(times.delivery_s)
        for outcome, count in (("hit", times.draft.num_hits), ("miss", times.draft.num_misses)):
            if count:
                self._run_ahead_wait_s.labels(self._model_name, outcome).observe(times.draft.wait_s)

    def observe_recovery(self) -> None:
        """Count a restart of the target."""
        self._recoveries.inc()

    def collect(self) -> list[Metric]:
        """Return all metrics, in a form that can be sent to the Ingress."""
        return list(self._registry.collect())

    def _by_phase(self, name: str, text: str) -> Counter:
        return Counter(f"paceline:{name}", text, ["model_name", "phase"], registry=self._registry)


class IngressMetrics:
    """The metrics of one Ingress replica."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._resubmissions = Counter(
            "paceline:resubmissions",
            "Requests that were sent to a Router again, by why the Router before it could not go on.",
            ["model_name", "reason"],
            registry=self._registry,
        )
        self._started = _counter(
            "paceline:requests_started", "Requests that were sent to a Router.", model_name, self._registry
        )
        self._ended = Counter(
            "paceline:requests_ended",
            "Requests that have ended: finished; failed, by the error's code; aborted by their client.",
            ["model_name", "outcome", "reason"],
            registry=self._registry,
        )
        self._model_name = model_name

    def observe_started(self) -> None:
        """Count a request that is sent to a Router for the first time."""
        self._started.inc()

    def observe_ended(self, outcome: str, reason: str) -> None:
        """Count the end of a request; `reason` is empty unless it failed."""
        self._ended.labels(self._model_name, outcome, reason).inc()

    def observe_resubmission(self, reason: str) -> None:
        """Count a request that was sent to a Router again."""
        self._resubmissions.labels(self._model_name, reason).inc()

    def collect(self) -> list[Metric]:
        """Return all metrics."""
        return list(self._registry.collect())


def _counter(name: str, text: str, model_name: str, registry: CollectorRegistry) -> Counter:
    return Counter(name, text, ["model_name"], registry=registry).labels(model_name)


def _latency(name: str, text: str, registry: CollectorRegistry) -> Histogram:
    return Histogram(name, text, ["model_name"], registry=registry, buckets=LATENCY_BUCKETS_S)


class _EngineCollector(Collector):
    """Reads the engine's own counters when it is collected."""

    def __init__(self, model_name: str, engine: Engine, drafter: object) -> None:
        self._model_name = model_name
        self._engine = engine
        self._drafter = drafter

    def describe(self) -> Iterable[Metric]:
        """Return nothing: names are known only when counted."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's counters and gauges."""
        engine, stats = self._engine, self._engine.stats
        yield self._counter("spec_decode_num_drafts", "Verified drafts.", stats.num_drafts)
        yield self._counter("spec_decode_num_draft_tokens", "Verified draft tokens.", stats.num_draft_tokens)
        yield self._counter("spec_decode_num_accepted_tokens", "Accepted draft tokens.", stats.num_accepted_tokens)
        yield self._counter_by(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by position in the draft.",
            "position",
            {str(position): count for position, count in enumerate(stats.num_accepted_tokens_per_pos)},
        )
        yield self._counter("prompt_tokens", "Prompt tokens.", stats.num_prompt_tokens)
        yield self._counter("generation_tokens", "Generated tokens.", stats.num_generation_tokens)
        yield self._counter("num_preemptions", "Sequences sent back to the queue.", stats.num_preemptions)
        yield self._gauge("num_requests_running", "Sequences in the batch.", engine.num_running)
        yield self._gauge("num_requests_waiting", "Sequences in the queue.", engine.num_waiting)
        usage = 1 - engine.num_free_blocks / engine.num_blocks
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", usage)
        current = engine.goodput.num_draft_tokens
        yield self._gauge("num_speculative_tokens", "Draft length chosen last.", current, prefix="paceline")
        lengths = CounterMetricFamily(
            "paceline:rounds_by_draft_length",
            "Rounds by draft length and why it was chosen: goodput, trial, fixed, off or request.",
            labels=["model_name", "num_draft_tokens", "reason"],
        )
        for (length, reason), count in stats.num_rounds_by_length.items():
            lengths.add_metric([self._model_name, str(length), reason], count)
        yield lengths
        fallbacks: Mapping[str, int] = getattr(self._drafter, "fallbacks", {})
        yield self._counter_by("paceline:drafter_fallbacks", "Rounds without a draft, by reason.", "reason", fallbacks)
        ahead: RunAheadStats | None = getattr(self._drafter, "run_ahead", None)
        if ahead is not None:
            hits = "Drafts that were prepared when they were requested."
            misses = "Drafts that were not prepared, by reason."
            wasted = "Draft passes spent on preparing whose result was never used."
            yield self._paceline_counter("verdict_cache_hits", hits, ahead.hits)
            yield self._counter_by("paceline:verdict_cache_misses", misses, "reason", ahead.misses)
            yield self._paceline_counter("run_ahead_forwards", "Draft passes spent on preparing.", ahead.num_forwards)
            yield self._paceline_counter("run_ahead_forwards_wasted", wasted, ahead.num_wasted)

    def _paceline_counter(self, name: str, text: str, value: float) -> Metric:
        return self._counter(name, text, value, prefix="paceline")

    def _counter(self, name: str, text: str, value: float, *, prefix: str = "vllm") -> Metric:
        family = CounterMetricFamily(f"{prefix}:{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _gauge(self, name: str, text: str, value: float, *, prefix: str = "vllm") -> Metric:
        family = GaugeMetricFamily(f"{prefix}:{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter_by(self, name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name", label])
        for key, value in values.items():
            family.add_metric([self._model_name, key], value)
        return family


@dataclass(frozen=True, slots=True)
class ReplicaMetrics:
    """The metrics of one replica, by Serve's name of it."""

    replica: str
    metrics: list[Metric]


class _Labelled(Collector):
    """Joins the metrics of several replicas, each with its label."""

    def __init__(self, replicas: Sequence[ReplicaMetrics]) -> None:
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        """Yield each family once, with the samples of all replicas."""
        families: dict[str, Metric] = {}
        for replica in self._replicas:
            for metric in replica.metrics:
                family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                for sample in metric.samples:
                    if not sample.name.endswith("_created"):
                        family.add_sample(sample.name, {**sample.labels, "replica": replica.replica}, sample.value)
        yield from families.values()


def exposition(replicas: Sequence[ReplicaMetrics]) -> bytes:
    """Return the text that `/metrics` answers with."""
    registry = CollectorRegistry()
    registry.register(_Labelled(replicas))
    return generate_latest(registry)
