"""Which replica a request goes to: a pure policy, without I/O and without a clock.

Invariant of :class:`StickyRouter`, the bound B: a request is put on a replica, or left waiting for it, only while that
replica has at most ``spread`` requests more than the least busy replica with room, plus a quarter of what that one has.
So no replica idles while more than ``spread`` requests queue for another. Within the bound requests stay where their
prefix is cached: those of a session on the replica of the session, the first ones of a group on one replica together.

A router of one's own is a class with :meth:`Router.choose`, named by ``engine: {router: "module:Class"}``.
"""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fsm_rollout.engines.protocol import Load, Request
from fsm_rollout.errors import EngineError

# Requests sent to a replica that has not yet said how many it runs at once; also the least step of its growth.
FIRST = 32


@dataclass(eq=False, slots=True)
class ReplicaView:
    """What a router may know of a replica that is up."""

    name: str
    in_flight: int = 0  # requests that it has and has not finished
    waiting: int = 0  # requests that the pool keeps back because this replica is full, counted as they are chosen
    allowed: int = FIRST  # how many it may have in flight
    pace: float = 0.0  # tokens per second and running request, lately; 0.0 while unknown

    @property
    def load(self) -> int:
        """Everything it has to do."""
        return self.in_flight + self.waiting

    @property
    def has_room(self) -> bool:
        """Whether a request sent to it now would leave at once."""
        return self.in_flight < self.allowed


V = TypeVar("V", bound=ReplicaView)


class Fleet(Sequence[V]):
    """Replicas in a fixed order, by name, and the least busy of them at hand.

    Invariant: it knows what they have to do as of when :meth:`changed` was last called for each. So a choice looks at
    numbers side by side and not at replicas, and costs as much with a thousand of them as with one.

    Args:
        replicas: they.
        loads: how much each has to do, and infinity where it has no room; default: they are asked.
    """

    def __init__(self, replicas: Sequence[V], loads: NDArray[np.float64] | None = None) -> None:
        self._replicas = replicas
        self.places = {replica.name: place for place, replica in enumerate(replicas)}
        own = (replica.in_flight + replica.waiting if replica.has_room else math.inf for replica in replicas)
        self._loads = np.fromiter(own, float) if loads is None else loads

    def __len__(self) -> int:
        return len(self._replicas)

    def __getitem__(self, place: Any) -> Any:
        return self._replicas[place]

    def changed(self, replica: V) -> None:
        """Learn that one of them has more or less to do, or may have."""
        room = replica.allowed - replica.in_flight
        self._loads[self.places[replica.name]] = replica.in_flight + replica.waiting if room > 0 else math.inf

    def named(self, name: str | None) -> V | None:
        """Return the one of that name, if it is there."""
        place = None if name is None else self.places.get(name)
        return None if place is None else self._replicas[place]

    @property
    def has_room(self) -> bool:
        """Whether any of them has."""
        return bool(np.isfinite(self._loads).any())

    @property
    def least(self) -> V:
        """The least busy with room, of equals the first."""
        return self._replicas[int(self._loads.argmin())]

    def among(self, which: NDArray[np.bool_]) -> Fleet[V]:
        """Return some of them, as they are now, by their places."""
        (places,) = which.nonzero()
        if len(places) == len(self._replicas):
            return self
        return Fleet([self._replicas[place] for place in places.tolist()], self._loads[places])


@runtime_checkable
class Router(Protocol):
    """Chooses replicas. It may remember what it chose; equal calls in equal order must give equal choices."""

    def choose(self, request: Request, replicas: Fleet[Any]) -> ReplicaView:
        """Return one of ``replicas``: those that are up, in a fixed order, at least one of them with room.

        When the chosen one has no room, the request waits and is asked for again when there is news.
        """


def choose(router: Router, request: Request, replicas: Fleet[V], avoids: str = "") -> V:
    """Return the replica that the router chooses, another than ``avoids`` if one has room.

    Raises:
        EngineError: ("RouterFailed") it fails, or returns none of them.
    """
    name = type(router).__name__
    if avoids:
        others = Fleet([replica for replica in replicas if replica.name != avoids])
        replicas = others if others.has_room else replicas
    try:
        chosen = router.choose(request, replicas)
    except Exception as error:  # a router may be the user's
        raise EngineError(f"router {name} failed: {type(error).__name__}: {error}", kind="RouterFailed") from error
    if isinstance(chosen, ReplicaView) and (view := replicas.named(chosen.name)) is chosen:
        return view
    hint = ""
    if inspect.iscoroutine(chosen):
        chosen.close()  # or Python warns that nobody awaited it
        hint = "; choose() is called, not awaited: drop its 'async'"
    raise EngineError(
        f"router {name} returned {chosen!r:.120}; choose() must return one of the replicas that it is given{hint}",
        kind="RouterFailed",
    )


def allowance(load: Load) -> int:
    """Return how many requests a replica that reports ``load`` may have in flight.

    One that runs all it has may get as many again; where requests queue already, only a few to take up slots that
    become free. So the queue inside a replica, which nothing can be taken from any more, stays short.
    """
    if load.waiting:
        return load.running + max(4, load.running // 4)
    return max(FIRST, 2 * load.running)


class StickyRouter:
    """See the module.

    Args:
        spread: the bound's constant part.
        memory: how many sessions and groups are remembered in all; the least recent ones are forgotten.
    """

    def __init__(self, spread: int = 16, memory: int = 131_072) -> None:
        self.spread = spread
        self.memory = memory
        # The replica of each session, and of each group's latest request.
        self._pins: OrderedDict[tuple[str, str], str] = OrderedDict()

    def choose(self, request: Request, replicas: Fleet[Any]) -> ReplicaView:
        """Return the replica of the request's session, else of its group, unless that breaks the bound."""
        least: ReplicaView = replicas.least
        keys = [("session", request.session)] if request.session else []
        keys += [("group", request.group_id)] if request.group_id else []
        pinned = replicas.named(next((self._pins[key] for key in keys if key in self._pins), None))
        chosen: ReplicaView = pinned if pinned is not None and self._worth_it(pinned, least) else least
        for key in keys:
            self._pins[key] = chosen.name
            self._pins.move_to_end(key)
        while len(self._pins) > self.memory:
            self._pins.popitem(last=False)
        return chosen

    def _worth_it(self, pinned: ReplicaView, least: ReplicaView) -> bool:
        slow = 0 < 2 * pinned.pace < least.pace
        return pinned.load <= least.load + (0 if slow else self.spread + least.load // 4)


class LeastLoadedRouter:
    """Always the replica with the least to do: for engines without a prefix cache."""

    def choose(self, request: Request, replicas: Fleet[Any]) -> ReplicaView:
        """Return the least busy replica with room; of equals, the first."""
        least: ReplicaView = replicas.least
        return least
