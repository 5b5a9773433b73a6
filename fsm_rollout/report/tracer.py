"""Tracing a run while it goes on: events in, OpenTelemetry's spans out, to whoever collects them.

Invariant: what is traced is a listener of the run's recorder, and nothing else knows of it; a collector that is down
costs one warning, and no trajectory. Spans are made and sent in a process of their own, and what it cannot keep up with
is dropped; `fsm-rollout export --format otlp` sends it later. An exporter of the user's works in the run's process.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from fsm_rollout.concurrency.loop_lag import LoopLag
from fsm_rollout.errors import ConfigError
from fsm_rollout.report.meter import Meter
from fsm_rollout.report.metrics import RunMetrics
from fsm_rollout.report.readers import Destination, Tracing
from fsm_rollout.report.run_spans import RunTimes, SpanMaker, Times
from fsm_rollout.report.running import running_of
from fsm_rollout.report.silence import Silent
from fsm_rollout.report.span_process import RemoteBook, SpanBook, SpanProcess, keep_books, say
from fsm_rollout.report.trackio_spans import SpansToTrackio
from fsm_rollout.scheduler.orders import SchedulerOrders
from fsm_rollout.scheduler.recorder import Listener
from fsm_rollout.trajectory.events import DIED, AnyEvent, Ended, Prompted, Resumed, Suspended
from fsm_rollout.trajectory.journal import Journal, events
from fsm_rollout.trajectory.trace_ids import TraceIds, root_of
from fsm_rollout.trajectory.trajectory import Trajectory

QUEUE = 2**16  # spans that wait for their collector, unless OTEL_BSP_MAX_QUEUE_SIZE says otherwise
LATER = 2**14  # trajectories that have ended and may still get a reward
PAUSE = 30.0  # seconds for which a collector that did not answer is left alone
# Seconds in which it must answer, tries included: so long the end of a run waits for one that hangs. MLflow's server
# was seen to take five for its first batch, with SQLite on a busy machine.
ANSWERS_WITHIN = 10.0


History = Callable[[str], list[AnyEvent]]  # returns the events of a trajectory so far


class Tracer:
    """Where the spans of a rollout's runs go, and which of them.

    Args:
        tracing: what to trace, and where to send it.
        exporter: takes the spans, in this process, instead of the collector that ``tracing`` names.
    """

    def __init__(self, tracing: Tracing, exporter: SpanExporter | None = None) -> None:
        self.tracing = tracing
        self._own_id = uuid4().hex  # of runs without a journal
        self._run: TracedRun | None = None
        self._process: SpanProcess | None = None
        self._own: BatchSpanProcessor | None = None
        self._meter: Meter | None = None
        if exporter is not None:
            self._own = _batches_for(exporter)
        else:
            _checked(tracing)

    @contextmanager
    def listens(
        self, scheduler: SchedulerOrders, description: Mapping[str, Any], *, lasts: bool, run_id: str = "",
        times: Callable[[Times], None] | None = None,
    ) -> Iterator[TraceIds]:  # fmt: skip
        """Listen to a run that is traced; yields how its spans are called.

        Args:
            scheduler: of the run.
            description: of the rollout.
            lasts: whether what is open afterwards goes on in a later run of the same recorder.
            run_id: the run's, in a shard, which its driver has said.
            times: hears when it was, in a shard, whose driver sends the run's own span.
        """
        scheduler.lag = scheduler.lag or LoopLag()
        recorder, run = scheduler.recorder, self._run
        journal = recorder.journal
        run_id = run_id or (journal.run_id if journal is not None else self._own_id if lasts else uuid4().hex)
        if run is None or not lasts or run.ids.run_id != run_id:
            run = self._traced(run_id, description, journal)
            metrics = self._metrics(description, scheduler)
            others = [each for each in recorder.listeners if each is not self._run and each is not metrics]
            recorder.listeners = (*others, run) if metrics is None else (*others, metrics, run)
        if lasts:
            self._run = run
        try:
            yield run.ids
        finally:
            if times is None:
                run.end()
            else:
                times(run.times.own)
            if not lasts:
                run.close()

    def _traced(self, run_id: str, description: Mapping[str, Any], journal: Journal | None) -> TracedRun:
        """Return what listens to the trajectories of a run."""
        maker = maker_of(self.tracing, run_id, description, None if journal is None else journal.path.absolute().parent)

        def history(trajectory_id: str) -> list[AnyEvent]:
            assert journal is not None
            journal.flush()
            return events(journal.path, trajectory_id)

        book: SpanBook | RemoteBook
        if self._own is not None:
            book = SpanBook(maker, self._own.on_end)
        else:
            if self._process is None:
                settings = {"tracing": self.tracing.model_dump(mode="json"), "answers_within": ANSWERS_WITHIN}
                self._process = SpanProcess("fsm_rollout.report.tracer:serve", settings)
            book = self._process.book(maker)
        return TracedRun(maker.ids, book, None if journal is None else history)

    def _metrics(self, description: Mapping[str, Any], scheduler: SchedulerOrders) -> RunMetrics | None:
        """Return what listens to all trajectories, traced or not; ``None``: nobody takes metrics."""
        spans, to = self._process, self.tracing.destination(checked=False).metrics
        if self._meter is None and spans is not None and to is not None:
            headers = {**self.tracing.destination().headers}
            exporter = OTLPMetricExporter(to or None, headers=headers or None, timeout=_seconds("METRICS"))
            heard = RunMetrics(description, partial(running_of, scheduler), rewarded=scheduler.rewarded)
            self._meter = Meter(heard, exporter, _resource(self.tracing), lambda: spans.is_down)
        return None if self._meter is None else self._meter.metrics

    async def aclose(self) -> None:
        """Send what is left, and end. Safe to call twice."""
        run, self._run = self._run, None
        if run is not None:
            run.close()
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        if self._own is not None:
            self._own.shutdown()  # type: ignore[no-untyped-call]
        if self._process is not None:
            self._process.close()
        meter, self._meter = self._meter, None
        if meter is not None:
            meter.close()


def serve(descriptor: int) -> None:
    """Be the process that makes and sends the spans of a run; entry of :class:`SpanProcess`."""
    global ANSWERS_WITHIN
    with Connection(descriptor) as connection:
        settings = msgspec.msgpack.decode(connection.recv_bytes())
        ANSWERS_WITHIN = settings["answers_within"]
        exporter = _WhileItAnswers(*exporter_of(Tracing(**settings["tracing"])), partial(say, connection))
        batches = _batches_for(exporter)
        keep_books(connection, batches.on_end)
        batches.shutdown()  # type: ignore[no-untyped-call]
        say(connection, "ended")


def _batches_for(exporter: SpanExporter) -> BatchSpanProcessor:
    return BatchSpanProcessor(exporter, max_queue_size=None if "OTEL_BSP_MAX_QUEUE_SIZE" in os.environ else QUEUE)


def exporter_of(tracing: Tracing, *, later: bool = False) -> tuple[SpanExporter, str]:
    """Return what sends spans, and where to; ``later``: those of a whole run, in one go.

    Raises:
        ConfigError: nothing says where, or a package is not installed.
    """
    to = _checked(tracing)
    if to.trackio is None:
        exporter = OTLPSpanExporter(to.endpoint or None, headers={**to.headers} or None, timeout=_seconds("TRACES"))
        return exporter, to.endpoint or "its collector"
    return SpansToTrackio(to.trackio, to.endpoint or None, later=later), f"trackio's project '{to.trackio}'"


def _checked(tracing: Tracing) -> Destination:
    """Return where spans go, once what is wrong with it was said."""
    to = tracing.destination()
    if to.trackio is not None and find_spec("trackio") is None:
        raise ConfigError("tracing: trackio is not installed: pip install trackio")
    return to


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
    """Listens to the trajectories of one run, and leaves out those that are not traced.

    Args:
        ids: how its spans are called.
        book: makes them.
        history: what is known of a trajectory that another process has begun, its latest event the last; ``None``:
            there is none such.
    """

    def __init__(self, ids: TraceIds, book: SpanBook | RemoteBook, history: History | None = None) -> None:
        self.ids = ids
        self._book, self._history = book, history
        self.times = RunTimes()
        """When it was."""
        self._known: set[str] = set()
        self._ended: dict[str, None] = {}  # those that have, the earliest first

    def hearer(self, kind: type[AnyEvent]) -> Listener:
        """Return what hears events of a kind."""
        return self if kind in _OF_THE_RUN else self._within

    def _within(self, trajectory: Trajectory, event: AnyEvent) -> None:
        """Take in an event of a trajectory that neither begins nor ends with it."""
        if trajectory.trajectory_id in self._known:
            self._book.take(trajectory.trajectory_id, event)

    def __call__(self, trajectory: Trajectory, event: AnyEvent) -> None:
        """Take in an event that was recorded."""
        kind, trajectory_id = type(event), trajectory.trajectory_id
        known = trajectory_id in self._known
        if kind in _OF_THE_RUN:
            self.times.take(trajectory_id, event)
            if not known:
                known = self._begun(trajectory, event)
            elif kind is Ended:
                self._ended[trajectory_id] = None
                if len(self._ended) > LATER:
                    oldest = next(iter(self._ended))
                    del self._ended[oldest]
                    self._known.remove(oldest)
                    self._book.forget(oldest)
        if known:
            self._book.take(trajectory_id, event)

    def _begun(self, trajectory: Trajectory, event: AnyEvent) -> bool:
        """Say whether a trajectory is traced that begins or, begun by another process, goes on."""
        kind, trajectory_id = type(event), trajectory.trajectory_id
        if kind is not Prompted and (self._history is None or kind is not Resumed):
            return False
        trace_id = self.ids.trace(root_of(trajectory.group_id, trajectory_id))
        if not self.ids.sampled(trace_id) or not self._book.takes_more():
            return False
        self._known.add(trajectory_id)
        if kind is Resumed:
            assert self._history is not None
            for earlier in self._history(trajectory_id)[:-1]:
                # Of these the earlier process has sent the spans, but for those of a death.
                died = isinstance(earlier, Suspended) and earlier.reason == DIED
                self._book.take(trajectory_id, earlier, sends=died)
        return True

    def timed(self, shard: int, times: Times) -> None:
        """Hear when the run was in a shard, which sends the spans of its trajectories itself."""
        self.times.elsewhere[shard] = times

    def end(self) -> None:
        """End the present run: its own span, or those of its steps, as they stand."""
        for times in self.times.each():
            self._book.run(*times)

    def close(self) -> None:
        """End what is still open, as far as it has come."""
        self._book.close()
        self._known.clear()


_OF_THE_RUN = frozenset({Prompted, Resumed, Suspended, Ended})


class _WhileItAnswers(SpanExporter):
    """Sends spans to a collector; one that does not answer is named once, and left alone for a while.

    ``say`` is told so: ``warning`` and a text, ``down`` and for how many seconds.
    """

    def __init__(self, exporter: SpanExporter, endpoint: str, say: Callable[..., None]) -> None:
        self._exporter, self._endpoint, self._say = Silent(exporter), endpoint, say
        self._until, self._warned = 0.0, False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send some spans."""
        if time.monotonic() < self._until:
            return SpanExportResult.FAILURE
        if self._exporter.sends(spans):
            return SpanExportResult.SUCCESS
        self._until = time.monotonic() + PAUSE
        self._say("down", PAUSE)
        if not self._warned:
            self._warned = True
            self._say(
                "warning",
                f"no spans reach {self._endpoint} ({self._exporter.why}); the run goes on without them, and "
                "`fsm-rollout export RUN --format otlp` sends them later",
            )
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        """Close the connection."""
        self._exporter.shutdown()
