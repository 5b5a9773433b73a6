"""Whether a tool does what the toolbox and the models that call it rely on.

Invariant: the tool runs as it does in a rollout, through a :class:`fsm_rollout.tools.Toolbox` with sessions of its own
for each trajectory, in virtual time. Sync tools run in their threads, where nothing can cancel them or be blocked.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from random import Random

from hypothesis import strategies as st
from msgspec.structs import replace

from fsm_rollout.agent.graph import AgentGraph, Retry, ToolSpec
from fsm_rollout.errors import BadArguments, ToolError
from fsm_rollout.testing.conformance.runner import Checked, ConformanceError, Subject, Suite, demand, named
from fsm_rollout.testing.simulation.simulate import embedded_tokenizer, one_trajectory
from fsm_rollout.testing.strategies import calls
from fsm_rollout.tools import AgentAnswer, AgentCall, ToolContext
from fsm_rollout.tools.schema import Arguments
from fsm_rollout.tools.tool_messages import Unshowable
from fsm_rollout.tools.toolbox import Toolbox, ToolSession
from fsm_rollout.trajectory.event_bytes import encode
from fsm_rollout.trajectory.events import Called, ToolCall
from fsm_rollout.trajectory.pictures import StoredPicture

LATER_SECONDS = 1024.0  # how much later the same calls are made again: they must not depend on the clock


def check_tool(
    tool: Callable[..., object] | str | ToolSpec,
    *,
    kwargs: Mapping[str, object] | None = None,
    tools_kwargs: Mapping[str, object] | None = None,
    extra: Mapping[str, object] | None = None,
    arguments: st.SearchStrategy[Arguments] | None = None,
    deterministic: bool = True,
    patience: float = 60.0,
    examples: int = 50,
) -> Checked:
    """Hold a tool to its promises, on generated calls.

    1. schema: Its schema can be built: a description, and parameters that are JSON.
    2. arguments taken: Arguments that follow the schema reach it, and not all of them make it raise.
    3. arguments refused: Others are refused, naming what is wrong, before the tool runs.
    4. results: A call ends in `patience` seconds; its result can be told to a model and journalled.
    5. cancellation: Cancellation passes, at every await (async tools).
    6. event loop: The event loop is never blocked (async tools).
    7. tasks: No task outlives its call.
    8. same seed: Equal calls of equal seeds give equal results: alone, beside others, and later.
    9. inputs: What it is given stays as it is: the prompt's other fields, the recorded arguments.
    10. release: `release` works after every use, and after none.

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
    if isinstance(tool, ToolSpec) and tool.agent is not None:
        embedded_tokenizer()  # loading it takes seconds, which are not the tool's
    code = tool.use or "agent" if isinstance(tool, ToolSpec) else tool
    with SUITE.judging():
        path, name = named(code)
        spec = tool if isinstance(tool, ToolSpec) else ToolSpec(use=path, kwargs=kwargs or {})
        subject = _Tool(spec, name, patience, examples, {"tool": tools_kwargs} if tools_kwargs else {}, extra or {})
        subject.calls = subject.calls if arguments is None else arguments
        subject.unmade |= set() if deterministic else {8}
        return SUITE.hold(subject)


SUITE = Suite[Callable[["_Tool"], "int | None"]](check_tool)


class _Tool(Subject):
    BLOCKING, ENDLESS, LEAKY, CANCELLED = 6, 4, 7, 5

    def __init__(
        self, spec: ToolSpec, name: str, patience: float, examples: int,
        tools_kwargs: Mapping[str, Mapping[str, object]], extra: Mapping[str, object],
    ) -> None:  # fmt: skip
        super().__init__(name, f"a call of {name}", patience, examples)
        self.tools_kwargs, self.extra = tools_kwargs, extra
        # Each call by itself and in full: tries and truncation are the toolbox's.
        spec = spec.model_copy(update={"retry": Retry(), "response_tokens": None})
        graph = AgentGraph(agent="check", tools={"tool": spec}, states={"PENDING": {}}, transitions=())
        try:
            self.box = Toolbox(graph)
            self.box.check(tools_kwargs)
        except ToolError as error:
            raise ConformanceError(1, f"{name} cannot be built: {error}") from error
        self.tool = self.box.tools_of("main")["tool"]
        function = self.tool.schema.get("function", {})
        self.description, self.parameters = function.get("description"), function.get("parameters", {})
        self.calls = calls.arguments(self.parameters)  # what the model may pass
        self.unmade = {5, 6} if self.tool.in_thread else set()
        self.prompt_fields: Mapping[str, object] = {}  # the prompt's fields as the latest session was given them
        self.failures: list[str] = []
        # What each call came to when a session began with it for the first time.
        self.first_results: dict[str, Called] = {}

    def open(self) -> ToolSession:
        """Begin a trajectory's use of the tool; each is given the same."""
        self.prompt_fields = copy.deepcopy(self.extra)
        return ToolSession(
            toolbox=self.box, trajectory_id="check/0", group_id="check", seed=0, tools_kwargs=self.tools_kwargs,
            extra=self.prompt_fields, run_agent=_run_agent,
        )  # fmt: skip

    async def release(self, session: ToolSession, after: str = "") -> None:
        """End a trajectory's use of the tool."""
        for failure in await session.release():
            raise ConformanceError(10, failure + after)

    # -- the checks -----------------------------------------------------------------------------------------------

    @SUITE.check(1)
    def schema_is_whole(self) -> None:
        try:
            json.dumps(self.tool.schema, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConformanceError(1, f"the schema of {self.name} is no JSON: {error}") from None
        missing = set(self.parameters.get("required", ())) - set(self.parameters.get("properties", {}))
        complete = self.description and self.parameters.get("type") == "object" and not missing
        demand(complete, 1, f"the schema of {self.name} is incomplete: {self.tool.schema}")

    async def _once(self, arguments: Arguments) -> Called:
        """Make a call in a session of its own."""
        session = self.open()
        result = await self.in_time(_made(session, arguments), f"{self.name}({arguments}) did not return")
        await self.release(session)
        return result

    @SUITE.check(2, 4, 7, 9)
    def calls_are_answered(self) -> int:
        """Make calls, and look at what each came to."""
        ran = self.search(self.calls, self._answers)
        all_failed = f"raised on all {ran} calls that follow its schema, at last: {', '.join(self.failures[-1:])}"
        demand(not ran or len(self.failures) < ran, 2, f"{self.name} {all_failed}")
        return ran

    def _answers(self, arguments: Arguments) -> None:
        # 1. The call, in a session of its own.
        kept = copy.deepcopy(arguments)
        result = self.run(self._once(arguments))
        # 2. What it came to can be told and kept.
        text = result.result
        refused = result.bad and not result.tries
        demand(not refused, 2, f"{self.name} refused what its schema allows: {text}")
        unreadable = result.failure == Unshowable.__name__  # how it is not is in the log
        demand(not unreadable, 4, f"what {self.name} returned for {kept} cannot be shown to a model; return plain data")
        silent = self.tool.silence and result.failure is None and text == "null"
        demand(not silent, 4, f"{self.name} {self.tool.silence}")
        try:
            encode(result)
        except (TypeError, ValueError, OverflowError) as error:
            raise ConformanceError(4, f"what {self.name} made of {kept} cannot be journalled: {error}") from None
        # 3. It changed nothing, and did what it always does.
        demand(arguments == kept, 9, f"{self.name} changed the recorded arguments {kept} to {arguments}")
        fields = f"{dict(self.extra)} to {self.prompt_fields}"
        demand(self.prompt_fields == self.extra, 9, f"{self.name} changed the prompt's fields {fields}")
        if 8 not in self.unmade:
            self._as_ever(kept, result)
        if result.failure is not None:
            self.failures.append(f"{text} (arguments {arguments})")

    def _as_ever(self, arguments: Arguments, result: Called) -> None:
        """Compare what a session's first call came to with what it came to when it was made for the first time."""
        first = self.first_results.setdefault(repr(arguments), _outcome(result))
        self._same(arguments, first, _outcome(result), "later")

    def _same(self, arguments: Arguments, first: Called, second: Called, when: str) -> None:
        gave = f"gave {first.result!r}, and {when} {second.result!r} (reward {first.reward}, {second.reward})"
        keep = "nothing between calls" if self.tool.holder is None else "what lasts between calls in `self` alone"
        advice = f"take randomness from ToolContext.rng, read no clock, and keep {keep}"
        if self.tool.holder is not None and self.tool.spec.order == "any":
            advice += "; its calls of one turn run at once: guard what they share, or leave out `order: any`"
        demand(first == second, 8, f"{self.name}({arguments}) {gave}; {advice}")

    @SUITE.check(3)
    def others_are_refused(self) -> int:
        """Pass what the schema forbids: a message comes back, and the tool does not run."""

        def refuses(drawn: tuple[str, Arguments]) -> None:
            mistake, arguments = drawn
            result = self.run(self._once(arguments))
            refused = result.failure is not None and not result.tries
            demand(refused, 3, f"{self.name} took {arguments}, though {mistake}")
            wrong = mistake.split("'")[1]
            named = result.bad and result.result.startswith("error: ") and wrong in result.result
            demand(named, 3, f"{self.name} refused {arguments} without naming '{wrong}': {result.result}")

        return self.search(calls.spoiled(self.parameters), refuses)

    @SUITE.check(10)
    def unused_sessions_are_released(self) -> int:
        """Release a session that made no call, and one whose call was cancelled before it could begin."""

        async def main(arguments: Arguments) -> None:
            await self.release(self.open())
            session = self.open()
            task = asyncio.get_running_loop().create_task(_made(session, arguments))
            task.cancel()
            await asyncio.wait({task})
            await self.release(session)

        return self.search(self.calls, lambda arguments: self.run(main(arguments)), self.examples)

    @SUITE.check(5, 6)
    def calls_are_cancelled(self) -> int:
        """Cancel the tool's own coroutine, at each of its awaits in turn."""

        def cancelled(arguments: Arguments) -> None:
            try:
                read_arguments = self.tool.read(arguments)
            except BadArguments:
                return

            @asynccontextmanager
            async def begin(where: str) -> AsyncIterator[Coroutine[object, object, object]]:
                session = self.open()
                try:
                    yield self.tool.call(session, dict(read_arguments), partial(_context, self.extra))
                finally:
                    await self.release(session, f", after a call that was {where}")

            self.cancel_everywhere(begin, f" (arguments {arguments})")

        return self.search(self.calls, cancelled, 5)

    @SUITE.check(8)
    def equal_calls_are_equal(self) -> int:
        """Make the same calls one after the other, and all at once in two trajectories."""
        return self.search(st.lists(self.calls, min_size=2, max_size=4), self._equal, 5)

    def _equal(self, listed: Sequence[Arguments]) -> None:
        async def calls(together: bool) -> list[Called]:
            session = self.open()
            sessions = [
                _made(session, copy.deepcopy(arguments_copy), f"c{number}")
                for number, arguments_copy in enumerate(listed, 1)
            ]
            results = await asyncio.gather(*sessions) if together else [await call for call in sessions]
            await session.release()
            return [_outcome(result) for result in results]

        async def main(seconds: float) -> tuple[list[Called], list[list[Called]]]:
            await asyncio.sleep(seconds)
            alone = await calls(False)
            return alone, await asyncio.gather(*(calls(True) for _ in range(2)))

        alone, together = self.run(main(0.0))
        self._as_ever(listed[0], alone[0])
        later, (first, second) = self.run(main(LATER_SECONDS))
        others = ("the second time", later), ("made at once", first), ("by another trajectory of that seed", second)
        for when, results in others:
            for arguments, result, other in zip(listed, alone, results, strict=True):
                self._same(arguments, result, other, when)
        demand(together[0] == first, 8, f"{self.name} gave {together[0]}, and the second time {first}")


class _Eye:
    """A model that sees any picture."""

    async def sizes_in_results(self, pictures: Sequence[StoredPicture]) -> list[int]:
        """Return a token for each."""
        return [1] * len(pictures)


async def _made(session: ToolSession, arguments: Arguments, call_id: str = "c1") -> Called:
    return await session.call(ToolCall(id=call_id, name="tool", arguments=arguments), eye=_Eye())


def _outcome(result: Called) -> Called:
    """Return what must be the same each time."""
    return replace(result, seconds=0.0, child_id=None)


def _context(extra: Mapping[str, object], purpose: str) -> ToolContext:
    return ToolContext("check/0", "check", Random(purpose), extra)


async def _run_agent(graph: AgentGraph, call: AgentCall) -> AgentAnswer:
    """Run an agent that is the tool: on its own scheduler, with an engine that always gives the same answer."""
    trajectory = await one_trajectory(graph, lambda request: "The answer is 4.", call.task)
    texts = list(trajectory.assistant_texts())
    return AgentAnswer(texts[-1] if texts else "", None if texts else trajectory.stop_reason)
