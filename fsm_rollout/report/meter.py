"""Sending a run's metrics to a collector of OpenTelemetry's, now and then and at the end.

Invariant: what is sent are the numbers of :mod:`fsm_rollout.report.metrics` as they stand, from a thread of its own; a
collector that does not take them costs nothing else.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from uuid import uuid4

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import export as sdk
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from fsm_rollout import __version__
from fsm_rollout.report.metrics import Labels, Metric, RunMetrics
from fsm_rollout.report.silence import Silent

logger = logging.getLogger(__name__)

EVERY = 60_000.0  # milliseconds between two sendings, unless OTEL_METRIC_EXPORT_INTERVAL says otherwise
CUMULATIVE = sdk.AggregationTemporality.CUMULATIVE
SCOPE = InstrumentationScope("fsm_rollout", __version__)


class Meter(threading.Thread):
    """Sends metrics until it is closed.

    Args:
        metrics: those of the runs of one rollout.
        exporter: takes them.
        resource: what is said of who sends them.
        is_down: says whether the collector is known not to answer; it is not tried then.
    """

    def __init__(
        self, metrics: RunMetrics, exporter: OTLPMetricExporter, resource: Resource, is_down: Callable[[], bool]
    ) -> None:
        super().__init__(name="fsm-rollout-metrics", daemon=True)
        self.metrics = metrics
        self._exporter, self._is_down = Silent(exporter), is_down
        # Counts begin anew with each process, so each is a source of its own.
        self._resource = resource.merge(Resource({"service.instance.id": uuid4().hex}))
        self._began, self._enough = time.time_ns(), threading.Event()
        self._seconds = float(os.environ.get("OTEL_METRIC_EXPORT_INTERVAL") or EVERY) / 1000
        self.start()

    def run(self) -> None:
        """Send them now and then."""
        while not self._enough.wait(self._seconds):
            self._send()

    def close(self) -> None:
        """Send them as they stand, and end."""
        self._enough.set()
        self.join()
        self._send()
        self._exporter.shutdown()

    def _send(self) -> None:
        if self._is_down():
            return
        shown = [self._shown(metric, list(series.items())) for metric, series in self.metrics.values.items() if series]
        scope = sdk.ScopeMetrics(SCOPE, shown, "")
        data = sdk.MetricsData([sdk.ResourceMetrics(self._resource, [scope], "")])
        if not self._exporter.sends(data):  # not every collector of spans takes metrics
            logger.info("no metrics are taken: %s", self._exporter.why)

    def _shown(self, metric: Metric, series: list[tuple[Labels, list[float]]]) -> sdk.Metric:
        """Return a metric as the library has it."""
        now = time.time_ns()
        named = [
            ({name: value for name, value in zip(metric.labels, values, strict=True) if value}, numbers)
            for values, numbers in series
        ]
        data: sdk.DataT
        if metric.kind == "histogram":
            counted = [
                sdk.HistogramDataPoint(
                    labels, self._began, now, int(sum(counts)), total, [*map(int, counts)], metric.bounds,
                    min=None, max=None,  # type: ignore[arg-type]  # the protocol's own are optional; nobody counts them
                )
                for labels, (total, *counts) in named
            ]  # fmt: skip
            data = sdk.Histogram(counted, CUMULATIVE)
        else:
            points = [sdk.NumberDataPoint(labels, self._began, now, numbers[0]) for labels, numbers in named]
            is_counter = metric.kind == "counter"
            data = sdk.Sum(points, CUMULATIVE, is_monotonic=True) if is_counter else sdk.Gauge(points)
        return sdk.Metric(metric.name, metric.text, metric.unit, data)
