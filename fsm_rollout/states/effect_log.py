"""What an interrupted visit had done, so that its handler can run again from its start without doing it twice.

Invariant: each recorded event is handed out once, to the operation that would record the same thing again, in the
order of recording. So a handler whose steps follow from the trajectory and the visit's ``rng`` comes, after a
suspension or a crash, to where it was: what it generated, wrote, called, asked and spent is there already.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from fsm_rollout.trajectory.events import (
    AnyEvent,
    Called,
    ContextOpened,
    Event,
    Generated,
    LimitCharged,
    MessagesAppended,
    ModelQueried,
    Scored,
    UserReplied,
)

E = TypeVar("E", bound=Event)

_KEYS: Mapping[type[Event], Callable[[Any], object]] = {
    ContextOpened: lambda event: event.context,
    MessagesAppended: lambda event: event.context,
    Generated: lambda event: event.context,
    Called: lambda event: event.id,
    ModelQueried: lambda event: (event.engine, event.index),
    UserReplied: lambda event: event.context,
    LimitCharged: lambda event: event.limit,
    Scored: lambda event: event.turn,
}


class EffectLog:
    """The events of one visit, from before it was interrupted. Empty for a visit that was not."""

    __slots__ = ("_not_taken",)

    def __init__(self, events: Iterable[AnyEvent]) -> None:
        self._not_taken: dict[tuple[type, Any], deque[Any]] = defaultdict(deque)
        for event in events:
            if type(event) in _KEYS and not getattr(event, "instead_of_glue", False):
                self._not_taken[type(event), _KEYS[type(event)](event)].append(event)

    def take(self, kind: type[E], key: object) -> E | None:
        """Return the next event of that kind about ``key`` (context, call, engine, limit or turn), if there is one."""
        events = self._not_taken.get((kind, key)) if self._not_taken else None
        return events.popleft() if events else None

    def turns_ahead(self) -> int:
        """Return how many turns are recorded that the handler, beginning again, has not asked for yet."""
        ahead = (event for (kind, _), events in self._not_taken.items() if kind is Generated for event in events)
        return sum(not event.resumed for event in ahead)
