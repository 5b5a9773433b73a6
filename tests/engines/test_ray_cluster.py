"""A pool on several nodes, one of which dies. The nodes are processes of this machine; Ray does not know better."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
import ray
import ray_work
from ray.cluster_utils import Cluster
from ray_work import ByTrajectory, ask, right, through

from fsm_rollout.engines.pool import PoolEngine
from fsm_rollout.engines.pool_members import PoolTimes
from fsm_rollout.engines.ray_pool import RayOptions, RayPlacement

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.filterwarnings("ignore::ResourceWarning")]
ray.cloudpickle.register_pickle_by_value(ray_work)  # the actors cannot import it


def node_of(member: Any) -> str:
    where = member.replica._actor.__ray_call__.remote(lambda self: ray.get_runtime_context().get_node_id())
    return str(ray.get(where, timeout=30))


def test_a_node_dies_in_the_middle_of_a_run():
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    quick = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000}  # else it takes fifteen seconds
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": quick}
    ray.shutdown()  # of what an earlier test of this process has left connected
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.add_node(num_cpus=2) for _ in range(3)]
    try:
        # The pool connects by itself, and lets go by itself.
        options = RayOptions(address=cluster.address, nodes=[node.node_id for node in nodes])
        pool = PoolEngine(RayPlacement(ByTrajectory(0.5), 3, options), 3, times=PoolTimes(start=60, backoff=0.05))
        members = pool._crew.members
        assert [node_of(member) for member in members] == [node.node_id for node in nodes]

        async def main() -> None:
            def kill() -> None:
                cluster.remove_node(nodes[1], allow_graceful=False)

            for ticket in await through(pool, [ask(i) for i in range(48)], kill):
                right(ticket)
            async with asyncio.timeout(60):
                while (stats := pool.replicas[1]).restarts < 1 or stats.state != "up":  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert stats.moved > 0, "an answer takes four seconds, so some were under way"
            assert node_of(members[1]) in {nodes[0].node_id, nodes[2].node_id}
            for ticket in await through(pool, [ask(i) for i in range(100, 124)]):
                right(ticket)
            await pool.aclose()

        asyncio.run(main())
        assert not ray.is_initialized()
    finally:
        ray.shutdown()
        cluster.shutdown()
