"""RequestMetrics: the times, lengths and parameters of one Router's requests, and its prefix cache, with vLLM's names.

`vllm:inter_token_latency_seconds` is the time between two rounds of a sequence, as in vLLM: with drafts, a round brings
several tokens. `vllm:request_time_per_output_token_seconds` is the time per token.
"""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.engine import Engine
from engine.request_stats import Distribution, token_bounds
from engine.sampling.params import SamplingParams

_CHOICES = (1, 2, 5, 10, 20)


class RequestMetrics(Collector):
    """Counts what requests ask for; times, lengths and the cache are counted by the engine, and read here."""

    def __init__(self, model_name: str, engine: Engine) -> None:
        self._model_name = model_name
        self._engine = engine
        self._n = Distribution(_CHOICES)
        self._max_tokens = Distribution(token_bounds(engine.max_model_len))
        self._longest = Distribution(token_bounds(engine.max_model_len))

    def observe_request(self, params: SamplingParams) -> None:
        """Count a request that was admitted."""
        self._n.observe(params.n)
        self._max_tokens.observe(params.max_tokens)

    def observe_longest(self, num_tokens: int) -> None:
        """Count a request that finished, by the tokens of its longest choice."""
        self._longest.observe(num_tokens)

    def describe(self) -> Iterable[Metric]:
        """Return nothing, as for all collectors of this package."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics of requests."""
        stats = self._engine.request_stats
        yield self._histogram("request_queue_time_seconds", "Arrival to first round.", stats.queue_s)
        yield self._histogram("request_prefill_time_seconds", "First round to first token.", stats.prefill_s)
        yield self._histogram("request_decode_time_seconds", "First token to last token.", stats.decode_s)
        yield self._histogram("inter_token_latency_seconds", "Time between two rounds.", stats.inter_token_s)
        yield self._histogram(
            "request_time_per_output_token_seconds", "Time per token after the first.", stats.output_token_s
        )
        yield self._histogram("request_prompt_tokens", "Prompt tokens of a sequence.", stats.num_prompt_tokens)
        yield self._histogram("request_generation_tokens", "Tokens of a sequence.", stats.num_output_tokens)
        yield self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens that were not cached.", stats.num_computed_tokens
        )
        yield self._histogram(
            "iteration_tokens_total", "Tokens that a round computes, drafts included.", stats.num_round_tokens
        )
        yield self._histogram("request_params_n", "Choices that a request asks for.", self._n)
        yield self._histogram("request_params_max_tokens", "Tokens that a request allows.", self._max_tokens)
        yield self._histogram(
            "request_max_num_generation_tokens", "Tokens of a request's longest choice.", self._longest
        )
        yield from self._cache()
        waiting = {"capacity": self._engine.num_waiting}
        yield self._gauge_by("num_requests_waiting_by_reason", "Sequences in the queue.", "reason", waiting)
        # vLLM's status board shows a model as down unless an engine says that it is awake.
        states = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
        yield self._gauge_by("engine_sleep_state", "Always awake.", "sleep_state", states)

    def _cache(self) -> Iterator[Metric]:
        engine, stats = self._engine, self._engine.stats
        yield self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.num_prefix_queries)
        yield self._counter("prefix_cache_hits", "Looked-up tokens that were cached.", stats.num_prefix_hits)
        cached = stats.num_cached_prompt_tokens
        yield self._counter("prompt_tokens_cached", "Prompt tokens that were cached.", cached)
        sources = {"local_compute": stats.num_prompt_tokens - cached, "local_cache_hit": cached}
        yield self._counter_by_source("prompt_tokens_by_source", "Prompt tokens, computed or cached.", sources)
        tiers = {"device": cached}
        yield self._counter_by_source("prompt_tokens_cached_by_source", "Cached tokens by where they were.", tiers)
        labels = {
            "model_name": self._model_name,
            "num_gpu_blocks": str(engine.num_blocks),
            "block_size": str(engine.config.block_size),
            "enable_prefix_caching": str(engine.config.enable_prefix_caching),
            "prefix_caching_hash_algo": "sha256",
            "gpu_memory_utilization": str(engine.config.memory_fraction),
        }
        info = GaugeMetricFamily("vllm:cache_config_info", "The KV cache; always 1.", labels=list(labels))
        info.add_metric(list(labels.values()), 1)
        yield info

    def _histogram(self, name: str, text: str, values: Distribution) -> Metric:
        family = HistogramMetricFamily(f"vllm:{name}", text, labels=["model_name"])
        bounds = [*(str(float(bound)) for bound in values.bounds), "+Inf"]
        family.add_metric([self._model_name], list(zip(bounds, values.cumulative, strict=True)), values.total)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter_by_source(self, name: str, text: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=["model_name", "source"])
        for key, value in values.items():
            family.add_metric([self._model_name, key], value)
        return family

    def _gauge_by(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name", label])
        for key, value in values.items():
            family.add_metric([self._model_name, key], value)
        return family
