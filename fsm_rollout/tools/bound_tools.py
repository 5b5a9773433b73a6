"""From an entry of an agent's tools to something that can be called: its code is loaded, its schema built.

Invariant: a :class:`BoundTool` is shared by all trajectories and holds none of their state; what it keeps for one of
them is in that one's session.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeAlias

from fsm_rollout.agent import graph
from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.errors import ConfigError, ToolError, did_you_mean, place_of
from fsm_rollout.names.objects import HERE_ALONE, load_object
from fsm_rollout.tools.base import AgentAnswer, AgentCall, ToolContext, fresh
from fsm_rollout.tools.bounded_call import STOP_SECONDS, Expired, RaisedElsewhere, bounded, call_of, invoke, is_async
from fsm_rollout.tools.schema import Arguments, Function, Parameters, Schema, context_parameters, parameters_of
from fsm_rollout.tools.tool_messages import Unshowable, described

RELEASE_SECONDS = 30.0  # how long a `release` may take where the tool has no timeout
THREADS = 256  # calls of one sync tool that run at once where it has no `concurrency`: each takes a thread

_logger = logging.getLogger(__name__)

# Runs an agent as a child trajectory, or goes on with the one of that call.
RunAgent = Callable[[AgentGraph, AgentCall], Awaitable[AgentAnswer]]
# Makes the ToolContext of a call; the argument tells its randomness from that of others within the call.
MakeContext = Callable[[str], ToolContext]
ToolsKwargs = Mapping[str, Mapping[str, object]]  # a prompt's `tools_kwargs`, by tool


class NotReady(Exception):
    """A tool's `create` failed; its cause says how. Not the model's fault."""


class ReportedFailure(Exception):
    """The server that runs the tool reports a failure; its text is meant for the model, which is not blamed."""


class Holder(Protocol):
    """Something that a trajectory holds open for its calls, such as an instance of a tool's class."""

    async def release(self, held: Any) -> str | None:
        """Release what it holds, and return what went wrong."""


class Session(Protocol):
    """What a tool sees of the trajectory that calls it; see :class:`fsm_rollout.tools.toolbox.ToolSession`."""

    trajectory_id: str
    group_id: str
    extra: Mapping[str, object]
    hidden: ToolsKwargs
    instances: dict[Holder, Any]
    run_agent: RunAgent | None


def succeeded(making: asyncio.Task[Any]) -> bool:
    """Whether what is made is there."""
    return making.done() and not making.cancelled() and making.exception() is None


async def made_once(
    made: MutableMapping[Any, asyncio.Task[Any]], key: object, make: Callable[[], Coroutine[object, object, Any]],
    name: str | None = None,
) -> Any:  # fmt: skip
    """Return what stands at a key in ``made``: made once, for all calls that come meanwhile, and anew where it failed.

    A call that gives up waiting does not stop it: a sandbox that takes a minute to start is ready for the next call.

    Raises:
        NotReady: making it has raised.
    """
    making = made.get(key)
    if making is None or (making.done() and not succeeded(making)):
        making = made[key] = asyncio.get_running_loop().create_task(make(), name=name)
    try:
        return await asyncio.shield(making)
    except Exception as error:  # the user's own code
        raise NotReady from error


class BoundTool(ABC):
    """A tool of an agent, its code loaded and its schema built. One subclass per kind of tool."""

    kind: str  # what it is, for messages
    schema: Schema
    parameters: Parameters
    silence = ""  # what to say to its developer where it returns nothing; empty: nothing
    runs_here = False  # whether its code runs in this process, and could end it
    in_thread = False  # whether its calls occupy a thread
    on_ray = False  # whether they go to a Ray cluster
    slots: int | None = None  # how many of its calls run at once where it has no `concurrency`; `None`: any number
    server: Any = None  # what brings it, where that brings several; has `close`, for what trajectories share
    # What keeps a trajectory's state between its calls: those of one holder run in the order in which they were made.
    holder: Holder | None = None
    snapshots = False  # whether that state is kept in the journal after each call, and restored from it
    # How long a cancelled call may take to clean up; `None` waits as long as it takes.
    stop_seconds: float | None = STOP_SECONDS

    def __init__(self, name: str, spec: graph.ToolSpec) -> None:
        self.name = name
        self.spec = spec
        self.may_repeat = spec.may_repeat
        self.where = f"tool '{name}' ({spec.use or ('agent' if spec.agent is not None else 'mcp')})"
        self._reported: set[str] = set()  # the kinds of errors that have been logged

    async def snapshot(self, session: Session) -> bytes | None:
        """Return what a trajectory's calls have left, where the tool can (`snapshots`)."""
        raise NotImplementedError

    async def restore(self, session: Session, data: bytes, context: MakeContext) -> None:
        """Let a trajectory's further calls run on what its earlier ones had left."""
        raise NotImplementedError

    def report(self, kind: str, error: BaseException, told: str = "which models are told and not charged for") -> None:
        """Log an error that the tool's code raised, with its place there; the first of each kind."""
        if kind not in self._reported:
            self._reported.add(kind)
            place = error.place if isinstance(error, RaisedElsewhere) else place_of(error)
            place = "" if kind == Unshowable.__name__ else place  # where it was found out, and not where it is wrong
            problem = described(error, kind) + (f" (at {place})" if place else "")
            _logger.warning("%s failed, %s: %s", self.where, told, problem)

    def report_silence(self) -> None:
        """Log, once, that a tool which prints has returned nothing: its model reads `null`."""
        if self.silence and self.silence not in self._reported:
            self._reported.add(self.silence)
            _logger.warning("%s %s", self.where, self.silence)

    def check(self, tools_kwargs: Mapping[str, object]) -> None:
        """Raise ToolError unless a prompt's ``tools_kwargs`` for this tool fit; most kinds of tools take none."""
        if tools_kwargs:
            raise ToolError(f"{self.where}: {self.kind} takes no tools_kwargs; got {', '.join(tools_kwargs)}")

    @abstractmethod
    async def call(self, session: Session, arguments: Arguments, context: MakeContext) -> object:
        """Carry out one call and return what the tool returns, or raise what it raises."""

    def read(self, arguments: Mapping[str, object]) -> Arguments:
        """Return a model's arguments as the tool takes them, or raise BadArguments."""
        return self.parameters.read(arguments)

    def _runs(self, function: Function) -> None:
        """Note where calls of ``function`` run, how many at once by default, and whether it prints."""
        self.runs_here, self.on_ray = self.spec.placement == "local", self.spec.placement == "ray"
        if "print" in getattr(getattr(inspect.unwrap(function), "__code__", None), "co_names", ()):
            self.silence = "returned None; did you mean to return what it prints?"
        if self.spec.placement == "process":
            self.slots = os.cpu_count() or 1
        elif self.spec.placement == "local" and not is_async(function):
            self.in_thread, self.slots = True, THREADS


class FunctionTool(BoundTool):
    """A plain function, sync or async."""

    def __init__(self, name: str, spec: graph.ToolSpec, function: Function) -> None:
        super().__init__(name, spec)
        self.function = function
        self._call = call_of(function)
        self.parameters = parameters_of(function, where=self.where, hidden=spec.kwargs)
        self.schema = self.parameters.tool(name, spec.description)
        self._runs(function)
        self._check_travels(spec.kwargs)

    def _check_travels(self, hidden: Mapping[str, object]) -> None:
        """Raise ToolError for hidden values that cannot go to where the tool runs."""
        if hidden and self.spec.placement != "local":
            from fsm_rollout.tools.placement import check_travels  # multiprocessing: only for those who ask for it

            check_travels(str(self.spec.use), hidden)

    def read(self, arguments: Mapping[str, object]) -> Arguments:
        """Return them as the tool takes them; elsewhere they are read once more, as the model wrote them."""
        read = self.parameters.read(arguments)
        return read if self.spec.placement == "local" else dict(arguments)

    def check(self, tools_kwargs: Mapping[str, object]) -> None:
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
        for key in parameters.required:
            if key not in tools_kwargs and key not in self.spec.kwargs:
                raise ToolError(
                    f"{self.where}: nothing gives the hidden parameter '{key}'; "
                    "give it in the tool's kwargs or in the prompt's tools_kwargs"
                )
        self._check_travels(tools_kwargs)

    async def call(self, session: Session, arguments: Arguments, context: MakeContext) -> object:
        """Call it where it is placed, with the hidden values laid under the model's arguments."""
        hidden = fresh(given) if (given := {**self.spec.kwargs, **session.hidden.get(self.name, {})}) else {}
        contexts = self.parameters.contexts
        if self.spec.placement == "local":
            context_arguments = {name: context("call") for name in contexts}
            return await self._call(self.function, hidden | arguments | context_arguments)
        from fsm_rollout.tools import placement  # multiprocessing and Ray: only for those who ask for them

        call = placement.call_in_process if self.spec.placement == "process" else placement.call_on_ray
        first = context("call") if contexts else None
        return await call(placement.ToolRequest(str(self.spec.use), arguments, hidden, contexts, first))


# An instance of a tool's class: has `execute`, and `create` and `release` if the class has them.
Instance: TypeAlias = Any


class ClassTool(BoundTool):
    """A class with `execute`: one instance per trajectory that calls it (see :class:`fsm_rollout.tools.Tool`)."""

    def __init__(self, name: str, spec: graph.ToolSpec, cls: type[Instance]) -> None:
        super().__init__(name, spec)
        self.cls = cls
        execute = getattr(cls, "execute", None)
        if not callable(execute):
            raise ToolError(f"{self.where}: the class has no method `execute`{did_you_mean('execute', vars(cls))}")
        if inspect.isabstract(cls):
            missing = ", ".join(sorted(cls.__abstractmethods__))
            raise ToolError(f"{self.where}: the class is abstract; it lacks {missing}")
        method = inspect.isfunction(inspect.getattr_static(cls, "execute"))
        self.parameters = parameters_of(execute, where=f"{self.where}: execute", method=method)
        if required := self.parameters.required:
            raise ToolError(f"{self.where}: hidden values go to `create`, not to `execute`: {required}")
        description = spec.description or self.parameters.description or inspect.cleandoc(cls.__doc__ or "")
        self.schema = self.parameters.tool(name, description)
        self.create: Function | None = getattr(cls, "create", None)
        self.create_contexts = context_parameters(self.create, self.where) if self.create is not None else []
        self._runs(execute)
        if spec.placement == "process":
            raise ToolError(
                f"{self.where}: placement 'process' runs functions only, because a class keeps its instance between "
                "calls; use 'ray' (an actor for each trajectory), or write a function"
            )
        self._fit(cls, spec.kwargs, "the tool's kwargs")
        self.holder = self
        has = [name for name in ("snapshot", "restore") if callable(getattr(cls, name, None))]
        if len(has) == 1:
            raise ToolError(f"{self.where}: the class has `{has[0]}` alone; what is kept must be restored: write both")
        # Elsewhere, and while other calls run, nobody can say after which calls the state is.
        self.snapshots = bool(has) and spec.placement == "local" and spec.order == "called"

    def check(self, tools_kwargs: Mapping[str, object]) -> None:
        """They must be what `create` takes."""
        if self.create is not None:
            is_method = inspect.isfunction(inspect.getattr_static(self.cls, "create"))
            kwargs = {**tools_kwargs, **dict.fromkeys(self.create_contexts)}
            self._fit(self.create, kwargs, "the prompt's tools_kwargs", *[None] * is_method)
        elif tools_kwargs:
            raise ToolError(f"{self.where}: the prompt gives tools_kwargs, but the class has no `create` to take them")

    def _fit(self, function: Function, kwargs: Mapping[str, object], source: str, *args: None) -> None:
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            return  # the signature cannot be read (a C extension's); the call itself will tell
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            name = getattr(function, "__qualname__", repr(function))
            raise ToolError(f"{self.where}: {source} do not fit {name}{signature}: {error}") from error

    async def call(self, session: Session, arguments: Arguments, context: MakeContext) -> object:
        """Call the trajectory's instance, which the first call creates."""
        instance = await self._instance(session, context)
        contexts = {name: context("call") for name in self.parameters.contexts}
        return await invoke(instance.execute, arguments | contexts)

    async def snapshot(self, session: Session) -> bytes | None:
        """Return what the trajectory's instance keeps; ``None`` if there is none."""
        creating = session.instances.get(self)
        if creating is None or not succeeded(creating):
            return None
        data = await invoke(creating.result().snapshot, {})
        if not isinstance(data, bytes):
            raise ToolError(f"{self.where}: snapshot must return bytes, got {type(data).__name__}")
        return data

    async def restore(self, session: Session, data: bytes, context: MakeContext) -> None:
        """Make the trajectory's instance, and give it what an earlier one kept."""
        instance = await self._instance(session, context)
        await invoke(partial(instance.restore, data), {})

    async def _instance(self, session: Session, context: MakeContext) -> Instance:
        """Return the trajectory's instance."""
        return await made_once(
            session.instances, self, lambda: self._create(session.hidden.get(self.name, {}), context),
            f"create of tool '{self.name}'",
        )  # fmt: skip

    async def _create(self, tools_kwargs: Mapping[str, object], context: MakeContext) -> Instance:
        make: Function = self.cls
        if self.spec.placement == "ray":
            from fsm_rollout.tools.placement import ray_instance  # Ray: only for those who ask for it

            make = partial(ray_instance, str(self.spec.use))
        instance: Instance = await invoke(make, fresh(self.spec.kwargs))
        if self.create is not None:
            contexts = {name: context("create") for name in self.create_contexts}
            await invoke(instance.create, {**fresh(tools_kwargs), **contexts})
        return instance

    async def release(self, creating: asyncio.Task[Instance]) -> str | None:
        """Release a trajectory's instance, and return what went wrong; a `create` that still runs is stopped."""
        timeout = self.spec.timeout or RELEASE_SECONDS
        try:
            await bounded(self._release(creating), timeout, name=f"release of tool '{self.name}'")
        except Expired:
            return f"tool '{self.name}': release did not end within {timeout:g} s and was stopped"
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # whatever the tool raises
            return f"tool '{self.name}': release raised {type(error).__name__}: {error}"
        return None

    async def _release(self, creating: asyncio.Task[Instance]) -> None:
        if self.create is not None and is_async(self.create):
            creating.cancel()  # no effect when it is done
        try:
            await asyncio.wait({creating})
        finally:
            creating.cancel()
        if succeeded(creating) and hasattr(creating.result(), "release"):
            await invoke(creating.result().release, {})


class AgentTool(BoundTool):
    """Another agent, run as a child trajectory."""

    kind = "an agent"
    stop_seconds = None  # a child trajectory ends by itself, and must be recorded

    def __init__(self, name: str, spec: graph.ToolSpec, agent: AgentGraph) -> None:
        super().__init__(name, spec)
        self.agent = agent
        if spec.placement != "local":
            raise ToolError(f"{self.where}: `placement` does not apply to an agent; leave it out")
        if spec.kwargs:
            raise ToolError(f"{self.where}: an agent takes no kwargs, only a task; got {', '.join(spec.kwargs)}")
        self.parameters = parameters_of(_ask, where=self.where)
        description = spec.description or agent.description or f"Hand a task to the agent '{agent.agent}'."
        self.schema = self.parameters.tool(name, description)

    async def call(self, session: Session, arguments: Arguments, context: MakeContext) -> AgentAnswer:
        """Run it on its task."""
        assert session.run_agent is not None
        tool_context = context("agent")
        call = AgentCall(
            self.name, arguments["task"], tool_context.rng.getrandbits(63), tool_context.call_id, tool_context.number
        )
        answer = await session.run_agent(self.agent, call)
        return replace(answer, pictures=answer.pictures[-self.spec.pictures :] if self.spec.pictures else ())


def _ask(task: str) -> None:
    """Give the agent its task.

    Args:
        task: What to do, with all that is needed to do it.
    """


def bind(name: str, spec: graph.ToolSpec) -> BoundTool:
    """Load a tool's code and build its schema; nothing of the tool runs. Raise ToolError for what is wrong with it."""
    _check_form(name, spec)
    if spec.agent is not None:
        return AgentTool(name, spec, spec.agent)
    try:
        code = load_object(str(spec.use))
    except ConfigError as error:
        raise ToolError(f"tool '{name}': {error}") from error
    if isinstance(code, type) and issubclass(code, BoundTool):
        return code(name, spec)  # a kind of its own, which knows its schema otherwise
    if isinstance(code, type):
        return ClassTool(name, spec, code)
    if spec.placement != "local" and str(spec.use).startswith(HERE_ALONE):
        raise ToolError(
            f"tool '{name}': it was given as an object, which a process of its own cannot import; write it into a "
            "module and name that, or leave `placement` out"
        )
    if callable(code):
        return FunctionTool(name, spec, code)
    raise ToolError(f"tool '{name}': '{spec.use}' is a {type(code).__name__}; a tool is a function or a class")


def bind_all(name: str, spec: graph.ToolSpec) -> Mapping[str, BoundTool]:
    """Return the tools of one entry of an agent's ``tools``; an MCP server, or a taskset, is asked for its own."""
    if not spec.is_source:
        return {name: bind(name, spec)}
    _check_form(name, spec)
    # What needs packages that not all have is imported by those who ask for it.
    home = "tools.mcp_server:MCPServer" if spec.mcp is not None else "environment.verifiers:TasksetTools"
    source: Any = load_object(f"fsm_rollout.{home}")
    tools: Mapping[str, BoundTool] = source(name, spec).tools()
    return tools


def check_tool(name: str, spec: graph.ToolSpec) -> None:
    """Raise ToolError for what is wrong with an entry of an agent's ``tools``; nothing is started, loaded or asked."""
    if not spec.is_source:
        bind(name, spec)
    else:
        _check_form(name, spec)


def _check_form(name: str, spec: graph.ToolSpec) -> None:
    if sum(kind is not None for kind in (spec.use, spec.agent, spec.mcp, spec.verifiers)) != 1:
        raise ToolError(
            f"tool '{name}': give either `use` (a function or class) or `agent` (a YAML file) or `mcp` (a server) or "
            "`verifiers` (a taskset)"
        )
    if not spec.may_repeat and spec.retry.attempts > 1:
        advice = "leave out one of the two" if spec.repeatable is False else "say `repeatable: true` if it may be"
        raise ToolError(f"tool '{name}': it is not repeatable, so it cannot be retried; {advice}")
    if spec.agent is None and spec.pictures is not None:
        raise ToolError(f"tool '{name}': `pictures` are those of an agent's answer, and this is none")
    if spec.mcp is None and spec.allow is not None:
        raise ToolError(f"tool '{name}': `allow` names tools of an MCP server, and this is none")
    if spec.is_source:
        kind = "an MCP server" if spec.mcp is not None else "a taskset"
        if spec.placement != "local":
            raise ToolError(f"tool '{name}': `placement` does not apply to {kind}; leave it out")
        if spec.kwargs or spec.description is not None:
            raise ToolError(f"tool '{name}': {kind} describes its tools itself; leave kwargs and description out")


def tool_schema_of(name: str, tool: graph.ToolSpec) -> Schema:
    """Return the schema of a tool of an agent, code or another agent; its code is imported, and not run.

    Raises:
        ToolError: its import, its signature or its ``kwargs`` are wrong; or it brings several tools, as an MCP server.
    """
    if tool.is_source:
        raise ToolError(f"tool '{name}' brings tools with schemas of their own; see `Toolbox(agent).schemas('main')`")
    return bind(name, tool).schema
