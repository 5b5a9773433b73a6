"""A tool's code on a Ray cluster: a function as a task, a class as one actor for each trajectory.

Invariant: as in :mod:`fsm_rollout.tools.process_placement`: plain data there and back, a call that is given up is killed, and
errors come back as they were raised. Tools take no CPU of Ray's accounts (engines may have them all): how many run at
once is the toolbox's to say, and tasks are spread over the nodes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from fsm_rollout.agent.handlers import load_object
from fsm_rollout.concurrency.ray_session import answer_to, connect, import_ray
from fsm_rollout.tools import tool_messages
from fsm_rollout.tools.base import ToolResult
from fsm_rollout.tools.call import invoke
from fsm_rollout.tools.process_placement import ToolDied, portable, run_here

logger = logging.getLogger(__name__)

TELL_AFTER = 2.0
"""Seconds of connecting after which it is said what is waited for."""
OPTIONS = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": "SPREAD"}


async def call_on_ray(use: str, arguments: Mapping[str, Any]) -> Any:
    """Call the function ``use`` (``module:name``) as a Ray task; cancelling the call kills the worker.

    Raises:
        ToolDied: the worker, or its node, was lost.
        EngineError: there is no Ray.
        Exception: whatever the function raises.
    """
    ray = await _ray()
    task = ray.remote(_run_there).options(**OPTIONS)
    return await _answer(ray, task.remote(sys.path, use, dict(arguments)), force=True)


def _run_there(path: Sequence[str], use: str, arguments: dict[str, Any]) -> tuple[Any, Exception | None]:
    _see(path)
    return run_here(use, arguments)


def _see(path: Sequence[str]) -> None:
    """Find modules where the driver finds them, as far as those places are there too."""
    sys.path += [entry for entry in path if entry not in sys.path and os.path.isdir(entry)]


async def _ray() -> Any:
    """Return ``ray``, connected; the first time takes seconds, in a thread."""
    ray = import_ray()
    if not ray.is_initialized():
        await asyncio.to_thread(connect)
    return ray


async def prepare() -> None:
    """Connect Ray, and have it start a worker, so that the first call's time is all its own.

    Raises:
        EngineError: there is no Ray.
    """
    slow = asyncio.get_running_loop().call_later(TELL_AFTER, logger.info, "waiting for Ray, where tools are to run")
    try:
        if not import_ray().is_initialized():
            await _ray()
            with suppress(ToolDied):  # the calls will tell
                await call_on_ray("os:getpid", {})
    finally:
        slow.cancel()


async def _answer(ray: Any, reference: Any, *, force: bool) -> Any:
    try:
        value, error = await answer_to(reference)
    except asyncio.CancelledError:
        ray.cancel(reference, force=force)
        raise
    except ray.exceptions.RayError as lost:
        raise ToolDied(f"it ended without an answer: {type(lost).__name__}") from lost
    if error is not None:
        raise error
    return value


class _Holder:
    """Runs in the actor: one instance of a tool's class."""

    def __init__(self, path: Sequence[str], use: str, kwargs: dict[str, Any]) -> None:
        _see(path)
        self._use, self._kwargs = use, kwargs
        self._made: Any = None
        self._making = asyncio.Lock()

    async def run(self, method: str, arguments: dict[str, Any]) -> tuple[Any, Exception | None]:
        try:
            async with self._making:
                if self._made is None:
                    self._made = await invoke(cast(Callable[..., Any], load_object(self._use)), self._kwargs)
            if not hasattr(self._made, method):
                return None, None
            value = await invoke(getattr(self._made, method), arguments)
            if method != "execute":
                return None, None
            return (value if isinstance(value, ToolResult) else tool_messages.result(value)), None
        except Exception as error:
            return None, portable(error)


class RayInstance:
    """An instance of a tool's class in an actor of its own; its methods are the tool's."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    @classmethod
    async def make(cls, use: str, /, **kwargs: Any) -> RayInstance:
        """Start the actor; the instance is made at its first call."""
        ray = await _ray()
        options = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": "SPREAD", "max_concurrency": 1000}
        return cls(ray.remote(_Holder).options(**options).remote(sys.path, use, kwargs))

    async def create(self, /, **arguments: Any) -> None:
        """Get it ready for one trajectory."""
        await self._run("create", arguments)

    async def execute(self, /, **arguments: Any) -> Any:
        """Carry out one call."""
        return await self._run("execute", arguments)

    async def release(self) -> None:
        """Let go of it, and of the actor."""
        try:
            await self._run("release", {})
        finally:
            import_ray().kill(self._actor)

    async def _run(self, method: str, arguments: dict[str, Any]) -> Any:
        return await _answer(import_ray(), self._actor.run.remote(method, arguments), force=False)
