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

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.engines.scripted.engine import Turn
from fsm_rollout.errors import EngineError
from fsm_rollout.scheduler.group import Group
from fsm_rollout.scheduler.run_agents import RunAgents
from fsm_rollout.scheduler.worker_link import MOST_UNSENT, PairedLink, SocketLink, framed
from fsm_rollout.scheduler.worker_pool import MOST_DEATHS, WorkerPool
from fsm_rollout.testing.simulation.virtual_time import run_virtual
from tests.paired_workers import PairedWorkers
from tests.runs import Bench, agent, only, prompts

SCRIPT = Turn(text="one two three", delay=1.0, chunks=3)


def shared(
    body: Callable[[Bench, WorkerPool], Coroutine[Any, Any, list[Group]]], script: Any = lambda request: SCRIPT, *,
    graph: AgentGraph | None = None, prepare: Any = lambda agents: None, workers: int = 2, **options: Any,
) -> list[Group]:  # fmt: skip
    """Carry out ``body`` with a bench whose trajectories run in workers, in virtual time."""

    async def main() -> list[Group]:
        bench, paired = Bench(graph or agent(), script, **options), PairedWorkers(prepare)
        pool = WorkerPool(bench.scheduler, workers, paired.connect)
        try:
            return await body(bench, pool)
        finally:
            await paired.close(pool)

    return run_virtual(main())


def test_a_target_is_kept_and_what_is_carried_goes_on_with_the_next_run() -> None:
    async def body(bench: Bench, pool: WorkerPool) -> list[Group]:
        first = await bench.run(2, iter(prompts(6)), target_groups=2, over_sample=2)
        assert [group.ended for group in first] == [True, True]
        carried = {group.group_id for group in bench.scheduler.carried}
        assert carried
        rest = await bench.run(2, 0)
        assert {group.group_id for group in rest} == carried
        return rest

    rest = shared(body, lambda r: Turn(text="one two three", delay=1.0 + int(r.group_id[1:]), chunks=3), concurrency=6)
    assert any(trajectory.resumptions for group in rest for trajectory in group.trajectories)


def test_samples_that_fall_behind_the_weights_begin_anew() -> None:
    """At 1.5 s of virtual time every trajectory has sampled something."""
    groups = shared(lambda bench, pool: bench.run(2, 3, at={1.5: bench.new_weights}), max_staleness=0)
    sampled = [t.streams[0].tokens.sampled() for group in groups for t in group.trajectories]
    assert {span.version for spans in sampled for span in spans} == {1}
    assert sum(len(group.discarded) for group in groups) == 6


def test_timeouts_stand_still_while_the_engine_is_paused() -> None:
    async def body(bench: Bench, pool: WorkerPool) -> list[Group]:
        policy = bench.scheduler.clients["policy"]
        return await bench.run(1, 1, at={1.5: policy.pause, 501.5: policy.resume})  # five times the state's timeout

    assert only(shared(body)).stop_reason == "answered"


def test_cancelling_and_suspending_reach_a_trajectory_in_its_worker() -> None:
    async def body(bench: Bench, pool: WorkerPool) -> list[Group]:
        def stop() -> None:
            assert bench.scheduler.cancel("p0/0")
            assert bench.scheduler.suspend("p1/0", "asked")

        return await bench.run(1, 3, at={1.5: stop})

    found = {t.trajectory_id: (t.stop_reason, t.suspended, t.generations) for g in shared(body) for t in g.trajectories}
    assert found == {"p0/0": ("cancelled", None, 1), "p1/0": (None, "asked", 1), "p2/0": ("answered", None, 1)}


def test_workers_that_only_die_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    async def body(bench: Bench, pool: WorkerPool) -> list[Group]:
        async def kill() -> None:
            while True:
                await asyncio.sleep(0.5)
                pool.kill(0)

        killing = asyncio.create_task(kill())
        with caplog.at_level(logging.ERROR), pytest.raises(EngineError, match="died one after the other"):
            await bench.run(1, 1)
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)
        assert pool._deaths == MOST_DEATHS + 1
        return []

    shared(body, workers=1)


def test_a_tools_slots_are_shared_among_the_workers() -> None:
    tool = {"use": "fsm_rollout.tools.calculator:calculate", "concurrency": 5}
    graph = agent(tools={"calculate": tool})
    limits: list[int] = []

    def prepare(agents: RunAgents) -> None:
        toolbox = agents.of_graph(graph).toolbox
        with_slots = toolbox.slot(toolbox.tools_of("main")["calculate"])
        assert with_slots is not None
        limits.extend(slots.free._value for slots in toolbox._slots[asyncio.get_running_loop()].values())

    assert len(shared(lambda bench, pool: bench.run(1), ["text"], graph=graph, prepare=prepare)) == 2
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


def test_what_comes_in_pieces_is_taken_when_it_is_whole() -> None:
    got: list[tuple[object, ...]] = []
    link = SocketLink(worker=False)
    link.receive = lambda *message: got.append(message)
    sent = framed(msgspec.msgpack.encode([("ready",)])) + framed(msgspec.msgpack.encode([("log", "name", 30, "text")]))
    for place in range(len(sent)):
        link.data_received(sent[place : place + 1])
    assert got == [("ready",), ("log", "name", 30, "text")]


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
