"""What an interrupted visit had done, so that its handler can run again from its start without doing it twice.

Invariant: each recorded event is handed out once, to the operation that would record the same thing again, in the
order of recording. So after a suspension or a crash, a handler whose steps depend only on the trajectory and the
visit's ``rng`` gets back to where it was: its generations, messages, calls, questions and charges are not repeated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, TypeVar

from fsm_rollout.trajectory import events
from fsm_rollout.trajectory.events import AnyEvent, Event, Generated

E = TypeVar("E", bound=Event)

# The key under which an operation finds its recorded event.
_KEYS: Mapping[type[Event], Callable[[AnyEvent], object]] = {
    **dict.fromkeys(
        (events.ContextOpened, events.MessagesAppended, events.Generated, events.UserReplied), attrgetter("context")
    ),
    events.Called: attrgetter("id"),
    events.ModelQueried: attrgetter("engine", "index"),
    events.LimitCharged: attrgetter("limit"),
    events.Scored: attrgetter("turn"),
}


class EffectLog(dict[tuple[type, object], deque[Any]]):
    """The events of one visit, from before it was interrupted. Empty for a visit that was not."""

    def __init__(self, recorded: Iterable[AnyEvent]) -> None:
        super().__init__()
        for event in recorded:
            if type(event) in _KEYS and not getattr(event, "instead_of_glue", False):
                self.setdefault((type(event), _KEYS[type(event)](event)), deque()).append(event)

    def take(self, kind: type[E], key: object) -> E | None:
        """Return the next event of that kind about ``key`` (context, call, engine, limit or turn), or ``None``."""
        recorded = self.get((kind, key))
        return recorded.popleft() if recorded else None

    def turns_ahead(self) -> int:
        """Return how many recorded turns the handler, which began again, has not asked for yet."""
        turns = (queue for (kind, _), queue in self.items() if kind is Generated)
        return sum(not event.resumed for queue in turns for event in queue)


NO_EFFECTS = EffectLog(())  # of all visits that were not interrupted


class Replayed:
    """What tools, users and judges answered in the recorded run that is being replayed."""

    __slots__ = ("by_agents", "effects")

    def __init__(self, recorded: Iterable[AnyEvent]) -> None:
        recorded = list(recorded)
        # The calls that sub-agents answered; those are replayed as trajectories of their own.
        self.by_agents = frozenset(e.id for e in recorded if isinstance(e, events.Called) and e.child_id is not None)
        kinds = (events.Called, events.UserReplied, events.ModelQueried)
        self.effects = EffectLog(event for event in recorded if isinstance(event, kinds))
