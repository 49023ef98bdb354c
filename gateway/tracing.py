"""A span for each request, by OpenTelemetry. Imported only where an operator wants traces: it needs penstock[otel].

A span begins when its request arrived and ends when its reply has. What happened between is what the engine noted in
`Timings`, written down when it is over, so that a trace costs nothing while tokens are made. Spans leave by a thread of
their own, from a bounded queue; a collector that is not there costs spans and a line in the log.
Names are those of the semantic conventions for generative AI, where they have one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, format_trace_id
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from penstock.gateway.http.correlation import CORRELATION
from penstock.gateway.reply.generation import Generation

log = logging.getLogger("penstock.gateway")

_EXPORT_S = 2.0
"""The seconds that the last spans get to be exported when the server ends."""
_TEXT_COMPLETIONS = "/v1/completions"


class Traces:
    """The spans of one server's requests. For the event loop's thread."""

    def __init__(self, endpoint: str | None, model: str, replica: str, clock: Callable[[], float]) -> None:
        """
        Args:
            endpoint: the collector's address, without /v1/traces; None: OpenTelemetry's own variables have it.
            clock: the engine's.
        """
        # It would tell of every batch that could not be sent.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        exporter = OTLPSpanExporter(None if endpoint is None else f"{endpoint.rstrip('/')}/v1/traces")
        ours = Resource({"service.name": "penstock", "service.instance.id": replica})
        # What the standard variables say goes before what is ours.
        resource = Resource.create().merge(ours).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(_LoggingExporter(exporter, endpoint or "OTEL_EXPORTER_OTLP_ENDPOINT"))
        )
        self._tracer = self._provider.get_tracer("penstock")
        self._propagator = TraceContextTextMapPropagator()
        self._model = model
        self._clock = clock
        self._spans: dict[Generation, tuple[Span, int]] = {}
        """And where the engine's clock has its zero, in nanoseconds since 1970."""

    def begin(self, stream: Generation) -> None:
        """Its requests are about to be queued; what nobody asked for has no span."""
        correlation = CORRELATION.get()
        if correlation is None:
            return
        request, zero_ns = stream.requests[0], time.time_ns() - _ns(self._clock())
        operation = "text_completion" if correlation.path == _TEXT_COMPLETIONS else "chat"
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            context=self._propagator.extract(correlation.trace_headers),
            kind=SpanKind.SERVER,
            start_time=zero_ns + _ns(request.arrival_s),
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "penstock",
                "gen_ai.request.model": self._model,
                "gen_ai.response.model": self._model,
                "gen_ai.request.max_tokens": request.sampling.max_tokens,
                "gen_ai.request.choice.count": sum(each.n for each in stream.requests),
                "gen_ai.usage.input_tokens": stream.num_prompt_tokens,
                "penstock.tenant": request.tenant,
                "penstock.request_id": correlation.request_id,
            },
        )
        span.add_event("queued", timestamp=zero_ns + _ns(self._clock()))
        correlation.trace_id = format_trace_id(span.get_span_context().trace_id)
        self._spans[stream] = span, zero_ns

    def end(self, stream: Generation) -> None:
        """It has ended, or its reader has gone. Idempotent."""
        if stream not in self._spans:
            return
        span, zero_ns = self._spans.pop(stream)
        if span.is_recording():
            for name, at_s in sorted(_events(stream), key=lambda event: event[1]):
                span.add_event(name, timestamp=zero_ns + _ns(at_s))
            _describe(span, stream)
        span.end(zero_ns + _ns(self._clock()))

    def close(self) -> None:
        """Exports the remaining spans, waiting at most `_EXPORT_S`. Must not be called on the event loop."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_EXPORT_S)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _events(stream: Generation) -> Iterator[tuple[str, float]]:
    """Adds the engine's timings: choices start and get their first token together, and end one by one."""
    if not stream.timings:
        return
    yield "admitted", min(timings.scheduled_s for timings in stream.timings)
    yield "first_token", min(timings.first_token_s for timings in stream.timings)
    for timings in stream.timings:
        for at_s in timings.preempted_s:
            yield "preempted", at_s
        yield "ended", timings.finished_s


def _describe(span: Span, stream: Generation) -> None:
    span.set_attributes(
        {
            "gen_ai.response.finish_reasons": [reason.value for reason in stream.finish_reasons],
            "gen_ai.usage.output_tokens": stream.num_output_tokens,
            "gen_ai.usage.cache_read.input_tokens": stream.num_cached_tokens,
            "penstock.lane": stream.lane.label,
        }
    )
    if stream.predicted_ttft_s is not None:
        span.set_attribute("penstock.predicted_time_to_first_token", stream.predicted_ttft_s)
    if stream.error is not None:
        span.set_attribute("error.type", stream.error.code or stream.error.type)
        span.set_status(Status(StatusCode.ERROR, stream.error.message))


class _LoggingExporter(SpanExporter):
    """Says once that spans cannot be sent, and once that they can be again."""

    def __init__(self, exporter: SpanExporter, where: str) -> None:
        self._exporter = exporter
        self._where = where
        self._is_failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        was_failing, self._is_failing = self._is_failing, result is not SpanExportResult.SUCCESS
        if self._is_failing and not was_failing:
            log.warning("traces are lost: no collector takes them at %s", self._where)
        elif was_failing and not self._is_failing:
            log.info("traces are taken again")
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
