"""The Ray that all tests of a worker share.

Not in the conftest of `tests/integration`: pytest loses what stands there where a command line names that folder twice.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from tests.kit import closed_port

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster


@pytest.fixture(scope="session")
def ray_client_port() -> int:
    """Where the head of the worker's Ray serves Ray's client."""
    return closed_port()


@pytest.fixture(scope="session")
def ray_cluster(ray_client_port: int) -> Iterator[Cluster]:
    """The Ray of this worker: its head, which tests connect to, and add nodes to, and leave connected or not."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    settings = {
        "health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000,  # else a loss takes fifteen seconds
        "prestart_worker_first_driver": False,  # four processes that may serve nobody
    }  # fmt: skip
    head = {
        "num_cpus": 4, "include_dashboard": False, "include_log_monitor": False, "no_monitor": True,
        "_system_config": settings,
    }  # fmt: skip
    if find_spec("grpc") is not None:
        head["ray_client_server_port"] = ray_client_port
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("GRPC_ENABLE_FORK_SUPPORT", "false")  # or now and then it fails to start a server for a client
        with warnings.catch_warnings(action="ignore", category=ResourceWarning):
            cluster = Cluster(initialize_head=True, head_node_args=head)
            gc.collect()  # files that Ray leaves open, before another test is blamed for them
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="session")
def shared_ray(ray_cluster: Cluster) -> None:
    """Like a training job that has connected to Ray itself."""
    import ray

    ray.init(address=ray_cluster.address, log_to_driver=False, logging_level="ERROR")
