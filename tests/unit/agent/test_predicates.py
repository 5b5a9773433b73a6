"""Predicates over trajectories that are folded from events."""

from __future__ import annotations

import inspect
from array import array
from typing import Any

import pytest

from fsm_rollout.agent.graph import AgentGraph, Predicate
from fsm_rollout.agent.predicates import PREDICATES, compile_predicate
from fsm_rollout.errors import ConfigError
from fsm_rollout.trajectory.events import (
    AnyEvent,
    Called,
    ContextOpened,
    Generated,
    MalformedCall,
    Prompted,
    Scored,
    ToolCall,
    Transitioned,
)
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.trajectory import Trajectory

GRAPH = AgentGraph.model_validate(
    {
        "agent": "a",
        "initial": "GENERATING",
        "contexts": {"critic": {}},
        "limits": {"context_tokens": 10, "response_tokens": 20},
        "tools": {"add": {"use": "m:f"}, "sub": {"use": "m:f"}},
        "states": {"GENERATING": {}, "REVIEW": {"handler": "generate", "context": "critic"}},
        "transitions": [],
    }
)
UNLIMITED = GRAPH.model_copy(update={"limits": type(GRAPH.limits)()})
CALL = ToolCall(id="1", name="add", arguments={})
BROKEN = MalformedCall(id="2", kind="json", message="add(")


def prompted(**limits: float | None) -> Prompted:
    return Prompted(
        at=0, trajectory_id="t", group_id="g", sample=0, agent="a", initial="GENERATING", messages=[], extra={},
        limits=dict(limits), seed=0, date="2026-01-01",
    )  # fmt: skip


def opened(context: str, length: int) -> ContextOpened:
    ids = array("i", range(length))
    return ContextOpened(at=0, context=context, state="GENERATING", messages=[], ids=ids, trained=True, engine="policy")


def generated(text: str = "", *attempts: ToolCall | MalformedCall, tokens: int = 0, context: str = "main") -> Generated:
    return Generated(
        at=0, context=context, state="GENERATING", ids=array("i", [7] * tokens), logprobs=array("f", [0.0] * tokens),
        versions=[(tokens, 0)] if tokens else [], finish_reason="stop",
        message={"role": "assistant", "content": text}, attempts=list(attempts),
    )  # fmt: skip


def called(failure: str | None = None, *, bad: bool = False) -> Called:
    return Called(at=0, state="T", id="1", name="add", arguments={}, result="", failure=failure, bad=bad)


def moved(source: str, dest: str) -> Transitioned:
    return Transitioned(at=0, trigger="generated", source=source, dest=dest, spent={})


def holds(condition: object, *events: AnyEvent, limit: str | None = None, first: Prompted | None = None) -> bool:
    name, argument = condition if isinstance(condition, tuple) else (condition, None)
    predicate = compile_predicate(Predicate(name=name, argument=argument), GRAPH)
    trajectory = Trajectory.fold([first or prompted(), opened("main", 4), *events])
    answer = predicate(trajectory, Outcome("generated", limit=limit))
    assert answer is True or answer is False
    return answer


def test_has_tool_calls_counts_broken_ones_and_forgets_earlier_turns() -> None:
    assert not holds("has_tool_calls")
    assert not holds("has_tool_calls", generated("hi"))
    assert holds("has_tool_calls", generated("", CALL))
    assert holds("has_tool_calls", generated("", BROKEN))
    assert not holds("has_tool_calls", generated("", CALL), generated("hi"))


def test_all_calls_bad_wants_at_least_one_and_no_good_one() -> None:
    turn = generated("", CALL)
    assert not holds("all_calls_bad", turn)
    assert holds("all_calls_bad", turn, called("x", bad=True), called("x", bad=True))
    assert not holds("all_calls_bad", turn, called("x", bad=True), called())
    assert not holds("all_calls_bad", turn, called("timeout", bad=False))
    assert not holds("all_calls_bad", turn, called("x", bad=True), generated("hi"))


def test_last_tool_failed_looks_at_the_last_only() -> None:
    turn = generated("", CALL)
    assert not holds("last_tool_failed", turn)
    assert holds("last_tool_failed", turn, called(), called("x"))
    assert not holds("last_tool_failed", turn, called("x"), called())


def test_tool_called_by_name() -> None:
    assert holds(("tool_called", "add"), generated("", BROKEN, CALL))
    assert not holds(("tool_called", "sub"), generated("", BROKEN, CALL))
    assert not holds(("tool_called", "add"), generated("", BROKEN))


def test_texts_are_those_of_the_latest_turn() -> None:
    assert holds(("text_contains", "ACC"), generated("no"), generated("I ACCEPT"))
    assert not holds(("text_contains", "ACC"), generated("I ACCEPT"), generated("no"))
    assert holds(("text_matches", r"\d+$"), generated("it is 42"))
    assert not holds(("text_matches", r"^\d+$"), generated("it is 42"))
    assert not holds(("text_matches", r"."))


def test_context_over_is_about_the_context_of_the_present_state() -> None:
    assert holds(("context_over", 3))
    assert not holds(("context_over", 4))
    assert holds(("context_over", 4), generated(tokens=1))
    critic = (moved("GENERATING", "REVIEW"), opened("critic", 2))
    assert holds(("context_over", 1), *critic)
    assert not holds(("context_over", 2), *critic)
    assert not holds(("context_over", 0), moved("GENERATING", "REVIEW"))


def test_fractions_are_of_the_limit_that_holds() -> None:
    assert not holds(("context_over", 0.4))
    assert holds(("context_over", 0.39))
    assert holds(("context_over", 0.5), first=prompted(context_tokens=6))
    assert not holds(("context_over", 1.0), generated(tokens=6))
    assert holds(("context_over", 1.0), generated(tokens=7))
    assert holds(("context_over", 1), generated(tokens=7))


def test_response_over_counts_all_streams() -> None:
    assert not holds(("response_over", 5), generated(tokens=5))
    assert holds(("response_over", 5), generated(tokens=3), opened("critic", 9), generated(tokens=3, context="critic"))
    assert holds(("response_over", 0.25), generated(tokens=6))
    assert not holds(("response_over", 0.25), generated(tokens=5))


def test_visits_over_counts_the_state_that_the_row_leaves_or_the_named_one() -> None:
    there_and_back = (moved("GENERATING", "REVIEW"), moved("REVIEW", "GENERATING"))
    assert not holds(("visits_over", 1))
    assert holds(("visits_over", 1), *there_and_back)
    assert not holds(("visits_over", 2), *there_and_back)
    assert not holds(("visits_over", {"REVIEW": 1}), *there_and_back)
    assert holds(("visits_over", {"REVIEW": 0}), *there_and_back)
    assert not holds(("visits_over", {"REVIEW": 0}))


def test_score_at_least_prefers_the_latest_turns_score() -> None:
    assert not holds(("score_at_least", 0.5))
    assert holds(("score_at_least", 0.5), Scored(at=0, value=0.5))
    assert not holds(("score_at_least", 0.5), Scored(at=0, value=0.9), Scored(at=0, value=0.4, turn=0))
    assert holds(("score_at_least", 1), Scored(at=0, value=0.0, turn=0), Scored(at=0, value=1.0, turn=1))


def test_limit_is_the_outcomes() -> None:
    assert holds(("limit", "tool_calls"), limit="tool_calls")
    assert holds(("limit", "max_visits"), limit="max_visits")
    assert not holds(("limit", "tool_calls"), limit="bad_calls")
    assert not holds(("limit", "tool_calls"))


def test_functions_of_the_user() -> None:
    assert holds("tests.custom_code:is_long")
    assert holds(("tests.custom_code:exceeds", 2))
    assert not holds(("tests.custom_code:exceeds", 1))


@pytest.mark.parametrize(
    ("name", "argument", "says"),
    [
        ("has_tool_cals", None, "predicate 'has_tool_cals' is not defined; did you mean 'has_tool_calls'?"),
        ("has_tool_calls", 3, "predicate 'has_tool_calls' takes no argument, got 3"),
        ("all_calls_bad", True, "takes no argument, got True"),
        ("tool_called", None, "predicate 'tool_called' takes a tool's name, got nothing"),
        ("tool_called", "ad", "tool 'ad' is not defined; did you mean 'add'?"),
        ("text_contains", "", "takes a text, got ''"),
        ("text_contains", 5, "takes a text, got 5"),
        ("text_matches", "(", "'(' is no regular expression: missing )"),
        ("text_matches", None, "takes a regular expression, got nothing"),
        ("context_over", 1.5, "takes a count of tokens, or a fraction (0.8) of limits.context_tokens, got 1.5"),
        ("context_over", -1, "got -1"),
        ("context_over", True, "got True"),
        ("response_over", "5", "got '5'"),
        ("visits_over", None, "takes a count, or {STATE: count}, got nothing"),
        ("visits_over", 1.0, "got 1.0"),
        ("visits_over", {"REVEW": 1}, "state 'REVEW' is not defined; did you mean 'REVIEW'?"),
        ("visits_over", {"REVIEW": -1}, "got {'REVIEW': -1}"),
        ("visits_over", {}, "got {}"),
        ("score_at_least", "high", "takes a number, got 'high'"),
        ("score_at_least", float("nan"), "got nan"),
        ("limit", "tool_call", "there is no limit 'tool_call'; did you mean 'tool_calls'?"),
        ("limit", None, "takes a limit's name, got nothing"),
        ("text_matches", "(?=a)b", "is not taken by RE2 (invalid perl operator: (?=), which needs linear time"),
        ("text_matches", r"(a)\1", r"no back-references, and `\z` for `\Z`; write several predicates"),
        ("tests.custom_code:missing", None, "'tests.custom_code' has no 'missing'"),
        ("tests.custom_code:NOT_A_FUNCTION", None, "is a int; it must be a function"),
        ("tests.custom_code:waits", None, "is async, so it would always hold; make it a plain `def`"),
        ("tests.custom_code:waits_too", None, "is async, so it would always hold; make it a plain `def`"),
    ],
)
def test_wrong_arguments(name: str, argument: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compile_predicate(Predicate(name=name, argument=argument), GRAPH)
    assert says in str(caught.value)


@pytest.mark.parametrize("name", ["context_over", "response_over"])
def test_a_fraction_needs_its_limit(name: str) -> None:
    with pytest.raises(ConfigError, match=r"0\.5 is a fraction of limits"):
        compile_predicate(Predicate(name=name, argument=0.5), UNLIMITED)
    compile_predicate(Predicate(name=name, argument=5), UNLIMITED)


def test_the_table_says_which_predicates_the_proof_evaluates() -> None:
    assert {spec.name for spec in PREDICATES.values() if spec.counter} == {"visits_over", "limit"}
    assert all(spec.doc and inspect.isfunction(spec.build) for spec in PREDICATES.values())


def test_a_pattern_takes_linear_time_whatever_the_model_writes() -> None:
    """Python's engine needs 2**5000 steps here: this test does not end with it."""
    assert not holds(("text_matches", "^(a+)+$"), generated("a" * 5000 + "b"))
    assert holds(("text_matches", "^(a+)+$"), generated("a" * 5000))
