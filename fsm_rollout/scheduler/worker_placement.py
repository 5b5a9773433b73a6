"""Where rollout workers run: processes of this machine, or actors of a Ray cluster.

Invariant: a worker outlives its run by a second at most, however that ends (processes are those of
:mod:`fsm_rollout.concurrency.child_process`). Ray only places its workers: messages go over a connection of the
worker's own, which knows a secret.
"""

from __future__ import annotations

import asyncio
import pickle
import secrets
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Literal, get_args

from fsm_rollout.concurrency.child_process import ChildProcess
from fsm_rollout.concurrency.ray_session import Remote, import_ray
from fsm_rollout.concurrency.ray_session import connect as connect_ray
from fsm_rollout.errors import ConfigError, EngineError, check_at_least
from fsm_rollout.scheduler.worker import WorkerSetup, serve
from fsm_rollout.scheduler.worker_link import SocketLink, framed
from fsm_rollout.scheduler.worker_pool import Connect, Connection

WorkerPlacement = Literal["local", "ray"]
SECRET_BYTES = 32
CONNECT_SECONDS = 60.0  # how long an actor of Ray may take to start and to call back


def starter(workers: int, placement: str) -> Connect | None:
    """Return what starts a worker, or ``None`` if the run's own process is enough; ConfigError: that cannot be had."""
    check_at_least(1, "process", "workers", workers)
    if placement not in get_args(WorkerPlacement):
        raise ConfigError(f"worker_placement must be 'local' or 'ray', got {placement!r}")
    if placement == "ray":
        return start_actor
    return start_process if workers > 1 else None


async def start_process(setup: WorkerSetup) -> Connection:
    """Start a worker as a process of this machine."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.to_thread(ChildProcess, "fsm_rollout.scheduler.worker:main", theirs.fileno())
    return await _connected(ours, setup, process.kill)


async def start_actor(setup: WorkerSetup) -> Connection:
    """Start a worker as an actor of Ray, which calls back; EngineError says what it asked for, and what to try."""
    await asyncio.to_thread(connect_ray)
    ray, secret = import_ray(), secrets.token_bytes(SECRET_BYTES)
    address = ray.util.get_node_ip_address()
    listening = socket.create_server((address, 0))
    listening.settimeout(CONNECT_SECONDS)
    actor = ray.remote(_Actor).options(num_cpus=1, max_restarts=0).remote()
    running = actor.run.remote(address, listening.getsockname()[1], secret)
    with listening:
        try:
            ours = await asyncio.to_thread(_accept, listening, secret)
        except TimeoutError:
            why = await asyncio.to_thread(_why_silent, ray, running, address)
            ray.kill(actor)
            raise EngineError(f"no rollout worker has called back within {CONNECT_SECONDS:g} s: {why}") from None
    return await _connected(ours, setup, partial(ray.kill, actor))


def _accept(listening: socket.socket, secret: bytes) -> socket.socket:
    """Return the first connection that knows the secret."""
    while True:
        connection, _ = listening.accept()
        connection.settimeout(CONNECT_SECONDS)
        received = b""
        with suppress(OSError):
            while len(received) < len(secret) and (more := connection.recv(len(secret) - len(received))):
                received += more
        if secrets.compare_digest(received, secret):
            return connection
        connection.close()


def _why_silent(ray: Remote, running: Remote, address: str) -> str:
    """Return why an actor may not have called back, and what to try."""
    if ray.wait([running], timeout=0)[0]:
        try:
            ray.get(running)
        except Exception as error:  # whatever it raised, there
            return f"it failed: {str(error).strip().splitlines()[-1]}"
    there, free = (resources().get("CPU", 0.0) for resources in (ray.cluster_resources, ray.available_resources))
    asked = f"it asks Ray for 1 CPU, and of {there:g} CPUs {free:g} are free"
    if free < 1:
        return (
            f"{asked}; ask for fewer `workers`, let engines and tools on Ray take fewer CPUs, or give Ray more "
            "(ray start --num-cpus=N)"
        )
    return f"{asked}, so it may have started; its node must have fsm_rollout, and must reach {address}"


class _Actor:
    """Holds a worker on a node of the cluster."""

    def run(self, host: str, port: int, secret: bytes) -> None:
        connection = socket.create_connection((host, port))
        connection.sendall(secret)
        serve(connection)


async def _connected(ours: socket.socket, setup: WorkerSetup, kill: Callable[[], object]) -> Connection:
    """Say to a worker what it is."""
    ours.setblocking(False)
    _, link = await asyncio.get_running_loop().create_connection(partial(SocketLink, worker=False), sock=ours)
    for part in (sys.path, setup):
        link.write_frame(framed(pickle.dumps(part, pickle.HIGHEST_PROTOCOL)))

    def end() -> None:
        with suppress(Exception):  # it may be gone
            kill()

    return Connection(link, end)
