"""Pools of real Ray actors: what they promise when actors die, weights change, or Ray is not there."""

import asyncio
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from fsm_rollout.concurrency.ray_session import answer_to
from fsm_rollout.engines.build import build_engine
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.engines.pool import EnginePool
from fsm_rollout.engines.protocol import Engine
from fsm_rollout.engines.ray_placement import RayOptions, RayPlacement
from fsm_rollout.engines.replica import PoolTimes
from fsm_rollout.engines.router import LeastLoadedRouter
from fsm_rollout.errors import EngineError
from fsm_rollout.names.objects import look_in
from fsm_rollout.rollout import Rollout
from fsm_rollout.scheduler import shard_placement
from fsm_rollout.testing import check_engine
from fsm_rollout.trajectory.journal import Journal
from tests.cases import FILES
from tests.embedded import tokenizer
from tests.integration import ray_work, shard_work
from tests.integration.ray_work import ByTrajectory, Weighted, ask, right, through
from tests.integration.replica_kills import differences

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning")]
TIMES = PoolTimes(start=600, ping=300, order=300, backoff=0.05)
ray.cloudpickle.register_pickle_by_value(ray_work)  # the actors cannot import it


# -- with a Ray that is there already ------------------------------------------------------------------------------


def scripted(count: int, delay: float = 0.05, **options: Any) -> EnginePool:
    placement = RayPlacement(ByTrajectory(delay), count, RayOptions(cpus=0.5))
    return EnginePool(placement, count, times=TIMES, **options)


def actors(pool: EnginePool) -> list[Any]:
    return [replica.engine.actor for replica in pool.replicas]  # type: ignore[union-attr]


def is_there(actor: Any) -> bool:
    try:
        ray.get(actor.ping.remote(), timeout=600)
    except ray.exceptions.RayActorError:
        return False
    return True


@pytest.mark.ray("shared")
def test_an_engine_in_an_actor_conforms():
    pool = scripted(2, delay=0.005)
    handles = actors(pool)

    async def main() -> None:
        await check_engine(pool.replicas[1].live, patience=600)  # type: ignore[arg-type]  # it has all planes
        await pool.aclose()

    asyncio.run(main())
    for actor in handles:  # closed, so nothing of it is left, once Ray has killed it
        until = time.monotonic() + 600
        while is_there(actor):
            assert time.monotonic() < until
            time.sleep(0.01)
    assert ray.is_initialized()  # it was not ours


@pytest.mark.ray("shared")
def test_killed_actors_cost_nothing_and_three_replicas_answer_like_one():
    pool = scripted(3)

    async def main() -> None:
        requests = [ask(i) for i in range(48)]
        killed = actors(pool)[1]
        for ticket in await through(pool, requests, lambda: ray.kill(killed)):
            right(ticket)
        lost = pool.replicas[1]
        assert lost.restarts == 1
        assert lost.moved > 0
        async with asyncio.timeout(600):
            while pool.replicas[1].state != "up":  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def once_more() -> None:
        """In another loop, with the call of the first one still open at every actor."""
        before = pool.replicas[1].requests
        for ticket in await through(pool, [ask(i) for i in range(48)]):
            right(ticket)
        assert pool.replicas[1].requests > before
        await pool.aclose()

    asyncio.run(main())
    asyncio.run(once_more())


@pytest.mark.ray("shared")
@pytest.mark.real
def test_the_only_actor_is_killed_twice():
    """A run of one replica loses no trajectory, and takes no token twice."""
    pool = scripted(1)

    async def main() -> None:
        dispatcher = EngineClient(pool)
        tickets = [dispatcher.submit(ask(i)) for i in range(24)]
        async with asyncio.timeout(600):
            for life in range(2):
                before = pool.replicas[0].tokens
                while pool.replicas[0].state != "up" or pool.replicas[0].tokens <= before:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                ray.kill(actors(pool)[0])
                while pool.replicas[0].restarts <= life:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await asyncio.gather(*(ticket.done.wait() for ticket in tickets))
        for ticket in tickets:
            right(ticket)
        assert pool.replicas[0].restarts == 2
        await pool.aclose()

    asyncio.run(main())


OWN_ENGINE = FILES["an engine of letters"]


@pytest.mark.ray("shared")
def test_an_engine_of_ones_own_runs_over_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its module lies in a folder that only the driver has been told of; one of two actors is killed and comes back."""
    (tmp_path / "own_engine.py").write_text(OWN_ENGINE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    look_in(str(tmp_path))
    own = {"kind": "own_engine:Echo", "says": "hello, world", "placement": "ray", "replicas": 2, "cpus": 0.5}
    pool = build_engine(own, Path())
    expected = [*pool.facts.tokenizer.encode("hello, world"), *pool.facts.eos_ids]

    async def main() -> None:
        for ticket in await through(
            pool, [ask(i, *pool.facts.eos_ids) for i in range(8)], lambda: ray.kill(actors(pool)[0])
        ):
            assert (ticket.error, ticket.finish_reason, list(ticket.ids)) == (None, "stop", expected)
        async with asyncio.timeout(600):
            while pool.replicas[0].state != "up":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await pool.aclose()

    asyncio.run(main())


@pytest.mark.ray("shared")
def test_too_few_resources():
    options = RayOptions(cpus=3, patience=0.1)
    with pytest.raises(EngineError, match=r"2 replica\(s\) take 3 CPU each, and only 1 fit into 1 node"):
        RayPlacement(ByTrajectory(0.0), 2, options)
    with pytest.raises(EngineError, match=r"take 1 CPU, 1 GPU each, and only 0 fit"):
        RayPlacement(ByTrajectory(0.0), 1, RayOptions(gpus=1, patience=0.1))


@pytest.mark.ray("shared")
def test_resources_that_others_hold():
    first = RayPlacement(ByTrajectory(0.0), 1, RayOptions(cpus=4))
    pool = EnginePool(first, 1, times=TIMES)
    second = RayPlacement(ByTrajectory(0.0), 1, RayOptions(cpus=4))
    with pytest.raises(EngineError, match="did not start within 1 s; a replica takes 4 CPU, free are nothing"):
        EnginePool(second, 1, times=PoolTimes(start=1))
    asyncio.run(pool.aclose())


@pytest.mark.ray("shared")
@pytest.mark.real
def test_a_process_that_stands_still_is_noticed():
    times = PoolTimes(start=600, backoff=0.05, ping_every=0.2, ping=5.0)  # its neighbour answers in that
    placement = RayPlacement(ByTrajectory(0.05), 2, RayOptions(cpus=0.5))
    pool = EnginePool(placement, 2, times=times)
    process = ray.get(actors(pool)[0].__ray_call__.remote(lambda self: os.getpid()))

    async def main() -> None:
        for ticket in await through(pool, [ask(i) for i in range(32)], lambda: os.kill(process, signal.SIGSTOP)):
            right(ticket)
        assert "does not answer" in pool.replicas[0].cause or "no answer" in pool.replicas[0].cause
        os.kill(process, signal.SIGCONT)
        await pool.aclose()

    asyncio.run(main())


@pytest.mark.ray("shared")
def test_an_engine_that_cannot_start_over_there_says_why():
    def broken(name: str) -> Engine:
        raise EngineError("there is no such device")

    with pytest.raises(EngineError, match="there is no such device"):
        EnginePool(RayPlacement(broken, 1, RayOptions(cpus=0.5)), 1, times=TIMES)


# -- weights -------------------------------------------------------------------------------------------------------


@pytest.mark.ray("shared")
@pytest.mark.real
def test_five_updates_and_two_losses_leave_every_token_with_its_version(tmp_path: Path):
    """The oracle is the logprob of each token, which the weights that sampled it have chosen."""
    pool = EnginePool(RayPlacement(Weighted, 2, RayOptions(cpus=0.5)), 2, router=LeastLoadedRouter(), times=TIMES)

    async def main() -> list[PendingRequest]:
        client = EngineClient(pool)
        tickets: list[PendingRequest] = []
        for version in range(1, 6):
            tickets += [client.submit(ask(10 * version + index)) for index in range(4)]
            async with asyncio.timeout(600):
                while min(len(ticket.ids) for ticket in tickets[-4:]) < 8:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            if version in (2, 4):
                up = [replica for replica in pool.replicas if replica.state == "up"]
                ray.kill(up[version // 2 - 1 if len(up) > 1 else 0].engine.actor)  # type: ignore[union-attr]
            # They come from folders: an actor that reads tensors has to import torch (those of test_ray_cluster do).
            (folder := tmp_path / str(version)).mkdir()
            (folder / "weight").write_text(str(version))
            assert await EngineClient(pool).update_weights(folder) == version
        async with asyncio.timeout(600):
            await asyncio.gather(*(ticket.done.wait() for ticket in tickets))
        assert sum(stats.restarts for stats in pool.replicas) == 2
        assert sum(stats.moved for stats in pool.replicas) >= 2
        await pool.aclose()
        return tickets

    versions = set()
    for ticket in asyncio.run(main()):
        assert (ticket.finish_reason, ticket.error) == ("stop", None)
        assert list(ticket.ids) == Weighted.answer(ticket.request)
        sampled = [version for count, version in ticket.versions for _ in range(count)]
        assert sampled == sorted(sampled)
        assert list(ticket.logprobs) == [-float(version) for version in sampled]
        versions.update(sampled)
    assert versions == set(range(6))


# -- runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.ray("shared")
def test_a_replica_that_is_killed_in_a_run_changes_no_row() -> None:
    """At one point; `make nightly` tries more."""
    points = int(os.environ.get("KILL_POINTS", "1"))
    placement = RayPlacement(ray_work.Calling(tokenizer(), shard_work.CALL, 2), 2, RayOptions(cpus=0.5))
    times = PoolTimes(start=600, ping=300, order=300, backoff=0.05, ping_every=0.2)
    pool = EnginePool(placement, 2, times=times, restarts=points)  # one may die before it finishes anything
    pool.facts = replace(pool.facts, tokenizer=tokenizer())  # the actors' own knows the script's texts only

    async def processes() -> list[int]:
        return [await answer_to(actor.__ray_call__.remote(lambda self: os.getpid())) for actor in actors(pool)]

    async def main() -> None:
        graph = shard_work.agent()
        assert await differences(pool, graph, shard_work.prompts(3), processes, points=points) == []
        assert sum(replica.restarts for replica in pool.replicas) >= points
        await pool.aclose()

    asyncio.run(main())


# -- shards ------------------------------------------------------------------------------------------------


@pytest.mark.ray("shared")
@pytest.mark.real
def test_shards_for_which_ray_has_no_cpu_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Holder:
        def hold(self) -> None:
            """Nothing more."""

    monkeypatch.setattr(shard_placement, "CONNECT_SECONDS", 1.0)
    cpus = ray.cluster_resources()["CPU"]
    holder = ray.remote(Holder).options(num_cpus=cpus).remote()
    ray.get(holder.hold.remote())
    until = time.monotonic() + 600
    while ray.available_resources().get("CPU", 0) and time.monotonic() < until:  # what Ray says lags behind
        time.sleep(0.05)

    try:
        with pytest.raises(EngineError, match=f"asks Ray for 1 CPU, and of {cpus:g} CPUs 0 are free; ask for fewer"):
            Rollout(shard_work.agent(), shard_work.spec(), workers=2, worker_placement="ray")
    finally:
        ray.kill(holder)


@pytest.mark.ray("shared")
@pytest.mark.real
def test_shards_may_be_actors_and_one_that_dies_loses_nothing(tmp_path: Path) -> None:
    async def main(kill: bool, **options: Any) -> dict[str, Any]:
        with Journal(tmp_path / f"{kill}.sqlite") as book:
            async with Rollout(shard_work.agent(), shard_work.spec(0.05), seed=3, journal=book, **options) as rollout:
                groups = []
                async for group in rollout.stream(shard_work.prompts(6), 2):
                    if kill and not groups:
                        assert rollout._shards is not None
                        rollout._shards.kill(0)
                    groups.append(group)
                return shard_work.rows([trajectory for group in groups for trajectory in group.trajectories])

    assert asyncio.run(main(True, workers=2, worker_placement="ray")) == asyncio.run(main(False))
