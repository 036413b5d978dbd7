"""The spans of a request through an Ingress and a Router, as an OpenTelemetry exporter gets them."""

import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import INVALID_SPAN, get_current_span

from deployments.config import AppConfig
from deployments.ingress import routes
from deployments.observe import metrics, tracing
from engine.errors import TargetError
from engine.sampling.grammar import Grammars
from engine.stats.requests import RequestStats
from tests.deployments.conftest import make_app, make_client
from tests.deployments.fakes import LocalRouters, Rig, generation, output, rounds_of
from tests.deployments.routing.test_resumable_stream import LAST, Routers

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
"""W3C's example."""
BODY = {"prompt": "abc", "max_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    for module in (routes, metrics):
        monkeypatch.setattr(module, "make_tracer", lambda: provider.get_tracer("test"))
    return exporter


@pytest.fixture
async def traced(exporter: InMemorySpanExporter, config: AppConfig, routers: LocalRouters) -> AsyncIterator[Any]:
    async with make_client(await make_app(config, routers, keys=("key",))) as client:
        client.headers["Authorization"] = "Bearer key"
        yield client


@pytest.fixture
async def rig(exporter: InMemorySpanExporter, grammars: Grammars) -> AsyncIterator[Rig]:
    rig = Rig(grammars=grammars)
    yield rig
    await rig.loop.stop()


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_requests_spans_are_one_trace(traced: httpx.AsyncClient, exporter: Any, stream: bool) -> None:
    response = await traced.post("/v1/completions", json={**BODY, "stream": stream}, headers={"traceparent": PARENT})
    assert response.status_code == 200
    spans = by_name(exporter)
    assert list(spans) == ["queue", "prefill", "decode", "POST /v1/completions"]
    request = spans["POST /v1/completions"]
    assert request.context.trace_id == int(PARENT[3:35], 16)
    assert request.parent.span_id == int(PARENT[36:52], 16)
    assert dict(request.attributes or {}) == {
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "gen_ai.request.model": "tiny",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.response.finish_reasons": ("length",),
    }
    sequence = [spans[name] for name in ("queue", "prefill", "decode")]
    for span, following in pairwise(sequence):
        assert span.end_time == following.start_time
    for span in sequence:
        assert (span.context.trace_id, span.parent.span_id) == (request.context.trace_id, request.context.span_id)
        assert (span.attributes or {})["sequence"].endswith("-0")
        assert request.start_time <= span.start_time <= span.end_time <= request.end_time  # type: ignore[operator]


async def test_rounds_are_events_with_their_drafts(exporter: InMemorySpanExporter, rig: Rig) -> None:
    request = replace(generation(n=2, seed=1), traceparent=PARENT, predicted_token_ids=[22, 23, 28, 9, 9])
    async for _ in rounds_of(rig.loop, request):
        pass
    async for _ in rounds_of(rig.loop, replace(generation(), request_id="untraced")):
        pass
    decodes = [span for span in exporter.get_finished_spans() if span.name == "decode"]
    assert [(span.attributes or {})["sequence"] for span in decodes] == ["request-0", "request-1"]
    for span in decodes:
        assert {event.name for event in span.events} == {"round"}
        rounds: list[Any] = [event.attributes for event in span.events]
        sums = {name: sum(figures[name] for figures in rounds) for name in rounds[0]}
        assert sums == {"tokens": 8, "draft_tokens": 5, "accepted_tokens": 2}
        assert span.start_time == span.events[0].timestamp
        assert sorted(event.timestamp for event in span.events) == [event.timestamp for event in span.events]


async def test_a_request_that_never_ran_has_waited_only(exporter: InMemorySpanExporter, rig: Rig) -> None:
    rig.verifier.gate.clear()
    rounds = rounds_of(rig.loop, replace(generation(), traceparent=PARENT))
    rig.loop._engine.add("request-0", [1], generation().params)
    rig.loop._metrics.observe_request(replace(generation(), traceparent=PARENT))
    rig.engine.abort("request-0")
    await rounds.aclose()
    assert list(by_name(exporter)) == ["queue"]
    assert rig.engine.request_stats._traces == {}  # type: ignore[attr-defined]


async def test_a_refusal_is_traced_and_a_probe_is_not(traced: httpx.AsyncClient, exporter: Any) -> None:
    await traced.get("/health")
    await traced.post("/v1/messages", json={}, headers={"Authorization": "Bearer wrong"})
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.attributes["http.response.status_code"]) == ("POST /v1/messages", 401)
    assert span.parent is None


async def test_a_resubmission_is_an_event_of_the_requests_span(exporter: InMemorySpanExporter) -> None:
    routers = Routers([[output(1)], TargetError("gone")], [[LAST]])
    with routes.make_tracer().start_as_current_span("request"):  # type: ignore[union-attr]
        stream = routers.open(replace(generation(), traceparent=tracing.traceparent()))
        while await stream.next():
            pass
    (span,) = exporter.get_finished_spans()
    assert [(event.name, dict(event.attributes or {})) for event in span.events] == [
        ("resubmission", {"reason": "target_lost", "tokens": 1})
    ]
    ids = f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}"
    assert [(sent.traceparent or "")[:-3] for sent in routers.submitted] == [ids, ids]


async def test_nothing_is_made_when_nobody_asks(config: AppConfig) -> None:
    rig = Rig()
    routers = LocalRouters(rig)
    async with make_client(await make_app(config, routers)) as client:
        response = await client.post("/v1/completions", json=BODY, headers={"traceparent": PARENT})
    await rig.loop.stop()
    assert response.status_code == 200
    assert routers.last.traceparent is None
    assert get_current_span() is INVALID_SPAN
    assert type(rig.engine.request_stats) is RequestStats


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        ({}, None),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, "exporter-otlp-proto-http"),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "exporter-otlp-proto-grpc"),
    ],
)
def test_an_exporter_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variables: dict[str, str], missing: str | None
) -> None:
    monkeypatch.setattr(tracing, "entry_points", lambda **selection: [])
    for name in ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING, "ray.serve"):
        assert tracing.make_tracer() is None
    assert [f"pip install opentelemetry-{missing}" in text for text in caplog.messages] == [True] * bool(missing)


def test_the_console_needs_no_package() -> None:
    code = "from deployments.observe.tracing import make_tracer; make_tracer().start_span('hello').end()"
    environment = {"OTEL_TRACES_EXPORTER": "console", "OTEL_SERVICE_NAME": "mine", "PATH": "", "PYTHONPATH": "."}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert '"name": "hello"' in result.stdout
    assert '"service.name": "mine"' in result.stdout
