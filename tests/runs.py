"""Runs of tests in a line each: graphs, prompts, and a scripted engine with its scheduler in virtual time."""

import asyncio
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.chat import ChatTemplate
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.protocol import Chunk, Request
from fsm_rollout.engines.scripted.engine import ScriptedEngine, Turn
from fsm_rollout.scheduler.group import Group
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.testing.simulation.virtual_time import run_virtual
from fsm_rollout.trajectory.event_bytes import decode, encode
from fsm_rollout.trajectory.events import AnyEvent
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.embedded import tokenizer

CHATS: dict[object, ChatTemplate] = {}
"""Those of the one tokenizer: a template is read once for all tests."""


# -- graphs and prompts ----------------------------------------------------------------------------------------------


def rows(*lines: str) -> list[dict[str, Any]]:
    """Return transitions: ``SOURCE trigger DEST``, then ``if predicate`` or ``as stop_reason`` where there is one."""
    found: list[dict[str, Any]] = []
    for line in lines:
        source, trigger, dest, *more = line.split()
        row: dict[str, Any] = {"source": source, "trigger": trigger, "dest": dest}
        for word, value in zip(more[::2], more[1::2], strict=True):
            key = {"if": "conditions", "as": "stop_reason"}[word]
            row[key] = [{"name": value}] if word == "if" else value
        found.append(row)
    return found


LIMITS = {"assistant_turns": 6, "tool_calls": 6, "wall_seconds": 1000.0}
SINGLE: dict[str, Any] = {
    "states": {"PENDING": {}, "GENERATING": {"timeout": 100.0, "sampling": {"max_tokens": 64}}},
    "transitions": rows("PENDING prompted GENERATING", "GENERATING generated TERMINATED"),
}
TOOLS: dict[str, Any] = {
    "states": {"PENDING": {}, "GENERATING": {"timeout": 100.0}, "PROCESSING_TOOLS": {"timeout": 200.0}},
    "transitions": rows(
        "PENDING prompted GENERATING",
        "GENERATING generated PROCESSING_TOOLS if has_tool_calls",
        "GENERATING generated TERMINATED",
        "PROCESSING_TOOLS tools_done GENERATING",
    ),
}


LISTENING = {
    "states": {"PENDING": {}, "INTERACTING": {"timeout": 50.0}},
    "transitions": rows("PENDING prompted INTERACTING", "INTERACTING interaction_done TERMINATED"),
}

ECHOES = {"echo": {"use": "tests.law_tools:echo", "timeout": 50.0}}


def agent(frame: Mapping[str, Any] = SINGLE, **more: Any) -> AgentGraph:
    return AgentGraph(**{"agent": "a", "limits": LIMITS, **frame, **more})


def changed(frame: Mapping[str, Any], *lines: str, **states: Any) -> dict[str, Any]:
    """Return a frame with other states, or other keys of them, and further transitions."""
    named = {name: {**frame["states"].get(name, {}), **keys} for name, keys in states.items()}
    return {"states": {**frame["states"], **named}, "transitions": [*frame["transitions"], *rows(*lines)]}


def with_tool(use: str, **more: Any) -> AgentGraph:
    """Return an agent whose one tool is called `tool`."""
    return agent(TOOLS, tools={"tool": {"use": use, "timeout": 50.0, **more}})


def asking(helper: AgentGraph, timeout: float = 50.0, **more: Any) -> AgentGraph:
    """Return an agent that can ask another, by the tool `ask`."""
    return agent(TOOLS, **{"tools": {"ask": {"agent": helper, "timeout": timeout}}, **more})


ASKS = '<tool_call>\n{"name": "ask", "arguments": {"task": "Think."}}\n</tool_call>'
"""What a model says that asks the other."""


def prompts(count: int = 1, start: int = 0, **extra: Any) -> list[Prompt]:
    return [
        Prompt(prompt_id=f"p{i}", messages=({"role": "user", "content": f"Question {i}?"},), **extra)
        for i in range(start, start + count)
    ]


# -- runs ------------------------------------------------------------------------------------------------------------


class Bench:
    """An engine, its scheduler and all events, in order; the policy and a judge are the same engine."""

    def __init__(
        self, graph: AgentGraph, script: Any, *, chats: dict[object, ChatTemplate] = CHATS, eye: Any = None,
        **options: Any,
    ) -> None:  # fmt: skip
        tokens = tokenizer() if eye is None else eye.tokenizer
        self.engine = ScriptedEngine(script, tokenizer=tokens, processor=eye, log=True)
        self.log: list[tuple[str, AnyEvent]] = []
        clients = {name: EngineClient(self.engine) for name in ("policy", "judge")}
        for client in clients.values():
            client.chats = chats
        listeners = [self.hear, *options.pop("listeners", ())]
        self.scheduler = Scheduler({graph.agent: graph}, clients, listeners=listeners, **options)

    def hear(self, trajectory: Trajectory, event: AnyEvent) -> None:
        self.log.append((trajectory.trajectory_id, event))

    def go(self, *arguments: Any, **options: Any) -> list[Group]:
        """Run to the end, as :meth:`run`."""
        return run_virtual(self.run(*arguments, **options))

    async def run(
        self,
        n: int = 2,
        listed: int | Iterable[Prompt] = 2,
        *,
        at: Mapping[float, Callable[[], object]] | None = None,
        **options: Any,
    ) -> list[Group]:
        """Run prompts (or so many of our own), and do ``at`` so many seconds what stands there."""
        beside = [asyncio.ensure_future(_later(*each)) for each in (at or {}).items()]
        source = prompts(listed) if isinstance(listed, int) else listed
        groups = [group async for group in self.scheduler.run(source, n, **options)]
        await asyncio.gather(*beside)
        return groups

    async def interrupted(self, at: float, n: int = 1, listed: int = 1, away: float = 0.0) -> list[Group]:
        """Run, set everything aside at some time, stay away for a while, and go on."""
        groups = await self.run(n, listed, at={at: self.stop})
        await asyncio.sleep(away)
        return await self.run(n, listed, resume=[trajectory for group in groups for trajectory in group.all])

    def cancel(self) -> None:
        self.scheduler.cancel("p0/0")

    def stop(self) -> None:
        self.scheduler.stop("asked")

    async def new_weights(self) -> None:
        await self.scheduler.update_weights({})

    @property
    def asked(self) -> list[Request]:
        """What the engine was asked, in order."""
        return [line.what for line in self.engine.log if isinstance(line.what, Request)]

    @property
    def sampled(self) -> list[int]:
        """All ids that the engine has said, in order."""
        return [i for line in self.engine.log if isinstance(line.what, Chunk) for i in line.what.ids]


async def _later(seconds: float, do: Callable[[], object]) -> None:
    await asyncio.sleep(seconds)
    done = do()
    if inspect.isawaitable(done):
        await done


def run(
    graph: AgentGraph, script: Any, listed: int | Iterable[Prompt] = 1, n: int = 1, *,
    at: Mapping[float, Callable[[Bench], object]] | None = None, **options: Any,
) -> tuple[list[Group], Bench]:  # fmt: skip
    """Run once, on a bench of its own; what is done ``at`` some times is called with it."""
    bench = Bench(graph, script, **options)
    return bench.go(n, listed, at={seconds: _bound(do, bench) for seconds, do in (at or {}).items()}), bench


def _bound(do: Callable[[Bench], object], bench: Bench) -> Callable[[], object]:
    return lambda: do(bench)


SLOW = Turn(text="one two three four five six", delay=10.0, chunks=4)
"""Four pieces, ten seconds each."""


def slow(seconds: Mapping[str, float] = {}) -> Callable[[Request], Turn]:
    """Ten pieces of words, each `seconds` of the prompt's id long."""
    return lambda request: Turn(text="word " * 10, delay=seconds.get(request.group_id, 0.1), chunks=10)


# -- what came of them -----------------------------------------------------------------------------------------------


def only(groups: Sequence[Group]) -> Trajectory:
    (group,) = groups
    (trajectory,) = group.trajectories
    return trajectory


def results(trajectory: Trajectory) -> list[str]:
    """Return what tools have told the model."""
    return [message["content"] for message in trajectory.streams[0].messages if message["role"] == "tool"]


def ends(groups: Iterable[Group]) -> dict[str, str | None]:
    """Return why each sample ended, by its id."""
    return {t.trajectory_id: t.stop_reason for group in groups for t in group.trajectories}


def histories(log: Iterable[tuple[str, AnyEvent]]) -> list[list[AnyEvent]]:
    """What a journal holds of some events: by trajectory, in order, packed and unpacked."""
    found: dict[str, list[AnyEvent]] = defaultdict(list)
    for trajectory_id, event in log:
        found[trajectory_id].append(decode(encode(event)))
    return list(found.values())


def outline(groups: Iterable[Group], *, children: bool = False) -> list[tuple[Any, ...]]:
    """All that must not depend on where a run was interrupted, also of sub-agents' trajectories, in their order."""
    return [
        (
            t.trajectory_id, t.parent_id, t.sample, t.agent, t.seed, t.stop_reason, t.visits, t.spent, t.turn_scores,
            t.tool_rewards, t.generations, t.queries,
            [(s.context, s.tokens.ids.tolist(), s.tokens.spans, s.messages) for s in t.streams],
            [(called.id, called.result, called.failure, called.tries, called.child_id) for called in t.called],
        )
        for group in sorted(groups, key=lambda group: group.index)
        for t in (group.all if children else group.trajectories)
    ]  # fmt: skip


def ids_of(trajectory: Trajectory) -> list[int]:
    """Return what follows the prompt in a trajectory's latest stream."""
    return trajectory.streams[-1].tokens.response_ids().tolist()


def ages(bench: Bench, group: Group) -> list[int]:
    """How many versions behind the engine is each token that a batch of this group would train on."""
    now = bench.engine.weight_version
    tokens = [stream.tokens for trajectory in group.all for stream in trajectory.streams]
    return [
        now - version
        for one in tokens
        for version, trained in zip(one.response_versions().tolist(), one.response_mask().tolist(), strict=True)
        if trained
    ]
