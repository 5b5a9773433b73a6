"""Each limit of an agent ends or routes its trajectories where it says, counted by the engine's and the tools' side."""

from __future__ import annotations

from typing import Any

import pytest

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.protocol import Request
from fsm_rollout.engines.scripted.engine import ScriptedEngine
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.testing.simulation.virtual_time import run_virtual
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.embedded import tokenizer

GOOD = '<tool_call>\n{"name": "echo", "arguments": {"text": "a"}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "echo", "argum'
ROWS = (
    {"trigger": "prompted", "source": "PENDING", "dest": "GENERATING"},
    {
        "trigger": "generated",
        "source": "GENERATING",
        "dest": "PROCESSING_TOOLS",
        "conditions": ({"name": "has_tool_calls"},),
    },
    {"trigger": "generated", "source": "GENERATING", "dest": "TERMINATED"},
    {"trigger": "tools_done", "source": "PROCESSING_TOOLS", "dest": "GENERATING"},
)


def run(
    limits: dict[str, Any], says: str, *, rows: Any = (), states: Any = (), generating: Any = ()
) -> tuple[Trajectory, int]:
    """Run one prompt on a model that always says the same; return the trajectory and how often the model was asked."""
    graph = AgentGraph(
        agent="limited",
        limits={"assistant_turns": 9, "tool_calls": 9} | limits,
        tools={"echo": {"use": "tests.law_tools:echo", "timeout": 5.0}},
        states={
            "PENDING": {},
            "GENERATING": {"timeout": 60.0, **dict(generating)},
            "PROCESSING_TOOLS": {"timeout": 60.0},
            **dict(states),
        },
        transitions=(*ROWS, *rows),
    )
    engine = ScriptedEngine(lambda request: says, tokenizer=tokenizer(), log=True)

    async def main() -> Trajectory:
        scheduler = Scheduler({"limited": graph}, {"policy": EngineClient(engine)})
        prompt = Prompt(prompt_id="p", messages=({"role": "user", "content": "Go."},))
        (group,) = [group async for group in scheduler.run([prompt])]
        return group.trajectories[0]

    trajectory = run_virtual(main())
    return trajectory, sum(isinstance(line.what, Request) for line in engine.log)


SUMMARY = {
    "states": {"SUMMARISING": {"handler": "generate", "prompt": "Sum up.", "max_visits": 1, "timeout": 60.0}},
    "rows": [
        {"trigger": "limit_reached", "source": ("GENERATING", "PROCESSING_TOOLS"), "dest": "SUMMARISING"},
        {"trigger": "generated", "source": "SUMMARISING", "dest": "TERMINATED", "stop_reason": "summed_up"},
    ],
}


@pytest.mark.parametrize(
    ("limits", "says", "more", "reason", "generations"),
    [
        # A bound of n allows n bad calls.
        *(({"bad_calls": n}, BROKEN, {}, "limit:bad_calls", n + 1) for n in (0, 1, 3)),
        # A state is visited as often as it may be.
        *(({}, GOOD, {"generating": {"max_visits": n}}, "limit:max_visits", n) for n in (1, 2, 4)),
        # A limit that is routed leaves the last state to its `max_visits`.
        ({"assistant_turns": 2}, GOOD, SUMMARY, "summed_up", 3),
        ({"tool_calls": 2}, GOOD, SUMMARY, "summed_up", 4),
    ],
)
def test_a_limit_ends_a_trajectory_or_routes_it_where_it_says(
    limits: dict[str, int], says: str, more: dict[str, Any], reason: str, generations: int
) -> None:
    trajectory, asked = run(limits, says, **more)
    assert (trajectory.stop_reason, asked) == (reason, generations)


def test_a_broken_call_is_answered_and_never_an_answer() -> None:
    trajectory, asked = run({"assistant_turns": 2}, BROKEN)
    assert (trajectory.stop_reason, asked) == ("limit:assistant_turns", 2)
    tool_texts = [message["content"] for message in trajectory.streams[0].messages if message["role"] == "tool"]
    assert len(tool_texts) == 2
    assert all(text.startswith("error: ") for text in tool_texts)


@pytest.mark.parametrize("room", [1, 3])
def test_glue_that_leaves_no_room_for_a_token_is_not_written(room: int) -> None:
    free, _ = run({"assistant_turns": 2}, GOOD)
    first = next(span for span in free.streams[0].tokens.sampled())
    bound = len(first) + room  # less than what stands between two turns
    trajectory, asked = run({"assistant_turns": 2, "response_tokens": bound}, GOOD)
    assert (trajectory.stop_reason, asked) == ("limit:response_tokens", 1)
    assert trajectory.response_tokens == len(first)


@pytest.mark.parametrize("room", [1, 3, 8])
def test_no_stream_is_longer_than_allowed(room: int) -> None:
    trajectory, _ = run({"assistant_turns": 2, "response_tokens": room}, GOOD)
    assert trajectory.response_tokens == room
    bound = trajectory.streams[0].tokens.prompt_length + room
    trajectory, _ = run({"assistant_turns": 2, "context_tokens": bound}, GOOD)
    assert len(trajectory.streams[0].tokens) == bound
