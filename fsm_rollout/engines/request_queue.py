"""Requests that wait for a replica with room.

Invariant: what goes on comes first, since its session's cache is warm and its tokens are begun; then the turns of
trajectories that have had others, which came back; then first turns. In each of these lanes who came first goes first.
So a run ends the trajectories that it has begun before it begins more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from fsm_rollout.engines.pending import PendingRequest


class RequestQueue:
    """See the module. A request is in it once, or not at all."""

    def __init__(self) -> None:
        self._lanes: tuple[dict[PendingRequest, None], ...] = ({}, {}, {})

    def __len__(self) -> int:
        return sum(map(len, self._lanes))

    def __iter__(self) -> Iterator[PendingRequest]:
        return chain(*self._lanes)

    def add(self, pending: PendingRequest) -> None:
        """Let a request wait behind those of its lane."""
        self._lanes[pending.lane][pending] = None

    def put_back(self, requests: Iterable[PendingRequest]) -> None:
        """Let requests wait before those of their lanes, in order: they were taken out for nothing."""
        returned: tuple[dict[PendingRequest, None], ...] = ({}, {}, {})
        for pending in requests:
            returned[pending.lane][pending] = None
        self._lanes = tuple(back | lane for back, lane in zip(returned, self._lanes, strict=True))

    def discard(self, pending: PendingRequest) -> None:
        """Take a request out, if it is there."""
        for lane in self._lanes:
            lane.pop(pending, None)

    def clear(self) -> None:
        """Take all out."""
        for lane in self._lanes:
            lane.clear()
