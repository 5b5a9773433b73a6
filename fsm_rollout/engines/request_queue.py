"""The requests of a pool that wait to be sent.

Invariant: each stands in its lane (what goes on comes first, then turns that follow others, then first turns), by when
it came there; or it is *held*, while its trajectory stands in the line for a place in the engines' memory, or while the
replica where that is resident is full. Nobody looks at what is held before it is released, so a dispatch costs nothing
for those who wait for others' ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.engines.replica import Replica
from fsm_rollout.engines.residency import Tree


class RequestQueue:
    """See the module."""

    def __init__(self) -> None:
        self.lanes: list[dict[PendingRequest, None]] = [{}, {}, {}]
        self.held: dict[Tree | Replica | None, dict[PendingRequest, None]] = {}

    def put_back(self, requests: Iterable[PendingRequest]) -> None:
        """Take in requests that stood here before, each by when it came."""
        lanes = set[int]()
        for pending in requests:
            self.lanes[pending.lane][pending] = None
            lanes.add(pending.lane)
        for lane in lanes:
            self.lanes[lane] = dict.fromkeys(sorted(self.lanes[lane], key=attrgetter("place")))

    def hold(self, pending: PendingRequest, replica: Replica | None = None) -> None:
        """Let a request wait until its trajectory has a place, or a replica room."""
        until = replica or pending.tree
        del self.lanes[pending.lane][pending]
        self.held.setdefault(until, {})[pending] = None
        pending.held_until = until

    def release(self, those: Iterable[Tree | Replica | None]) -> None:
        """Let go on what was held for these."""
        self.put_back([pending for each in those for pending in self.held.pop(each, ())])

    def remove(self, pending: PendingRequest) -> None:
        """Let a request go, wherever it is, if it is here."""
        self.lanes[pending.lane].pop(pending, None)
        if pending in (held := self.held.get(pending.held_until, {})):
            del held[pending]
            if not held:
                del self.held[pending.held_until]
