"""OpenTelemetry, if it is asked for: a span for each answer, with vLLM's names, sent by a thread of its own.

Needs the packages of the extra `otel`. What was asked and said is not in a span, only how much it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from executor.request import Acceptance

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

    from executor.server.generation import Ended

_SECONDS = 5.0
"""For one attempt to reach the collector, so that a server ends soon without one."""


class Tracing:
    def __init__(self, endpoint: str, model: str) -> None:
        """`endpoint`: where a collector takes OTLP by HTTP, the path included."""
        self._model = model
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "speclane"}), shutdown_on_exit=False
        )
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_SECONDS)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("speclane")
        self._propagator = TraceContextTextMapPropagator()

    def record(self, ended: Ended) -> None:
        """Its parent is the span that the client named in `traceparent`, if it did."""
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(ended.headers),
            kind=SpanKind.SERVER,
            attributes=self._attributes(ended),
            start_time=ended.began_ns,
        )
        if ended.failure is not None:
            span.set_attribute("error.type", ended.failure.code or str(ended.failure.status))
            span.set_status(Status(StatusCode.ERROR, str(ended.failure)))
        span.end(ended.began_ns + round(ended.seconds * 1e9))

    def close(self) -> None:
        """Send what is left; takes a while if there is nobody to take it."""
        self._provider.shutdown()

    def _attributes(self, ended: Ended) -> dict[str, AttributeValue]:
        params = ended.jobs[0].params
        acceptance = Acceptance()
        for completion in ended.completions:
            acceptance.add(completion.acceptance)
        told: dict[str, AttributeValue] = {
            "gen_ai.response.model": self._model,
            "gen_ai.request.id": ended.label,
            "gen_ai.request.temperature": float(params.temperature),
            "gen_ai.request.top_p": float(params.top_p),
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.n": len(ended.jobs),
            "gen_ai.usage.num_sequences": len(ended.completions),
            "gen_ai.usage.prompt_tokens": len(ended.jobs[0].tokens),
            "gen_ai.usage.completion_tokens": sum(len(each.token_ids) for each in ended.completions),
            "gen_ai.latency.e2e": ended.seconds,
            "gen_ai.response.finish_reasons": [each.finish_reason for each in ended.completions],
            "speclane.spec_decode.num_draft_tokens": sum(acceptance.drafted),
            "speclane.spec_decode.num_accepted_tokens": sum(acceptance.accepted),
            "speclane.spec_decode.mean_acceptance_length": acceptance.length,
        }
        if ended.first_seconds is not None:
            told["gen_ai.latency.time_to_first_token"] = ended.first_seconds
        return told
