"""Replicas of a pool that are as many as there is room for: ``replicas: auto``.

Invariant: whatever nodes come and go, each look brings their number closer to what the placement has room for. Where
there is room, replicas are added. One that was lost, and for which there is no place from one look to the next, leaves,
unless nobody else would stay. The place of one that was told to leave stays empty for as long as its node is there.
"""

from __future__ import annotations

import asyncio
import logging

from fsm_rollout.engines.replica import Replica
from fsm_rollout.engines.replicas import Replicas
from fsm_rollout.errors import EngineError

logger = logging.getLogger(__name__)


class FollowingReplicas(Replicas):
    """See the module."""

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """See there."""
        super().begin(loop)
        self._not_come = 0  # how many in a row have not come up
        self._tasks.begin(self._follow())

    async def _follow(self) -> None:
        waited = frozenset[str]()
        while self._not_come <= self._restarts:
            await asyncio.sleep(self.times.ping_every)
            if self._asleep:
                continue  # others use the memory
            try:
                room = await asyncio.to_thread(self.placement.room)
            except Exception as error:  # whatever Ray raises; it is asked again
                logger.warning("it is not known how many replicas there is room for: %s", error)
                continue
            # 1. Those for which there is no place any more.
            waiting = self.placement.waiting
            for replica in [each for each in self.all if each.name in waiting & waited and each.task is not None]:
                if any(other.state in ("up", "starting") for other in self.all if other is not replica):
                    await self._give_up_place(replica)
            waited = frozenset(waiting)
            # 2. Those for which there is one: those that wait take theirs first, those that fall again keep theirs.
            kept = len(waiting) + sum(replica.state == "dead" for replica in self.all)
            for _ in range(room - kept):
                # It is not waited for: the room may be that of a node which has just died.
                self._tasks.begin(self._add_one())
        logger.error("no replica is added any more: %d in a row did not come up", self._not_come)

    async def _add_one(self) -> None:
        try:
            await self.add(None)
        except EngineError as error:
            self._not_come += 1
            logger.warning("a replica for which there was room has not come: %s", error)
        else:
            self._not_come = 0

    async def _give_up_place(self, replica: Replica) -> None:
        assert replica.task is not None
        replica.task.cancel()
        await asyncio.wait([replica.task])
        if replica.state == "starting":
            self._move("left", replica)
            await replica.stop(self.times.order)
            logger.warning("%s has left: there is no place for it any more (%s)", replica.name, replica.cause)

    async def _leave(self, replica: Replica) -> None:
        self.placement.decline(replica.name)
        await super()._leave(replica)
