"""Code of users' sees the span that it runs in: what it begins itself is below that."""

import sys
from types import FrameType

import pytest

from tests.open_spans import TracedRuns, calling
from tests.runs import agent, rows

HERE = "tests.open_spans"
FOR_TRACES = ("trace_ids.py", "telemetry.py", "tracer.py", "report/metrics.py", "report/spans.py")


@pytest.mark.parametrize("use", ["plain", "waiting", "told", "Kept"])
def test_a_tool_runs_in_the_span_of_its_try(use: str) -> None:
    runs = TracedRuns({"here": {"use": f"{HERE}:{use}"}}, calling(), calling(), "done")
    spans = runs.spans("execute_tool here")
    assert len(set(spans)) == 2
    assert runs.results == spans


def test_each_try_has_its_own_also_where_a_later_one_succeeds() -> None:
    runs = TracedRuns({"here": {"use": f"{HERE}:second_time", "retry": {"attempts": 2}}}, calling(), "done")
    first, second = runs.spans("execute_tool here")
    assert runs.results == [f"{first} {second}"]


def test_a_user_and_a_handler_of_ones_own_run_in_theirs() -> None:
    graph = agent(
        {
            "states": {"PENDING": {"handler": f"{HERE}:Visits"}, "GENERATING": {"timeout": 9.0}, "INTERACTING": {}},
            "transitions": rows(
                "PENDING prompted GENERATING",
                "GENERATING generated INTERACTING",
                "INTERACTING replied GENERATING",
                "INTERACTING interaction_done TERMINATED",
            ),
        },
        interaction={"use": f"{HERE}:User"},
    )
    runs = TracedRuns(graph, "one")
    (visit,) = runs.spans("PENDING")
    (reply,) = runs.named("user")
    (trajectory,) = runs.trajectories
    texts = [message["content"] for stream in trajectory.streams for message in stream.messages]
    assert visit in texts
    assert reply in texts


def test_scores_that_a_visit_gives_are_events_of_it() -> None:
    states = {"PENDING": {}, "GENERATING": {"timeout": 9.0}, "GRADING": {"handler": f"{HERE}:Grades", "max_visits": 1}}
    ways = ("PENDING prompted GENERATING", "GENERATING generated GRADING", "GRADING graded TERMINATED")
    runs = TracedRuns(agent({"states": states, "transitions": rows(*ways)}), "one")
    runs.run()
    told = [(span.name, dict(mark.attributes or {})) for span in runs.ended for mark in span.events]
    name, value = "gen_ai.evaluation.name", "gen_ai.evaluation.score.value"
    assert told == [
        ("GRADING", {name: "GRADING", value: 0.25, "fsm_rollout.turn": 0}),
        ("GRADING", {name: "GRADING", value: 0.5}),
    ]


def test_a_trajectory_that_is_not_sampled_says_so() -> None:
    """Its tools' own spans are not recorded either."""
    runs = TracedRuns({"here": {"use": f"{HERE}:told"}}, calling(), "done")
    assert runs.spans("execute_tool here", share=0.0) == []
    (result,) = runs.results
    assert result.startswith("00-")
    assert result.endswith("-00")


def test_where_nobody_traces_there_is_none() -> None:
    runs = TracedRuns({"here": {"use": f"{HERE}:plain"}}, calling(), "done")
    assert runs.spans("execute_tool here", share=None) == []
    assert runs.results == ["none "]


def test_where_nobody_traces_nothing_is_called_for_it() -> None:
    called: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.endswith(FOR_TRACES):
            called.add(frame.f_code.co_name)

    runs = TracedRuns({"here": {"use": f"{HERE}:plain"}}, calling(), "done")
    sys.setprofile(note)
    try:
        runs.run(share=None)
    finally:
        sys.setprofile(None)
    assert called == set()
