"""An agent's tools, and carrying out the calls that models make.

Invariant: :meth:`ToolSession.call` always returns (or is cancelled): whatever a model writes and whatever a tool does
becomes a result that the model reads. A call goes through these steps, and the first that fails is its result:
readable → known tool → its turn (where there is state) → arguments → a free slot → tries, each bounded in time, with
pauses between → cut to size.
A :class:`Toolbox` is shared by all trajectories; a :class:`ToolSession` is one trajectory's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import InitVar, dataclass
from functools import partial
from random import Random
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

from msgspec.structs import replace

from fsm_rollout.agent.graph import MAIN, AgentGraph
from fsm_rollout.concurrency.seeds import derive_seed
from fsm_rollout.errors import BadArguments, ChatTemplateError, PictureError, ToolError, did_you_mean
from fsm_rollout.tools import tool_messages
from fsm_rollout.tools.base import AgentAnswer, ToolContext, ToolResult
from fsm_rollout.tools.bound_tools import BoundTool, Holder, NotReady, ReportedFailure, RunAgent, ToolsKwargs, bind_all
from fsm_rollout.tools.bounded_call import Expired, NoSlot, RaisedElsewhere, Slots, ToolDied, bounded
from fsm_rollout.tools.schema import Schema
from fsm_rollout.tools.tool_messages import GO_ON, Tokenizer, Unshowable, described, error_text, truncate
from fsm_rollout.trajectory.events import Called, MalformedCall, ToolCall
from fsm_rollout.trajectory.pictures import StoredPicture
from fsm_rollout.trajectory.stream import text_of
from fsm_rollout.trajectory.trace_ids import within

CORRECT = "correct the arguments and try again"
GO_ON_LATER = "try again later or go on without it"
GO_ON_WITHOUT = "try again, or go on without it"
FIRST_PAUSE = 0.5  # seconds before the second try, at most; doubled for each further one
LONGEST_PAUSE = 30.0
_NO_TURN = nullcontext()  # of calls that wait for no other
LEAST_TOKENS = 64  # of a result whose tool has no `response_tokens`, however little is left: enough for a short answer
LONG_TEXT = 20_000  # characters from which on a result is tokenised in a thread


class Eye(Protocol):
    """What a model sees through (:class:`fsm_rollout.chat.template.ChatTemplate`)."""

    async def sizes_in_results(self, pictures: Sequence[StoredPicture]) -> list[int]:
        """Return how many tokens each picture has; ChatTemplateError, PictureError: it cannot be shown there."""


class Toolbox:
    """The tools of one agent, shared by all its trajectories.

    Raises:
        ToolError: a tool cannot be built.
    """

    def __init__(self, agent: AgentGraph) -> None:
        self._agent = agent
        # The tools of each entry of the agent's `tools`, by name.
        self._entries = {name: bind_all(name, spec) for name, spec in agent.tools.items()}
        named: dict[str, BoundTool] = {}
        for entry, tools in self._entries.items():
            if twice := [name for name in tools if name in named]:
                raise ToolError(
                    f"tool '{entry}': there is another tool called '{twice[0]}'; choose by `allow`, or rename the other"
                )
            named |= tools
        self._have(named)
        # What brings several tools, to be closed with them.
        self._servers = dict.fromkeys(tool.server for tool in named.values() if tool.server is not None)
        self.share = 1  # among how many processes the slots of a tool are shared; each has one at least
        # How often a call is made that fails through no fault of the model's, where its tool has no `retry`; and the
        # seconds before its second try, at most.
        self.attempts, self.first_pause = 1, FIRST_PAUSE
        # Slots belong to the loop that waits for them, and a toolbox may serve several, one after the other.
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Slots]] = WeakKeyDictionary()

    def replace(self, make: Callable[[BoundTool], BoundTool]) -> None:
        """Put another tool in the place of each, before any session: simulations draw what tools return."""
        self._have({name: make(tool) for name, tool in self._tools.items()})

    def _have(self, tools: Mapping[str, BoundTool]) -> None:
        self._tools = tools
        self._on_ray = any(tool.on_ray for tool in tools.values())
        self._schemas: dict[str, tuple[Schema, ...]] = {}
        self._by_context: dict[str, Mapping[str, BoundTool]] = {}
        self._needs_nothing = False  # whether it is known that a prompt may give no `tools_kwargs`

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

    def tool(self, name: str) -> BoundTool | None:
        """Return the tool that a model calls ``name``, if there is one."""
        return self._tools.get(name)

    async def close(self) -> None:
        """Close what trajectories shared; a later call opens it again."""
        for server in self._servers:
            await server.close()

    def check(self, tools_kwargs: object) -> ToolsKwargs:
        """Return a prompt's ``tools_kwargs`` (``None``: it has none); ToolError where a tool does not take them."""
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
        if self._on_ray:
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
    seed: int  # of the trajectory; with a call's id it seeds all randomness of that call
    tools_kwargs: InitVar[object]  # the prompt's `tools_kwargs`, not checked yet
    extra: Mapping[str, object]  # the prompt's other fields, for tools that ask
    # Runs an agent used as a tool. `None` once released, so that this session and who runs agents come apart.
    run_agent: RunAgent | None
    elsewhere: Collection[str] = ()  # tools that the model may call, too, and that others carry out
    keeps: bool = False  # whether the state of tools is kept after each call, in `snapshots`

    def __post_init__(self, tools_kwargs: object) -> None:
        self.hidden = self.toolbox.check(tools_kwargs)  # the values of hidden parameters, by tool
        self.under_way: dict[str, str] = {}  # the tools of the calls under way, by the calls' ids
        # What this trajectory holds open: the tasks that make, or have made, its instances, and its connections.
        self.instances: dict[Holder, Any] = {}
        # What tools keep after their latest call, by name, until it is taken out: it belongs to that call's record.
        self.snapshots: dict[str, bytes] = {}
        self._turns: dict[Holder, asyncio.Lock] = {}  # held by the call that runs on what a holder keeps

    async def call(
        self,
        attempt: ToolCall | MalformedCall,
        *,
        context: str = MAIN,
        tokenizer: Tokenizer | None = None,
        room: Callable[[], int] | None = None,
        span: Callable[[int], str] | None = None,
        eye: Eye | None = None,
    ) -> Called:
        """Carry out one attempted call; failures are results, never exceptions.

        Args:
            attempt: the call, or what was wrong with it.
            context: whose tools may be called.
            tokenizer: counts the result's tokens; needed where a tool has ``response_tokens``, and with ``room``.
            room: returns how many tokens a result may have whose tool has no ``response_tokens``, at least
                :data:`LEAST_TOKENS`; default: any number.
            span: returns the ``traceparent`` of a try by its number; default: nobody traces it.
            eye: tells how many tokens pictures have; default: the model sees none.

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
            return Called.of(attempt, text, attempt.kind, bad=True)
        tools = self.toolbox.tools_of(context)
        tool = tools.get(attempt.name)
        if tool is None:
            text = tool_messages.unknown_tool(attempt.name, [*tools, *self.elsewhere])
            return Called.of(attempt, text, "unknown_tool", bad=True)
        self.under_way[attempt.id] = attempt.name
        turn: AbstractAsyncContextManager[None] = _NO_TURN
        if tool.holder is not None and tool.spec.order == "called":
            turn = self._turns.setdefault(tool.holder, asyncio.Lock())
        try:
            # Whoever holds the turn has recorded its call before the next can end: nothing waits behind this block.
            async with turn:
                # 2. Run, as often as its retry allows; on what keeps state, after the calls that came before.
                called = replace(await self._run(tool, attempt, span), seconds=loop.time() - begun)
                if self.keeps and tool.snapshots:
                    await self._keep(tool)
                return await self._fitted(called, tool, attempt, tokenizer, room, eye)
        finally:
            self.under_way.pop(attempt.id, None)

    async def _fitted(
        self,
        called: Called,
        tool: BoundTool,
        attempt: ToolCall,
        tokenizer: Tokenizer | None,
        room: Callable[[], int] | None,
        eye: Eye | None,
    ) -> Called:
        """Return a result as the model can be given it: with pictures that it sees, and cut to size."""
        # 1. A text has no more tokens than bytes, so most need not be tokenised.
        text, sizes = called.result, list[int]()
        most: float = len(text) * (1 if text.isascii() else 4)
        if called.shown:
            try:
                if eye is None:
                    raise ChatTemplateError("multimodal-content", "nobody here sees pictures")
                sizes = await eye.sizes_in_results([part["image"] for part in called.shown if "image" in part])
            except (ChatTemplateError, PictureError) as error:
                failed, _ = _failure(tool, attempt, Unshowable(f"a picture cannot be shown to this model: {error}"))
                return replace(failed, seconds=called.seconds, tries=called.tries, failed_tries=called.failed_tries)
            most = float("inf")
        limit = tool.spec.response_tokens
        if limit is None:
            if room is None or most <= LEAST_TOKENS:
                return called
            limit = room()
            if most <= limit:
                return called
        # 2. Long ones are cut in a thread, where nothing waits for it.
        how = _needed(tokenizer, tool), limit, tool.spec.truncate
        cut = partial(tool_messages.fit, called.shown, sizes, *how) if called.shown else partial(truncate, text, *how)
        kept, dropped = await asyncio.to_thread(cut) if len(text) > LONG_TEXT else cut()
        if isinstance(kept, str):
            return replace(called, result=kept, truncated_tokens=dropped)
        return replace(called, result=text_of({"content": kept}), shown=kept, truncated_tokens=dropped)

    async def _keep(self, tool: BoundTool) -> None:
        """Ask a tool for its state; a failure is logged, and then there is none to go on from."""
        self.snapshots.pop(tool.name, None)
        try:
            work = tool.snapshot(self)
            data = await bounded(work, tool.spec.timeout, name=f"snapshot of tool '{tool.name}'")
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # the tool's own code
            tool.report("snapshot", error, "the trajectories of which begin anew if they are resumed")
            return
        if data is not None:
            self.snapshots[tool.name] = data

    async def restore(self, tool: BoundTool, call_id: str, data: bytes) -> None:
        """Give a tool back what it has kept; ``call_id``: the trajectory's first call of it. Raises what it raises."""
        work = tool.restore(self, data, partial(self._context, call_id, 1))
        await bounded(work, tool.spec.timeout, name=f"restore of tool '{tool.name}'")

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

    async def _run(self, tool: BoundTool, call: ToolCall, span: Callable[[int], str] | None) -> Called:
        retry, number, clock = tool.spec.retry, 0, asyncio.get_running_loop().time
        since, failed = clock(), list[tuple[float, str]]()
        attempts = self.toolbox.attempts if retry.attempts == 1 and tool.may_repeat else retry.attempts
        while True:
            number += 1
            # 1. Arguments: read anew for each try, since the one before may have changed what it was given.
            try:
                arguments = tool.read(call.arguments)
            except Exception as error:  # BadArguments, or whatever a validator of the tool's own types raises
                return replace(_failure(tool, call, error)[0], failed_tries=failed)
            # 2. One try, in one of the tool's slots. What cannot be made text raises.
            try:
                async with self.toolbox.slot(tool):
                    work = tool.call(self, arguments, partial(self._context, call.id, number))
                    if span is not None:
                        work = within(span(number), work)
                    value = await bounded(
                        work, tool.spec.timeout, name=f"tool '{tool.name}'", stop_seconds=tool.stop_seconds,
                        waits=tool.in_thread,
                    )  # fmt: skip
                if value is None:
                    tool.report_silence()
                said = partial(Called.of, call, tries=number, failed_tries=failed)
                if not isinstance(value, AgentAnswer):
                    value, reward = (value.text, value.reward) if isinstance(value, ToolResult) else (value, None)
                    short = tool_messages.is_short(value)
                    content = tool_messages.content
                    result, shown = content(value) if short else await asyncio.to_thread(content, value)
                    return said(result, shown=shown, reward=reward)
                if value.failure is None:
                    said_all = [value.text, *value.pictures] if value.pictures else value.text
                    text, shown = tool_messages.content(said_all)
                    return said(text, shown=shown, child_id=value.child_id)
                text = error_text(f"{tool.name} ended without an answer ({value.failure})", GO_ON)
                called = Called.of(call, text, value.failure, child_id=value.child_id)
                names = frozenset({value.failure, value.failure.rpartition(":")[2]})
            except (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit):
                raise
            except BaseException as error:  # tools may raise anything, pytest's and trio's own kinds included
                called, names = _failure(tool, call, error)
            # 3. Done, unless it failed in a way that is to be tried again. The same arguments stay wrong.
            if called.bad or number >= attempts or (retry.errors and names.isdisjoint(retry.errors)):
                return replace(called, tries=number, failed_tries=failed)
            now = clock()
            failed.append((now - since, called.failure or ""))
            since = now
            jitter = Random(derive_seed(self.seed, "tool", call.id, number, "pause")).uniform(0.5, 1.0)
            await asyncio.sleep(min(LONGEST_PAUSE, self.toolbox.first_pause * 2 ** (number - 1)) * jitter)

    def _context(self, call_id: str, number: int, purpose: str) -> ToolContext:
        rng = Random(derive_seed(self.seed, "tool", call_id, number, purpose))
        return ToolContext(self.trajectory_id, self.group_id, rng, self.extra, call_id, number)


def _needed(tokenizer: Tokenizer | None, tool: BoundTool) -> Tokenizer:
    if tokenizer is None:
        raise ToolError(f"the result of tool '{tool.name}' is bounded in tokens; give a tokenizer")
    return tokenizer


def _failure(tool: BoundTool, call: ToolCall, error: BaseException) -> tuple[Called, frozenset[str]]:
    """Return the result of a try that raised, and the names that a retry may know the error by.

    The model is to blame for BadArguments alone, which the schema raises, and tools on purpose. Whatever else tools
    raise is a failure of theirs.
    """
    name = tool.name
    kinds = error.names if isinstance(error, RaisedElsewhere) else [cls.__name__ for cls in type(error).__mro__]
    failure, names, bad = kinds[0], frozenset(kinds), False
    match error:
        case NotReady(__cause__=BaseException() as cause):
            called, names = _failure(tool, call, cause)
            text = error_text(f"{name} is not available ({called.failure})", GO_ON_LATER)
            return replace(called, result=text, bad=False), names
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
        case _ if failure == Unshowable.__name__:
            text = error_text(f"{name} gave no result that can be shown", GO_ON_WITHOUT)
            tool.report(failure, error)
        case _:
            text = error_text(f"{name} failed: {described(error, failure)}", GO_ON_WITHOUT)
            tool.report(failure, error)
    return Called.of(call, text, failure, bad=bad), names
