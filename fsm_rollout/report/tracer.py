"""Tracing a run while it goes on: events in, OpenTelemetry's spans out, to whoever collects them.

Invariant: what is traced is a listener of the run's recorder, and nothing else knows of it; a collector that is down
costs one warning, and no trajectory. Spans leave in a thread of their own; those that it cannot keep up with are
dropped, and `fsm-rollout export --format otlp` sends them later.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from fsm_rollout.errors import ConfigError
from fsm_rollout.report.meter import Meter
from fsm_rollout.report.metrics import RunMetrics
from fsm_rollout.report.readers import Tracing
from fsm_rollout.report.silence import Silent
from fsm_rollout.report.telemetry import RunTimes, SpanMaker, Times, TracedTrajectory
from fsm_rollout.report.trackio_spans import SpansToTrackio
from fsm_rollout.trajectory.events import DIED, AnyEvent, Ended, Prompted, Resumed, Suspended
from fsm_rollout.trajectory.journal import Journal, events
from fsm_rollout.trajectory.trace_ids import TraceIds, root_of
from fsm_rollout.trajectory.trajectory import Trajectory

logger = logging.getLogger(__name__)

QUEUE = 2**16  # spans that wait for their collector, unless OTEL_BSP_MAX_QUEUE_SIZE says otherwise
LATER = 2**14  # trajectories that have ended and may still get a reward
PAUSE = 30.0  # seconds for which a collector that did not answer is left alone
# Seconds in which it must answer, tries included: so long the end of a run waits for one that hangs. MLflow's server
# was seen to take five for its first batch, with SQLite on a busy machine.
ANSWERS_WITHIN = 10.0


Spans = Silent[Sequence[ReadableSpan], SpanExportResult]  # what takes spans
History = Callable[[str], list[AnyEvent]]  # returns the events of a trajectory so far


class Tracer:
    """Where the spans of runs go, and which of them.

    Args:
        tracing: what to trace, and where to send it.
        exporter: takes the spans instead of the collector that ``tracing`` names.
    """

    def __init__(self, tracing: Tracing, exporter: SpanExporter | None = None) -> None:
        self.tracing = tracing
        self._spans: _WhileItAnswers | None = None
        self._meter: Meter | None = None
        if exporter is None:
            exporter = self._spans = _WhileItAnswers(*exporter_of(tracing))
        size = None if "OTEL_BSP_MAX_QUEUE_SIZE" in os.environ else QUEUE
        self._processor = BatchSpanProcessor(exporter, max_queue_size=size)

    def of_run(self, run_id: str, description: Mapping[str, Any], journal: Journal | None) -> TracedRun:
        """Return what listens to the trajectories of a run."""
        maker = maker_of(self.tracing, run_id, description, None if journal is None else journal.path.absolute().parent)

        def history(trajectory_id: str) -> list[AnyEvent]:
            assert journal is not None
            journal.flush()
            return events(journal.path, trajectory_id)

        return TracedRun(maker, self._processor.on_end, None if journal is None else history)

    def metrics_of(self, description: Mapping[str, Any]) -> RunMetrics | None:
        """Return what listens to all trajectories of runs that are described so; ``None``: nobody takes metrics."""
        spans, to = self._spans, self.tracing.destination(checked=False).metrics
        if self._meter is None and spans is not None and to is not None:
            headers = {**self.tracing.destination().headers}
            exporter = OTLPMetricExporter(to or None, headers=headers or None, timeout=_seconds("METRICS"))
            self._meter = Meter(RunMetrics(description), exporter, _resource(self.tracing), lambda: spans.is_down)
        return None if self._meter is None else self._meter.metrics

    def flush(self) -> None:
        """Send what has not been sent."""
        self._processor.force_flush()

    def close(self) -> None:
        """Send what is left, and end. Blocks; safe to call twice."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]
        meter, self._meter = self._meter, None
        if meter is not None:
            meter.close()


def exporter_of(tracing: Tracing, *, later: bool = False) -> tuple[SpanExporter, str]:
    """Return what sends spans, and where to; ``later``: those of a whole run, in one go.

    Raises:
        ConfigError: nothing says where, or a package is not installed.
    """
    to = tracing.destination()
    if to.trackio is None:
        exporter = OTLPSpanExporter(to.endpoint or None, headers={**to.headers} or None, timeout=_seconds("TRACES"))
        return exporter, to.endpoint or "its collector"
    try:
        return SpansToTrackio(to.trackio, to.endpoint or None, later=later), f"trackio's project '{to.trackio}'"
    except ImportError as error:
        raise ConfigError("tracing: trackio is not installed: pip install trackio") from error


def silent(exporter: SpanExporter) -> Spans:
    """Return what sends spans by an exporter that is to log nothing itself."""
    return Silent(exporter, SpanExportResult.FAILURE)


def _seconds(signal: str) -> float | None:
    """Return how long a collector may take; ``None``: as its variables say."""
    names = (f"OTEL_EXPORTER_OTLP_{signal}_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
    return None if any(os.environ.get(name) for name in names) else ANSWERS_WITHIN


def _resource(tracing: Tracing) -> Resource:
    own = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "fsm-rollout"}
    return Resource.create({**own, **tracing.destination(checked=False).resource})


def maker_of(tracing: Tracing, run_id: str, description: Mapping[str, Any], folder: Path | None) -> SpanMaker:
    """Return what makes the spans of a run that is described so, live or later; ``folder`` is that of its journal."""
    name = tracing.experiment or ("rollout" if folder is None else folder.name)
    return SpanMaker.of(TraceIds(run_id, tracing.share), _resource(tracing), name, description, tracing.content)


class TracedRun:
    """Listens to the trajectories of one run.

    Args:
        maker: makes its spans.
        on_end: takes them.
        history: what is known of a trajectory that another process has begun, its latest event the last; ``None``:
            there is none such.
    """

    def __init__(
        self, maker: SpanMaker, on_end: Callable[[ReadableSpan], None], history: History | None = None
    ) -> None:
        self.maker = maker
        self._on_end, self._history = on_end, history
        self.times = RunTimes()
        """When it was."""
        self._known: dict[str, TracedTrajectory] = {}
        self._ended: dict[str, None] = {}  # those that have, the earliest first

    def __call__(self, trajectory: Trajectory, event: AnyEvent) -> None:
        """Take in an event that was recorded."""
        kind, traced = type(event), self._known.get(trajectory.trajectory_id)
        if kind in _OF_THE_RUN:
            self.times.take(event)
            if traced is None:
                traced = self._begun(trajectory, event)
                if traced is None:
                    return
            elif kind is Ended:
                self._ended[trajectory.trajectory_id] = None
                if len(self._ended) > LATER:
                    oldest = next(iter(self._ended))
                    del self._ended[oldest], self._known[oldest]
        if traced is not None:
            for span in traced.take(event):
                self._on_end(span)

    def _begun(self, trajectory: Trajectory, event: AnyEvent) -> TracedTrajectory | None:
        """Return what traces a trajectory that begins or, begun by another process, goes on; `None`: nobody does."""
        if type(event) is not Prompted and (self._history is None or type(event) is not Resumed):
            return None
        ids, trajectory_id = self.maker.ids, trajectory.trajectory_id
        if not ids.sampled(ids.trace(root_of(trajectory.group_id, trajectory_id))):
            return None
        if isinstance(event, Prompted):
            self._known[trajectory_id] = self.maker.begin(event)
            return None
        assert self._history is not None
        first, *history = self._history(trajectory_id)
        assert isinstance(first, Prompted)
        traced = self._known[trajectory_id] = self.maker.begin(first)
        for earlier in history[:-1]:
            spans = traced.take(earlier)
            if isinstance(earlier, Suspended) and earlier.reason == DIED:  # else the earlier process has sent them
                for span in spans:
                    self._on_end(span)
        return traced

    def timed(self, shard: int, times: Times) -> None:
        """Hear when the run was in a shard, which sends the spans of its trajectories itself."""
        self.times.elsewhere[shard] = times

    def end(self) -> None:
        """End the present run: its own span, or those of its steps, as they stand."""
        for span in self.times.spans(self.maker):
            self._on_end(span)

    def close(self) -> None:
        """End what is still open, as far as it has come."""
        for traced in self._known.values():
            for span in traced.rest():
                self._on_end(span)
        self._known.clear()


_OF_THE_RUN = frozenset({Prompted, Resumed, Suspended, Ended})


class _WhileItAnswers(SpanExporter):
    """Sends spans to a collector; one that does not answer is named once, and left alone for a while."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter, self._endpoint = silent(exporter), endpoint
        self._until, self._warned = 0.0, False

    @property
    def is_down(self) -> bool:
        """Whether it has not answered a while ago."""
        return time.monotonic() < self._until

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send some spans."""
        if self.is_down:
            return SpanExportResult.FAILURE
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self._until = time.monotonic() + PAUSE
            if not self._warned:
                self._warned = True
                logger.warning(
                    "no spans reach %s (%s); the run goes on without them, and `fsm-rollout export RUN --format otlp` "
                    "sends them later", self._endpoint, self._exporter.why,
                )  # fmt: skip
        return result

    def shutdown(self) -> None:
        """Close the connection."""
        self._exporter.shutdown()
