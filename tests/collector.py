"""A collector of OpenTelemetry: what it was sent over HTTP, and ways in which it does not take it."""

import gzip
import threading
from collections.abc import Collection, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """Takes spans and metrics while it is open.

    Args:
        status: what it answers.
        hangs: it answers nobody before it is closed.
        without: paths that it does not have.
    """

    def __init__(self, status: int = 200, *, hangs: bool = False, without: Collection[str] = ()) -> None:
        self.requests: list[tuple[str, Mapping[str, str], bytes]] = []
        closing = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler) -> None:  # noqa: N805
                body = handler.rfile.read(int(handler.headers["content-length"]))
                if handler.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                self.requests.append((handler.path, dict(handler.headers), body))
                if hangs:
                    closing.wait()
                    return
                handler.send_response(404 if handler.path in without else status)
                handler.send_header("content-length", "0")
                handler.end_headers()

            def log_message(handler, *_: Any) -> None:  # noqa: N805
                """Say nothing."""

        self._closing, self._server = closing, ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "Collector":
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def bodies(self, path: str) -> list[bytes]:
        """Return what was sent to a path."""
        return [body for where, _, body in self.requests if where == path]

    @property
    def spans(self) -> list[Span]:
        """All spans, as they came."""
        sent = map(ExportTraceServiceRequest.FromString, self.bodies("/v1/traces"))
        scopes = (scope for request in sent for resource in request.resource_spans for scope in resource.scope_spans)
        return [span for scope in scopes for span in scope.spans]

    @property
    def metrics(self) -> list[Metric]:
        """All metrics, as they came."""
        sent = map(ExportMetricsServiceRequest.FromString, self.bodies("/v1/metrics"))
        scopes = (
            scope for request in sent for resource in request.resource_metrics for scope in resource.scope_metrics
        )
        return [metric for scope in scopes for metric in scope.metrics]
