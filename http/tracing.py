"""OpenTelemetry spans, with the extra `otel`: one a request, inside it queue, prefill and decode.

Nothing is traced while a request runs: its spans are made when it ends, out of the times that the
metrics have anyway. A `traceparent` header makes the caller's span the parent. Names of attributes:
OpenTelemetry's semantic conventions for generative AI.

Runs on: loop.
"""

import time
from typing import TYPE_CHECKING, Any

from ..engine.api.errors import StartError

if TYPE_CHECKING:
    from aiohttp import web

    from .serving import Work


class Tracer:
    """Sends spans to a collector over OTLP/HTTP.

    Args:
        endpoint: the collector's base URL, as http://127.0.0.1:4318; /v1/traces is added.

    Raises:
        StartError: the packages of the extra `otel` are missing.
    """

    def __init__(self, endpoint: str, model_name: str):
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise StartError(
                "--otlp-traces-endpoint needs opentelemetry-sdk and "
                f"opentelemetry-exporter-otlp-proto-http ({error})"
            ) from None
        exporter = OTLPSpanExporter(endpoint.rstrip("/") + "/v1/traces", timeout=5)
        self.provider = TracerProvider(resource=Resource.create({"service.name": "stoker"}))
        self.provider.add_span_processor(BatchSpanProcessor(exporter))  # it has its own thread
        self._tracer = self.provider.get_tracer("stoker")
        self._extract = TraceContextTextMapPropagator().extract
        self._model_name = model_name

    def record(self, request: "web.Request", work: "Work", outcome: str) -> None:
        """Make the spans of a request that has just ended as `outcome`."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        to_unix_ns = time.time_ns() - time.perf_counter_ns()

        def ns(perf_s: float) -> int:
            return int(perf_s * 1e9) + to_unix_ns

        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "chat" if "chat" in request.path else "text_completion",
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.id": work.caller.id,
            "http.route": request.path,
            "gen_ai.usage.input_tokens": sum(len(s.prompt_tokens) for s in work.streams),
            "gen_ai.usage.output_tokens": sum(meter.num_output for meter in work.meters),
            "stoker.outcome": outcome,
        }
        if (params := work.params) is not None:
            attributes["gen_ai.request.temperature"] = params.temperature
            attributes["gen_ai.request.top_p"] = params.top_p
            if params.max_tokens is not None:
                attributes["gen_ai.request.max_tokens"] = params.max_tokens
        root = self._tracer.start_span(
            f"POST {request.path}",
            context=self._extract({"traceparent": request.headers.get("traceparent", "")}),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=ns(work.caller.arrival_s),
        )
        inside = set_span_in_context(root)
        now = time.perf_counter()
        for meter in work.meters:
            first, last = min(filter(None, meter.first_s), default=0.0), max(meter.last_s)
            begun = meter.submit_s + meter.queue_s if first else now
            for name, start, end in (
                ("queue", meter.submit_s, begun),
                ("prefill", begun, first),
                ("decode", first, last),
            ):
                if end >= start > 0:
                    span = self._tracer.start_span(name, context=inside, start_time=ns(start))
                    span.end(ns(end))
        if outcome in ("error", "overload"):
            root.set_status(Status(StatusCode.ERROR))
        root.end(ns(now))

    def close(self) -> None:
        """Send what has not been sent."""
        self.provider.shutdown()
