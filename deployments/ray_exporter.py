"""RayExporter: copies the metrics of a replica to the exporter of its Ray node, which Prometheus may scrape instead.

`vllm:generation_tokens_total` of `/metrics` is `ray_vllm_generation_tokens_total` there, as vLLM's own metrics are when
vLLM runs on Ray: Ray prefixes all names, and allows no colons. So Ray's "Serve LLM" dashboard shows them.

Every sample is a gauge with its present value, those of counters and histograms too. PromQL does not look at types.

Why not Ray's counters and histograms: they take increments. A counter that is still 0 would not be exported, and
`increase` would miss its first step; those of dead replicas would stay forever, where gauges disappear after 20 s; and
Ray's agent replaces each value of a histogram by the middle of its bucket, so that sums are wrong.
"""

import asyncio
from collections.abc import Callable

from ray.util.metrics import Gauge

from deployments.background import in_background
from deployments.metrics import ReplicaMetrics

EXPORT_INTERVAL_S = 5.0
"""Half of the interval in which Ray collects from its processes."""


class RayExporter:
    """Exports the metrics of one replica for as long as that lives."""

    def __init__(self, collect: Callable[[], ReplicaMetrics]) -> None:
        """Start to export every few seconds."""
        self._collect = collect
        self._gauges: dict[str, Gauge] = {}
        loss = "metrics are not exported to Ray"
        self._task = in_background(self._run(), name="exporting metrics to Ray", loss=loss)

    def export(self) -> None:
        """Set Ray's gauges to the present values."""
        collected = self._collect()
        for metric in collected.metrics:
            for sample in metric.samples:
                if not sample.name.endswith("_created"):
                    tags = {**sample.labels, "replica": collected.replica}
                    self._gauge(sample.name, metric.documentation, tuple(tags)).set(sample.value, tags)

    def stop(self) -> None:
        """Export no more; Ray forgets the values after 20 s."""
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(EXPORT_INTERVAL_S)
            self.export()

    def _gauge(self, name: str, documentation: str, labels: tuple[str, ...]) -> Gauge:
        if name not in self._gauges:
            self._gauges[name] = Gauge(name.replace(":", "_"), documentation, labels)
        return self._gauges[name]
