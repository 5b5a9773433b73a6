"""A run shared among workers: targets, weights, pauses and what is carried, as in one process."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.protocol import Request
from fsm_rollout.engines.scripted.engine import ScriptedEngine, Turn
from fsm_rollout.errors import EngineError
from fsm_rollout.scheduler.group import Group
from fsm_rollout.scheduler.run_agents import RunAgents
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.scheduler.worker_link import MOST_UNSENT, PairedLink, SocketLink, framed
from fsm_rollout.scheduler.worker_pool import MOST_DEATHS, WorkerPool
from fsm_rollout.testing.simulation.stand_ins import PairedWorkers
from fsm_rollout.testing.simulation.virtual_time import run_virtual
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.embedded import tokenizer
from tests.unit.scheduler.test_scheduler import SINGLE, agent, prompts

Body = Callable[[Scheduler, WorkerPool], Coroutine[Any, Any, None]]


def shared(body: Body, turn: Turn | Callable[[Request], Turn], *, workers: int = 2, **options: Any) -> None:
    """Run ``body`` with a scheduler whose trajectories run in workers, in virtual time."""
    graph = agent(SINGLE)

    async def main() -> None:
        engine = ScriptedEngine(turn if callable(turn) else lambda request: turn, tokenizer=tokenizer())
        scheduler = Scheduler({graph.agent: graph}, {"policy": EngineClient(engine)}, **options)
        paired = PairedWorkers()
        pool = WorkerPool(scheduler, workers, paired.connect)
        try:
            await body(scheduler, pool)
        finally:
            await paired.close(pool)

    run_virtual(main())


def trajectories(groups: list[Group]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]


def test_a_target_is_kept_and_what_is_carried_goes_on_with_the_next_run() -> None:
    async def body(scheduler: Scheduler, pool: WorkerPool) -> None:
        first = [group async for group in scheduler.run(iter(prompts(6)), 2, target_groups=2, over_sample=2)]
        assert len(first) == 2
        assert all(trajectory.ended for trajectory in trajectories(first))
        carried = {group.group_id for group in scheduler.carried}
        assert carried
        rest = [group async for group in scheduler.run([], 2)]
        assert {group.group_id for group in rest} == carried
        assert any(trajectory.resumptions for trajectory in trajectories(rest))

    def script(request: Request) -> Turn:
        return Turn(text="one two three", delay=1.0 + int(request.group_id[1:]), chunks=3)

    shared(body, script, concurrency=6)


def test_samples_that_fall_behind_the_weights_begin_anew() -> None:
    async def body(scheduler: Scheduler, pool: WorkerPool) -> None:
        async def update() -> None:
            await asyncio.sleep(1.5)  # of virtual time: every trajectory has sampled something
            assert await scheduler.update_weights({}) == 1

        updating = asyncio.create_task(update())
        groups = [group async for group in scheduler.run(prompts(3), 2)]
        await updating
        versions = {span.version for t in trajectories(groups) for span in t.streams[0].tokens.sampled()}
        assert versions == {1}
        assert sum(len(group.discarded) for group in groups) == 6

    shared(body, Turn(text="one two three", delay=1.0, chunks=3), max_staleness=0)


def test_timeouts_stand_still_while_the_engine_is_paused() -> None:
    async def body(scheduler: Scheduler, pool: WorkerPool) -> None:
        async def pause() -> None:
            await asyncio.sleep(1.5)
            await scheduler.clients["policy"].pause()
            await asyncio.sleep(500)  # five times as long as the state may take
            await scheduler.clients["policy"].resume()

        pausing = asyncio.create_task(pause())
        (group,) = [group async for group in scheduler.run(prompts(1))]
        await pausing
        assert group.trajectories[0].stop_reason == "answered"

    shared(body, Turn(text="one two three", delay=1.0, chunks=3))


def test_cancelling_and_suspending_reach_a_trajectory_in_its_worker() -> None:
    async def body(scheduler: Scheduler, pool: WorkerPool) -> None:
        async def stop() -> None:
            await asyncio.sleep(1.5)
            assert scheduler.cancel("p0/0")
            assert scheduler.suspend("p1/0", "asked")

        stopping = asyncio.create_task(stop())
        groups = [group async for group in scheduler.run(prompts(3))]
        await stopping
        found = {t.trajectory_id: (t.stop_reason, t.suspended, t.generations) for t in trajectories(groups)}
        assert found == {"p0/0": ("cancelled", None, 1), "p1/0": (None, "asked", 1), "p2/0": ("answered", None, 1)}

    shared(body, Turn(text="one two three", delay=1.0, chunks=3))


def test_workers_that_only_die_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    async def body(scheduler: Scheduler, pool: WorkerPool) -> None:
        async def kill() -> None:
            while True:
                await asyncio.sleep(0.5)
                pool.kill(0)

        killing = asyncio.create_task(kill())
        with caplog.at_level(logging.ERROR), pytest.raises(EngineError, match="died one after the other"):
            [group async for group in scheduler.run(prompts(1))]
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)
        assert pool._deaths == MOST_DEATHS + 1

    shared(body, Turn(text="one two three", delay=1.0), workers=1)


def test_a_tools_slots_are_shared_among_the_workers() -> None:
    tool = {"use": "fsm_rollout.tools.calculator:calculate", "concurrency": 5}
    graph = agent(SINGLE, tools={"calculate": tool})
    limits: list[int] = []

    def prepare(agents: RunAgents) -> None:
        toolbox = agents.of_graph(graph).toolbox
        with_slots = toolbox.slot(toolbox.tools_of("main")["calculate"])
        assert with_slots is not None
        limits.extend(slots.free._value for slots in toolbox._slots[asyncio.get_running_loop()].values())

    async def main() -> None:
        engine = ScriptedEngine(["text"], tokenizer=tokenizer())
        scheduler = Scheduler({graph.agent: graph}, {"policy": EngineClient(engine)})
        paired = PairedWorkers(prepare)
        pool = WorkerPool(scheduler, 2, paired.connect)
        assert len([group async for group in scheduler.run(prompts(2))]) == 2
        await paired.close(pool)

    run_virtual(main())
    assert limits == [2, 2]


class Loaded:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_a_tool_sends_down_its_workers_link_runs_nowhere(tmp_path: Path) -> None:
    """Tools run in workers, and can write to whatever their process has open."""
    got: list[tuple[object, ...]] = []
    lost = asyncio.Event()

    async def main() -> None:
        ours, theirs = socket.socketpair()
        _, link = await asyncio.get_running_loop().create_connection(partial(SocketLink, worker=False), sock=ours)
        link.receive, link.lost = lambda *message: got.append(message), lost.set
        with theirs:
            theirs.sendall(framed(msgspec.msgpack.encode([("log", "name", 30, "text")])))
            theirs.sendall(framed(pickle.dumps([("log", "name", 30, Loaded(tmp_path / "made"))])))
            theirs.sendall(framed(msgspec.msgpack.encode([("ready",)])))
            await lost.wait()
        link.close()

    asyncio.run(main())
    assert not (tmp_path / "made").exists()
    assert got == [("log", "name", 30, "text")], "a worker that sends what is no message is not listened to any more"


def test_much_that_is_sent_in_one_pass_goes_out_while_the_pass_goes_on() -> None:
    ours, theirs = PairedLink.pair()
    blocks: list[list[int]] = []
    theirs.receive = lambda *message: blocks[-1].append(*message)
    take = theirs._take

    def taken(block: bytes) -> None:
        blocks.append([])
        take(block)

    theirs._take = taken  # type: ignore[method-assign]

    async def main() -> None:
        for number in range(2 * MOST_UNSENT + 1):
            ours.send(number)
            if number == MOST_UNSENT:
                await asyncio.sleep(0)  # what was written so far arrives; no flush of the whole pass has been
                assert blocks[:1] == [list(range(MOST_UNSENT))]
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(main())
    assert [number for block in blocks for number in block] == list(range(2 * MOST_UNSENT + 1))
