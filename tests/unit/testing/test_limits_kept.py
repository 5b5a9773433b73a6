"""Each limit of an agent ends or routes its trajectories where it says, counted by the engine's and the tools' side."""

from typing import Any

import pytest

from fsm_rollout.trajectory.trajectory import Trajectory
from tests import runs
from tests.runs import TOOLS, agent, changed, only, results

GOOD = '<tool_call>\n{"name": "echo", "arguments": {"text": "a"}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "echo", "argum'
SUMMARY = changed(
    TOOLS,
    "GENERATING limit_reached SUMMARISING",
    "PROCESSING_TOOLS limit_reached SUMMARISING",
    "SUMMARISING generated TERMINATED as summed_up",
    SUMMARISING={"handler": "generate", "prompt": "Sum up.", "max_visits": 1, "timeout": 60.0},
)


def run(limits: dict[str, int], says: str, frame: dict[str, Any] = TOOLS) -> tuple[Trajectory, int]:
    """Run one prompt on a model that always says the same; return the trajectory and how often the model was asked."""
    tools = {"echo": {"use": "tests.law_tools:echo", "timeout": 5.0}}
    graph = agent(frame, limits={"assistant_turns": 9, "tool_calls": 9, **limits}, tools=tools)
    groups, bench = runs.run(graph, lambda request: says)
    return only(groups), len(bench.asked)


@pytest.mark.parametrize(
    ("limits", "says", "frame", "reason", "generations"),
    [
        # A bound of n allows n bad calls.
        *(({"bad_calls": n}, BROKEN, TOOLS, "limit:bad_calls", n + 1) for n in (0, 1, 3)),
        # A state is visited as often as it may be.
        *(({}, GOOD, changed(TOOLS, GENERATING={"max_visits": n}), "limit:max_visits", n) for n in (1, 2, 4)),
        # A limit that is routed leaves the last state to its `max_visits`.
        ({"assistant_turns": 2}, GOOD, SUMMARY, "summed_up", 3),
        ({"tool_calls": 2}, GOOD, SUMMARY, "summed_up", 4),
    ],
)
def test_a_limit_ends_a_trajectory_or_routes_it_where_it_says(
    limits: dict[str, int], says: str, frame: dict[str, Any], reason: str, generations: int
) -> None:
    trajectory, asked = run(limits, says, frame)
    assert (trajectory.stop_reason, asked) == (reason, generations)


def test_a_broken_call_is_answered_and_never_an_answer() -> None:
    trajectory, asked = run({"assistant_turns": 2}, BROKEN)
    assert (trajectory.stop_reason, asked) == ("limit:assistant_turns", 2)
    assert [text.startswith("error: ") for text in results(trajectory)] == [True, True]


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
