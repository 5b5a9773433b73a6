"""What Prometheus is told of a server, by the official client.

Invariant: labels are the names of agents, tools, engines, models and stop reasons, which are few; no text of a
conversation is in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client.registry import Collector

from fsm_rollout.report import metrics

__all__ = ["CONTENT_TYPE", "Metrics", "page_of"]

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


def page_of(listener: metrics.RunMetrics) -> bytes:
    """Return what a listener has heard in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Heard(listener))
    return generate_latest(registry)


class Metrics:
    """The figures of one server.

    Args:
        calls: says how many calls are being answered.
        waiting: says how many conversations wait.
        listener: hears the events of its trajectories.
    """

    def __init__(self, calls: Callable[[], int], waiting: Callable[[], int], listener: metrics.RunMetrics) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Heard(listener))
        common: dict[str, Any] = {"namespace": "fsm_rollout", "registry": self._registry}
        self.answers = Counter("answers", "Requests that were answered", ["agent", "protocol", "status"], **common)
        self.seconds = Histogram("answer_seconds", "From request to answer", ["agent"], buckets=SECONDS, **common)
        self.first_text = Histogram(
            "first_text_seconds", "From request to a stream's first text", ["agent"], buckets=SECONDS, **common
        )
        Gauge("calls_under_way", "Requests that are being answered", **common).set_function(calls)
        Gauge("conversations_waiting", "Conversations that wait for their callers", **common).set_function(waiting)

    def page(self) -> bytes:
        """Return all of them in Prometheus' text format."""
        return generate_latest(self._registry)


class _Heard(Collector):
    """Shows what a listener has heard, by the names that OpenTelemetry's collectors give its metrics."""

    def __init__(self, listener: metrics.RunMetrics) -> None:
        self._listener = listener

    def collect(self) -> Iterator[Family]:
        """Yield each metric with its present values."""
        for metric, series in self._listener.values.items():
            name = metric.name.replace(".", "_") + ("_seconds" if metric.unit == "s" else "")
            labels = [label.replace(".", "_") for label in metric.labels]
            if metric.kind == "histogram":
                histogram = HistogramMetricFamily(name, metric.text, labels=labels)
                ends = [*map(str, metric.bounds), "+Inf"]
                for values, (total, *counts) in series.items():
                    histogram.add_metric(values, list(zip(ends, accumulate(counts), strict=True)), total)
                yield histogram
                continue
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(name, metric.text, labels=labels)
            for values, (total,) in series.items():
                family.add_metric(values, total)
            yield family
