"""Code of users' that begins a span of its own wherever it runs, and runs that say which span that is in."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from openai import OpenAI
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import fsm_rollout as fr
from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.engines.scripted.engine import ScriptedEngine
from fsm_rollout.environment.users import Conversation, Reply
from fsm_rollout.report.readers import Tracing
from fsm_rollout.report.tracer import Tracer
from fsm_rollout.states.base import State
from fsm_rollout.states.external.handler import ForeignVisit
from fsm_rollout.tools import ToolContext
from fsm_rollout.trajectory.events import AnyEvent, Called, Scored
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.trace_ids import traceparent
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.embedded import tokenizer
from tests.runs import TOOLS, agent


def begun() -> str:
    """Begin a span as any library would, and return the `traceparent` of what it is in."""
    provider, exporter = TracerProvider(shutdown_on_exit=False), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with provider.get_tracer("users").start_as_current_span("inside"):
        pass
    if not exporter.get_finished_spans():  # those around it are not recorded
        return traceparent.get()
    (span,) = exporter.get_finished_spans()
    if span.parent is None or span.context is None:
        return f"none {traceparent.get()}"
    assert span.context.trace_id == span.parent.trace_id
    return f"00-{span.parent.trace_id:032x}-{span.parent.span_id:016x}-{span.parent.trace_flags:02x}"


def plain() -> str:
    """Say which span runs."""
    return begun()


async def waiting() -> str:
    """Say which span runs."""
    await asyncio.sleep(0)
    return await asyncio.create_task(asyncio.to_thread(begun))


def told(context: ToolContext) -> str:
    """Say which span runs."""
    assert context.traceparent == begun()
    return context.traceparent


_earlier: dict[str, str] = {}


def second_time(context: ToolContext) -> str:
    """Say which span ran the first time, and which runs now."""
    if context.number == 1:
        _earlier[context.trajectory_id] = begun()
        raise ConnectionError
    return f"{_earlier.pop(context.trajectory_id)} {begun()}"


def foreign(visit: ForeignVisit) -> None:
    """Tell a model which span runs."""
    messages: Any = [{"role": "user", "content": begun()}]
    with OpenAI(base_url=visit.base_url, api_key=visit.api_key) as client:
        client.chat.completions.create(model="any", messages=messages)


class Kept:
    """Say which span runs."""

    def execute(self) -> str:
        """Say which span runs."""
        return begun()


class User:
    """Says which span runs, and no more."""

    async def reply(self, conversation: Conversation) -> Reply:
        """Say so."""
        return Reply(begun(), done=True)


class Visits(State):
    """A state that says which span its visit is."""

    triggers = ("prompted",)

    async def run(self, trajectory: Trajectory, ctx: Any) -> Outcome:
        """Say so in the trajectory's own words."""
        await ctx.opened("main")
        ctx.write([{"role": "user", "content": begun()}], context="main")
        return Outcome("prompted")


class Grades(State):
    """A state that scores what was said."""

    triggers = ("graded",)

    async def run(self, trajectory: Trajectory, ctx: Any) -> Outcome:
        """Score the latest turn, then all of them."""
        ctx.score_turn(0.25)
        ctx.emit(Scored(at=ctx.clock(), value=0.5, source=self.name))
        return Outcome("graded")


def calling(name: str = "here", /, **arguments: Any) -> str:
    """Return what a model says that calls a tool."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


class TracedRuns:
    """Runs of an agent, and their spans.

    Args:
        graph: the agent; or the `tools` of one that calls them.
        turns: what the model says.
    """

    def __init__(self, graph: AgentGraph | Mapping[str, Any], *turns: str) -> None:
        self.graph = graph if isinstance(graph, AgentGraph) else agent(TOOLS, tools=graph)
        self.turns = turns
        self.trajectories: list[Trajectory] = []
        self.results: list[str] = []  # what tools have said

    def spans(self, name: str, share: float | None = 1.0, **options: Any) -> list[str]:
        """Run it once, and return the `traceparent` of each span that is called so, as :meth:`named`."""
        self.run(share, **options)
        return self.named(name)

    def run(self, share: float | None = 1.0, **options: Any) -> None:
        """Run it once, with such a share of trajectories traced; ``None``: nobody traces it."""
        self._exporter, self.results = InMemorySpanExporter(), []

        def note(_: Trajectory, event: AnyEvent) -> None:
            if isinstance(event, Called):
                self.results.append(event.result)

        async def main() -> None:
            engine = ScriptedEngine(list(self.turns), tokenizer=tokenizer())
            tracing = False if share is None else Tracer(Tracing(sample=share), self._exporter)
            made = fr.Rollout(self.graph, engine, tracing=tracing, on_event=[note], **options)
            async with made as rollout, asyncio.timeout(600):
                async for group in rollout.stream(["Where?"]):
                    self.trajectories = group.trajectories

        asyncio.run(main())

    def named(self, name: str) -> list[str]:
        """Return the `traceparent` of each span of the latest run that is called so, in the order of their ends."""
        found = [span.context for span in self.ended if span.name == name]
        return [f"00-{each.trace_id:032x}-{each.span_id:016x}-01" for each in found if each is not None]

    @property
    def ended(self) -> Sequence[ReadableSpan]:
        """The spans of the latest run, in the order of their ends."""
        return self._exporter.get_finished_spans()
