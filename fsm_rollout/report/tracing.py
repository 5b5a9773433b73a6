"""Whether a rollout is traced, and by whom: OpenTelemetry is loaded only where it is.

Invariant: where nothing asks for spans, nothing here listens to anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from fsm_rollout.concurrency.loop_lag import LoopLag
from fsm_rollout.errors import ConfigError
from fsm_rollout.report.readers import Tracing, tracing_of
from fsm_rollout.report.running import running_of
from fsm_rollout.scheduler.orders import SchedulerOrders
from fsm_rollout.trajectory.trace_ids import TraceIds

if TYPE_CHECKING:
    from fsm_rollout.report.telemetry import Times
    from fsm_rollout.report.tracer import TracedRun, Tracer

    TracingLike = Tracing | Tracer | Mapping[str, object] | str | bool | None

logger = logging.getLogger(__name__)

MISSING = "tracing needs OpenTelemetry's SDK: pip install 'fsm-rollout[otel]'"


class RolloutTracing:
    """The tracing of one rollout that is traced."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer: Tracer | None = tracer
        self._own_id = uuid4().hex  # of runs without a journal
        self._run: TracedRun | None = None

    @classmethod
    def of(cls, tracing: TracingLike) -> RolloutTracing | None:
        """Return the tracing that a rollout is given; ``None``: nobody traces it.

        Args:
            tracing: settings, as in a run YAML; a :class:`~fsm_rollout.report.tracer.Tracer`; ``False``: none;
                ``None``: what OpenTelemetry's variables say, if anything.

        Raises:
            ConfigError: the settings are wrong, or OpenTelemetry is not installed.
        """
        is_setting = tracing is None or isinstance(tracing, Tracing | Mapping | str | bool)
        settings = tracing_of(tracing) if is_setting else None
        if is_setting and settings is None:
            return None
        try:
            from fsm_rollout.report.tracer import Tracer
        except ImportError as error:
            if tracing is None:
                logger.warning("OTEL_EXPORTER_OTLP_ENDPOINT is set, and %s", MISSING)
                return None
            raise ConfigError(MISSING) from error
        if settings is not None:
            return cls(Tracer(settings))
        if not isinstance(tracing, Tracer):
            raise ConfigError(f"tracing: got {tracing!r}; give a mapping: {{'endpoint': 'http://127.0.0.1:4318'}}")
        return cls(tracing)

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
        assert self._tracer is not None
        scheduler.lag = scheduler.lag or LoopLag()
        recorder, run = scheduler.recorder, self._run
        journal = recorder.journal
        run_id = run_id or (journal.run_id if journal is not None else self._own_id if lasts else uuid4().hex)
        if run is None or not lasts or run.ids.run_id != run_id:
            run = self._tracer.of_run(run_id, description, journal)
            running = partial(running_of, scheduler)
            metrics = self._tracer.metrics_of(description, running, rewarded=scheduler.rewarded)
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

    async def aclose(self) -> None:
        """Send what is left. Safe to call twice."""
        if self._run is not None:
            self._run.close()
        tracer, self._tracer = self._tracer, None
        if tracer is not None:
            await asyncio.to_thread(tracer.close)
