"""The ids of spans, and the span that code of the user's runs in.

Invariant: an id follows from the run's id, the trajectory's and the span's own name in it, and from nothing else. So
whoever traces live, whoever does so later from the journal, a worker process and a run that goes on after a crash all
speak of the same spans; and whether a trajectory is traced at all is known to each of them without asking.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from fsm_rollout.trajectory.events import Called, Resumed

if TYPE_CHECKING:
    from opentelemetry.trace import Span

T = TypeVar("T")

_HALF = 2**64  # the lower half of a trace's id decides whether it is sampled, as in OpenTelemetry's TraceIdRatioBased

# The W3C `traceparent` of the span that the present code runs in; empty: there is none.
traceparent: ContextVar[str] = ContextVar("traceparent", default="")


@dataclass(frozen=True, slots=True)
class TraceIds:
    """How the spans of one run are called."""

    run_id: str
    share: float = 1.0
    """The share of trajectories that are traced, each with its sub-agents'."""

    def trace(self, root: str) -> int:
        """Return the id of a sample's trace, or (with an empty ``root``) of the run's own."""
        return _number(f"{self.run_id}|{root}", 16)

    def span(self, trajectory_id: str, key: str) -> int:
        """Return the id of a trajectory's span; its key is what :mod:`fsm_rollout.report.telemetry` calls it."""
        return _number(f"{self.run_id}|{trajectory_id}|{key}", 8)

    def sampled(self, trace_id: int) -> bool:
        """Say whether a trace is one of those that are recorded."""
        return trace_id % _HALF < self.share * _HALF

    def of(self, group_id: str, trajectory_id: str) -> TrajectoryTrace:
        """Return the names of one trajectory's spans."""
        trace_id = self.trace(root_of(group_id, trajectory_id))
        unrecorded = "" if self.sampled(trace_id) else _unrecorded(self.run_id)
        return TrajectoryTrace(self, trajectory_id, trace_id, unrecorded)


class TrajectoryTrace(NamedTuple):  # quickly made: each trajectory has one, also those that are not recorded
    """How the spans of one trajectory are called."""

    ids: TraceIds
    trajectory_id: str
    trace_id: int
    unrecorded: str  # the `traceparent` of all its spans, if they are not recorded; else empty

    def parent(self, key: str) -> str:
        """Return the W3C ``traceparent`` of a span of it, for what runs within that."""
        return self.unrecorded or f"00-{self.trace_id:032x}-{self.ids.span(self.trajectory_id, key):016x}-01"

    def of_try(self, call_id: str, before: int, number: int) -> str:
        """Return that of a try of a call, of which so many tries were made before."""
        return self.parent(try_key(call_id, before + number))


@dataclass(frozen=True, slots=True)
class RunNow:
    """What the trajectories of the present run are told of it, in each process the same."""

    epoch: float = 0.0
    """What the scheduler's clock has to be added to for seconds since 1970."""
    step: int | None = None
    """The training step that the run belongs to."""
    trace: TraceIds | None = None
    """How its spans are called; ``None``: nobody traces it."""

    def resumed(self, at: float, away: float, weight_version: int = 0) -> Resumed:
        """Return the event of a trajectory that goes on in it."""
        return Resumed(at=at, away=away, weight_version=weight_version, epoch=self.epoch + at, step=self.step)


NO_RUN = RunNow()  # of trajectories outside of any


@lru_cache(maxsize=16)
def _unrecorded(run_id: str) -> str:
    """Return the `traceparent` of what is not recorded in a run: one for all, as any id will do for a parent."""
    trace_id = TraceIds(run_id).trace("")
    return f"00-{trace_id:032x}-{trace_id % _HALF or 1:016x}-00"


def root_of(group_id: str, trajectory_id: str) -> str:
    """Return the id of the sample that a trajectory serves: its own, or that of whoever called the sub-agent first."""
    return f"{group_id}/{trajectory_id.removeprefix(f'{group_id}/').partition('/')[0]}"


def tries_before(called: Iterable[Called], call_id: str) -> int:
    """Return how often a call was tried, by calls of it that have come to their end."""
    return sum(max(1, call.tries) for call in called if call.id == call_id)


def try_key(call_id: str, number: int) -> str:
    """Return the key of a try of a call: of all that were made of it, the one with that number, from 1."""
    return f"tool/{call_id}/{number}"


def visit_key(visit: int, part: int) -> str:
    """Return the key of a visit, or of what a part of the trajectory has of it; both are counted from 0."""
    return f"visit/{visit}/{part}"


def reply_key(visit: int, number: int) -> str:
    """Return the key of a reply of the user: that of a visit with that number, from 0."""
    return f"user/{visit}/{number}"


def _number(name: str, size: int) -> int:
    """Return a number of so many bytes that is not 0, which is no id."""
    return int.from_bytes(blake2b(name.encode(), digest_size=size).digest(), "big") or 1


async def within(parent: str, work: Awaitable[T]) -> T:
    """Await work in a span, so that OpenTelemetry's in the same process, and what is sent elsewhere, know of it."""
    with inside(parent):
        return await work


class inside:  # noqa: N801  # used as a function
    """Runs code in the span of a ``traceparent`` (empty: in none); what it begins of its own is below that one."""

    __slots__ = ("_attached", "_parent", "_token")

    def __init__(self, parent: str) -> None:
        self._parent = parent

    def __enter__(self) -> None:
        if self._parent:
            self._token, library = traceparent.set(self._parent), _opentelemetry()
            if library is not None:
                self._attached = library.attach(library.within(_span_of(self._parent)))

    def __exit__(self, *_: object) -> None:
        if self._parent:
            library = _opentelemetry()
            if library is not None:
                library.detach(self._attached)
            traceparent.reset(self._token)


class _Library(NamedTuple):
    """What of OpenTelemetry makes a span the present one."""

    attach: Callable[[Any], Any]
    detach: Callable[[Any], None]
    within: Callable[[Span], Any]


@cache
def _opentelemetry() -> _Library | None:
    """Return it, if it is here; else no code here can begin a span."""
    try:
        from opentelemetry import context, trace
    except ImportError:
        return None
    return _Library(context.attach, context.detach, trace.set_span_in_context)


@lru_cache(maxsize=64)  # all tries of what is not recorded run in one
def _span_of(parent: str) -> Span:
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

    _, trace_id, span_id, flags = parent.split("-")
    return NonRecordingSpan(SpanContext(int(trace_id, 16), int(span_id, 16), True, TraceFlags(int(flags, 16))))
