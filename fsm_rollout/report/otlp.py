"""Spans as OTLP has them on the wire, written in a quarter of the time that the library's messages take.

Invariant: the bytes say what the library's say of the same spans: a test reads both by OTLP's own definition. All else
about sending (addresses, headers, certificates, tries) is the library's.

Format: https://github.com/open-telemetry/opentelemetry-proto, ``trace/v1/trace.proto``; what a field's first byte is:
https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

import gzip
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import Link

MOST_KEPT = 2**13  # encoded texts; they are those of names and ids, of which a run has few at a time
LONGEST_KEPT = 64  # characters
PROVIDER = "CREDENTIAL_PROVIDER"  # ends the names of variables that give the library a session of somebody else's
COMPRESS: Mapping[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}
_fixed64, _double = struct.Struct("<Q").pack, struct.Struct("<d").pack
_SHORT = [bytes((number,)) for number in range(128)]
_NOT_REMOTE, _REMOTE = struct.pack("<I", 0x100), struct.pack("<I", 0x300)
_keys: dict[str, bytes] = {}
_texts: dict[tuple[str, str], bytes] = {}


class SpansToCollector(OTLPSpanExporter):
    """The library's exporter, which sends what :func:`encoded` has written."""

    logs_as = OTLPSpanExporter.__module__  # the name of its logger

    def __init__(self, endpoint: str | None, headers: Mapping[str, str], timeout: float | None) -> None:
        self._own = not any(name.endswith(PROVIDER) for name in os.environ)
        session = requests.Session()
        session.auth = self._write  # which is asked for each try, may change the request, and comes before its length
        super().__init__(
            endpoint, headers={**headers}, timeout=timeout, session=session if self._own else None
        )  # fmt: skip
        self._body = b""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send some spans."""
        if not self._own:
            return super().export(spans)
        self._body = encoded(spans)
        return super().export(())

    def _write(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        compress = COMPRESS.get(request.headers.get("content-encoding", ""))
        request.body = self._body if compress is None else compress(self._body)
        return request


def encoded(spans: Sequence[ReadableSpan]) -> bytes:
    """Return the body of a request that exports these spans."""
    return b"".join(
        _message(b"\x0a", _resource_spans([*of_one])) for _, of_one in groupby(spans, lambda span: id(span.resource))
    )


def _resource_spans(spans: Sequence[ReadableSpan]) -> bytes:
    resource, scope = spans[0].resource, spans[0].instrumentation_scope
    assert scope is not None
    named = _text(b"\x0a", scope.name) + (_text(b"\x12", scope.version) if scope.version else b"")
    parts = [_message(b"\x0a", named)]
    for span in spans:
        parts += _framed(b"\x12", _span(span))
    told = _message(b"\x0a", b"".join(_attributes(b"\x0a", resource.attributes)))
    schema = _text(b"\x1a", resource.schema_url) if resource.schema_url else b""
    return told + _message(b"\x12", b"".join(parts)) + schema


def _span(span: ReadableSpan) -> bytes:
    context, parent, status = span.context, span.parent, span.status
    assert context is not None
    name, code = span.name.encode(), status.status_code.value
    said = (_text(b"\x12", status.description) if status.description else b"") + (
        b"\x18" + _SHORT[code] if code else b""
    )
    return b"".join((
        b"\x0a\x10", context.trace_id.to_bytes(16, "big"), b"\x12\x08", context.span_id.to_bytes(8, "big"),
        *(() if parent is None else (b"\x22\x08", parent.span_id.to_bytes(8, "big"))),
        *_framed(b"\x2a", name), b"\x30", _SHORT[span.kind.value + 1],
        b"\x39", _fixed64(span.start_time or 0), b"\x41", _fixed64(span.end_time or 0),
        *_attributes(b"\x4a", span.attributes),
        *(_message(b"\x5a", _event(event)) for event in span.events),
        *(_message(b"\x6a", _link(link)) for link in span.links),
        *_framed(b"\x7a", said), b"\x85\x01", _REMOTE if parent is not None and parent.is_remote else _NOT_REMOTE,
    ))  # fmt: skip


def _event(event: Event) -> bytes:
    told = _attributes(b"\x1a", event.attributes)
    return b"".join((b"\x09", _fixed64(event.timestamp), *_framed(b"\x12", event.name.encode()), *told))


def _link(link: Link) -> bytes:
    context = link.context
    ids = b"\x0a\x10", context.trace_id.to_bytes(16, "big"), b"\x12\x08", context.span_id.to_bytes(8, "big")
    told = _attributes(b"\x22", link.attributes)
    return b"".join((*ids, *told, b"\x35", _REMOTE if context.is_remote else _NOT_REMOTE))


def _attributes(field: bytes, attributes: Mapping[str, Any] | None) -> Iterator[bytes]:
    for key, value in (attributes or {}).items():
        yield field
        kept = _texts.get((key, value)) if type(value) is str else None
        yield kept or _pair(key, value)


def _pair(key: str, value: object) -> bytes:
    """Return a key and its value, with their length before them."""
    known = _keys.get(key)
    if known is None:
        known = _keys[key] = _text(b"\x0a", key)
    written = b"".join(_framed(b"", known + _message(b"\x12", _value(value))))
    if type(value) is str and len(value) <= LONGEST_KEPT:
        if len(_texts) >= MOST_KEPT:
            _texts.clear()
        _texts[key, value] = written
    return written


def _value(value: object) -> bytes:
    write = _WRITE.get(type(value))
    if write is not None:
        return write(value)
    if isinstance(value, str):  # an enum's
        return _text(b"\x0a", value)
    assert isinstance(value, Sequence), value
    return _message(b"\x2a", b"".join(_message(b"\x0a", _value(item)) for item in value))


def _integer(value: int) -> bytes:
    return b"\x18" + _number(value % 2**64) if -(2**63) <= value < 2**63 else _text(b"\x0a", str(value))


_WRITE: dict[type, Callable[[Any], bytes]] = {
    str: lambda value: _text(b"\x0a", value),
    bool: lambda value: b"\x10\x01" if value else b"\x10\x00",
    int: _integer,
    float: lambda value: b"\x21" + _double(value),
}


def _text(field: bytes, text: str) -> bytes:
    return _message(field, text.encode("utf-8", "replace"))


def _message(field: bytes, body: bytes) -> bytes:
    return b"".join(_framed(field, body))


def _framed(field: bytes, body: bytes) -> tuple[bytes, bytes, bytes]:
    length = len(body)
    return field, _SHORT[length] if length < 128 else _number(length), body


def _number(number: int) -> bytes:
    """Return a number that is not negative, seven bits in each byte, the lowest first."""
    written = bytearray()
    while number > 127:
        written.append(number & 127 | 128)
        number >>= 7
    written.append(number)
    return bytes(written)
