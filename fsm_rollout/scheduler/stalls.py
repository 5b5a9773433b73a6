"""Saying what a run waits for, when nothing has happened in it for a long time.

Invariant: nothing is decided here; limits and timeouts end what takes too long. Whoever looks at a run that stands
still reads in the log which trajectories wait, in which state, and for which request, call or reply.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

from fsm_rollout.engines.client import EngineClient
from fsm_rollout.scheduler.group import Group, GroupState
from fsm_rollout.states.active_trajectory import ActiveTrajectory
from fsm_rollout.trajectory.enums import LimitName

logger = logging.getLogger(__name__)

MOST = 8  # so many waits are named


class StallWatch:
    """Logs what is waited for, once for each silence of ``seconds`` (seen up to as many seconds later).

    Args:
        seconds: how long nothing may happen.
        waits: says what is waited for, the longest wait first; nothing if the run waits for nobody.
    """

    def __init__(self, seconds: float, waits: Callable[[], Sequence[str]]) -> None:
        self._seconds = seconds
        self._waits = waits
        self._heard = False  # whether anything has happened since the timer was set
        self._timer: asyncio.TimerHandle | None = None

    def event(self) -> None:
        """Note that something has happened."""
        self._heard = True
        if self._timer is None:
            self._set()

    def stop(self) -> None:
        """Watch no longer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self) -> None:
        self._heard = False
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._heard:
            self._set()
        elif waits := self._waits():
            more = f"; and {len(waits) - MOST:,} more" if len(waits) > MOST else ""
            named = "; ".join(waits[:MOST])
            logger.warning("nothing has happened for %g s; waiting for: %s%s", self._seconds, named, more)


def waits_of(groups: Sequence[Group], clients: Mapping[str, EngineClient], now: float) -> list[str]:
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
    held = [f"engine '{name}' to be resumed: it is paused" for name, client in clients.items() if client.paused]
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
