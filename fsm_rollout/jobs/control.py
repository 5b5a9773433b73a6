"""Orders for a run that is under way, from other programs of its machine: a socket in its folder.

Invariant: whoever may write into the folder may give orders, and nobody else. An order is one line of JSON, and so is
its answer; reading it runs nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from fsm_rollout.agent.graph import POLICY
from fsm_rollout.engines.replica import Rows
from fsm_rollout.errors import ConfigError, EngineError, RolloutError, did_you_mean
from fsm_rollout.jobs.run_config import RunConfig
from fsm_rollout.jobs.run_folder import LOCK, SUMMARY, is_written
from fsm_rollout.rollout import Rollout
from fsm_rollout.trajectory.journal import JournalFolder, metadata

logger = logging.getLogger(__name__)
SOCKET = "run.sock"
REPLICAS = "replicas"  # what a journal calls those that orders have left: keys of engines, by their names
COUNTED = ("replicas", "urls")  # the keys of an engine that say how many it has
LONGEST = 100  # bytes of a socket's path; the kernel takes 107


class Order(msgspec.Struct, frozen=True):
    """What is to be done with the replicas of an engine."""

    what: Literal["list", "add", "remove"]
    which: str | None = None
    """The url of a server to add, or the name of the replica to remove."""
    within: float | None = None
    """Seconds that one which leaves has to end what it has."""
    engine: str = POLICY


class OrderAnswer(msgspec.Struct, frozen=True):
    """What has become of it."""

    error: str = ""
    name: str = ""
    """That of the replica which was added."""
    rows: Rows = msgspec.field(default_factory=list)
    """All there are now."""


@asynccontextmanager
async def taking_orders(folder: Path, rollout: Rollout) -> AsyncIterator[None]:
    """Carry out orders for a rollout, on its event loop, while the block runs."""
    tasks = set[asyncio.Task[None]]()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            try:
                answer = await _carry_out(rollout, msgspec.json.decode(await reader.readline(), type=Order))
            except (RolloutError, msgspec.DecodeError) as error:
                answer = OrderAnswer(error=str(error))
            with suppress(OSError):  # whoever asked is gone
                writer.write(msgspec.json.encode(answer, enc_hook=str) + b"\n")
                await writer.drain()
        finally:
            tasks.discard(task)
            writer.close()

    with _path(folder) as path:
        try:
            server = await asyncio.start_unix_server(take, path)
        except OSError as error:  # some shared file systems have no sockets
            logger.info("no orders are taken here, as %s cannot be made: %s", SOCKET, error)
            yield
            return
        os.chmod(path, 0o600)
        try:
            yield
        finally:
            server.close()
            for task in tasks:
                task.cancel()
            with suppress(FileNotFoundError):
                os.unlink(path)


async def _carry_out(rollout: Rollout, order: Order) -> OrderAnswer:
    try:
        engine = rollout.engines[order.engine]
    except KeyError:
        hint = did_you_mean(order.engine, rollout.engines)
        raise EngineError(f"the run has no engine '{order.engine}'{hint}") from None
    name = ""
    if order.what == "add":
        name = await engine.add(order.which)
    elif order.what == "remove":
        await engine.remove(order.which or "", float("inf") if order.within is None else order.within)
    rows = await engine.rows()
    if order.what != "list" and rollout.journal is not None:
        urls = [row["url"] for row in rows if row["state"] not in ("left", "leaving")]
        keys = {"urls": urls} if any(urls) else {"replicas": len(urls)}
        before = metadata(rollout.journal.path).get(REPLICAS, {})
        rollout.journal.describe({REPLICAS: before | {order.engine: keys}}, anew=True)
    return OrderAnswer(name=name, rows=rows)


def orders_left(
    config: RunConfig, recorded: Mapping[str, Any], overrides: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Return the replicas that orders have left, as a journal's metadata say: keys of engines, by their names.

    What the run's YAML says otherwise than when it began, or ``overrides`` name, is no longer an order's.
    """
    run, given = json.loads(recorded["run"]), {override.partition("=")[0] for override in overrides}
    began, specs = {POLICY: run["engine"], **run["engines"]}, {POLICY: config.engine, **config.engines}
    left = {}
    for name, keys in recorded.get(REPLICAS, {}).items():
        at, first, spec = "engine" if name == POLICY else f"engines.{name}", began.get(name, {}), specs.get(name)
        if spec is None or spec.get("replicas") == "auto" or given & {at, *(f"{at}.{key}" for key in COUNTED)}:
            continue
        if all(spec.get(key) == first.get(key) for key in COUNTED):
            left[name] = keys
    return left


def with_orders(config: RunConfig, left: Mapping[str, Mapping[str, Any]]) -> RunConfig:
    """Return a run's config with the replicas of :func:`orders_left`."""
    specs = {POLICY: config.engine, **config.engines}
    specs = {name: {**spec, **left.get(name, {})} for name, spec in specs.items()}
    return config.model_copy(update={"engine": specs.pop(POLICY), "engines": specs})


def ask(folder: Path, order: Order) -> OrderAnswer:
    """Give the run in a folder an order, and return what has become of it.

    Raises:
        ConfigError: nobody runs there, or not on this machine.
        EngineError: the run could not do it.
    """
    with _path(folder) as path, socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(path)
        except OSError as error:
            raise ConfigError(f"'{folder}': no run takes orders here ({_why_not(folder)})") from error
        connection.sendall(msgspec.json.encode(order) + b"\n")
        with connection.makefile("rb") as lines:
            line = lines.readline()
    if not line:
        raise EngineError(f"the run in '{folder}' ended before it answered")
    answer = msgspec.json.decode(line, type=OrderAnswer)
    if answer.error:
        raise EngineError(answer.error)
    return answer


def _why_not(folder: Path) -> str:
    if is_written(folder):
        who = (folder / LOCK).read_text("utf-8").strip()
        return f"it is {who}: ask on that machine, once it has started"
    if (folder / SUMMARY).is_file():
        return "the one in it has ended"
    if JournalFolder(folder).first.is_file():
        return f"the one in it has stopped: fsm-rollout resume {folder}"
    return "it is no run's folder"


@contextmanager
def _path(folder: Path) -> Iterator[str]:
    """Yield the socket's path, a short one also where the folder's is long."""
    path = str(folder.absolute() / SOCKET)
    if len(os.fsencode(path)) <= LONGEST:
        yield path
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"'{folder}' is no run's folder: {error.strerror}") from error
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET}"
    finally:
        os.close(descriptor)
