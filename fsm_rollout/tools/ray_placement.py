"""A tool's code on a Ray cluster: a function as a task, a class as one actor for each trajectory.

Invariant: as in :mod:`fsm_rollout.tools.process_placement`, arguments and results are plain data, a call that is given
up is killed, and errors come back as they were raised. Tools take no CPU of Ray's accounts (engines may have them all):
the toolbox says how many run at once, and tasks are spread over the nodes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from fsm_rollout.agent.handlers import load_object
from fsm_rollout.concurrency.ray_session import answer_to, connect, import_ray
from fsm_rollout.tools.call import ToolDied, invoke
from fsm_rollout.tools.process_placement import Answer, portable, run_here, sendable
from fsm_rollout.tools.schema import Function

logger = logging.getLogger(__name__)

LOG_AFTER = 2.0
"""Seconds of connecting after which a line says what is waited for."""
OPTIONS = {"num_cpus": 0, "scheduling_strategy": "SPREAD"}


async def call_on_ray(use: str, arguments: Mapping[str, object]) -> object:
    """Call the function ``use`` (``module:name``) as a Ray task; cancelling the call kills the worker.

    Raises:
        ToolDied: the worker, or its node, was lost.
        EngineError: there is no Ray.
        Exception: whatever the function raises.
    """
    ray = await _connected()
    task = ray.remote(_run_there).options(max_retries=0, **OPTIONS)
    return await _answer(task.remote(sys.path, use, dict(arguments)), force=True)


async def prepare() -> None:
    """Connect Ray, and have it start a worker, so that the first call's time is all its own.

    Raises:
        EngineError: there is no Ray.
    """
    slow = asyncio.get_running_loop().call_later(LOG_AFTER, logger.info, "waiting for Ray, where tools are to run")
    try:
        if not import_ray().is_initialized():
            with suppress(ToolDied):  # the calls will tell
                await call_on_ray("os:getpid", {})
    finally:
        slow.cancel()


async def _connected() -> Any:
    """Return ``ray``, connected; the first time takes seconds, in a thread."""
    ray = import_ray()
    if not ray.is_initialized():
        await asyncio.to_thread(connect)
    return ray


async def _answer(reference: object, *, force: bool) -> object:
    ray = import_ray()
    try:
        value, error = cast(Answer, await answer_to(reference))
    except asyncio.CancelledError:
        ray.cancel(reference, force=force)
        raise
    except ray.exceptions.RayError as lost:
        raise ToolDied(f"it ended without an answer: {type(lost).__name__}") from lost
    if error is not None:
        raise error
    return value


class RayInstance:
    """An instance of a tool's class in an actor of its own; its methods are the tool's."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    @classmethod
    async def make(cls, use: str, /, **kwargs: object) -> RayInstance:
        """Start the actor; the instance is made at its first call."""
        ray = await _connected()
        actor = ray.remote(_Holder).options(max_restarts=0, max_concurrency=1000, **OPTIONS)
        return cls(actor.remote(sys.path, use, kwargs))

    async def create(self, /, **arguments: object) -> object:
        """Get it ready for one trajectory."""
        return await self._run("create", arguments)

    async def execute(self, /, **arguments: object) -> object:
        """Carry out one call."""
        return await self._run("execute", arguments)

    async def release(self) -> None:
        """Release it, and end the actor."""
        try:
            await self._run("release", {})
        finally:
            import_ray().kill(self._actor)

    async def _run(self, method: str, arguments: Mapping[str, object]) -> object:
        return await _answer(self._actor.run.remote(method, arguments), force=False)


# In Ray's worker.


def _run_there(path: Sequence[str], use: str, arguments: dict[str, object]) -> Answer:
    _look_in(path)
    return run_here(use, arguments)


def _look_in(path: Sequence[str]) -> None:
    """Find modules where the driver finds them, as far as those folders exist here too."""
    sys.path += [entry for entry in path if entry not in sys.path and os.path.isdir(entry)]


class _Holder:
    """The actor: holds one instance of a tool's class."""

    def __init__(self, path: Sequence[str], use: str, kwargs: dict[str, object]) -> None:
        _look_in(path)
        self._use, self._kwargs = use, kwargs
        self._instance: object = None
        self._making = asyncio.Lock()

    async def run(self, method: str, arguments: dict[str, object]) -> Answer:
        try:
            async with self._making:
                if self._instance is None:
                    self._instance = await invoke(cast(Function, load_object(self._use)), self._kwargs)
            if not hasattr(self._instance, method):
                return None, None
            value = await invoke(getattr(self._instance, method), arguments)
            return (sendable(value) if method == "execute" else None), None
        except Exception as error:  # whatever the tool raises
            return None, portable(error)
