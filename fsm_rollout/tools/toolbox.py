"""An agent's tools, and carrying out the calls that models make.

Invariant: :meth:`ToolSession.call` always returns (or is cancelled): whatever a model writes and whatever a tool does
becomes a result that the model reads. A call goes through these steps, and the first that fails is its result:
readable → known tool → arguments → a free slot → tries, each bounded in time, with pauses between → cut to size.
A :class:`BoundTool` is shared by all trajectories and holds none of their state; a :class:`ToolSession` is one
trajectory's.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import InitVar, dataclass
from functools import partial
from random import Random
from typing import Any, Protocol, TypeAlias, cast
from weakref import WeakKeyDictionary

from msgspec.structs import replace

from fsm_rollout.agent import graph
from fsm_rollout.agent.graph import MAIN, AgentGraph
from fsm_rollout.agent.handlers import load_object
from fsm_rollout.concurrency.seeds import derive_seed
from fsm_rollout.errors import BadArguments, ConfigError, ToolError, did_you_mean, place_of
from fsm_rollout.tools import tool_messages
from fsm_rollout.tools.base import AgentAnswer, AgentCall, CallResult, ToolContext, ToolResult, fresh
from fsm_rollout.tools.bounded_call import (
    STOP_SECONDS,
    Expired,
    NoSlot,
    RaisedElsewhere,
    Slots,
    ToolDied,
    bounded,
    call_of,
    invoke,
    is_async,
)
from fsm_rollout.tools.schema import Arguments, Function, Parameters, Schema, context_parameters, parameters_of
from fsm_rollout.tools.tool_messages import GO_ON, Tokenizer, bounded_result, described, error_text, truncate
from fsm_rollout.trajectory.events import MalformedCall, ToolCall
from fsm_rollout.trajectory.named_objects import HERE_ALONE

CORRECT = "correct the arguments and try again"
GO_ON_LATER = "try again later or go on without it"
GO_ON_WITHOUT = "try again, or go on without it"
FIRST_PAUSE = 0.5
"""Seconds before the second try, at most; doubled for each further one."""
LONGEST_PAUSE = 30.0
LONG_TEXT = 20_000
"""Characters from which on a result is tokenised in a thread."""
RELEASE_SECONDS = 30.0
"""How long a `release` may take where the tool has no timeout."""
THREADS = 256
"""Calls of one sync tool that run at once where it has no `concurrency`: each takes a thread."""

_logger = logging.getLogger(__name__)

RunAgent = Callable[[AgentGraph, AgentCall], Awaitable[AgentAnswer]]
"""Runs an agent as a child trajectory, or goes on with the one of that call."""
MakeContext = Callable[[str], ToolContext]
"""Makes the ToolContext of a call; the argument tells its randomness from that of others within the call."""
ToolsKwargs = Mapping[str, Mapping[str, object]]
"""A prompt's ``tools_kwargs``, by tool."""


class NotReady(Exception):
    """A tool's `create` failed; its cause says how. Not the model's fault."""


class ReportedFailure(Exception):
    """The server that runs the tool reports a failure; its text is meant for the model, which is not blamed."""


class Holder(Protocol):
    """Something that a trajectory holds open for its calls, such as an instance of a tool's class."""

    async def release(self, held: Any) -> str | None:
        """Release what it holds, and return what went wrong."""


class BoundTool(ABC):
    """A tool of an agent, its code loaded and its schema built. One subclass per kind of tool."""

    schema: Schema
    parameters: Parameters
    in_thread = False
    """Whether its calls occupy a thread."""
    slots: int | None = None
    """How many of its calls run at once where it has no ``concurrency``; ``None``: any number."""
    stop_seconds: float | None = STOP_SECONDS
    """How long a cancelled call may take to clean up; ``None`` waits as long as it takes."""

    def __init__(self, name: str, spec: graph.Tool) -> None:
        self.name = name
        self.spec = spec
        self.where = f"tool '{name}' ({spec.use or ('agent' if spec.agent is not None else 'mcp')})"
        self._reported: set[str] = set()
        """The kinds of errors that have been logged."""

    def report(self, kind: str, error: BaseException) -> None:
        """Log an error that the tool's code raised, with its place there; the first of each kind."""
        if kind not in self._reported:
            self._reported.add(kind)
            place = error.place if isinstance(error, RaisedElsewhere) else place_of(error)
            problem = described(error, kind) + (f" (at {place})" if place else "")
            _logger.warning("%s failed, which models are told and not charged for: %s", self.where, problem)

    @abstractmethod
    def check(self, tools_kwargs: Mapping[str, object]) -> None:
        """Raise ToolError unless a prompt's ``tools_kwargs`` for this tool fit."""

    @abstractmethod
    async def call(self, session: ToolSession, arguments: Arguments, context: MakeContext) -> object:
        """Carry out one call and return what the tool returns, or raise what it raises."""

    def read(self, arguments: Mapping[str, object]) -> Arguments:
        """Return a model's arguments as the tool takes them, or raise BadArguments."""
        return self.parameters.read(arguments)

    def _runs(self, function: Function) -> None:
        """Note where calls of ``function`` run, and how many at once by default."""
        if self.spec.placement == "process":
            self.slots = os.cpu_count() or 1
        elif self.spec.placement == "local" and not is_async(function):
            self.in_thread, self.slots = True, THREADS


class FunctionTool(BoundTool):
    """A plain function, sync or async."""

    def __init__(self, name: str, spec: graph.Tool, function: Function) -> None:
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
        read = super().read(arguments)
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

    async def call(self, session: ToolSession, arguments: Arguments, context: MakeContext) -> object:
        """Call it where it is placed, with the hidden values laid under the model's arguments."""
        hidden = fresh({**self.spec.kwargs, **session.hidden.get(self.name, {})})
        contexts = self.parameters.contexts
        if self.spec.placement == "local":
            context_arguments = {name: context("call") for name in contexts}
            return await self._call(self.function, hidden | arguments | context_arguments)
        from fsm_rollout.tools import placement  # multiprocessing and Ray: only for those who ask for them

        call = placement.call_in_process if self.spec.placement == "process" else placement.call_on_ray
        first = context("call") if contexts else None
        return await call(placement.Request(str(self.spec.use), arguments, hidden, contexts, first))


Instance: TypeAlias = Any
"""An instance of a tool's class: has ``execute``, and ``create`` and ``release`` if the class has them."""


class ClassTool(BoundTool):
    """A class with `execute`: one instance per trajectory that calls it (see :class:`fsm_rollout.tools.Tool`)."""

    def __init__(self, name: str, spec: graph.Tool, cls: type[Instance]) -> None:
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

    async def call(self, session: ToolSession, arguments: Arguments, context: MakeContext) -> object:
        """Call the trajectory's instance, which the first call creates.

        It is created once, for all calls that come meanwhile, and a call that gives up waiting does not stop it: a
        sandbox that takes a minute to start is ready for the next call.
        """
        creating = session.instances.get(self)
        if creating is None or (creating.done() and not _succeeded(creating)):
            creating = asyncio.get_running_loop().create_task(
                self._create(session.hidden.get(self.name, {}), context), name=f"create of tool '{self.name}'"
            )
            session.instances[self] = creating
        try:
            instance = await asyncio.shield(creating)
        except Exception as error:  # whatever the class raises
            raise NotReady from error
        contexts = {name: context("call") for name in self.parameters.contexts}
        return await invoke(instance.execute, arguments | contexts)

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
        if _succeeded(creating) and hasattr(creating.result(), "release"):
            await invoke(creating.result().release, {})


def _succeeded(task: asyncio.Task[Instance]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


class AgentTool(BoundTool):
    """Another agent, run as a child trajectory."""

    stop_seconds = None  # a child trajectory ends by itself, and must be recorded

    def __init__(self, name: str, spec: graph.Tool, agent: AgentGraph) -> None:
        super().__init__(name, spec)
        self.agent = agent
        if spec.placement != "local":
            raise ToolError(f"{self.where}: `placement` does not apply to an agent; leave it out")
        if spec.kwargs:
            raise ToolError(f"{self.where}: an agent takes no kwargs, only a task; got {', '.join(spec.kwargs)}")
        self.parameters = parameters_of(_ask, where=self.where)
        description = spec.description or agent.description or f"Hand a task to the agent '{agent.agent}'."
        self.schema = self.parameters.tool(name, description)

    def check(self, tools_kwargs: Mapping[str, object]) -> None:
        """There must be none."""
        if tools_kwargs:
            raise ToolError(f"{self.where}: an agent takes no tools_kwargs, only a task; got {', '.join(tools_kwargs)}")

    async def call(self, session: ToolSession, arguments: Arguments, context: MakeContext) -> object:
        """Run it on its task."""
        assert session.run_agent is not None
        tool_context = context("agent")
        call = AgentCall(
            self.name, arguments["task"], tool_context.rng.getrandbits(63), tool_context.call_id, tool_context.number
        )
        return await session.run_agent(self.agent, call)


def _ask(task: str) -> None:
    """Give the agent its task.

    Args:
        task: What to do, with all that is needed to do it.
    """


def bind(name: str, spec: graph.Tool) -> BoundTool:
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


def bind_all(name: str, spec: graph.Tool) -> Mapping[str, BoundTool]:
    """Return the tools of one entry of an agent's ``tools``; an MCP server, or a taskset, is asked for its own."""
    if not spec.is_source:
        return {name: bind(name, spec)}
    _check_form(name, spec)
    # What needs packages that not all have is imported by those who ask for it.
    home = "tools.mcp_server:MCPServer" if spec.mcp is not None else "environment.verifiers:TasksetTools"
    source: Any = load_object(f"fsm_rollout.{home}")
    tools: Mapping[str, BoundTool] = source(name, spec).tools()
    return tools


def check_tool(name: str, spec: graph.Tool) -> None:
    """Raise ToolError for what is wrong with an entry of an agent's ``tools``; nothing is started, loaded or asked."""
    if not spec.is_source:
        bind(name, spec)
    else:
        _check_form(name, spec)


def _check_form(name: str, spec: graph.Tool) -> None:
    if sum(kind is not None for kind in (spec.use, spec.agent, spec.mcp, spec.verifiers)) != 1:
        raise ToolError(
            f"tool '{name}': give either `use` (a function or class) or `agent` (a YAML file) or `mcp` (a server) or "
            "`verifiers` (a taskset)"
        )
    if not spec.may_repeat and spec.retry.attempts > 1:
        advice = "leave out one of the two" if spec.repeatable is False else "say `repeatable: true` if it may be"
        raise ToolError(f"tool '{name}': it is not repeatable, so it cannot be retried; {advice}")
    if spec.mcp is None and spec.allow is not None:
        raise ToolError(f"tool '{name}': `allow` names tools of an MCP server, and this is none")
    if spec.is_source:
        kind = "an MCP server" if spec.mcp is not None else "a taskset"
        if spec.placement != "local":
            raise ToolError(f"tool '{name}': `placement` does not apply to {kind}; leave it out")
        if spec.kwargs or spec.description is not None:
            raise ToolError(f"tool '{name}': {kind} describes its tools itself; leave kwargs and description out")


def tool_schema_of(name: str, tool: graph.Tool) -> Schema:
    """Return the schema of a tool of an agent, code or another agent; its code is imported, and not run.

    Raises:
        ToolError: its import, its signature or its ``kwargs`` are wrong; or it brings several tools, as an MCP server.
    """
    if tool.is_source:
        raise ToolError(f"tool '{name}' brings tools with schemas of their own; see `Toolbox(agent).schemas('main')`")
    return bind(name, tool).schema


class Toolbox:
    """The tools of one agent, shared by all its trajectories.

    Raises:
        ToolError: a tool cannot be built.
    """

    def __init__(self, agent: AgentGraph) -> None:
        self._agent = agent
        self._entries = {name: bind_all(name, spec) for name, spec in agent.tools.items()}
        """The tools of each entry of the agent's ``tools``, by name."""
        self._tools: dict[str, BoundTool] = {}
        for entry, tools in self._entries.items():
            if twice := [name for name in tools if name in self._tools]:
                raise ToolError(
                    f"tool '{entry}': there is another tool called '{twice[0]}'; choose by `allow`, or rename the other"
                )
            self._tools |= tools
        self._schemas: dict[str, tuple[Schema, ...]] = {}
        self._by_context: dict[str, Mapping[str, BoundTool]] = {}
        self.share = 1
        """Among how many processes the slots of a tool are shared; each has one at least."""
        self._needs_nothing = False
        """Whether it is known that a prompt may give no ``tools_kwargs``."""
        self.attempts, self.first_pause = 1, FIRST_PAUSE
        """How often a call is made that fails through no fault of the model's, where its tool has no ``retry``; and the
        seconds before its second try, at most."""
        # Slots belong to the loop that waits for them, and a toolbox may serve several, one after the other.
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Slots]] = WeakKeyDictionary()

    def replace(self, make: Callable[[BoundTool], BoundTool]) -> None:
        """Put another tool in the place of each, before any session: simulations draw what tools return."""
        self._tools = {name: make(tool) for name, tool in self._tools.items()}
        self._schemas.clear()
        self._by_context.clear()
        self._needs_nothing = False

    def schemas(self, context: str) -> tuple[Schema, ...]:
        """Return the schemas shown in a context; the same object each time, to be used as a cache key."""
        if context not in self._schemas:
            self._schemas[context] = tuple(tool.schema for tool in self.tools_of(context).values())
        return self._schemas[context]

    def tools_of(self, context: str) -> Mapping[str, BoundTool]:
        """Return the tools that may be called in a context."""
        if context not in self._by_context:
            names = [name for entry in self._agent.tools_of(context) for name in self._entries[entry]]
            self._by_context[context] = {name: self._tools[name] for name in names}
        return self._by_context[context]

    def spec_of(self, name: str) -> graph.Tool | None:
        """Return what the agent says of the tool that a model calls ``name``, if there is one."""
        return self._tools[name].spec if name in self._tools else None

    @property
    def _servers(self) -> list[Any]:
        """The entries that bring several tools."""
        servers = (getattr(next(iter(tools.values())), "server", None) for tools in self._entries.values())
        return [server for server in servers if server is not None]

    async def close(self) -> None:
        """Close what trajectories shared; a later call opens it again."""
        for server in self._servers:
            await server.close()

    def check(self, tools_kwargs: object) -> ToolsKwargs:
        """Check a prompt's ``tools_kwargs`` (``None``: it has none), and return them.

        Raises:
            ToolError: no mapping, an unknown tool, or values that the tool does not take, or lacks.
        """
        checked: ToolsKwargs = cast(ToolsKwargs, {} if tools_kwargs is None else tools_kwargs)
        if self._needs_nothing and checked == {}:
            return checked
        if not isinstance(checked, Mapping):
            raise ToolError(f"tools_kwargs must be a mapping from tools to values, got {type(checked).__name__}")
        for name, kwargs in checked.items():
            if name not in self._tools:
                raise ToolError(f"tools_kwargs name '{name}', which is no tool{did_you_mean(name, self._tools)}")
            if not isinstance(kwargs, Mapping):
                raise ToolError(f"tools_kwargs of '{name}' must be a mapping, got {type(kwargs).__name__}")
        for name, tool in self._tools.items():
            tool.check(checked.get(name, {}))
        self._needs_nothing = self._needs_nothing or checked == {}
        return checked

    async def prepare(self) -> None:
        """Connect to what tools run on. Await it before the first call, whose timeout does not include it."""
        if any(isinstance(t, FunctionTool | ClassTool) and t.spec.placement == "ray" for t in self._tools.values()):
            from fsm_rollout.tools.placement import prepare_ray  # Ray: only for those who ask for it

            await prepare_ray()

    def slot(self, tool: BoundTool) -> AbstractAsyncContextManager[None]:
        """Return what to hold while a tool runs: one of its ``concurrency`` slots, over all trajectories."""
        limit = tool.spec.concurrency or tool.slots
        if limit is not None and self.share > 1:
            limit = max(1, limit // self.share)
        if limit is None:
            return nullcontext()
        slots = self._slots.setdefault(asyncio.get_running_loop(), {})
        if tool.name not in slots:
            slots[tool.name] = Slots(tool.name, limit)
        return slots[tool.name].hold(tool.spec.timeout)


@dataclass(eq=False, kw_only=True)
class ToolSession:
    """The tools of one trajectory: makes its calls and releases what they took. Nothing runs before the first call.

    Raises:
        ToolError: as :meth:`Toolbox.check`.
    """

    toolbox: Toolbox
    trajectory_id: str
    group_id: str
    seed: int
    """Of the trajectory; with a call's id it seeds all randomness of that call."""
    tools_kwargs: InitVar[object]
    """The prompt's ``tools_kwargs``, not checked yet."""
    extra: Mapping[str, object]
    """The prompt's other fields, for tools that ask."""
    run_agent: RunAgent | None
    """Runs an agent used as a tool. ``None`` once released, so that this session and who runs agents come apart."""

    def __post_init__(self, tools_kwargs: object) -> None:
        """Check the prompt's ``tools_kwargs``."""
        self.hidden = self.toolbox.check(tools_kwargs)
        """The values of hidden parameters, by tool."""
        self.under_way: dict[str, str] = {}
        """The tools of the calls under way, by the calls' ids."""
        self.instances: dict[Holder, Any] = {}
        """What this trajectory holds open: the tasks that make, or have made, its instances, and its connections."""

    async def call(
        self, attempt: ToolCall | MalformedCall, *, context: str = MAIN, tokenizer: Tokenizer | None = None
    ) -> CallResult:
        """Carry out one attempted call; failures are results, never exceptions.

        Args:
            attempt: the call, or what was wrong with it.
            context: whose tools may be called.
            tokenizer: counts the result's tokens; needed where a tool has ``response_tokens``.

        Raises:
            ToolError: the session has been released, or a tokenizer is needed.
        """
        if self.run_agent is None:
            raise ToolError(f"the tools of trajectory {self.trajectory_id} have been released; make calls before that")
        loop = asyncio.get_running_loop()
        begun = loop.time()
        # 1. Readable, and of a tool that is there.
        if isinstance(attempt, MalformedCall):
            text = error_text(
                f"the tool call cannot be read: {attempt.message}", "write it again, in the format of the tools"
            )
            return CallResult(text, failure=attempt.kind, bad=True)
        tools = self.toolbox.tools_of(context)
        tool = tools.get(attempt.name)
        if tool is None:
            return CallResult(tool_messages.unknown_tool(attempt.name, list(tools)), failure="unknown_tool", bad=True)
        # 2. Run, as often as its retry allows.
        self.under_way[attempt.id] = attempt.name
        try:
            result = replace(await self._run(tool, attempt), seconds=loop.time() - begun)
        finally:
            self.under_way.pop(attempt.id, None)
        # 3. Cut to size.
        if tool.spec.response_tokens is None:
            text, dropped = bounded_result(result.text, tool.spec.truncate)
            return replace(result, text=text, truncated_characters=dropped) if dropped else result
        if tokenizer is None:
            raise ToolError(f"tool '{tool.name}' has response_tokens, which only a tokenizer can count; give one")
        arguments = (result.text, tokenizer, tool.spec.response_tokens, tool.spec.truncate)
        if len(result.text) > LONG_TEXT:  # in a thread, where nothing waits for it
            text, dropped = await asyncio.to_thread(truncate, *arguments)
        else:
            text, dropped = truncate(*arguments)
        return replace(result, text=text, truncated_tokens=dropped)

    async def release(self) -> list[str]:
        """Release every tool that was created, all at once, each exactly once; return what went wrong.

        It finishes what it began even when it is cancelled meanwhile. A second time there is nothing to do.
        """
        self.run_agent = None
        instances, self.instances = self.instances, {}
        if not instances:
            return []
        work = asyncio.gather(*(holder.release(held) for holder, held in instances.items()))
        try:
            failures = await asyncio.shield(work)
        except asyncio.CancelledError:
            await work
            raise
        return [failure for failure in failures if failure is not None]

    async def _run(self, tool: BoundTool, call: ToolCall) -> CallResult:
        retry, number = tool.spec.retry, 0
        attempts = self.toolbox.attempts if retry.attempts == 1 and tool.spec.may_repeat else retry.attempts
        while True:
            number += 1
            # 1. Arguments: read anew for each try, since the one before may have changed what it was given.
            try:
                arguments = tool.read(call.arguments)
            except Exception as error:  # BadArguments, or whatever a validator of the tool's own types raises
                return _failure(tool, error)[0]
            # 2. One try, in one of the tool's slots. What cannot be made text raises.
            try:
                async with self.toolbox.slot(tool):
                    work = tool.call(self, arguments, partial(self._context, call.id, number))
                    value = await bounded(
                        work, tool.spec.timeout, name=f"tool '{tool.name}'", stop_seconds=tool.stop_seconds
                    )
                if isinstance(value, ToolResult):
                    return CallResult(tool_messages.result(value.text), reward=value.reward, tries=number)
                if not isinstance(value, AgentAnswer):
                    if tool_messages.is_short(value):
                        return CallResult(tool_messages.result(value), tries=number)
                    return CallResult(await asyncio.to_thread(tool_messages.result, value), tries=number)
                if value.failure is None:
                    return CallResult(tool_messages.clean(value.text), tries=number, child_id=value.child_id)
                text = error_text(f"{tool.name} ended without an answer ({value.failure})", GO_ON)
                result = CallResult(text, value.failure, child_id=value.child_id)
                names = frozenset({value.failure, value.failure.rpartition(":")[2]})
            except (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit):
                raise
            except BaseException as error:  # tools may raise anything, pytest's and trio's own kinds included
                result, names = _failure(tool, error)
            # 3. Done, unless it failed in a way that is to be tried again. The same arguments stay wrong.
            if result.bad or number >= attempts or (retry.errors and names.isdisjoint(retry.errors)):
                return replace(result, tries=number)
            jitter = Random(derive_seed(self.seed, "tool", call.id, number, "pause")).uniform(0.5, 1.0)
            await asyncio.sleep(min(LONGEST_PAUSE, self.toolbox.first_pause * 2 ** (number - 1)) * jitter)

    def _context(self, call_id: str, number: int, purpose: str) -> ToolContext:
        rng = Random(derive_seed(self.seed, "tool", call_id, number, purpose))
        return ToolContext(self.trajectory_id, self.group_id, rng, self.extra, call_id, number)


def _failure(tool: BoundTool, error: BaseException) -> tuple[CallResult, frozenset[str]]:
    """Return the result of a try that raised, and the names that a retry may know the error by.

    The model is to blame for BadArguments alone, which the schema raises, and tools on purpose. Whatever else tools
    raise is a failure of theirs.
    """
    name = tool.name
    kinds = error.names if isinstance(error, RaisedElsewhere) else [cls.__name__ for cls in type(error).__mro__]
    failure, names, bad = kinds[0], frozenset(kinds), False
    match error:
        case NotReady(__cause__=BaseException() as cause):
            result, names = _failure(tool, cause)
            text = error_text(f"{name} is not available ({result.failure})", GO_ON_LATER)
            return replace(result, text=text, bad=False), names
        case BadArguments():
            failure, bad = "bad_arguments", True
            text = error_text(f"{name}: {tool_messages.message_of(error)}", CORRECT)
        case Expired():
            failure, text = "timed_out", tool_messages.timed_out(name, tool.spec.timeout)
        case NoSlot():
            failure = "timed_out"
            text = error_text(f"{name} is still busy with calls that did not end", GO_ON_LATER)
        case ToolDied():
            text = error_text(f"{name}: the tool broke down", GO_ON_WITHOUT)
        case ReportedFailure():
            failure, text = "tool_error", error_text(f"{name} failed: {tool_messages.message_of(error)}", GO_ON_WITHOUT)
        case _:
            text = error_text(f"{name} failed: {described(error, failure)}", GO_ON_WITHOUT)
            tool.report(failure, error)
    return CallResult(text, failure, bad), names
