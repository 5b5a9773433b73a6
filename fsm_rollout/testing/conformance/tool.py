"""Whether a tool does what the toolbox and the models that call it rely on.

Invariant: the tool runs as it does in a rollout, through a :class:`fsm_rollout.tools.Toolbox` with sessions of its own
for each trajectory, in virtual time. Sync tools run in their threads, where nothing can cancel them or be blocked.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from hypothesis import strategies as st
from msgspec.structs import replace

from fsm_rollout.agent.graph import POLICY, AgentGraph, Retry, Tool
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.scripted.engine import ScriptedEngine
from fsm_rollout.errors import BadArguments, ToolError
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.testing.conformance.promises import (
    Checked,
    ConformanceError,
    Stepped,
    called,
    cancelled_at,
    importable,
    search,
)
from fsm_rollout.testing.simulation.blocking import HOW_TIME_PASSES, busy, in_virtual_time
from fsm_rollout.testing.simulation.simulate import embedded_tokenizer
from fsm_rollout.testing.strategies import schema_values
from fsm_rollout.tools import AgentAnswer, ToolContext
from fsm_rollout.tools.base import CallResult
from fsm_rollout.tools.call import STOP_SECONDS
from fsm_rollout.tools.toolbox import BoundTool, Toolbox, ToolSession
from fsm_rollout.trajectory.events import Called, ToolCall, encode
from fsm_rollout.trajectory.prompt import Prompt

MOST_WAITS = 40
"""A call is cancelled at each of its awaits, up to this many."""
LATER_SECONDS = 1024.0
"""How much later the same calls are made again: they must not depend on the clock."""


def check_tool(
    tool: Callable[..., Any] | str | Tool,
    *,
    kwargs: Mapping[str, Any] | None = None,
    tools_kwargs: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
    arguments: st.SearchStrategy[dict[str, Any]] | None = None,
    deterministic: bool = True,
    patience: float = 60.0,
    examples: int = 50,
) -> Checked:
    """Hold a tool to its promises, on generated calls.

    1. Its schema can be built: a description, and parameters that are JSON.
    2. Arguments that follow the schema are taken, and not every one of them makes it raise.
    3. Arguments that do not follow it are refused with a message that names what is wrong, before the tool runs.
    4. A call ends within ``patience`` seconds, and what it returns can be told to a model and written to a journal.
    5. Cancellation passes, at every await (async tools).
    6. The event loop is never blocked (async tools).
    7. No task outlives its call.
    8. Equal calls of equal seeds give equal results, alone or beside other calls and trajectories, and however often
       they were made before (``deterministic``).
    9. What it is given stays as it is: the prompt's other fields, the arguments as they were recorded.
    10. `release` works after every use, and after none.

    Example::

        check_tool(my_tools.search, tools_kwargs={"index": "wiki"}, arguments=st.just({"query": "rain"}))

    Args:
        tool: a function or class, its ``module:name``, or a tool of an agent (``graph.tools["search"]``).
        kwargs: those of the agent's YAML.
        tools_kwargs: a prompt's ``tools_kwargs`` of this tool.
        extra: the prompt's other fields.
        arguments: draws what the model may pass; default: anything that follows the schema.
        deterministic: whether promise 8 is made. Randomness must come from :class:`fsm_rollout.tools.ToolContext` then.
        patience: virtual seconds that a call may take.
        examples: how many calls each promise is tried on.

    Raises:
        ConformanceError: a promise does not hold; with the simplest call that shows it.
    """
    if isinstance(tool, Tool):
        if tool.agent is not None:
            embedded_tokenizer()  # loading it takes seconds, which are not the tool's
        return _check(tool, called(tool.use or "agent"), tools_kwargs, extra, arguments, deterministic, patience,
                      examples)  # fmt: skip
    with importable(tool) as path:
        spec = Tool(use=path, kwargs=kwargs or {})
        return _check(spec, called(tool), tools_kwargs, extra, arguments, deterministic, patience, examples)


def _check(
    spec: Tool,
    name: str,
    tools_kwargs: Mapping[str, Any] | None,
    extra: Mapping[str, Any] | None,
    drawn: st.SearchStrategy[dict[str, Any]] | None,
    deterministic: bool,
    patience: float,
    examples: int,
) -> Checked:
    given = {"tool": tools_kwargs} if tools_kwargs else {}
    checker = _Checker(spec, name, given, extra or {}, patience, deterministic)
    parameters = checker.schema()
    calls = schema_values.arguments(parameters) if drawn is None else drawn
    ran = search(calls, checker.answers, examples)
    if ran and checker.raised == ran:
        raise ConformanceError(2, f"{name} raised on all {ran} calls that follow its schema, at last: {checker.last}")
    ran += search(schema_values.spoiled(parameters), checker.refuses, examples)
    ran += search(calls, checker.unused, 1)
    if not checker.tool.in_thread:
        ran += search(calls, checker.cancelled, max(1, examples // 5))
    if deterministic:
        ran += search(st.lists(calls, min_size=2, max_size=4), checker.same, max(1, examples // 5))
    promises = ["schema", "arguments taken", "arguments refused", "results", "tasks", "inputs", "release"]
    promises += [] if checker.tool.in_thread else ["cancellation", "event loop"]
    return Checked((*promises, *(["same seed"] if deterministic else [])), ran)


class _Checker:
    def __init__(
        self,
        spec: Tool,
        name: str,
        tools_kwargs: Mapping[str, Any],
        extra: Mapping[str, Any],
        patience: float,
        deterministic: bool,
    ) -> None:
        self.name, self.tools_kwargs, self.extra, self.patience = name, tools_kwargs, extra, patience
        self.deterministic = deterministic
        # Each call by itself and in full: tries and truncation are the toolbox's.
        spec = spec.model_copy(update={"retry": Retry(), "response_tokens": None})
        graph = AgentGraph(
            agent="check",
            tools={"tool": spec},
            states={"PENDING": {}, "GENERATING": {"timeout": 1.0}},
            transitions=(
                {"trigger": "prompted", "source": "PENDING", "dest": "GENERATING"},
                {"trigger": "generated", "source": "GENERATING", "dest": "TERMINATED"},
            ),
        )
        try:
            self.box = Toolbox(graph)
            self.box.check(tools_kwargs)
        except ToolError as error:
            raise ConformanceError(1, f"{name} cannot be built: {error}") from error
        self.tool: BoundTool = self.box.known("main")["tool"]
        self.told: Mapping[str, Any] = {}
        """The prompt's fields as the latest session was given them."""
        self.raised = 0
        self.last = ""
        self.first: dict[str, CallResult] = {}
        """What each call came to when a session began with it for the first time."""

    def schema(self) -> Mapping[str, Any]:
        """Return the schema of the parameters, looked at."""
        function = self.tool.schema.get("function", {})
        try:
            json.dumps(self.tool.schema, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConformanceError(1, f"the schema of {self.name} is no JSON: {error}") from None
        parameters: Mapping[str, Any] = function.get("parameters", {})
        missing = set(parameters.get("required", ())) - set(parameters.get("properties", {}))
        if not function.get("description") or parameters.get("type") != "object" or missing:
            raise ConformanceError(1, f"the schema of {self.name} is incomplete: {self.tool.schema}")
        return parameters

    def open(self) -> ToolSession:
        """Begin a trajectory's use of the tool; each is told the same."""
        self.told = copy.deepcopy(self.extra)
        return self.box.open(
            trajectory_id="check/0",
            group_id="check",
            seed=0,
            tools_kwargs=self.tools_kwargs,
            extra=self.told,
            run_agent=_run_agent,
        )

    def run(self, work: Any) -> Any:
        """Run in virtual time."""
        return in_virtual_time(
            work,
            blocking=(6, self.name),
            endless=(4, f"a call of {self.name} never ends"),
            leaky=(7, f"tasks that {self.name} started outlived it"),
        )

    def answers(self, arguments: dict[str, Any]) -> None:
        """Make one call and look at what it came to."""
        kept = copy.deepcopy(arguments)

        async def one() -> Any:
            session = self.open()
            stepped = Stepped(session.call(ToolCall(id="c1", name="tool", arguments=arguments)))
            try:
                async with asyncio.timeout(self.patience):
                    result = await stepped
            except TimeoutError:
                raise ConformanceError(
                    4, f"{self.name} did not return within {self.patience:g} s; the arguments: {arguments}; "
                    f"{HOW_TIME_PASSES}"
                ) from None  # fmt: skip
            failures = await session.release()
            if failures:
                raise ConformanceError(10, failures[0])
            busy(6, self.name, stepped)
            return result

        result = self.run(one())
        if result.failure == "bad_arguments":
            raise ConformanceError(2, f"{self.name} refused what its schema allows: {result.text}")
        if "cannot be told to a model" in result.text or "not JSON serializable" in result.text:
            raise ConformanceError(4, f"what {self.name} returned for {kept} cannot be told to a model: {result.text}")
        event = Called(
            at=0.0, state="CHECK", id="c1", name="tool", arguments=arguments, result=result.text,
            failure=result.failure, bad=result.bad, reward=result.reward, seconds=0.0, tries=result.tries,
        )  # fmt: skip
        try:
            encode(event)
        except (TypeError, ValueError, OverflowError) as error:
            raise ConformanceError(4, f"what {self.name} made of {kept} cannot be journalled: {error}") from None
        if arguments != kept:
            raise ConformanceError(9, f"{self.name} changed the recorded arguments {kept} to {arguments}")
        if self.told != self.extra:
            raise ConformanceError(9, f"{self.name} changed the prompt's fields {dict(self.extra)} to {self.told}")
        if self.deterministic:
            self.as_ever(kept, result)
        if result.failure is not None:
            self.raised += 1
            self.last = f"{result.text} (arguments {arguments})"

    def as_ever(self, arguments: dict[str, Any], result: CallResult) -> None:
        """Compare what a session's first call came to with what it came to when it was made for the first time."""
        result = _outcome(result)
        first = self.first.setdefault(repr(arguments), result)
        if result != first:
            raise self.differs(arguments, first, result, "later")

    def differs(self, arguments: dict[str, Any], one: CallResult, two: CallResult, when: str) -> ConformanceError:
        """Return what to raise for two calls that should have come to the same."""
        return ConformanceError(
            8,
            f"{self.name}({arguments}) gave {one.text!r}, and {when} {two.text!r} (reward {one.reward}, {two.reward}); "
            "take randomness from ToolContext.rng, read no clock, and keep nothing between calls",
        )

    def refuses(self, drawn: tuple[str, dict[str, Any]]) -> None:
        """Pass what the schema forbids: a message comes back, and the tool does not run."""
        what, arguments = drawn

        async def one() -> Any:
            session = self.open()
            result = await session.call(ToolCall(id="c1", name="tool", arguments=arguments))
            await session.release()
            return result

        result = self.run(one())
        if result.failure is None or result.tries:
            raise ConformanceError(3, f"{self.name} took {arguments}, though {what}")
        wrong = what.split("'")[1]
        if not (result.bad and result.text.startswith("error: ") and wrong in result.text):
            raise ConformanceError(3, f"{self.name} refused {arguments} without naming '{wrong}': {result.text}")

    def unused(self, arguments: dict[str, Any]) -> None:
        """Release a session that made no call, and one whose call was cancelled before it could begin."""

        async def main() -> list[str]:
            failures = await self.open().release()
            session = self.open()
            call = session.call(ToolCall(id="c1", name="tool", arguments=arguments))
            task = asyncio.get_running_loop().create_task(call)
            task.cancel()
            await asyncio.wait({task})
            return failures + await session.release()

        failures = self.run(main())
        if failures:
            raise ConformanceError(10, failures[0])

    def cancelled(self, arguments: dict[str, Any]) -> None:
        """Cancel the tool's own coroutine, at each of its awaits in turn."""
        try:
            read = self.tool.read(arguments)
        except BadArguments:
            return
        for number in range(1, MOST_WAITS):

            async def one(number: int = number) -> Stepped[Any] | None:
                session = self.open()
                try:
                    work = self.tool.call(session, dict(read), lambda purpose: _context(self.extra, purpose))
                    return await cancelled_at(number, work, STOP_SECONDS)
                except TimeoutError:
                    return None
                finally:
                    if failures := await session.release():
                        raise ConformanceError(
                            10, f"{failures[0]}, after a call that was cancelled at its await number {number}"
                        )

            stepped = self.run(one())
            where = f"cancelled at its await number {number} (arguments {arguments})"
            if stepped is None:
                raise ConformanceError(5, f"{self.name}, {where}, did not stop within {STOP_SECONDS:g} s")
            if stepped.cancelled_at is None:
                return
            if not stepped.heard:
                raise ConformanceError(5, f"{self.name}, {where}, swallowed it; let CancelledError pass")

    def same(self, listed: Sequence[dict[str, Any]]) -> None:
        """Make the same calls one after the other, and all at once in two trajectories."""

        async def calls(together: bool) -> list[Any]:
            session = self.open()
            made = [
                session.call(ToolCall(id=f"c{number}", name="tool", arguments=copy.deepcopy(one)))
                for number, one in enumerate(listed, 1)
            ]
            results = await asyncio.gather(*made) if together else [await call for call in made]
            await session.release()
            return [_outcome(result) for result in results]

        async def main(seconds: float) -> tuple[list[Any], list[list[Any]]]:
            await asyncio.sleep(seconds)
            alone = await calls(False)
            return alone, await asyncio.gather(*(calls(True) for _ in range(2)))

        alone, beside = self.run(main(0.0))
        self.as_ever(listed[0], alone[0])
        again, (first, second) = self.run(main(LATER_SECONDS))
        for other, when in (
            (again, "the second time"), (first, "made at once"), (second, "made by another trajectory of the same seed")
        ):  # fmt: skip
            for arguments, one, two in zip(listed, alone, other, strict=True):
                if one != two:
                    raise self.differs(arguments, one, two, when)
        if beside[0] != first:
            raise ConformanceError(8, f"{self.name} gave {beside[0]}, and the second time {first}")


def _outcome(result: CallResult) -> CallResult:
    """Return what must be the same each time."""
    return replace(result, seconds=0.0, child_id=None)


def _context(extra: Mapping[str, Any], purpose: str) -> ToolContext:
    return ToolContext("check/0", "check", Random(purpose), extra)


async def _run_agent(tool: str, graph: AgentGraph, task: str, seed: int) -> AgentAnswer:
    """Run an agent that is the tool: on its own scheduler, with an engine that always gives the same answer."""
    engine = ScriptedEngine(lambda request: "The answer is 4.", tokenizer=embedded_tokenizer())
    names = {spec.engine for spec in graph.contexts.values()} | {POLICY}
    scheduler = Scheduler({graph.agent: graph}, {name: EngineClient(engine) for name in names})
    prompt = Prompt(prompt_id="check", messages=({"role": "user", "content": task},))
    (group,) = [group async for group in scheduler.run([prompt])]
    texts = list(group.trajectories[0].assistant_texts())
    return AgentAnswer(texts[-1] if texts else "", None if texts else group.trajectories[0].stop_reason)
