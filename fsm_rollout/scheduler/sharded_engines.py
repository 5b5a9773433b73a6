"""The engines of a rollout with shards, as their driver speaks of them.

Invariant: nothing is sampled from here. Which replicas there are is asked of who has them: the shards, each its own; or
where these share servers, the driver's pool of them, whom the shards follow.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsm_rollout.agent.graph import POLICY
from fsm_rollout.engines.adapters import Adapter
from fsm_rollout.engines.replica import Rows
from fsm_rollout.errors import EngineError, did_you_mean
from fsm_rollout.scheduler.shards import Shards

COUNTS = ("in_flight", "requests", "tokens", "restarts")  # what shards know of the servers that they share
HERE = ("up", "starting")  # the states of those that stay


def check_weights(weights: object) -> None:
    """Raise EngineError for new weights that no other process can have."""
    if not isinstance(weights, str | Path | Mapping | Adapter):
        raise EngineError(
            f"each shard (workers) loads new weights into the replicas that it has started, and cannot have a "
            f"{type(weights).__name__}, which is of this process; give a folder that all can read, an Adapter, or a "
            "mapping of tensors (which is sent to each), or let all shards share servers that run already (kind: "
            "sglang_http), which are loaded from here"
        )


class ReplicasOfShards:
    """The replicas of the policy, which come and go as those of :class:`fsm_rollout.engines.pool.EnginePool` do.

    One of a shard's own is called by its shard's number, a slash, and its name there: ``2/replica-0``.
    """

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    async def add(self, url: str | None = None) -> str:
        """Have one more, in the shard that has the fewest; or meet a server that all share; return its name."""
        shards, servers = self._shards, self._shards.servers
        if servers is not None:
            name = await servers.pool.add(url)
            await shards.call_all("meet", servers.urls)
            return name
        if url is not None:
            raise EngineError("replicas of this engine are started by shards, and have no url of their own")
        rows = await self.rows()
        stay = Counter(row["name"].partition("/")[0] for row in rows if row["state"] in HERE)
        shard = min(shards.alive, key=lambda shard: stay[str(shard.number)])
        return f"{shard.number}/{await shards.call(shard, 'add')}"

    async def remove(self, name: str, within: float = math.inf) -> None:
        """Have one leave; what it has not said ``within`` so many seconds goes on elsewhere, nothing lost."""
        shards, servers = self._shards, self._shards.servers
        if servers is not None:
            url = next((row["url"] for row in await servers.pool.rows() if row["name"] == name), "")
            await servers.pool.remove(name)
            await shards.call_all("leave", url.rstrip("/"), within)
            return
        number, _, own = name.partition("/")
        shard = next((shard for shard in await shards.here() if str(shard.number) == number), None)
        if shard is None or not own:
            names = [row["name"] for row in await self.rows() if row["state"] in HERE]
            raise EngineError(f"there is no replica '{name}'{did_you_mean(name, names)}; there are {', '.join(names)}")
        await shards.call(shard, "remove", own, within)

    async def rows(self) -> Rows:
        """Return what is known of each; see :func:`fsm_rollout.engines.replica.rows_of`."""
        servers, answers = self._shards.servers, await self._shards.ask_all("rows")
        each = [
            row | {"name": f"{shard.number}/{row['name']}"}
            for shard, rows in answers.items() if not isinstance(rows, BaseException) for row in rows
        ]  # fmt: skip
        if servers is None:
            return each
        found = await servers.pool.rows()
        for row in found:
            theirs = [other for other in each if other["url"].rstrip("/") == row["url"].rstrip("/")]
            row |= {name: sum(other[name] for other in theirs) for name in COUNTS}
        return found


class EnginesOfShards(dict[str, Any]):
    """The engines that can be spoken of from here: those of a rollout with workers are where its shards are."""

    def __init__(self, shards: Shards) -> None:
        super().__init__({POLICY: ReplicasOfShards(shards)})

    def __missing__(self, name: str) -> Any:
        raise EngineError(f"with workers, engine '{name}' is in each shard, and is not spoken of here; use workers=1")
