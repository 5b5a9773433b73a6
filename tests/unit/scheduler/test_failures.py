"""Failures: whose they are, and that nothing but the policy's own is learned from."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest

from fsm_rollout.engines.scripted.engine import Turn
from fsm_rollout.environment.users import Conversation, Reply
from fsm_rollout.states import State
from fsm_rollout.states.context import HandlerContext
from fsm_rollout.tools.bounded_call import ToolDied
from fsm_rollout.trajectory.enums import FailureClass
from fsm_rollout.trajectory.events import Ended, decode, encode
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.trajectory import Outcome, Trajectory
from tests.laws.world import call
from tests.unit.scheduler.test_scheduler import LIMITS, SINGLE, SLOW, TOOLS, agent, only, run

HERE = "tests.unit.scheduler.test_failures"


def breaks(text: str) -> str:
    """Fail in one of several ways.

    Args:
        text: Which.
    """
    match text:
        case "down":
            raise ConnectionError("no route")
        case "dead":
            raise ToolDied("killed")
        case _:
            raise ValueError("a wrong argument")


async def hang(text: str) -> str:
    """Never return.

    Args:
        text: Whatever.
    """
    await asyncio.Event().wait()
    return text


class Raises(State):
    """Raises what its options say."""

    triggers: ClassVar = ("said",)

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        match trajectory.extra["how"]:
            case "memory":
                raise MemoryError
            case "hangs":
                await asyncio.Event().wait()
            case "is wrong":
                return Outcome("unheard of")
        raise KeyError("how")


class Crashing:
    """A user that raises."""

    async def reply(self, conversation: Conversation) -> Reply:
        raise RuntimeError("the simulator is down")


OWN = {
    "states": {"PENDING": {}, "OWN": {"handler": f"{HERE}:Raises", "timeout": 5.0, "max_visits": 1}},
    "transitions": [
        {"trigger": "prompted", "source": "PENDING", "dest": "OWN"},
        {"trigger": "said", "source": "OWN", "dest": "TERMINATED"},
    ],
}
ASKS = {
    "states": {"PENDING": {}, "INTERACTING": {"timeout": 5.0}},
    "interaction": {"use": f"{HERE}:Crashing"},
    "transitions": [
        {"trigger": "prompted", "source": "PENDING", "dest": "INTERACTING"},
        {"trigger": "replied", "source": "INTERACTING", "dest": "TERMINATED"},
        {"trigger": "interaction_done", "source": "INTERACTING", "dest": "TERMINATED"},
    ],
    "limits": {"user_turns": 2},
}
TOLD = {name: {"use": f"{HERE}:{name}"} for name in ("breaks", "hang")}
HURRIED = {**TOOLS, "states": {**TOOLS["states"], "PROCESSING_TOOLS": {"timeout": 5.0}}}  # type: ignore[dict-item]
Frame = dict[str, Any]


@pytest.mark.parametrize(
    ("frame", "turn", "how", "reason", "failure"),
    [
        (SINGLE, "four", "", "answered", None),
        (SINGLE, SLOW, "", "limit:response_tokens", FailureClass.POLICY),
        (SINGLE, Turn(text="", hang=True), "", "timed_out", FailureClass.POLICY),
        (SINGLE, Turn(text="", error="Boom: no"), "", "failed:Boom", FailureClass.ENGINE),
        (SINGLE, Turn(text="", error="ReplicaLost: gone"), "", "failed:EngineError", FailureClass.INFRASTRUCTURE),
        (TOOLS, call("breaks", "down"), "", "failed:ToolError", FailureClass.TOOL),
        (TOOLS, call("breaks", "dead"), "", "failed:ToolError", FailureClass.INFRASTRUCTURE),
        (TOOLS, call("breaks", "wrong"), "", "failed:ToolError", FailureClass.TOOL),
        (HURRIED, call("hang", "x"), "", "timed_out", FailureClass.TOOL),
        (OWN, "", "anyhow", "failed:KeyError", FailureClass.ENVIRONMENT),
        (OWN, "", "is wrong", "failed:UndeclaredOutcome", FailureClass.ENVIRONMENT),
        (OWN, "", "hangs", "timed_out", FailureClass.ENVIRONMENT),
        (OWN, "", "memory", "failed:MemoryError", FailureClass.INFRASTRUCTURE),
        (ASKS, "", "", "failed:RuntimeError", FailureClass.ENVIRONMENT),
    ],
)
def test_every_failure_has_its_class(
    frame: Frame, turn: Any, how: str, reason: str, failure: FailureClass | None
) -> None:
    limits = {**LIMITS, **frame.get("limits", {}), "response_tokens": 4 if turn is SLOW else 500}
    graph = agent({**frame, "limits": limits}, tools=TOLD)
    prompt = Prompt(messages=({"role": "user", "content": "?"},), how=how)
    groups, _ = run(graph, [turn, "done"], [prompt], on_tool_failure="end")
    trajectory = only(groups)
    assert (trajectory.stop_reason, trajectory.failure) == (reason, failure)


def test_a_prompt_that_does_not_fit_is_the_data_s() -> None:
    groups, _ = run(agent(SINGLE, limits={**LIMITS, "context_tokens": 5}), ["four"])
    assert (only(groups).stop_reason, only(groups).failure) == ("prompt_too_long", FailureClass.DATA)


def test_a_failure_that_a_row_takes_to_another_state_is_none_in_the_end() -> None:
    rows = [
        {"trigger": "prompted", "source": "PENDING", "dest": "OWN"},
        {"trigger": "said", "source": "OWN", "dest": "TERMINATED"},
        {"trigger": "failed", "source": "OWN", "dest": "GENERATING"},
        {"trigger": "generated", "source": "GENERATING", "dest": "TERMINATED"},
    ]
    states = {**OWN["states"], "GENERATING": {"timeout": 5.0}}  # type: ignore[dict-item]
    prompt = Prompt(messages=({"role": "user", "content": "?"},), how="anyhow")
    groups, _ = run(agent({"states": states, "transitions": rows}), ["four"], [prompt])
    assert (only(groups).stop_reason, only(groups).failure) == ("answered", None)


def test_one_that_a_row_takes_to_an_end_is_still_a_failure() -> None:
    rows = [
        {"trigger": "prompted", "source": "PENDING", "dest": "OWN"},
        {"trigger": "said", "source": "OWN", "dest": "TERMINATED"},
        {"trigger": "failed", "source": "OWN", "dest": "TERMINATED", "stop_reason": "gave_up"},
    ]
    prompt = Prompt(messages=({"role": "user", "content": "?"},), how="memory")
    groups, _ = run(agent({"states": OWN["states"], "transitions": rows}), ["four"], [prompt])
    assert (only(groups).stop_reason, only(groups).failure) == ("gave_up", FailureClass.INFRASTRUCTURE)


def test_a_class_survives_the_journal_and_an_older_journal_has_none() -> None:
    event = Ended(at=1.0, stop_reason="failed:Boom", failure=FailureClass.ENGINE)
    assert decode(encode(event)) == event
    assert type(decode(encode(event)).failure) is FailureClass  # type: ignore[union-attr]
    assert decode(encode(Ended(at=1.0, stop_reason="x"))).failure is None  # type: ignore[union-attr]
