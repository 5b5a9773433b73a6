"""Kill a replica of a pool at random points of runs, and compare what each comes to with an uninterrupted run.

Invariant: a point is a run of its own over the same prompts, with the same seed, on the same pool; one of the pool's
processes gets SIGKILL at an event of that run that the seed draws. The rows must be those of the first run, which
nobody disturbs.
"""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Any

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.engines.pool import EnginePool
from fsm_rollout.rollout import Rollout
from fsm_rollout.trajectory.events import AnyEvent
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.integration import shard_work

Processes = Callable[[], Awaitable[Sequence[int]]]
"""Returns the ids of the processes that may be killed now."""


async def differences(
    pool: EnginePool,
    graph: AgentGraph,
    prompts: Sequence[Prompt],
    processes: Processes,
    *,
    points: int,
    seed: int = 0,
    **options: Any,
) -> list[str]:
    """Try ``points`` points and return a line for each whose rows differ."""
    rng = Random(seed)

    async def run(kill_at: int | None, victim: int | None) -> tuple[dict[str, Any], int]:
        count = 0

        def listen(trajectory: Trajectory, event: AnyEvent) -> None:
            nonlocal count
            count += 1
            if count == kill_at and victim is not None:
                os.kill(victim, signal.SIGKILL)

        async with Rollout(graph, pool, seed=3, on_event=[listen], **options) as rollout:
            groups = [group async for group in rollout.stream(prompts, 2)]
        return shard_work.rows([trajectory for group in groups for trajectory in group.trajectories]), count

    expected, events = await run(None, None)
    unlike: list[str] = []
    for point in range(points):
        victim, kill_at = rng.choice(await processes()), rng.randrange(1, events)
        before = sum(replica.restarts for replica in pool.replicas)
        rows, _ = await run(kill_at, victim)
        if rows != expected:
            names = [name for name in expected if rows.get(name) != expected[name]]
            unlike.append(f"point {point}, event {kill_at}, process {victim}: {', '.join(names)}")
        async with asyncio.timeout(600):  # the loss is noticed, and made good, before the next
            while sum(replica.restarts for replica in pool.replicas) == before:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            while any(replica.state != "up" for replica in pool.replicas):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    return unlike
