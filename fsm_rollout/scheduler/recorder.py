"""Where the events of all trajectories go: into the journal, to the listeners, to the watch for stalls.

Invariant: an event is in the journal before a listener hears of it; a listener that raises is logged and harms nobody.
A run that stands still says in the log which trajectories wait, in which state, and for which request, call or reply;
nothing is decided by that: limits and timeouts end what takes too long.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from fsm_rollout.engines.client import EngineClient
from fsm_rollout.scheduler.group import Group, GroupState
from fsm_rollout.scheduler.run_state import GroupTable
from fsm_rollout.states.active_trajectory import ActiveTrajectory
from fsm_rollout.trajectory.enums import LimitName
from fsm_rollout.trajectory.events import AnyEvent, CallBegun
from fsm_rollout.trajectory.journal import Journal, blob, run_journal
from fsm_rollout.trajectory.trajectory import Trajectory

logger = logging.getLogger(__name__)

MOST_NAMED = 8  # so many waits are named in the log

Listener = Callable[[Trajectory, AnyEvent], None]


@runtime_checkable
class SelectiveListener(Protocol):
    """A listener that does not hear all events: a call that it does not need costs nothing."""

    def hearer(self, kind: type[AnyEvent]) -> Listener | None:
        """Return what hears events of a kind; ``None``: nobody does."""

    def __call__(self, trajectory: Trajectory, event: AnyEvent) -> None:
        """Hear an event of any kind."""


@runtime_checkable
class CountsListener(Protocol):
    """A listener that shards tell how far they are, as their events stay with them."""

    def counted(self, shard: int, states: Mapping[str, int], done: int, tokens: int) -> None:
        """Hear how many samples of a shard are in which state, how many have ended, and what was sampled."""


@runtime_checkable
class TimesListener(Protocol):
    """A listener that shards tell when a run was under way in them."""

    def timed(self, shard: int, times: Any) -> None:
        """Hear it, by step."""


class Recorder:
    """Records events, for a scheduler."""

    def __init__(self, journal: Journal | None, listeners: Sequence[Listener]) -> None:
        self.journal = journal
        self._watch: Callable[[], object] | None = None  # begins to watch again after a silence that was told
        self.listeners = listeners

    @property
    def listeners(self) -> tuple[Listener, ...]:
        """Who hears what is recorded, in this order."""
        return self._listeners

    @listeners.setter
    def listeners(self, listeners: Sequence[Listener]) -> None:
        self._listeners = tuple(listeners)
        self._hearers: dict[type[AnyEvent], list[Listener]] = {}  # by kinds of events, as far as any was recorded
        self._see_who_hears()

    def _see_who_hears(self) -> None:
        self.hears = bool(self._listeners) or self._watch is not None

    def _hearers_of(self, kind: type[AnyEvent]) -> list[Listener]:
        each = [one.hearer(kind) if isinstance(one, SelectiveListener) else one for one in self._listeners]
        hearers = self._hearers[kind] = [hearer for hearer in each if hearer is not None]
        return hearers

    def keep(self, data: bytes) -> str:
        """Keep bytes in the journal and return their name."""
        assert self.journal is not None
        return self.journal.keep(data)

    def kept(self, name: str) -> bytes:
        """Return bytes that the journal keeps; JournalError if it does not, or they are damaged."""
        assert self.journal is not None
        self.journal.flush()
        return blob(run_journal(self.journal.path), name)  # a shard that died may have kept them, in its own

    @contextmanager
    def watched(self, seconds: float, groups: GroupTable, clients: Mapping[str, EngineClient]) -> Iterator[None]:
        """Log what a run waits for when nothing has happened in it for so many seconds (seen up to as many later).

        Each silence is told once; the next event ends it.
        """
        loop = asyncio.get_running_loop()
        timer = loop.call_later(seconds, lambda: look())
        before: dict[str, float] = {}  # when the latest event of each trajectory under way had come, at the last look

        def watch() -> None:
            nonlocal timer
            timer, self._watch = loop.call_later(seconds, look), None
            self._see_who_hears()

        def look() -> None:
            nonlocal before
            now = {t.trajectory_id: t.latest_at for group in groups.under_way for t in group.all}
            if now != before:
                before = now
                watch()
                return
            if now and (waits := waits_of(groups.under_way, clients, loop.time())):
                more = f"; and {len(waits) - MOST_NAMED:,} more" if len(waits) > MOST_NAMED else ""
                named = "; ".join(waits[:MOST_NAMED])
                logger.warning("nothing has happened for %g s; waiting for: %s%s", seconds, named, more)
            self._watch = watch
            self._see_who_hears()

        try:
            yield
        finally:
            timer.cancel()
            if self._watch is not None:
                self._watch = None
                self._see_who_hears()

    def record(self, trajectory: Trajectory, event: AnyEvent, payload: bytes | None = None) -> None:
        """Record an event that was applied to a trajectory; ``payload`` is its encoding, if that is known."""
        if self.journal is not None:
            self.journal.append(trajectory.trajectory_id, event, payload)
            if isinstance(event, CallBegun):
                self.journal.persist()  # this call must not be made twice, so a resumed run has to know of it
        if self._watch is not None:
            self._watch()
        kind = type(event)
        hearers = self._hearers.get(kind)
        if hearers is None:
            hearers = self._hearers_of(kind)
        for hearer in hearers:
            try:
                hearer(trajectory, event)
            except Exception:  # the user's code
                logger.exception("an event listener failed on %s of %s", type(event).__name__, trajectory.trajectory_id)


def waits_of(groups: Iterable[Group], clients: Mapping[str, EngineClient], now: float) -> list[str]:
    """Return what the trajectories of some groups wait for, the longest wait first."""
    waits: list[tuple[float, str]] = []
    for group in groups:
        if group.state is GroupState.SCORING:
            waits.append((0.0, f"the reward or the filter of group {group.group_id}"))
        for live in group.active.values():
            trajectory = live.trajectory
            if not trajectory.ended and trajectory.suspended is None:
                state, since = trajectory.state, trajectory.latest_at
                waits += [
                    (since, f"{trajectory.trajectory_id} in {state} for {now - since:.0f} s: {what}")
                    for what in _waits_of(live, clients)
                ]
    held = [f"engine '{name}' to be resumed: it is paused" for name, client in clients.items() if client.pool.paused]
    return [*held, *(wait for _, wait in sorted(waits))]


def _waits_of(live: ActiveTrajectory, clients: Mapping[str, EngineClient]) -> Iterator[str]:
    """Yield what one trajectory waits for."""
    trajectory, found = live.trajectory, False
    for name, client in clients.items():
        for pending in client.waits_of(trajectory.trajectory_id):
            found = True
            begun = "not admitted yet" if pending.admitted_at is None else f"{len(pending.ids)} tokens so far"
            at = f" at {pending.replica}" if pending.replica else ""
            yield f"request {pending.request_id} of engine '{name}'{at} (try {pending.attempt}, {begun})"
    for call_id, tool in live.tools.under_way.items():
        found = True
        yield f"call {call_id} of tool '{tool}'"
    if not found:
        spends = live.agent.machine.spends.get(trajectory.state)
        yield "the user's reply" if spends == LimitName.USER_TURNS else "its handler"
