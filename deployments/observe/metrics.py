"""Prometheus metrics: the counters of a Router and of an Ingress, and the text of `/metrics` with all of them.

Names are vLLM's, so that its dashboards and load tools work. `k8s/components/monitoring` has queries.

The label `replica` is Serve's name of the Router or Ingress that counted. Any Ingress answers for all, so scrape one
address, such as a load balancer; gateways that scrape every pod ask for `?scope=local`. The label `phase` is prefill
for rounds that computed prompts, else decode. As in vLLM, `vllm:inter_token_latency_seconds` is the time between two
rounds of a sequence, and `vllm:request_time_per_output_token_seconds` the time per token.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import starmap
from types import SimpleNamespace
from typing import Any

import ray
from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from cluster.remote_drafter import RemoteDrafter
from cluster.remote_verifier import RemoteVerifier
from cluster.round_times import Calls
from deployments.observe.draft_health import DraftHealth
from deployments.observe.tracing import TracedStats, make_tracer
from deployments.wire import Generation
from engine.engine import Engine
from engine.errors import RequestError
from engine.stats.requests import REQUEST_BOUNDS_S, Distribution, token_bounds

_Row = tuple[Any, ...]
"""A metric's name, its text, its value or a map from label values to values, and the names of the labels."""
LATENCY_BOUNDS_S = sorted((*REQUEST_BOUNDS_S, 0.75))
_ROUND_TIMES = {
    "round": "Time of rounds, delivery included.",
    "draft_wait": "Time rounds waited for their drafts.",
    "draft_compute": "Time the draft worker computed.",
    "target_wait": "Time rounds waited for their verdicts.",
    "target_compute": "Time the target's first rank computed.",
    "delivery": "Time between rounds to give tokens to the streams and let other tasks run; most run during rounds.",
}

_FEATURES = {
    "bytes": "Bytes of the target's features that the draft worker's head has received.",
    "waited": "Drafts that waited for features of the last round.",
    "missing": "Drafts that stayed empty because features had not arrived.",
}


def learning_metrics(counts: Mapping[str, float]) -> list[Metric]:
    """Return the metrics of a draft that learns, from the counters of `Study`; none if it does not."""
    if not counts:
        return []
    name, weights = "paceline:draft_learning", {"loaded": "accepted_before", "learned": "accepted_after"}
    swaps = {outcome: counts[outcome] for outcome in ("taken", "dropped", "undone")}
    accepted = {label: counts[key] for label, key in weights.items()}
    text = "Tokens that a draft would add to held-out texts, with the loaded and with the learned weights, when judged."
    rows: list[_Row] = [
        (f"{name}_tokens", "Tokens that the draft has learned from.", counts["tokens"]),
        (f"{name}_steps", "Steps of its optimiser.", counts["steps"]),
        (f"{name}_swaps", "Learned weights that took over, or were dropped; and those undone.", swaps, "outcome"),
    ]
    gauge = [(f"{name}_accepted_tokens", text, accepted, "weights")]
    return [*_families(CounterMetricFamily, rows), *_families(GaugeMetricFamily, gauge)]


class RouterMetrics:
    """The metrics of one Router, its engine and its workers."""

    def __init__(
        self, engine: Engine, drafter: RemoteDrafter, verifier: RemoteVerifier, *, has_draft: bool = False
    ) -> None:
        """Count for an engine and its links to workers; watch the draft if the group loads a draft (`has_draft`)."""
        self._engine, self._drafter, self._verifier = engine, drafter, verifier
        if (tracer := make_tracer()) is not None:
            engine.request_stats = TracedStats(engine.max_model_len, tracer)
        self.num_recoveries = 0
        self.longest = Distribution(token_bounds(engine.max_model_len))
        self.first_token_s = Distribution(LATENCY_BOUNDS_S)
        self._n = Distribution((1, 2, 5, 10, 20))
        self._max_tokens = Distribution(token_bounds(engine.max_model_len))
        self._whole_s = Distribution(LATENCY_BOUNDS_S)
        self._finished = Counter[str]()
        self._rounds = {"prefill": 0, "decode": 0}
        self._round_s = {name: dict.fromkeys(self._rounds, 0.0) for name in _ROUND_TIMES}
        self._draft_health = DraftHealth(engine.stats, drafter.fallbacks) if has_draft else None
        self._run_ahead_wait_s = {"hit": Distribution(()), "miss": Distribution(())}

    def observe_request(self, request: Generation) -> None:
        """Count the parameters of a request that was admitted, and begin its trace."""
        self._n.observe(request.params.n)
        self._max_tokens.observe(request.params.max_tokens)
        if isinstance(stats := self._engine.request_stats, TracedStats):
            stats.begin(request)

    def observe_finished(self, reason: str, latency_s: float) -> None:
        """Count a sequence that ended: stop, length or abort."""
        self._finished[reason] += 1
        if reason != "abort":
            self._whole_s.observe(latency_s)

    def calls(self) -> tuple[Calls, Calls]:
        """Return copies of the counters of calls to the draft worker and to the target."""
        return replace(self._drafter.calls), replace(self._verifier.calls)

    def observe_round(self, calls: tuple[Calls, Calls], *, round_s: float, delivery_s: float, is_prefill: bool) -> None:
        """Count a round: `delivery_s` is its time after the verdicts; `calls` are the counters before the round."""
        draft, target = self._drafter.calls.since(calls[0]), self._verifier.calls.since(calls[1])
        phase = "prefill" if is_prefill else "decode"
        self._rounds[phase] += 1
        times = (round_s, draft.wait_s, draft.compute_s, target.wait_s, target.compute_s, delivery_s)
        for name, seconds in zip(_ROUND_TIMES, times, strict=True):
            self._round_s[name][phase] += seconds
        for outcome, count in (("hit", draft.num_hits), ("miss", draft.num_misses)):
            if count:
                self._run_ahead_wait_s[outcome].observe(draft.wait_s)

    def watch_draft(self) -> None:
        """Judge whether drafts were of use lately; call it every second or so, even if no request runs."""
        if self._draft_health is not None:
            seconds = (sum(self._round_s[name].values()) for name in ("round", "draft_wait", "target_compute"))
            self._draft_health.observe(sum(self._rounds.values()), *seconds)

    def collect(self) -> list[Metric]:
        waits = SummaryMetricFamily(
            "paceline:run_ahead_wait_seconds",
            "Time rounds waited for the drafts of a worker that runs ahead; hit: all rows' drafts were prepared.",
            labels=["outcome"],
        )
        for outcome, wait_s in self._run_ahead_wait_s.items():
            waits.add_metric([outcome], wait_s.cumulative[-1], wait_s.total)
        rows = [*_families(CounterMetricFamily, self._counters()), *_families(GaugeMetricFamily, self._gauges())]
        learning = learning_metrics(self._drafter.learning)
        return [*rows, *starmap(_histogram, self._distributions()), waits, *learning]

    def _counters(self) -> Iterator[_Row]:
        stats, cached = self._engine.stats, self._engine.stats.num_cached_prompt_tokens
        sources = {"local_compute": stats.num_prompt_tokens - cached, "local_cache_hit": cached}
        accepted = {str(position): count for position, count in enumerate(stats.num_accepted_tokens_per_pos)}
        lengths = {(str(length), reason): count for (length, reason), count in stats.num_rounds_by_length.items()}
        reasons = "Rounds by longest draft and why it was chosen: goodput, trial, fixed, off or request."
        draft = "vllm:spec_decode_num"
        yield f"{draft}_drafts", "Verified drafts.", stats.num_drafts
        yield f"{draft}_draft_tokens", "Verified draft tokens.", stats.num_draft_tokens
        yield f"{draft}_accepted_tokens", "Accepted draft tokens.", stats.num_accepted_tokens
        yield f"{draft}_accepted_tokens_per_pos", "Accepted tokens by position in the draft.", accepted, "position"
        if by_adapter := stats.num_tokens_by_adapter:
            text = "Draft tokens of requests with a LoRA adapter."
            yield "paceline:adapter_draft_tokens", text, by_adapter, "adapter", "outcome"
        if self._engine.config.num_drafts > 1:
            by_draft = {(str(i), outcome): n for (i, outcome), n in self._engine.planner.num_tokens_by_draft.items()}
            yield "paceline:draft_tokens", "Draft tokens by place in draft_model.", by_draft, "draft", "outcome"
        yield "vllm:prompt_tokens", "Prompt tokens.", stats.num_prompt_tokens
        yield "vllm:prompt_tokens_cached", "Prompt tokens that were cached.", cached
        yield "vllm:prompt_tokens_by_source", "Prompt tokens, computed or cached.", sources, "source"
        yield "vllm:prompt_tokens_cached_by_source", "Cached tokens by where they were.", {"device": cached}, "source"
        yield "vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.num_prefix_queries
        yield "vllm:prefix_cache_hits", "Looked-up tokens that were cached.", stats.num_prefix_hits
        yield "vllm:generation_tokens", "Generated tokens.", stats.num_generation_tokens
        yield "vllm:num_preemptions", "Sequences sent back to the queue.", stats.num_preemptions
        yield "vllm:request_success", "Finished sequences by reason.", self._finished, "finished_reason"
        yield "paceline:target_recoveries", "Times the target ranks were restarted.", self.num_recoveries
        yield "paceline:rounds_by_draft_length", reasons, lengths, "num_draft_tokens", "reason"
        yield "paceline:rounds", "Finished rounds.", self._rounds, "phase"
        for name, seconds in self._round_s.items():
            yield f"paceline:{name}_seconds", _ROUND_TIMES[name], seconds, "phase"
        yield "paceline:drafter_fallbacks", "Rounds without a draft, by reason.", self._drafter.fallbacks, "reason"
        counts = {"draft": self._drafter.unprepared, "target": self._verifier.unprepared}
        late = {(process, kind): count for process, kinds in counts.items() for kind, count in kinds.items()}
        text = "Work of workers that no round should wait for, by kind; 0 is wanted: see the README."
        yield "paceline:unprepared", text, late, "process", "kind"
        for kind, count in self._drafter.features.items():
            yield f"paceline:feature_{kind}", _FEATURES[kind], count
        if (ahead := self._drafter.run_ahead) is not None:
            forwards, wasted = "paceline:run_ahead_forwards", "Draft passes spent on preparing, for nothing."
            yield "paceline:verdict_cache_hits", "Drafts that were prepared when they were requested.", ahead.hits
            yield "paceline:verdict_cache_misses", "Drafts that were not, by reason.", ahead.misses, "reason"
            yield forwards, "Draft passes spent on preparing.", ahead.num_forwards
            yield f"{forwards}_wasted", wasted, ahead.num_wasted

    def _gauges(self) -> Iterator[_Row]:
        engine, waiting = self._engine, "vllm:num_requests_waiting"
        num_waiting, pool = len(engine.scheduler.waiting), engine.scheduler.pool
        cache = {
            "num_gpu_blocks": str(pool.num_blocks),
            "block_size": str(engine.config.block_size),
            "enable_prefix_caching": str(engine.config.enable_prefix_caching),
            "prefix_caching_hash_algo": "sha256",
            "gpu_memory_utilization": str(engine.config.memory_fraction),
        }
        usage = 1 - pool.num_free / pool.num_blocks
        # vLLM's status board shows a model as down unless an engine says that it is awake.
        states = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
        yield "vllm:num_requests_running", "Sequences in the batch.", len(engine.scheduler.running)
        yield waiting, "Sequences in the queue.", num_waiting
        yield f"{waiting}_by_reason", "Sequences in the queue.", {"capacity": num_waiting}, "reason"
        yield "vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", usage
        if (slots := engine.scheduler.extras.slots) is not None:
            usage = 1 - slots.num_free / slots.num_blocks
            yield "paceline:state_slot_usage_perc", "Share of linear layers' state slots in use, 0 to 1.", usage
        yield "vllm:cache_config_info", "The KV cache; always 1.", {tuple(cache.values()): 1}, *cache
        yield "vllm:engine_sleep_state", "Always awake.", states, "sleep_state"
        length = engine.planner.num_draft_tokens
        yield "paceline:num_speculative_tokens", "Longest draft chosen last.", length
        if self._draft_health is not None:
            text = "1 for what is wrong with drafts of the last minute: low_acceptance, unused or costs_more."
            yield "paceline:draft_problem", text, self._draft_health.problems, "problem"

    def _distributions(self) -> Iterator[tuple[str, str, Distribution]]:
        stats = self._engine.request_stats
        yield "time_to_first_token_seconds", "Arrival to first token.", self.first_token_s
        yield "e2e_request_latency_seconds", "Arrival to last token.", self._whole_s
        yield "request_queue_time_seconds", "Arrival to first round.", stats.queue_s
        yield "request_prefill_time_seconds", "First round to first token.", stats.prefill_s
        yield "request_decode_time_seconds", "First token to last token.", stats.decode_s
        yield "inter_token_latency_seconds", "Time between two rounds.", stats.inter_token_s
        yield "request_time_per_output_token_seconds", "Time per token after the first.", stats.output_token_s
        yield "request_prompt_tokens", "Prompt tokens of a sequence.", stats.num_prompt_tokens
        yield "request_generation_tokens", "Tokens of a sequence.", stats.num_output_tokens
        yield "request_prefill_kv_computed_tokens", "Prompt tokens that were not cached.", stats.num_computed_tokens
        yield "iteration_tokens_total", "Tokens that a round computes, drafts included.", stats.num_round_tokens
        yield "request_params_n", "Choices that a request asks for.", self._n
        yield "request_params_max_tokens", "Tokens that a request allows.", self._max_tokens
        yield "request_max_num_generation_tokens", "Tokens of a request's longest choice.", self.longest


class IngressMetrics:
    """The requests of one Ingress: started; sent again, by reason; ended, by outcome and reason of failure."""

    def __init__(self) -> None:
        self.num_started = 0
        self.resubmissions = Counter[str]()
        self.ended = Counter[tuple[str, str]]()

    def collect(self) -> list[Metric]:
        resubmitted = "Requests that were sent to another Router, by the reason why the first could not continue."
        ended = "Requests that have ended: finished; aborted by their client; failed or refused, by the error's code."
        rows: list[_Row] = [
            ("paceline:resubmissions", resubmitted, self.resubmissions, "reason"),
            ("paceline:requests_started", "Requests that were sent to a Router.", self.num_started),
            ("paceline:requests_ended", ended, self.ended, "outcome", "reason"),
        ]
        return list(_families(CounterMetricFamily, rows))


@dataclass(frozen=True, slots=True)
class ReplicaMetrics:
    """The metrics of one replica, Serve's name of the replica, and its node's address."""

    replica: str
    metrics: list[Metric]
    node: str = field(default_factory=ray.util.get_node_ip_address)


def in_scope(replicas: list[ReplicaMetrics], scope: str, host: str) -> list[ReplicaMetrics]:
    """Return the metrics of all replicas, or only of replicas on the node whose address is the URL's host."""
    if scope == "all":
        return replicas
    if scope != "local" or not re.fullmatch(r"[\d.]+|[\da-f:]+", host):
        allowed = "all, or local if the URL has a node's address"
        raise RequestError(f"scope is {scope[:80]!r} at {host[:80]!r}; it must be {allowed}", "scope")
    return [replica for replica in replicas if replica.node == host]


def exposition(replicas: Sequence[ReplicaMetrics], model_name: str) -> bytes:
    """Return the text of `/metrics`: the metrics of several replicas, labelled by replica."""
    families: dict[str, Metric] = {}
    for replica in replicas:
        for metric in replica.metrics:
            family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            for sample in metric.samples:
                labels = {**sample.labels, "model_name": model_name, "replica": replica.replica}
                family.add_sample(sample.name, labels, sample.value)
    registry: Any = SimpleNamespace(collect=families.values)
    return generate_latest(registry)


def _families(
    family_class: type[CounterMetricFamily] | type[GaugeMetricFamily], rows: Iterable[_Row]
) -> Iterator[Metric]:
    for name, text, values, *labels in rows:
        family = family_class(name, text, labels=labels)
        for key, value in values.items() if isinstance(values, Mapping) else [((), values)]:
            family.add_metric([key] if isinstance(key, str) else key, value)
        yield family


def _histogram(name: str, text: str, values: Distribution) -> Metric:
    bounds = [*(str(float(bound)) for bound in values.bounds), "+Inf"]
    buckets = list(zip(bounds, values.cumulative, strict=True))
    return HistogramMetricFamily(f"vllm:{name}", text, buckets=buckets, sum_value=values.total)
