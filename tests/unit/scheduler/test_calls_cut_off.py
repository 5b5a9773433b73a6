"""Calls that an interruption, or the death of the process, has cut off: made again where they may be, never guessed."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from fsm_rollout.engines.scripted.engine import Turn
from fsm_rollout.scheduler.group import Group
from fsm_rollout.testing import run_virtual
from fsm_rollout.trajectory.enums import FailureClass
from fsm_rollout.trajectory.events import AnyEvent, CallBegun, Ended, Resumed
from tests.cases import cases
from tests.laws.world import call
from tests.runs import ASKS, TOOLS, Bench, agent, asking, changed, ends, histories, only, results, with_tool

pytestmark = pytest.mark.virtual_time
HERE = "tests.unit.scheduler.test_calls_cut_off"


CALLED: list[str] = []


async def pay(text: str) -> str:
    """Pay somebody.

    Args:
        text: Whom.
    """
    CALLED.append(text)
    await asyncio.sleep(10.0)
    return f"paid {text}"


@cases("scheduler")
def test_a_call_cut_off_by_an_interruption_is_made_again_only_if_it_may_be(
    repeatable: bool, names: list[str], made: list[str], told: list[str]
) -> None:
    CALLED.clear()
    script = ["\n".join(call("tool", name) for name in names), "done"]
    tools = {"tool": {"use": f"{HERE}:pay", "timeout": 50.0, "repeatable": repeatable}}
    graph = agent(changed(TOOLS, PROCESSING_TOOLS={"parallel": 1}), tools=tools)
    bench = Bench(graph, lambda request: Turn(text=script[request.turn], delay=1.0))
    trajectory = only(run_virtual(bench.interrupted(5.0)))
    assert made == CALLED
    assert all(part in result for part, result in zip(told, results(trajectory), strict=True))
    assert trajectory.spent["tool_calls"] == len(names)


def test_calls_have_the_same_ids_after_an_interruption() -> None:
    """Their randomness follows from their ids; the first turn, half of which is there, goes on and stays the first."""
    script = [call("tool", "one"), call("tool", "two"), "done"]

    def ids(going: Callable[[Bench], list[Group]]) -> list[str]:
        says = lambda r: Turn(text=script[r.turn], delay=1.0, chunks=4)  # noqa: E731
        (stream,) = only(going(Bench(with_tool("tests.law_tools:echo"), says))).streams
        return [message["tool_call_id"] for message in stream.messages if message["role"] == "tool"]

    whole = ids(lambda bench: bench.go(1, 1))
    assert ids(lambda bench: run_virtual(bench.interrupted(2.5))) == whole
    assert len(set(whole)) == 2


# -- a process that died in a call ---------------------------------------------------------------------------------


def looks(**options: Any) -> Bench:
    """Three trajectories; each calls `echo` once, at its own time."""
    return Bench(
        with_tool(f"{HERE}:pay"),
        lambda r: Turn(text="done" if r.turn else call("tool", r.group_id), delay=1.0 + float(r.group_id[1:])),
        **options,
    )


def tags(log: Sequence[tuple[str, AnyEvent]], trajectory_id: str) -> list[str]:
    return [event.__struct_config__.tag for id_, event in log if id_ == trajectory_id]


def dying(log: Sequence[tuple[str, AnyEvent]], *begun: str, after: int = 0) -> list[tuple[str, AnyEvent]]:
    """Return what a journal has when the process dies as soon as the calls of these trajectories have begun."""
    kept, waiting = list(log[:after]), set(begun)
    for entry in log[after:]:
        kept.append(entry)
        if isinstance(entry[1], CallBegun):
            waiting.discard(entry[0])
            if not waiting:
                return kept
    raise AssertionError(waiting)


def test_calls_are_recorded_before_they_are_made_once_a_process_has_died() -> None:
    first = looks()
    first.go(1, 1)
    assert "call_begun" not in tags(first.log, "p0/0"), "which costs something, and is no use before"
    second = looks()
    second.go(1, 1, resume=histories(first.log[:2]))
    assert tags(second.log, "p0/0").count("call_begun") == 1
    suspended = looks()

    async def main() -> list[Group]:
        return await suspended.interrupted(0.5)

    assert only(run_virtual(main())).deaths == 0
    assert "call_begun" not in tags(suspended.log, "p0/0")


def test_a_trajectory_that_was_alone_in_its_call_at_the_second_death_is_given_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = looks()
    first.go(1, 3)
    second = looks()
    second.go(1, 3, resume=histories(first.log[:3]))
    third = looks()
    groups = third.go(1, 3, resume=histories(dying(second.log, "p0/0")))
    assert ends(groups) == {"p0/0": "failed:ToolDied", "p1/0": "answered", "p2/0": "answered"}
    given_up = groups[0].trajectories[0]
    assert given_up.failure is FailureClass.TOOL
    why = (
        "the process died 2 times with this trajectory in its hands, at last while tool 'tool' carried out call "
        f"{given_up.attempts[0].id}: {{'text': 'p0'}}"
    )
    assert given_up.detail == why
    assert f"trajectory p0/0 is given up: {why}" in caplog.text


def test_of_several_in_their_calls_each_runs_alone_until_it_is_known_which_it_was() -> None:
    first = looks()
    first.go(1, 3)
    second = looks()
    second.go(1, 3, resume=histories(first.log[:3]))
    upto_second = dying(second.log, "p0/0", "p1/0")
    third = looks()
    groups = third.go(1, 3, resume=histories(upto_second))
    assert set(ends(groups).values()) == {"answered"}, "nobody knows in whose call the process died"
    order = [id_ for id_, event in third.log if isinstance(event, Resumed | Ended)]
    assert order[-6:] == ["p0/0", "p0/0", "p1/0", "p1/0", "p2/0", "p2/0"]
    fourth = looks()
    groups = fourth.go(1, 3, resume=histories(dying(third.log, "p1/0", after=len(upto_second))))
    assert ends(groups) == {"p0/0": "answered", "p1/0": "failed:ToolDied", "p2/0": "answered"}
    (given_up,) = [t for group in groups for t in group.trajectories if t.failure]
    assert given_up.deaths == 2


def test_a_sub_agent_is_given_up_for_its_own_tool_and_its_caller_goes_on() -> None:
    helper = with_tool(f"{HERE}:pay").model_copy(update={"agent": "helper"})
    says = {"a": [ASKS, "done"], "helper": [call("tool", "ann"), "It is done."]}
    make: Callable[[], Bench] = lambda: Bench(  # noqa: E731
        asking(helper), lambda r: Turn(text=says[r.agent or "a"][r.turn], delay=1.0)
    )
    first = make()
    first.go(1, 1)
    child_begun = next(place for place, (id_, _) in enumerate(first.log, 1) if id_ != "p0/0")
    second = make()
    second.go(1, 1, resume=histories(first.log[:child_begun]))
    (child,) = {id_ for id_, _ in second.log} - {"p0/0"}
    assert "call_begun" not in tags(second.log, "p0/0"), "the caller's call runs no code here"
    third = make()
    (group,) = third.go(1, 1, resume=histories(dying(second.log, child)))
    assert [t.stop_reason for t in group.children] == ["failed:ToolDied"]
    assert only([group]).stop_reason == "answered"
    (told,) = results(only([group]))
    assert told == "error: ask ended without an answer (failed:ToolDied); try again or go on without it"
    assert not group.active
