"""The ids that replicas have, or may still have, and how they are told to end some of them.

Invariant: an id is here from the moment a replica is asked for it until that replica's last word on it, also where its
request has ended before; until then nobody else gets it. All that is aborted in one pass of the event loop goes to each
replica in one call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Iterable

from fsm_rollout.concurrency.tasks import Tasks
from fsm_rollout.engines.replica import Replica

logger = logging.getLogger(__name__)

# Seconds that an aborted request's last tokens are waited for (and that the engine has to take the abort).
ABORT_GRACE = 10.0


class EngineIds(dict[str, Replica]):
    """See the module: which replica has an id. ``failed`` is called for one that could not even abort."""

    def __init__(self, failed: Callable[[Replica], object]) -> None:
        super().__init__()
        self._failed = failed
        self._aborts: list[str] = []  # what is to be ended in this pass of the loop
        self.tasks = Tasks()  # the calls that wait for an answer

    def unused(self, request_id: str, attempt: int, sent: Container[str]) -> str:
        """Return an id for another try that no request under way has (``sent``), and none that is still aborted."""
        number = max(2, attempt)
        while (name := f"{request_id}#{number}") in sent or name in self:
            number += 1
        return name

    def abort_soon(self, request_id: str) -> None:
        """Have a request ended where it is."""
        self._aborts.append(request_id)
        if len(self._aborts) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        request_ids, self._aborts = self._aborts, []
        self.tasks.begin(self.abort(request_ids))

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Tell the replicas to end these requests, each its own."""
        batches: dict[Replica, list[str]] = {}
        for request_id in request_ids:
            if (replica := self.get(request_id)) is not None and replica.state == "up":
                batches.setdefault(replica, []).append(request_id)
        await asyncio.gather(*(self._abort_at(replica, batch) for replica, batch in batches.items()))

    async def _abort_at(self, replica: Replica, request_ids: list[str]) -> None:
        try:
            async with asyncio.timeout(ABORT_GRACE):
                await replica.live.abort(request_ids)
        except Exception:  # an engine that cannot even abort has failed; its requests end all the same
            logger.warning("the engine failed to abort %s", request_ids, exc_info=True)
            self._failed(replica)
