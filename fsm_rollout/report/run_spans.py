"""What the spans of one run have in common, and the run's own.

Invariant: the same while the run goes on, in each of its processes, and later from its journal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai
from opentelemetry.trace import SpanContext, TraceFlags

from fsm_rollout import __version__
from fsm_rollout.report.metrics import names_of_engines
from fsm_rollout.trajectory import events
from fsm_rollout.trajectory.events import AnyEvent
from fsm_rollout.trajectory.trace_ids import TraceIds

Content = Literal["none", "text", "tokens"]
Attributes = dict[str, Any]  # as spans have them: texts, numbers, sequences of such

SCOPE = InstrumentationScope("fsm_rollout", __version__)
SAMPLED = TraceFlags(TraceFlags.SAMPLED)


@dataclass(frozen=True)
class SpanMaker:
    """Makes the spans of one run."""

    ids: TraceIds
    resource: Resource
    name: str
    """The run's, as `experiment_name`."""
    models: Mapping[str, str]
    """The model of each engine."""
    kinds: Mapping[str, str]
    """The kind of each engine, as `gen_ai.provider.name`."""
    content: Content

    @classmethod
    def of(
        cls, ids: TraceIds, resource: Resource, name: str, description: Mapping[str, Any], content: Content = "none"
    ) -> SpanMaker:
        """Return what makes the spans of a run that the journal describes so."""
        return cls(ids, resource, name, *names_of_engines(description), content)

    def said(self) -> tuple[object, ...]:
        """Return it as plain data, for :meth:`told`."""
        ids, resource = self.ids, dict(self.resource.attributes)
        return ids.run_id, ids.share, resource, self.name, self.models, self.kinds, self.content

    @classmethod
    def told(cls, run_id: str, share: float, resource: Attributes, *rest: Any) -> SpanMaker:
        """Return what another process has said of one."""
        return cls(TraceIds(run_id, share), Resource(resource), *rest)

    def run_context(self, step: int | None) -> SpanContext:
        """Return where the run's own span is, or that of a training step of it."""
        return SpanContext(self.ids.trace(""), self.ids.span("", f"run/{step}"), False, SAMPLED)

    def run_span(self, step: int | None, start: float, end: float, trajectories: int) -> ReadableSpan:
        """Return the span of the run, or of a training step of it; times are seconds since 1970."""
        attributes = {
            gen_ai.GEN_AI_OPERATION_NAME: "invoke_workflow",
            "gen_ai.workflow.name": self.name,
            "fsm_rollout.trajectories": trajectories,
            **self.of_run(step),
        }
        return self.make(f"invoke_workflow {self.name}", self.run_context(step), None, attributes, (start, end))

    def of_run(self, step: int | None) -> Attributes:
        """Return what is said of the run with each trajectory."""
        said: Attributes = {"experiment_name": self.name, "fsm_rollout.run_id": self.ids.run_id}
        return said if step is None else said | {"step": step}

    def make(
        self, name: str, context: SpanContext, parent: SpanContext | None, attributes: Attributes,
        times: tuple[float, float], **more: Any,
    ) -> ReadableSpan:  # fmt: skip
        """Make a span; times are seconds since 1970."""
        # Not by a tracer, which gives ids of its own and the present time, and takes five times as long.
        start, end = times
        return ReadableSpan(
            name, context, parent, self.resource, attributes, instrumentation_scope=SCOPE,
            start_time=int(start * 1e9), end_time=int(end * 1e9), **more,
        )  # fmt: skip


Times = dict[int | None, tuple[float, float, int]]  # by step: start, end, and how many trajectories began in it


class RunTimes:
    """When a run, or each training step of it, began and ended: that of its trajectories, as far as they were heard."""

    def __init__(self) -> None:
        self.own: Times = {}
        """As heard here."""
        self.elsewhere: dict[int, Times] = {}
        """As heard in shards, by their numbers."""
        self._open: dict[str, tuple[int | None, float]] = {}  # of trajectories: the step, and their clock's zero

    def take(self, trajectory_id: str, event: AnyEvent) -> None:
        """Take in an event of a trajectory."""
        kind = type(event)
        if isinstance(event, events.Prompted | events.Resumed):
            self._open[trajectory_id] = event.step, event.epoch - event.at
            start, end, count = self.own.get(event.step, (event.epoch, event.epoch, 0))
            count += kind is events.Prompted
            self.own[event.step] = min(start, event.epoch), max(end, event.epoch), count
        elif (kind is events.Ended or kind is events.Suspended) and trajectory_id in self._open:
            step, zero = self._open.pop(trajectory_id)
            start, end, count = self.own[step]
            self.own[step] = start, max(end, event.at + zero), count

    def each(self) -> Iterator[tuple[int | None, float, float, int]]:
        """Yield the step of the run, or of each of its parts, its start and end, and how many trajectories began."""
        found: dict[int | None, list[tuple[float, float, int]]] = {}
        for times in (self.own, *self.elsewhere.values()):
            for step, time in times.items():
                found.setdefault(step, []).append(time)
        for step, each in found.items():
            starts, ends, counts = zip(*each, strict=True)
            yield step, min(starts), max(ends), sum(counts)

    def spans(self, maker: SpanMaker) -> Iterator[ReadableSpan]:
        """Yield the run's span, or those of its steps."""
        for times in self.each():
            yield maker.run_span(*times)
