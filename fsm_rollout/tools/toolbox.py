"""Carrying out the calls that models make.

Invariant: :meth:`ToolSession.call` always returns (or is cancelled): whatever a model writes and whatever a tool does
becomes a result that the model is told. A call goes through these steps, and the first that fails is its result:
readable → known tool → arguments → a free place → tries, each bounded in time, with pauses between → cut to size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from random import Random
from typing import Any
from weakref import WeakKeyDictionary

from msgspec.structs import replace

from fsm_rollout.agent.graph import MAIN, AgentGraph
from fsm_rollout.concurrency.seeds import derive_seed
from fsm_rollout.errors import BadArguments, ToolError, did_you_mean
from fsm_rollout.tools import tool_messages
from fsm_rollout.tools.base import AgentAnswer, CallResult, RunAgent, ToolContext, ToolResult
from fsm_rollout.tools.binding import BoundTool, ClassTool, FunctionTool, NotReady, OpenTool, bind
from fsm_rollout.tools.call import Expired, bounded
from fsm_rollout.tools.process_placement import ToolDied
from fsm_rollout.tools.json_schema import Schema
from fsm_rollout.tools.slots import NoPlace, Places
from fsm_rollout.tools.truncation import truncate
from fsm_rollout.trajectory.events import MalformedCall, ToolCall

FIRST_PAUSE = 0.5
"""Seconds before the second try, at most; doubled for each further one."""
LONGEST_PAUSE = 30.0
OF_THE_WORLD = (OSError, MemoryError, ImportError)
"""What no other call would have helped: a tool that raises these (timeouts and connections are among them), or what its
``retry.errors`` name, has failed, and the model is told so without blame. For all else it may correct its call."""
OF_THE_CALL = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)
"""The exceptions to that: they are about the path that the call names."""
RELEASE_SECONDS = 30.0
"""How long a `release` may take where the tool has no timeout."""


class Toolbox:
    """The tools of one agent, shared by all its trajectories.

    Raises:
        ToolError: a tool cannot be built.
    """

    def __init__(self, graph: AgentGraph) -> None:
        self._graph = graph
        self._tools = {name: bind(name, spec) for name, spec in graph.tools.items()}
        self._schemas: dict[str, tuple[Schema, ...]] = {}
        # Places belong to the loop that waits for them, and a toolbox may serve several, one after the other.
        self._places: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Places]] = WeakKeyDictionary()

    def replace(self, make: Callable[[BoundTool], BoundTool]) -> None:
        """Put another tool in the place of each, before any is opened: simulations let tools come to drawn results."""
        self._tools = {name: make(tool) for name, tool in self._tools.items()}
        self._schemas.clear()

    def schemas(self, context: str) -> tuple[Schema, ...]:
        """Return the schemas shown in a context; the same object each time, to be used as a cache key."""
        if context not in self._schemas:
            self._schemas[context] = tuple(self._tools[name].schema for name in self._graph.tools_of(context))
        return self._schemas[context]

    def known(self, context: str) -> Mapping[str, BoundTool]:
        """Return the tools that may be called in a context."""
        return {name: self._tools[name] for name in self._graph.tools_of(context)}

    def check(self, tools_kwargs: Mapping[str, Mapping[str, Any]]) -> None:
        """Check a prompt's ``tools_kwargs``, keyed by tool.

        Raises:
            ToolError: an unknown tool, or values that the tool does not take, or lacks.
        """
        for name, kwargs in tools_kwargs.items():
            if name not in self._tools:
                raise ToolError(f"tools_kwargs name '{name}', which is no tool{did_you_mean(name, self._tools)}")
            if not isinstance(kwargs, Mapping):
                raise ToolError(f"tools_kwargs of '{name}' must be a mapping, got {type(kwargs).__name__}")
        for name, tool in self._tools.items():
            tool.check(tools_kwargs.get(name, {}))

    async def prepare(self) -> None:
        """Connect what tools run on; to be awaited before calls are made, whose timeouts are not for that.

        Raises:
            EngineError: it is not there.
        """
        real = [tool for tool in self._tools.values() if isinstance(tool, FunctionTool | ClassTool)]
        if any(tool.spec.placement == "ray" for tool in real):
            from fsm_rollout.tools.ray_placement import prepare  # Ray: only for those who ask for it

            await prepare()

    def open(
        self,
        *,
        trajectory_id: str,
        group_id: str,
        seed: int,
        tools_kwargs: Mapping[str, Mapping[str, Any]] | None,
        extra: Mapping[str, Any],
        run_agent: RunAgent,
    ) -> ToolSession:
        """Begin a trajectory's use of the tools; nothing of theirs runs before it calls them.

        Args:
            trajectory_id: told to tools that ask.
            group_id: told to tools that ask.
            seed: of the trajectory; with a call's id it seeds all randomness of that call.
            tools_kwargs: the prompt's, by tool.
            extra: the prompt's other fields, told to tools that ask.
            run_agent: runs an agent that is used as a tool.

        Raises:
            ToolError: as :meth:`check`.
        """
        self.check(tools_kwargs or {})
        return ToolSession(self, trajectory_id, group_id, seed, tools_kwargs or {}, extra, run_agent)

    def place(self, tool: BoundTool) -> AbstractAsyncContextManager[None]:
        """Return what to hold while a tool runs: one of its ``concurrency`` places, over all trajectories.

        A call that is given up holds its place until what it has left running ends (:mod:`fsm_rollout.tools.slots`).
        """
        limit = tool.spec.concurrency or tool.places
        if limit is None:
            return nullcontext()
        places = self._places.setdefault(asyncio.get_running_loop(), {})
        if tool.name not in places:
            places[tool.name] = Places(tool.name, limit)
        return places[tool.name].one(tool.spec.timeout)


@dataclass(frozen=True, slots=True)
class _End:
    """How one try ended. ``errors`` are the class names that a retry may ask for."""

    result: CallResult
    errors: frozenset[str] = field(default_factory=frozenset)


class ToolSession:
    """The tools of one trajectory: makes its calls and releases what they took. See :meth:`Toolbox.open`."""

    __slots__ = (
        "_box",
        "_extra",
        "_group_id",
        "_open",
        "_run_agent",
        "_seed",
        "_tools_kwargs",
        "_trajectory_id",
    )

    def __init__(
        self,
        box: Toolbox,
        trajectory_id: str,
        group_id: str,
        seed: int,
        tools_kwargs: Mapping[str, Mapping[str, Any]],
        extra: Mapping[str, Any],
        run_agent: RunAgent,
    ) -> None:
        self._box = box
        self._trajectory_id = trajectory_id
        self._group_id = group_id
        self._seed = seed
        self._tools_kwargs = tools_kwargs
        self._extra = extra
        self._run_agent: RunAgent | None = run_agent
        """``None`` once released: whoever runs the agents holds this session, and the two would keep each other."""
        self._open: dict[str, tuple[BoundTool, OpenTool]] = {}

    async def call(
        self, attempt: ToolCall | MalformedCall, *, context: str = MAIN, tokenizer: Any | None = None
    ) -> CallResult:
        """Carry out one attempted call; failures are results, never exceptions.

        Args:
            attempt: the call, or what was wrong with it.
            context: whose tools may be called.
            tokenizer: counts the result's tokens; needed where a tool has ``response_tokens``.

        Raises:
            ToolError: the session has been released, or a tokenizer is needed.
        """
        if self._run_agent is None:
            raise ToolError(f"the tools of trajectory {self._trajectory_id} have been released; make calls before that")
        loop = asyncio.get_running_loop()
        begun = loop.time()
        tool: BoundTool | None = None
        if isinstance(attempt, MalformedCall):
            result = CallResult(tool_messages.broken_call(attempt.message), failure=attempt.kind, bad=True)
        else:
            known = self._box.known(context)
            tool = known.get(attempt.name)
            if tool is None:
                result = CallResult(tool_messages.unknown_tool(attempt.name, known), failure="unknown_tool", bad=True)
            else:
                result = await self._run(tool, attempt, self._run_agent)
        result = replace(result, seconds=loop.time() - begun)
        if tool is None or tool.spec.response_tokens is None:
            return result
        if tokenizer is None:
            raise ToolError(f"tool '{tool.name}' has response_tokens, which only a tokenizer can count; give one")
        text, dropped = truncate(result.text, tokenizer, tool.spec.response_tokens, tool.spec.truncate)
        return replace(result, text=text, truncated_tokens=dropped)

    async def release(self) -> list[str]:
        """Release every tool that was created, all at once, each exactly once; return what went wrong.

        It finishes what it began even when it is cancelled meanwhile. A second time there is nothing to do.
        """
        self._run_agent = None
        opened, self._open = self._open, {}
        releases = [self._release(tool, mine) for tool, mine in opened.values() if mine.to_release]
        if not releases:
            return []
        work = asyncio.gather(*releases)
        try:
            failures = await asyncio.shield(work)
        except asyncio.CancelledError:
            await work
            raise
        return [failure for failure in failures if failure is not None]

    async def _release(self, tool: BoundTool, mine: OpenTool) -> str | None:
        timeout = tool.spec.timeout or RELEASE_SECONDS
        try:
            await bounded(mine.release(), timeout, name=f"release of tool '{tool.name}'")
        except Expired:
            return f"tool '{tool.name}': release did not end within {timeout:g} s and was stopped"
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            return f"tool '{tool.name}': release raised {type(error).__name__}: {error}"
        return None

    async def _run(self, tool: BoundTool, call: ToolCall, run_agent: RunAgent) -> CallResult:
        try:
            arguments = tool.read(call.arguments)
        except BadArguments as error:
            return CallResult(tool_messages.bad_arguments(tool.name, str(error)), failure="bad_arguments", bad=True)
        except Exception as error:  # a validator of the tool's own types
            return CallResult(tool_messages.raised(error), failure=type(error).__name__, bad=True)
        if tool.name not in self._open:
            opened = tool.open(self._tools_kwargs.get(tool.name, {}), run_agent)
            self._open[tool.name] = (tool, opened)
        retry = tool.spec.retry
        tries = 0
        while True:
            tries += 1
            if tries > 1:
                arguments = tool.read(call.arguments)  # the try before may have changed what it was given
            try:
                async with self._box.place(tool):
                    end = await self._try(tool, call.id, arguments, tries)
            except NoPlace:
                text = tool_messages.no_place(tool.name)
                end = _End(CallResult(text, failure="timed_out"), _class_names(TimeoutError()))
            if not end.errors or tries >= retry.attempts or (retry.errors and end.errors.isdisjoint(retry.errors)):
                return replace(end.result, tries=tries)
            jitter = Random(derive_seed(self._seed, "tool", call.id, tries, "pause")).uniform(0.5, 1.0)
            await asyncio.sleep(min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (tries - 1)) * jitter)

    async def _try(self, tool: BoundTool, call_id: str, arguments: dict[str, Any], number: int) -> _End:
        def context(purpose: str) -> ToolContext:
            rng = Random(derive_seed(self._seed, "tool", call_id, number, purpose))
            return ToolContext(self._trajectory_id, self._group_id, rng, self._extra)

        _, mine = self._open[tool.name]
        try:
            work = mine.call(arguments, context)
            name, stop = f"tool '{tool.name}'", tool.stop_seconds
            value = await bounded(work, tool.spec.timeout, name=name, stop_seconds=stop)
            return _end_of(tool, value)
        except Expired:
            text = tool_messages.timed_out(tool.name, tool.spec.timeout)
            return _End(CallResult(text, failure="timed_out"), _class_names(TimeoutError()))
        except NotReady as error:
            cause = error.__cause__ or error
            return _End(
                CallResult(tool_messages.not_ready(tool.name, cause), failure=type(cause).__name__), _class_names(cause)
            )
        except ToolDied as error:
            return _End(CallResult(tool_messages.died(tool.name), failure="ToolDied"), _class_names(error))
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # tools may raise anything, pytest's and trio's own kinds included
            names = _class_names(error)
            of_the_world = isinstance(error, OF_THE_WORLD) and not isinstance(error, OF_THE_CALL)
            if of_the_world or not names.isdisjoint(tool.spec.retry.errors):
                return _End(CallResult(tool_messages.failed(tool.name, error), failure=type(error).__name__), names)
            return _End(CallResult(tool_messages.raised(error), failure=type(error).__name__, bad=True), names)


def _end_of(tool: BoundTool, value: Any) -> _End:
    """Read what a tool returned; what cannot be told to a model raises."""
    if isinstance(value, AgentAnswer):
        if value.failure is None:
            return _End(CallResult(tool_messages.clean(value.text), child_id=value.child_id))
        text = tool_messages.agent_failed(tool.name, value.failure)
        names = frozenset({value.failure, value.failure.rpartition(":")[2]})
        return _End(CallResult(text, failure=value.failure, child_id=value.child_id), names)
    if isinstance(value, ToolResult):
        return _End(CallResult(tool_messages.result(value.text), reward=value.reward))
    return _End(CallResult(tool_messages.result(value)))


def _class_names(error: BaseException) -> frozenset[str]:
    return frozenset(cls.__name__ for cls in type(error).__mro__)
