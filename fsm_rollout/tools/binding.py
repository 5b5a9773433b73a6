"""An agent's tools, bound to their code: one class per kind of tool.

Invariant: a :class:`BoundTool` is shared by all trajectories and holds none of their state; what one trajectory has of
a tool (its extra arguments, its instance) is an :class:`OpenTool`. Neither knows timeouts, retries or limits.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

from fsm_rollout.agent import graph
from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.agent.handlers import load_object
from fsm_rollout.errors import ConfigError, ToolError, did_you_mean
from fsm_rollout.tools.base import RunAgent, ToolContext, fresh
from fsm_rollout.tools.call import STOP_SECONDS, invoke, is_async
from fsm_rollout.tools.process_placement import in_process
from fsm_rollout.tools.json_schema import Schema
from fsm_rollout.tools.parameters import Parameters, context_parameters, parameters_of

MakeContext = Callable[[str], ToolContext]
"""Makes the ToolContext of a call; the argument tells its randomness from that of others within the call."""


THREADS = 256
"""Calls of one sync tool that run at once where it has no `concurrency`: each takes a thread."""


class NotReady(Exception):
    """A tool's `create` failed; its cause says how. Not the model's fault."""


def function_schema(name: str, description: str | None, parameters: Parameters, where: str) -> Schema:
    """Put a schema together.

    Raises:
        ToolError: nothing says what the tool does. A model can only guess what such a tool is for.
    """
    description = description or parameters.description
    if not description:
        raise ToolError(f"{where}: it has no docstring to tell the model what it does; write one, or a `description`")
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": deepcopy(parameters.schema)},
    }


class OpenTool(ABC):
    """A tool within one trajectory."""

    @abstractmethod
    async def call(self, arguments: dict[str, Any], context: MakeContext) -> Any:
        """Carry out one call and return what the tool returns, or raise what it raises."""

    @property
    def to_release(self) -> bool:
        """Whether there is anything to let go of."""
        return False

    async def release(self) -> None:  # noqa: B027  # only classes have something to release
        """Let go of what the trajectory has of this tool."""


class BoundTool(ABC):
    """A tool of an agent, its code loaded and its schema built."""

    schema: Schema
    parameters: Parameters | None = None
    in_thread = False
    """Whether its calls occupy a thread."""
    places: int | None = None
    """How many of its calls run at once where it has no ``concurrency``; ``None``: any number."""
    stop_seconds: float | None = STOP_SECONDS
    """How long a cancelled call may take to clean up; ``None`` waits as long as it takes."""

    def __init__(self, name: str, spec: graph.Tool) -> None:
        self.name = name
        self.spec = spec
        self.where = f"tool '{name}' ({spec.use or 'agent'})"

    @abstractmethod
    def check(self, tools_kwargs: Mapping[str, Any]) -> None:
        """Raise ToolError unless a prompt's ``tools_kwargs`` for this tool fit."""

    @abstractmethod
    def open(self, tools_kwargs: Mapping[str, Any], run_agent: RunAgent) -> OpenTool:
        """Make what one trajectory has of this tool; nothing runs yet."""

    def read(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return a model's arguments as the tool takes them, or raise BadArguments."""
        assert self.parameters is not None
        return self.parameters.read(arguments)


class FunctionTool(BoundTool):
    """A plain function, sync or async."""

    def __init__(self, name: str, spec: graph.Tool, function: Callable[..., Any]) -> None:
        super().__init__(name, spec)
        self.function = function
        self.parameters: Parameters = parameters_of(function, where=self.where, hidden=spec.kwargs)
        self.schema = function_schema(name, spec.description, self.parameters, self.where)
        self.in_thread, self.places = _room(spec, function)

    def check(self, tools_kwargs: Mapping[str, Any]) -> None:
        """Hidden parameters may be given, and those without a default must."""
        parameters = self.parameters
        for key in tools_kwargs:
            if key in parameters.names:
                raise ToolError(
                    f"{self.where}: tools_kwargs give '{key}', which the model fills in; hide it: Annotated[…, Hidden]"
                )
            if key in parameters.contexts or (key not in parameters.hidden and not parameters.takes_any):
                hint = did_you_mean(key, parameters.hidden)
                raise ToolError(f"{self.where}: tools_kwargs give '{key}', which is not a hidden parameter{hint}")
        for key in parameters.needed:
            if key not in tools_kwargs and key not in self.spec.kwargs:
                raise ToolError(
                    f"{self.where}: nothing gives the hidden parameter '{key}'; "
                    "give it in the tool's kwargs or in the prompt's tools_kwargs"
                )

    def open(self, tools_kwargs: Mapping[str, Any], run_agent: RunAgent) -> OpenTool:
        """Keep the extra arguments."""
        return _OpenFunction(self, {**self.spec.kwargs, **tools_kwargs})


class _OpenFunction(OpenTool):
    def __init__(self, tool: FunctionTool, kwargs: Mapping[str, Any]) -> None:
        self._tool = tool
        self._kwargs = kwargs

    async def call(self, arguments: dict[str, Any], context: MakeContext) -> Any:
        contexts = {name: context("call") for name in self._tool.parameters.contexts}
        given = fresh(self._kwargs) | arguments | contexts
        spec = self._tool.spec
        match spec.placement:
            case "local":
                return await invoke(self._tool.function, given)
            case "process":
                return await in_process(str(spec.use), given)
            case "ray":
                from fsm_rollout.tools.ray_placement import call_on_ray  # Ray: only for those who ask for it

                return await call_on_ray(str(spec.use), given)


class ClassTool(BoundTool):
    """A class with `execute`: one instance per trajectory that calls it (see :class:`fsm_rollout.tools.Tool`)."""

    def __init__(self, name: str, spec: graph.Tool, cls: type[Any]) -> None:
        super().__init__(name, spec)
        self.cls = cls
        execute = getattr(cls, "execute", None)
        if not callable(execute):
            raise ToolError(f"{self.where}: the class has no method `execute`{did_you_mean('execute', vars(cls))}")
        if inspect.isabstract(cls):
            missing = ", ".join(sorted(cls.__abstractmethods__))
            raise ToolError(f"{self.where}: the class is abstract; it lacks {missing}")
        method = inspect.isfunction(inspect.getattr_static(cls, "execute"))
        self.parameters: Parameters = parameters_of(execute, where=f"{self.where}: execute", method=method)
        if self.parameters.needed:
            raise ToolError(f"{self.where}: hidden values go to `create`, not to `execute`: {self.parameters.needed}")
        documentation = spec.description or self.parameters.description or inspect.cleandoc(cls.__doc__ or "")
        self.schema = function_schema(name, documentation, self.parameters, self.where)
        self.create = getattr(cls, "create", None)
        self.create_contexts = context_parameters(self.create, self.where) if self.create is not None else []
        self.in_thread, self.places = _room(spec, execute)
        if spec.placement == "process":
            raise ToolError(
                f"{self.where}: placement 'process' runs functions only, because a class keeps its instance between "
                "calls; use 'ray' (an actor for each trajectory), or write a function"
            )
        self._fit(cls, spec.kwargs, "the tool's kwargs")

    def check(self, tools_kwargs: Mapping[str, Any]) -> None:
        """They must be what `create` takes."""
        if self.create is None:
            if tools_kwargs:
                raise ToolError(
                    f"{self.where}: the prompt gives tools_kwargs, but the class has no `create` to take them"
                )
            return
        contexts = dict.fromkeys(self.create_contexts)
        self_ = (None,) if inspect.isfunction(inspect.getattr_static(self.cls, "create")) else ()
        self._fit(self.create, {**tools_kwargs, **contexts}, "the prompt's tools_kwargs", *self_)

    def _fit(self, function: Callable[..., Any], kwargs: Mapping[str, Any], source: str, *args: None) -> None:
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            return  # no signature to be read (a C extension's): calling it will tell
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            name = getattr(function, "__qualname__", repr(function))
            raise ToolError(f"{self.where}: {source} do not fit {name}{signature}: {error}") from error

    def open(self, tools_kwargs: Mapping[str, Any], run_agent: RunAgent) -> OpenTool:
        """Keep the arguments of `create`."""
        return _OpenClass(self, tools_kwargs)


class _OpenClass(OpenTool):
    """Holds the one instance.

    It is created once, for all calls that come meanwhile, and a call that gives up waiting does not stop it: a sandbox
    that takes a minute to start is there for the next call.
    """

    def __init__(self, tool: ClassTool, tools_kwargs: Mapping[str, Any]) -> None:
        self._tool = tool
        self._tools_kwargs = tools_kwargs
        self._creating: asyncio.Task[Any] | None = None

    async def call(self, arguments: dict[str, Any], context: MakeContext) -> Any:
        if self._creating is None or (self._creating.done() and not self._created(self._creating)):
            self._creating = asyncio.get_running_loop().create_task(
                self._create(context), name=f"create of tool '{self._tool.name}'"
            )
        try:
            instance = await asyncio.shield(self._creating)
        except Exception as error:
            raise NotReady from error
        contexts = {name: context("call") for name in self._tool.parameters.contexts}
        return await invoke(instance.execute, arguments | contexts)

    async def _create(self, context: MakeContext) -> Any:
        tool = self._tool
        make: Callable[..., Any] = tool.cls
        if tool.spec.placement == "ray":
            from fsm_rollout.tools.ray_placement import RayInstance  # Ray: only for those who ask for it

            make = partial(RayInstance.make, str(tool.spec.use))
        instance = await invoke(make, fresh(tool.spec.kwargs))
        if tool.create is not None:
            contexts = {name: context("create") for name in tool.create_contexts}
            await invoke(instance.create, fresh(self._tools_kwargs) | contexts)
        return instance

    @staticmethod
    def _created(creating: asyncio.Task[Any]) -> bool:
        return creating.done() and not creating.cancelled() and creating.exception() is None

    @property
    def to_release(self) -> bool:
        return self._creating is not None

    async def release(self) -> None:
        creating, self._creating = self._creating, None
        if creating is None:
            return
        if self._tool.create is not None and is_async(self._tool.create):
            creating.cancel()  # no effect when it is done
        try:
            await asyncio.wait({creating})
        finally:
            creating.cancel()
        if self._created(creating) and (hasattr(self._tool.cls, "release") or self._tool.spec.placement == "ray"):
            await invoke(creating.result().release, {})


class AgentTool(BoundTool):
    """Another agent, run as a child trajectory."""

    stop_seconds = None  # a child trajectory ends by itself, and must be recorded

    def __init__(self, name: str, spec: graph.Tool, agent: AgentGraph) -> None:
        super().__init__(name, spec)
        self.agent = agent
        if spec.placement != "local":
            raise ToolError(f"{self.where}: an agent runs here; leave `placement` out")
        if spec.kwargs:
            raise ToolError(f"{self.where}: an agent takes no kwargs, only a task; got {', '.join(spec.kwargs)}")

        self.parameters = parameters_of(_ask, where=self.where)
        description = spec.description or agent.description or f"Hand a task to the agent '{agent.agent}'."
        self.schema = function_schema(name, description, self.parameters, self.where)

    def check(self, tools_kwargs: Mapping[str, Any]) -> None:
        """There must be none."""
        if tools_kwargs:
            raise ToolError(f"{self.where}: an agent takes no tools_kwargs, only a task; got {', '.join(tools_kwargs)}")

    def open(self, tools_kwargs: Mapping[str, Any], run_agent: RunAgent) -> OpenTool:
        """Keep the way to run it."""
        return _OpenAgent(self, run_agent)


class _OpenAgent(OpenTool):
    def __init__(self, tool: AgentTool, run_agent: RunAgent) -> None:
        self._tool = tool
        self._run_agent = run_agent

    async def call(self, arguments: dict[str, Any], context: MakeContext) -> Any:
        seed = context("agent").rng.getrandbits(63)  # the call's own, however often it was interrupted and made again
        return await self._run_agent(self._tool.name, self._tool.agent, arguments["task"], seed)


def _room(spec: graph.Tool, function: Callable[..., Any]) -> tuple[bool, int | None]:
    """Return whether a call takes a thread, and how many calls run at once by default."""
    if spec.placement == "process":
        return False, os.cpu_count() or 1
    in_thread = spec.placement == "local" and not is_async(function)
    return in_thread, THREADS if in_thread else None


def _ask(task: str) -> None:
    """Give the agent its task.

    Args:
        task: What to do, with all that is needed to do it.
    """


def bind(name: str, spec: graph.Tool) -> BoundTool:
    """Load a tool's code and build its schema; nothing of the tool runs.

    Raises:
        ToolError: its import, its signature or its ``kwargs`` are wrong.
    """
    if (spec.use is None) == (spec.agent is None):
        raise ToolError(f"tool '{name}': give either `use` (a function or class) or `agent` (a YAML file)")
    if not spec.repeatable and spec.retry.attempts > 1:
        raise ToolError(f"tool '{name}': it is not repeatable, so it cannot be retried; leave out one of the two")
    if spec.agent is not None:
        return AgentTool(name, spec, spec.agent)
    assert spec.use is not None
    try:
        found = load_object(spec.use)
    except ConfigError as error:
        raise ToolError(f"tool '{name}': {error}") from error
    if isinstance(found, type):
        return ClassTool(name, spec, found)
    if callable(found):
        return FunctionTool(name, spec, found)
    raise ToolError(f"tool '{name}': '{spec.use}' is a {type(found).__name__}; a tool is a function or a class")
