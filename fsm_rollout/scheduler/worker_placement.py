"""Where rollout workers run: processes of this machine, or actors of a Ray cluster.

Invariant: a worker outlives its run by a second at most, however that ends. The caller's script is never run again in
it. Ray only places its workers: messages go over a connection of the worker's own, which knows a secret.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal

from fsm_rollout.concurrency.ray_session import connect as connect_ray
from fsm_rollout.concurrency.ray_session import import_ray
from fsm_rollout.scheduler.worker import WorkerSetup, serve
from fsm_rollout.scheduler.worker_link import SocketLink, framed
from fsm_rollout.scheduler.worker_pool import Connection

WorkerPlacement = Literal["local", "ray"]
SECRET_BYTES = 32
CONNECT_SECONDS = 60.0
"""How long an actor of Ray may take to start and to call back."""

_START = """
import sys
sys.path.insert(0, sys.argv[1])
from fsm_rollout.scheduler.worker import main
main(int(sys.argv[2]), int(sys.argv[3]))
"""


async def start_process(setup: WorkerSetup) -> Connection:
    """Start a worker as a process of this machine."""
    ours, theirs = socket.socketpair()
    package = str(Path(__file__).parents[2])
    with theirs:
        # A session of its own: a Ctrl-C is for the run, which stops its workers in order.
        process = await asyncio.to_thread(
            subprocess.Popen,
            [sys.executable, "-c", _START, package, str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )

    def kill() -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # with all that its tools have started
        process.wait()

    return await _connected(ours, setup, kill)


async def start_actor(setup: WorkerSetup) -> Connection:
    """Start a worker as an actor of Ray, which calls back."""
    await asyncio.to_thread(connect_ray)
    ray, secret = import_ray(), secrets.token_bytes(SECRET_BYTES)
    address = ray.util.get_node_ip_address()
    listening = socket.create_server((address, 0))
    listening.settimeout(CONNECT_SECONDS)
    actor = ray.remote(_Actor).options(num_cpus=1, max_restarts=0).remote()
    actor.run.remote(address, listening.getsockname()[1], secret)
    with listening:
        ours = await asyncio.to_thread(_accept, listening, secret)
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
