"""Spans of answers, as a collector gets them."""

from __future__ import annotations

import http.server
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from serving import SLOW, ask, served

from executor.errors import InvalidConfig
from executor.server import options
from executor.server.options import ServerOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra otel")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

COMPLETE = "/v1/completions"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """A collector's address, and the spans that it gets."""
    spans: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                spans.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", spans
        finally:
            server.shutdown()
            thread.join()


def attributes(span: Any) -> dict[str, Any]:
    """By name, whatever their type."""
    told = {}
    for entry in span.attributes:
        value = getattr(entry.value, entry.value.WhichOneof("value"))
        told[entry.key] = [each.string_value for each in value.values] if hasattr(value, "values") else value
    return told


def test_an_answer_is_a_span_of_its_clients_trace():
    body = {"prompt": "hello", "max_tokens": 20, "temperature": 0.5, "top_p": 0.9, "n": 2, "seed": 1}
    with collector() as (url, spans):
        with served({"otlp_endpoint": url, "model_name": "toy"}) as toys:
            answer = ask(toys.url, COMPLETE, body, {"traceparent": f"00-{TRACE}-{PARENT}-01"})
            ask(toys.url, COMPLETE, body | {"stream": True})
            ask(toys.url, COMPLETE, body | {"top_p": 7})  # refused before there is anything to tell of
        first, second = sorted(spans, key=lambda span: span.start_time_unix_nano)
    assert first.name == "llm_request"
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == (TRACE, PARENT)
    assert second.trace_id.hex() != TRACE
    told, decoding = attributes(first), answer.body["metrics"]["speculative_decoding"]
    seconds = (first.end_time_unix_nano - first.start_time_unix_nano) / 1e9
    assert told.pop("gen_ai.latency.e2e") == pytest.approx(seconds, abs=1e-6)
    assert 0 < told.pop("gen_ai.latency.time_to_first_token") <= seconds
    assert told.pop("speclane.spec_decode.mean_acceptance_length") == pytest.approx(
        decoding["mean_acceptance_length"], abs=1e-3
    )
    assert told == {
        "gen_ai.response.model": "toy",
        "gen_ai.request.id": answer.body["id"],
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 20,
        "gen_ai.request.n": 2,
        "gen_ai.usage.num_sequences": 2,
        "gen_ai.usage.prompt_tokens": 5,
        "gen_ai.usage.completion_tokens": 40,
        "gen_ai.response.finish_reasons": ["length", "length"],
        "speclane.spec_decode.num_draft_tokens": decoding["num_draft_tokens"],
        "speclane.spec_decode.num_accepted_tokens": decoding["num_accepted_tokens"],
    }


def test_an_answer_that_fails_says_of_what():
    with collector() as (url, spans):
        with served({"request_timeout": 0.2, "otlp_endpoint": url}, target=SLOW) as toys:
            assert ask(toys.url, COMPLETE, {"prompt": "x", "max_tokens": 4000}).status == 504
        (span,) = spans
    assert span.status.code == span.status.STATUS_CODE_ERROR
    assert attributes(span)["error.type"] == "deadline_exceeded"
    assert attributes(span)["gen_ai.usage.num_sequences"] == 0


@pytest.mark.parametrize("url", ["localhost:4318", "grpc://localhost:4317", "http://", ""])
def test_what_is_no_collector(url):
    with pytest.raises(InvalidConfig, match="is no URL of a collector; try http://localhost:4318"):
        ServerOptions(otlp_endpoint=url)


def test_a_path_is_added_where_there_is_none():
    assert ServerOptions(otlp_endpoint="http://c:4318/").otlp_endpoint == "http://c:4318/v1/traces"
    assert ServerOptions(otlp_endpoint="https://c/otlp/x").otlp_endpoint == "https://c/otlp/x"


def test_without_the_packages_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(options, "find_spec", lambda _: None)
    with pytest.raises(InvalidConfig, match=r"pip install 'speclane\[otel\]'"):
        ServerOptions(otlp_endpoint="http://localhost:4318")
