"""Where shards run: processes of this machine, or actors of a Ray cluster.

Invariant: a shard outlives its driver by a second at most, however that ends (processes are those of
:mod:`fsm_rollout.concurrency.child_process`). Ray only places its shards: messages go over a connection of the shard's
own, which knows a secret. A shard that was started has said that it is ready; whatever kept it from that is raised.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, Literal, get_args

from fsm_rollout.concurrency.child_process import ChildProcess
from fsm_rollout.concurrency.ray_session import Remote, import_ray
from fsm_rollout.concurrency.ray_session import connect as connect_ray
from fsm_rollout.engines.protocol import HalfLoaded, ReplicaLost
from fsm_rollout.errors import (
    BatchError,
    ConfigError,
    EngineError,
    JournalError,
    Problem,
    RunStopped,
    TargetNotReached,
    check_at_least,
)
from fsm_rollout.scheduler.link import Link, SocketLink, framed, read_messages

WorkerPlacement = Literal["local", "ray"]
SHARD = "fsm_rollout.jobs.shard"  # the module that is a shard; it stands to the right of this one
SECRET_BYTES = 32
CONNECT_SECONDS = 60.0  # how long an actor of Ray may take to start and to call back
START_SECONDS = 600.0  # how long a shard may take to be ready: it imports what its agents name, and loads engines


class ShardLost(EngineError):
    """A shard ended while it started, without saying why."""


@dataclass(slots=True)
class Started:
    """A shard that is ready: what it says of itself, the link to it, and how to end it."""

    facts: dict[str, Any]
    link: Link
    kill: Callable[[], None]
    socket: socket.socket | None = None
    loop: asyncio.AbstractEventLoop | None = field(default=None)

    async def attach(self) -> None:
        """Have messages come in on the running event loop, which may be another one than before."""
        loop = asyncio.get_running_loop()
        if self.socket is not None:
            self.loop = loop
            await loop.create_connection(lambda: self._protocol, sock=self.socket.dup())

    def detach(self) -> None:
        """Let the event loop go, which ends."""
        if self.socket is not None:
            self.loop = None
            self._protocol.detach()

    def end(self) -> None:
        """End it, and everything that is open for it here. Safe to call twice."""
        self.kill()
        if self.socket is not None:
            self.socket.close()
        if self.loop is not None and not self.loop.is_closed():
            self.link.close()

    @property
    def _protocol(self) -> SocketLink:
        assert isinstance(self.link, SocketLink)
        return self.link


Start = Callable[[bytes], Started]  # starts a shard from its pickled setup, and waits until it is ready


def starter(workers: int, placement: str) -> Start | None:
    """Return what starts a shard, or ``None`` if the run's own process is enough; ConfigError: that cannot be had."""
    check_at_least(1, "process", "workers", workers)
    if placement not in get_args(WorkerPlacement):
        raise ConfigError(f"worker_placement must be 'local' or 'ray', got {placement!r}")
    if placement == "ray":
        return start_actor
    return start_process if workers > 1 else None


def start_process(setup: bytes) -> Started:
    """Start a shard as a process of this machine."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = ChildProcess(f"{SHARD}:main", theirs.fileno())
    return _ready(ours, setup, process.kill)


def start_actor(setup: bytes) -> Started:
    """Start a shard as an actor of Ray, which calls back; EngineError says what it asked for, and what to try."""
    connect_ray()
    ray, secret = import_ray(), secrets.token_bytes(SECRET_BYTES)
    address = ray.util.get_node_ip_address()
    listening = socket.create_server((address, 0))
    listening.settimeout(CONNECT_SECONDS)
    actor = ray.remote(_Actor).options(num_cpus=1, max_restarts=0).remote()
    running = actor.run.remote(address, listening.getsockname()[1], secret)
    with listening:
        try:
            ours = _accept(listening, secret)
        except TimeoutError:
            why = _why_silent(ray, running, address)
            ray.kill(actor)
            raise EngineError(f"no shard has called back within {CONNECT_SECONDS:g} s: {why}") from None
    return _ready(ours, setup, partial(ray.kill, actor))


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
    """Holds a shard on a node of the cluster."""

    def run(self, host: str, port: int, secret: bytes) -> None:
        connection = socket.create_connection((host, port))
        connection.sendall(secret)
        import_module(SHARD).serve(connection)


def _ready(ours: socket.socket, setup: bytes, kill: Callable[[], object]) -> Started:
    """Say to a shard what it is, and wait until it is ready."""

    def end() -> None:
        with suppress(Exception):  # it may be gone
            kill()

    try:
        ours.settimeout(START_SECONDS)
        ours.sendall(framed(pickle.dumps(sys.path)) + framed(setup))
        while True:
            for kind, *parts in read_messages(ours):
                if kind == "ready":
                    ours.setblocking(False)
                    return Started(parts[0], SocketLink(shard=False), end, ours)
                if kind == "failed":
                    raise error_of(*parts)
                log(0, *parts)
    except TimeoutError:
        ours.close()
        end()
        raise EngineError(f"a shard did not start within {START_SECONDS:g} s") from None
    except (EOFError, OSError) as error:
        ours.close()
        end()
        raise ShardLost("a shard ended while it started; see what it printed") from error
    except BaseException:
        ours.close()
        end()
        raise


ERRORS: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (BatchError, EngineError, HalfLoaded, JournalError, ReplicaLost, RunStopped, TargetNotReached)
}


def error_of(kind: str, problems: Sequence[Sequence[Any]], text: str) -> Exception:
    """Return the error that a shard has told of."""
    if kind == ConfigError.__name__:
        return ConfigError([Problem(*problem) for problem in problems])
    return ERRORS.get(kind, EngineError)(text if kind in ERRORS else f"a shard failed: {kind}: {text}")


def log(number: int, name: str, level: int, text: str) -> None:
    """Log here what a shard has logged."""
    logging.getLogger(name).log(level, "shard %d: %s" if number else "shard: %s", *([number] if number else []), text)
