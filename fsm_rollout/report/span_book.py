"""The trajectories of a run whose spans are made while it goes on.

Invariant: spans leave in the order in which they end, and those of a trajectory are what its events say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fsm_rollout.report.telemetry import SpanMaker, TracedTrajectory
from fsm_rollout.trajectory.events import AnyEvent, Prompted

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan


class SpanBook:
    """Makes the spans of a run's trajectories as their events come; ``on_end`` takes them."""

    def __init__(self, maker: SpanMaker, on_end: Callable[[ReadableSpan], None]) -> None:
        self._maker, self._on_end = maker, on_end
        self._known: dict[str, TracedTrajectory] = {}

    def takes_more(self) -> bool:
        """Say whether another trajectory may begin in it."""
        return True

    def take(self, trajectory_id: str, event: AnyEvent, *, sends: bool = True) -> None:
        """Take in the next event of a trajectory; ``sends``: the spans that end with it are wanted."""
        traced = self._known.get(trajectory_id)
        if traced is not None:
            made = traced.take(event)
            if sends:
                for span in made:
                    self._on_end(span)
        elif isinstance(event, Prompted):
            self._known[trajectory_id] = self._maker.begin(event)

    def forget(self, trajectory_id: str) -> None:
        """Take in no more of a trajectory."""
        del self._known[trajectory_id]

    def run(self, step: int | None, start: float, end: float, trajectories: int) -> None:
        """Make the span of the run, or of a training step of it."""
        self._on_end(self._maker.run_span(step, start, end, trajectories))

    def close(self) -> None:
        """End what is still open, as far as it has come."""
        for traced in self._known.values():
            for span in traced.rest():
                self._on_end(span)
        self._known.clear()
