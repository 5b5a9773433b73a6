"""Spans on the wire are what the library writes of them, and it is the library that sends them."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from fsm_rollout.report.otlp import SpansToCollector, encoded
from tests.collector import Collector

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=200)
values = st.one_of(
    texts, st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False),
    st.lists(texts, max_size=3), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3).map(tuple),
    st.sampled_from(list(StatusCode)).map(lambda code: code.name),
)  # fmt: skip
# The same few keys and values again and again, also 1, 1.0, "1" and True, since texts that were seen are kept.
attributes = st.dictionaries(st.sampled_from("abc") | texts, st.sampled_from([1, 1.0, "1", True, "text"]) | values)
contexts = st.builds(
    SpanContext, st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans(), st.just(TraceFlags(1))
)
times = st.integers(0, 2**63)
spans = st.builds(
    ReadableSpan, texts, contexts, st.none() | contexts,
    st.sampled_from([Resource({}), Resource({"service.name": "a"}, "schema")]), attributes,
    st.lists(st.builds(Event, texts, attributes, times), max_size=2),
    st.lists(st.builds(Link, contexts, attributes), max_size=2), st.sampled_from(SpanKind),
    status=st.sampled_from([Status(), Status(StatusCode.OK), Status(StatusCode.ERROR, "why")]), start_time=times,
    end_time=times, instrumentation_scope=st.sampled_from([InstrumentationScope("a", "1"), InstrumentationScope("a")]),
)  # fmt: skip


@given(st.lists(spans, min_size=1, max_size=4).map(lambda found: sorted(found, key=lambda span: id(span.resource))))
def test_the_bytes_say_what_the_librarys_do(found: list[ReadableSpan]) -> None:
    scope = found[0].instrumentation_scope
    for span in found:
        span._instrumentation_scope = scope  # those of a run have one
    assert ExportTraceServiceRequest.FromString(encoded(found)) == encode_spans(found)


@pytest.mark.parametrize(
    ("compression", "opened"), [("none", bytes), ("gzip", gzip.decompress), ("deflate", zlib.decompress)]
)
def test_they_arrive_by_the_librarys_settings(
    compression: str, opened: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", compression)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-mine=1")
    span = ReadableSpan("a", SpanContext(1, 2, False), instrumentation_scope=InstrumentationScope("s"))
    with Collector(opened=lambda body: body) as collector:
        exporter = SpansToCollector(f"{collector.url}/v1/traces", {"x-other": "2"}, None)
        assert exporter.export([span]) is exporter.export([span]) is SpanExportResult.SUCCESS
        exporter.shutdown()
        requests: Any = collector.requests
    assert len(requests) == 2
    for _, headers, body in requests:
        lower = {name.lower(): value for name, value in headers.items()}
        assert (lower["x-mine"], lower["x-other"], lower["content-length"]) == ("1", "2", str(len(body)))
        assert ExportTraceServiceRequest.FromString(opened(body)) == encode_spans([span])


def test_whoever_has_a_session_of_their_own_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER", "none such")
    with pytest.raises(RuntimeError, match="none such"):
        SpansToCollector("http://127.0.0.1:9", {}, None)
