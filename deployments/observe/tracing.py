"""OpenTelemetry spans of requests in Ingresses and of sequences in Routers, if the standard variables ask for them.

A request's span is the child of the client's `traceparent`; resubmissions are its events. A Router makes a sequence's
spans when the sequence ends: queue, prefill, and decode with rounds as events.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Collection, Sequence
from importlib.metadata import entry_points
from typing import Any

from opentelemetry.trace import SpanKind, Tracer, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette._utils import get_route_path
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.openai.writer import Writer
from deployments.wire import Generation
from engine.protocols import ScheduledRow
from engine.requests.output import RequestOutput
from engine.stats.requests import RequestStats

logger = logging.getLogger("ray.serve")  # the only logger that Serve shows

MAX_ROUNDS = 128  # the last of a sequence; by default the SDK keeps as many events of a span
_w3c = TraceContextTextMapPropagator()


def make_tracer() -> Tracer | None:
    """Return this process's tracer; None if the variables ask for no traces, or their exporter is not installed."""
    name = os.environ.get("OTEL_TRACES_EXPORTER") or ("otlp" if "OTEL_EXPORTER_OTLP_ENDPOINT" in os.environ else "none")
    if name == "none":
        return None
    if name == "otlp":
        name += "_proto_" + os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf").partition("/")[0]
    exporters = list(entry_points(group="opentelemetry_traces_exporter", name=name))
    if not exporters:
        package = f"opentelemetry-exporter-{name.replace('_', '-')}"
        logger.warning("no traces: OpenTelemetry's exporter %s is not installed; pip install %s", name, package)
        return None
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    service = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "paceline")}
    provider = TracerProvider(resource=Resource.create(service))
    provider.add_span_processor(BatchSpanProcessor(exporters[0].load()()))
    return provider.get_tracer("paceline")


class TracedRequests:
    """ASGI middleware that makes a span of each request to the routes."""

    def __init__(self, app: ASGIApp, *, tracer: Tracer, routes: Collection[str]) -> None:
        self._app, self._tracer, self._routes = app, tracer, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http" or (route := get_route_path(scope)) not in self._routes:
            await self._app(scope, receive, send)
            return
        parent, attributes = _w3c.extract(Headers(scope=scope)), {"http.route": route}
        with self._tracer.start_as_current_span(f"POST {route}", parent, SpanKind.SERVER, attributes) as span:

            async def send_and_note(message: Message) -> None:
                if "status" in message:
                    span.set_attribute("http.response.status_code", message["status"])
                await send(message)

            await self._app(scope, receive, send_and_note)


def traceparent() -> str | None:
    """Return the current span for another process, in W3C's form; None without a span."""
    carrier: dict[str, str] = {}
    _w3c.inject(carrier)
    return carrier.get("traceparent")


def note_answer(writer: Writer) -> None:
    """Add the model, tokens and finish reasons of an answer that has ended to the current span, if any."""
    if (span := get_current_span()).is_recording():
        span.set_attribute("gen_ai.request.model", writer.reply.model)
        span.set_attribute("gen_ai.usage.input_tokens", writer.usage().prompt_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", writer.usage().completion_tokens)
        span.set_attribute("gen_ai.response.finish_reasons", [choice.finish_reason or "" for choice in writer.choices])


def note_resubmission(reason: str, num_tokens: int) -> None:
    """Note in the current span, if any, that another Router gets the request after some tokens."""
    get_current_span().add_event("resubmission", {"reason": reason, "tokens": num_tokens})


class TracedStats(RequestStats):
    """Request statistics that make the spans of sequences, when these end."""

    def __init__(self, max_model_len: int, tracer: Tracer) -> None:
        super().__init__(max_model_len)
        self._tracer = tracer
        self._traces: dict[str, tuple[Any, deque[tuple[float, dict[str, int]]]]] = {}
        """The parent of each sequence's spans, and when its rounds ended, with their figures."""

    def begin(self, request: Generation) -> None:
        """Trace the sequences of a request that was just added, if its Ingress traces it."""
        if request.traceparent is not None:
            parent = _w3c.extract({"traceparent": request.traceparent})
            self._traces |= {
                sequence.request_id: (parent, deque(maxlen=MAX_ROUNDS)) for sequence in request.sequences()
            }

    def observe(
        self, batch: Sequence[ScheduledRow], outputs: Sequence[RequestOutput], *, started_s: float, ended_s: float
    ) -> None:
        super().observe(batch, outputs, started_s=started_s, ended_s=ended_s)
        for output in outputs:
            if (trace := self._traces.get(output.request_id)) is not None:
                figures = {"draft_tokens": output.num_draft_tokens, "accepted_tokens": output.num_accepted_tokens}
                trace[1].append((ended_s, {"tokens": len(output.token_ids), **figures}))

    def release(self, request_id: str) -> None:
        """Forget a request that has ended, and make its spans; unknown ids are ignored."""
        times, trace = self._times.get(request_id), self._traces.pop(request_id, None)
        super().release(request_id)
        if times is None or trace is None:
            return
        (parent, rounds), attributes = trace, {"sequence": request_id}
        starts_s = [start for start in (times.added_s, times.started_s, times.first_token_s) if start is not None]
        ends_s = [*starts_s[1:], time.perf_counter()]
        epoch_ns = time.time_ns() - time.perf_counter_ns()
        for phase, start_s, end_s in zip(("queue", "prefill", "decode"), starts_s, ends_s, strict=False):
            start_ns = epoch_ns + int(start_s * 1e9)
            span = self._tracer.start_span(phase, parent, attributes=attributes, start_time=start_ns)
            for ended_s, figures in rounds if phase == "decode" else ():
                span.add_event("round", figures, epoch_ns + int(ended_s * 1e9))
            span.end(epoch_ns + int(end_s * 1e9))
