"""What is set on Ray's gauges; `tests/k8s/test_dashboard.py` scrapes a real exporter."""

import asyncio
import logging
from typing import Any

import pytest

from deployments import ray_exporter
from deployments.metrics import IngressMetrics, ReplicaMetrics
from deployments.ray_exporter import RayExporter
from tests.deployments.fakes import Rig, generation

Labels = dict[str, str]


class Gauges:
    """Ray's gauges: the last value by name and labels; a gauge that is made twice, or set with other labels, fails."""

    def __init__(self) -> None:
        self.values: dict[str, list[tuple[Labels, float]]] = {}
        self.has_changed = asyncio.Event()

    def make(self, name: str, _: str, labels: tuple[str, ...]) -> "Gauge":
        assert name not in self.values
        self.values[name] = []
        return Gauge(self, name, labels)


class Gauge:
    def __init__(self, gauges: Gauges, name: str, labels: tuple[str, ...]) -> None:
        self._gauges, self._name, self._labels = gauges, name, labels

    def set(self, value: float, tags: Labels) -> None:
        assert sorted(tags) == sorted(self._labels)
        kept = [(labels, old) for labels, old in self._gauges.values[self._name] if labels != tags]
        self._gauges.values[self._name] = [*kept, (tags, value)]
        self._gauges.has_changed.set()


@pytest.fixture
def gauges(monkeypatch: pytest.MonkeyPatch) -> Gauges:
    gauges = Gauges()
    monkeypatch.setattr(ray_exporter, "Gauge", gauges.make)
    return gauges


async def test_every_sample_is_exported_with_the_name_that_vllm_has_on_ray(gauges: Gauges) -> None:
    rig = Rig()
    async for _ in rig.loop.generate(generation()):
        pass
    exporter = RayExporter(lambda: ReplicaMetrics("a", rig.metrics.collect()))
    exporter.export()
    exporter.stop()
    samples = [sample for metric in rig.metrics.collect() for sample in metric.samples]
    expected = {
        (sample.name.replace(":", "_"), frozenset({**sample.labels, "replica": "a"}.items()), sample.value)
        for sample in samples
        if not sample.name.endswith("_created")
    }
    exported = {
        (name, frozenset(labels.items()), value) for name, entry in gauges.values.items() for labels, value in entry
    }
    assert exported == expected
    labels = {"model_name": "tiny", "replica": "a"}
    assert gauges.values["vllm_generation_tokens_total"] == [(labels, 8)]
    assert gauges.values["paceline_target_recoveries_total"] == [(labels, 0)], "increase needs the 0"
    assert ({**labels, "le": "+Inf"}, 1) in gauges.values["vllm_time_to_first_token_seconds_bucket"]
    await rig.loop.stop()


async def test_values_are_exported_again_and_again(gauges: Gauges, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_exporter, "EXPORT_INTERVAL_S", 0.0)
    metrics = IngressMetrics("tiny")
    exporter = RayExporter(lambda: ReplicaMetrics("a", metrics.collect()))
    labels = {"model_name": "tiny", "replica": "a"}
    for count in (1, 2):
        metrics.observe_started()
        gauges.has_changed.clear()
        async with asyncio.timeout(30):
            await gauges.has_changed.wait()
        assert gauges.values["paceline_requests_started_total"] == [(labels, count)]
    exporter.stop()
    await asyncio.sleep(0)
    metrics.observe_started()
    await asyncio.sleep(0.01)
    assert gauges.values["paceline_requests_started_total"] == [(labels, 2)]


async def test_the_end_of_exporting_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_exporter, "EXPORT_INTERVAL_S", 0.0)
    monkeypatch.setattr(logging.getLogger("ray.serve"), "propagate", True)

    def collect() -> Any:
        raise ValueError("no metrics")

    RayExporter(collect)
    await asyncio.sleep(0.01)
    assert "metrics are not exported to Ray any more" in caplog.text
    assert "no metrics" in caplog.text
