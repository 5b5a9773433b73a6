"""A pool on a cluster: on several nodes, one of which dies, and through Ray's client.

The nodes are processes of this machine; Ray does not know better.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from fsm_rollout.engines.build import build_engine
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.pool import EnginePool
from fsm_rollout.engines.protocol import Request, SamplingParams
from fsm_rollout.engines.ray_placement import RayOptions, RayPlacement
from fsm_rollout.engines.replica import PoolTimes
from fsm_rollout.engines.transformers.checkpoints import load_model
from fsm_rollout.engines.transformers.engine import TransformersEngine
from fsm_rollout.errors import EngineError
from fsm_rollout.model.folders import model_folder
from fsm_rollout.trajectory.tokens import as_ids
from tests.integration import ray_work
from tests.integration.ray_work import ByTrajectory, ask, right, through

pytestmark = [pytest.mark.ray, pytest.mark.real, pytest.mark.filterwarnings("ignore::ResourceWarning")]
TIMES = PoolTimes(start=600, ping=300, order=300, backoff=0.05)
ray.cloudpickle.register_pickle_by_value(ray_work)  # the actors cannot import it


def node_of(replica: Any) -> str:
    where = replica.engine.actor.__ray_call__.remote(lambda self: ray.get_runtime_context().get_node_id())
    return str(ray.get(where, timeout=600))


@pytest.fixture(scope="module")
def cluster(ray_cluster: Cluster) -> Iterator[Cluster]:
    """Three nodes, to which the tests connect by themselves. They come last, so that nobody needs a node after them."""
    ray.shutdown()  # of what an earlier test of this process has left connected
    for _ in range(2):
        ray_cluster.add_node(num_cpus=2, include_log_monitor=False, wait=False)
    ray_cluster.wait_for_nodes()
    yield ray_cluster
    ray_cluster.shutdown()  # nodes at rest take a tenth of a core from the other tests


@pytest.mark.parametrize("how", ["nodes", "SPREAD", "PACK", "STRICT_SPREAD"])
def test_a_node_dies_in_the_middle_of_a_run(
    how: str, cluster: Cluster, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    nodes = {node.node_id: node for node in (cluster.head_node, *cluster.worker_nodes)}
    where: dict[str, Any] = {"nodes": [*nodes]} if how == "nodes" else {"strategy": how}
    options = RayOptions(address=cluster.address, cpus=1.5 if how == "PACK" else 0.5, **where)
    pool = EnginePool(
        RayPlacement(ByTrajectory(0.5), 3, options), 3, times=PoolTimes(start=600, ping=300, order=300, backoff=0.05)
    )
    homes = [node_of(replica) for replica in pool.replicas]
    assert len(set(homes)) == {"nodes": 3, "STRICT_SPREAD": 3}.get(how, len(set(homes))) >= 2
    lost = next(index for index, home in enumerate(homes) if nodes[home] in cluster.worker_nodes)
    assert how != "nodes" or homes == [*nodes]

    async def main() -> None:
        def kill() -> None:
            cluster.remove_node(nodes[homes[lost]], allow_graceful=False)

        for ticket in await through(pool, [ask(i) for i in range(48)], kill):
            right(ticket)
        added = cluster.add_node(num_cpus=2, include_log_monitor=False)  # with STRICT_SPREAD the replica waits for it
        async with asyncio.timeout(600):
            while (stats := pool.replicas[lost]).restarts < 1 or stats.state != "up":  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            while "Ray: Raylet is terminated" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert stats.moved > 0, "an answer takes four seconds, so some were under way"
        assert node_of(stats) in (
            {added.node_id} if how == "STRICT_SPREAD" else {added.node_id, *nodes} - {homes[lost]}
        )
        for ticket in await through(pool, [ask(i) for i in range(100, 124)]):
            right(ticket)
        await pool.aclose()

    asyncio.run(main())
    assert not ray.is_initialized()
    assert "state-dump" not in "".join((*capsys.readouterr(), caplog.text)), "of a node's log, a line is enough"


def test_each_on_its_own_needs_as_many_nodes(cluster: Cluster):
    options = RayOptions(address=cluster.address, cpus=0.5, patience=0.1, strategy="STRICT_SPREAD")
    with pytest.raises(EngineError, match=r"4 replica\(s\) take 0\.5 CPU each, and only 3 fit into 3 node\(s\)"):
        RayPlacement(ByTrajectory(0.0), 4, options)


def test_replicas_are_as_many_as_the_cluster_has_room_for(cluster: Cluster) -> None:
    """Nodes join, one is held by others, one dies, one of them is told to leave: nothing is lost meanwhile."""
    ray.init(address=cluster.address, log_to_driver=False)  # by the head, which stays
    other = ray.remote(num_cpus=1.0)(ray_work.Bytes)
    options = RayOptions(address=cluster.address, cpus=1.0, resources={"fast": 1}, patience=600)
    grown = cluster.add_node(num_cpus=4, resources={"fast": 3}, include_log_monitor=False)
    times = PoolTimes(start=600, ping=300, order=300, backoff=0.05, ping_every=0.2)
    held = other.options(resources={"fast": 1}).remote()
    ray.get(held.__ray_ready__.remote(), timeout=600)
    placement = RayPlacement(ByTrajectory(0.5), None, options)
    pool = EnginePool(placement, placement.count, times=times)
    assert len(pool.replicas) == 2, "one of the three is held by others"

    async def comes_to(count: int) -> list[Any]:
        async with asyncio.timeout(600):
            while len(up := [replica for replica in pool.replicas if replica.state == "up"]) != count:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        return up

    async def main() -> None:
        client = EngineClient(pool)
        answers = [client.submit(ask(i)) for i in range(100)]
        ray.kill(held)
        await comes_to(3)
        second = cluster.add_node(num_cpus=2, resources={"fast": 2}, include_log_monitor=False)
        assert [node_of(replica) for replica in await comes_to(5)] == [grown.node_id] * 3 + [second.node_id] * 2
        answers += [client.submit(ask(i)) for i in range(100, 200)]  # four seconds each
        await asyncio.sleep(0)
        cluster.remove_node(grown, allow_graceful=False)
        assert {node_of(replica) for replica in await comes_to(2)} == {second.node_id}
        leaving, staying = await comes_to(2)
        await pool.remove(leaving.name, within=0.0)
        async with asyncio.timeout(600):
            while placement.room():  # noqa: ASYNC110  # until it is known that the node is dead; its place stays empty
                await asyncio.sleep(0.05)
        third = cluster.add_node(num_cpus=1, resources={"fast": 1}, include_log_monitor=False)
        assert [node_of(replica) for replica in await comes_to(2)] == [second.node_id, third.node_id]
        answers += [client.submit(ask(i)) for i in range(200, 224)]
        async with asyncio.timeout(600):
            await asyncio.gather(*(answer.done.wait() for answer in answers))
        for answer in answers:
            right(answer)
        states = [replica.state for replica in pool.replicas]
        assert (staying.state, states.count("up"), states.count("left")) == ("up", 2, len(states) - 2)
        await pool.aclose()

    asyncio.run(main())
    ray.shutdown()


@pytest.fixture
def client_address(cluster: Cluster, ray_client_port: int) -> str:
    """Of the client server of the cluster's head."""
    pytest.importorskip("grpc", reason="Ray's client needs ray[client]")
    until = time.monotonic() + 600
    while time.monotonic() < until:
        with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", ray_client_port), timeout=60):
            break
    return f"ray://127.0.0.1:{ray_client_port}"


def test_a_pool_through_rays_client(client_address: str, caplog: pytest.LogCaptureFixture):
    """Tokens, weights, a loss and the end, as for a driver within the cluster."""
    spec = {"kind": "transformers", "threads": 1, "placement": "ray", "cpus": 0.5}
    pool = build_engine({**spec, "ray": {"address": client_address}}, Path())
    early, _ = load_model("embedded:early")
    prompts = [pool.facts.tokenizer.encode(text) for text in ("What is 3 + 4?", "a b c", "7 * 8 =", "Count: 1, 2,")]

    def requests(name: str) -> list[Request]:
        params = SamplingParams(60, temperature=0.0, ignore_eos=True)
        return [Request(f"{name}{i}", as_ids(ids), params, trajectory_id=f"{name}{i}") for i, ids in enumerate(prompts)]

    async def answers(engine: EnginePool | TransformersEngine, name: str) -> list[list[int]]:
        dispatcher = EngineClient(engine)
        tickets = [dispatcher.submit(request) for request in requests(name)]
        async with asyncio.timeout(600):
            await asyncio.gather(*(ticket.done.wait() for ticket in tickets))
        return [list(ticket.ids) for ticket in tickets]

    async def main() -> list[list[list[int]]]:
        found = [await answers(pool, "a")]
        assert await EngineClient(pool).update_weights(dict(early.state_dict())) == 1
        dispatcher = EngineClient(pool)
        tickets = [dispatcher.submit(request) for request in requests("b")]
        ray.kill(pool.replicas[0].engine.actor)  # type: ignore[union-attr]
        async with asyncio.timeout(600):
            await asyncio.gather(*(ticket.done.wait() for ticket in tickets))
        assert [ticket.error for ticket in tickets] == [None] * 4
        assert pool.replicas[0].restarts == 1
        found.append([list(ticket.ids) for ticket in tickets])
        assert await EngineClient(pool).update_weights(str(model_folder("embedded"))) == 2
        found.append(await answers(pool, "c"))
        await pool.aclose()
        return found

    async def alone(model: str) -> list[list[int]]:
        engine = TransformersEngine(model)
        found = await answers(engine, model)
        await engine.aclose()
        return found

    through_client = asyncio.run(main())
    assert not ray.is_initialized()
    embedded, early_answers = (asyncio.run(alone(model)) for model in ("embedded", "embedded:early"))
    assert through_client == [embedded, early_answers, embedded]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
