"""Sub-agents go on with those that they serve, wherever these were cut off, carried or set aside."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.engines.protocol import Request
from fsm_rollout.engines.scripted.engine import Turn
from fsm_rollout.scheduler.group import Group
from fsm_rollout.testing import run_virtual
from tests.runs import ASKS, TOOLS, Bench, agent, asking, changed, histories, outline


def asks(tool: str, tasks: Sequence[str]) -> str:
    made = ({"name": tool, "arguments": {"task": task}} for task in tasks)
    return "\n".join(f"<tool_call>\n{json.dumps(each)}\n</tool_call>" for each in made)


def family(timeout: float = 900.0, retry: int = 1) -> AgentGraph:
    """An agent that calls agents that call agents."""
    calling = changed(TOOLS, PROCESSING_TOOLS={"timeout": 900.0})
    deep = agent(agent="deep")
    ask = {"agent": deep, "timeout": timeout, "retry": {"attempts": retry}}
    middle = agent(calling, agent="middle", tools={"ask": ask})
    return agent(calling, agent="outer", tools={"delegate": {"agent": middle, "timeout": 900}})


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=2),
    st.lists(st.integers(0, 2), min_size=1, max_size=3),
    st.sampled_from([1, 2]),
    st.lists(st.floats(0, 1), min_size=1, max_size=4),
    st.booleans(),
)
def test_whoever_is_killed_and_resumed_however_often_rows_ids_and_order_are_those_of_one_run(
    calls: list[int], deeper: list[int], retry: int, cuts: list[float], kindly: bool
) -> None:
    """``cuts``: at which part of what is then in the journal the run ends; kindly, by being set aside."""

    def script(request: Request) -> Turn:
        number = request.sampling.seed % 1000
        counts, tool = {"outer": (calls, "delegate"), "middle": (deeper, "ask"), "deep": ([], "")}[request.agent]
        if request.turn < len(counts) and counts[request.turn]:
            tasks = [f"{request.agent} {request.turn} {index}" for index in range(counts[request.turn])]
            return Turn(text=asks(tool, tasks), delay=0.1 + number % 7)
        if request.agent == "deep" and retry == 2 and number % 2:
            return Turn(text="", error="Boom: no", delay=0.3)
        return Turn(text=f"answer {number}", delay=0.1 + number % 5, chunks=2)

    graph = family(retry=retry)
    whole = Bench(graph, script)
    expected = outline(whole.go(), children=True)
    log = whole.log
    for part in cuts:
        kept = log[: round(part * len(log))]
        again = Bench(graph, script)
        groups = again.go(resume=histories(kept), at={part * 20.0: again.stop} if kindly else None)
        assert kindly or outline(groups, children=True) == expected
        log = kept + again.log[len(kept) :]  # what it resumed is recorded again, first
    assert outline(Bench(graph, script).go(resume=histories(log)), children=True) == expected


@pytest.mark.parametrize("seconds", [0.7, 1.3, 4.1])
def test_sub_agents_are_carried_with_those_they_serve(seconds: float) -> None:
    """The first of two groups completes the target while calls of the other's are under way."""

    def script(request: Request) -> Turn:
        delay = 1.0 if request.group_id == "p0" else 1.0 + seconds
        tool = {"outer": "delegate", "middle": "ask"}.get(request.agent)
        return Turn(text="done" if tool is None or request.turn else asks(tool, ["a", "b"]), delay=delay, chunks=2)

    expected = outline(Bench(family(), script).go(1), children=True)
    bench = Bench(family(), script)

    async def main() -> list[Group]:
        return await bench.run(1, target_groups=1, over_sample=2) + await bench.run(1, [])

    groups = run_virtual(main())
    assert outline(groups, children=True) == expected
    assert any(t.resumptions for t in groups[1].all if t.parent_id is not None) or seconds > 2
    assert not any(group.active or group.discarded for group in groups)


async def suspended(bench: Bench, at: float | None) -> list[Group]:
    """Run one sample; set it aside at some time, if any, and go on with it at once."""
    groups = await bench.run(1, 1, at={at: lambda: bench.scheduler.suspend("p0/0")} if at is not None else None)
    return groups if at is None else await bench.run(1, 0, resume=groups[0].all)


@pytest.mark.parametrize("at", [None, 35.0])
def test_a_sub_agent_that_its_call_gave_up_stays(at: float | None) -> None:
    """Its call was answered (its time was up), so an interruption later on takes nothing of it back."""

    def script(request: Request) -> Turn:
        if request.agent == "helper":
            return Turn(text="a b c d e f", delay=2.0, chunks=6)
        return Turn(text="Done." if request.turn else ASKS, delay=20.0)

    (group,) = run_virtual(suspended(Bench(asking(agent(agent="helper"), timeout=5.0), script), at))
    assert [(t.stop_reason, t.trained_tokens > 0) for t in group.all] == [("answered", True), ("cancelled", True)]
    assert group.discarded == []
