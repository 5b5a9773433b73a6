"""Predicates over trajectories that are folded from events."""

import inspect
from array import array
from typing import Any

import pytest

from fsm_rollout.agent.graph import AgentGraph, Predicate
from fsm_rollout.agent.predicates import PREDICATES, compile_predicate
from fsm_rollout.errors import ConfigError
from fsm_rollout.trajectory.events import AnyEvent, Prompted, Scored
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.tokens import Usage
from tests import events
from tests.cases import cases
from tests.unit.agent.facts import BROKEN, CALL, called, folded, generated, moved, opened, prompted

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


def holds(condition: object, *events: AnyEvent, limit: str | None = None, first: Prompted | None = None) -> bool:
    name, argument = condition if isinstance(condition, tuple) else (condition, None)
    predicate = compile_predicate(Predicate(name=name, argument=argument), GRAPH)
    answer = predicate(folded(*events, first=first), Outcome("generated", limit=limit))
    assert answer is True or answer is False
    return answer


ADD, DONE, BACK = generated("", CALL), generated("hi"), (moved("GENERATING", "REVIEW"), moved("REVIEW", "GENERATING"))
MIXED = generated("", BROKEN, CALL)
CRITIC = (moved("GENERATING", "REVIEW"), opened("critic", 2))
# Of a hosted model, whose provider counts three tokens of these fourteen.
HOSTED = (
    CRITIC[0], events.opened("critic", ids=array("i", range(9)), text_only=True),
    events.generated("critic", 5, usage=Usage(input=2, output=1)),
)  # fmt: skip
BOTH = (generated(tokens=3), opened("critic", 9), generated(tokens=3, context="critic"))


@pytest.mark.parametrize(
    ("condition", "yes", "no"),
    [
        # Broken calls count; earlier turns' do not.
        ("has_tool_calls", [[ADD], [generated("", BROKEN)]], [[], [DONE], [ADD, DONE]]),
        ("all_calls_bad", [[ADD, called("x", bad=True), called("x", bad=True)]],
         [[ADD], [ADD, called("x", bad=True), called()], [ADD, called("timeout")], [ADD, called("x", bad=True), DONE]]),
        ("last_tool_failed", [[ADD, called(), called("x")]], [[ADD], [ADD, called("x"), called()]]),
        (("tool_called", "add"), [[MIXED]], [[generated("", BROKEN)]]),
        (("tool_called", "sub"), [], [[MIXED]]),
        # Texts are those of the latest turn.
        (("text_contains", "ACC"), [[generated("no"), generated("I ACCEPT")]],
         [[generated("I ACCEPT"), generated("no")]]),
        (("text_matches", r"\d+$"), [[generated("it is 42")]], []),
        (("text_matches", r"^\d+$"), [], [[generated("it is 42")]]),
        (("text_matches", "."), [], [[]]),
        # Python's engine needs 2**5000 steps here: this test does not end with it.
        (("text_matches", "^(a+)+$"), [[generated("a" * 5000)]], [[generated("a" * 5000 + "b")]]),
        # The context is the present state's; fractions are of the limit that holds.
        (("context_over", 3), [[]], []),
        (("context_over", 4), [[generated(tokens=1)]], [[]]),
        (("context_over", 1), [CRITIC, [generated(tokens=7)]], []),
        (("context_over", 2), [], [CRITIC]),
        (("context_over", 0), [], [CRITIC[:1]]),
        (("context_over", 2), [HOSTED], []),
        (("context_over", 3), [], [HOSTED]),
        (("context_over", 0.4), [], [[]]),
        (("context_over", 0.39), [[]], []),
        (("context_over", 1.0), [[generated(tokens=7)]], [[generated(tokens=6)]]),
        # All streams count.
        (("response_over", 5), [BOTH], [[generated(tokens=5)]]),
        (("response_over", 0.25), [[generated(tokens=6)]], [[generated(tokens=5)]]),
        # The state is the one that the row leaves, or the named one.
        (("visits_over", 1), [BACK], [[]]),
        (("visits_over", 2), [], [BACK]),
        (("visits_over", {"REVIEW": 1}), [], [BACK]),
        (("visits_over", {"REVIEW": 0}), [BACK], [[]]),
        # The latest turn's score comes first.
        (("score_at_least", 0.5), [[Scored(at=0, value=0.5)]],
         [[], [Scored(at=0, value=0.9), Scored(at=0, value=0.4, turn=0)]]),
        (("score_at_least", 1), [[Scored(at=0, value=0.0, turn=0), Scored(at=0, value=1.0, turn=1)]], []),
        ("tests.custom_code:is_long", [[]], []),
        (("tests.custom_code:exceeds", 2), [[]], []),
        (("tests.custom_code:exceeds", 1), [], [[]]),
    ],
    ids=str,
)  # fmt: skip
def test_what_holds(condition: object, yes: list[list[AnyEvent]], no: list[list[AnyEvent]]) -> None:
    assert all(holds(condition, *events) for events in yes)
    assert not any(holds(condition, *events) for events in no)


def test_a_fraction_is_of_the_limit_that_the_prompt_has_lowered() -> None:
    assert holds(("context_over", 0.5), first=prompted(context_tokens=6))


def test_limit_is_the_outcomes() -> None:
    assert holds(("limit", "tool_calls"), limit="tool_calls")
    assert holds(("limit", "max_visits"), limit="max_visits")
    assert not holds(("limit", "tool_calls"), limit="bad_calls")
    assert not holds(("limit", "tool_calls"))


@cases("agent", ("score_at_least", float("nan"), "got nan"))
def test_wrong_arguments(name: str, argument: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compile_predicate(Predicate(name=name, argument=argument), GRAPH)
    assert all(part in str(caught.value) for part in says.split(".*"))


@pytest.mark.parametrize("name", ["context_over", "response_over"])
def test_a_fraction_needs_its_limit(name: str) -> None:
    with pytest.raises(ConfigError, match=r"0\.5 is a fraction of limits"):
        compile_predicate(Predicate(name=name, argument=0.5), UNLIMITED)
    compile_predicate(Predicate(name=name, argument=5), UNLIMITED)


def test_the_table_says_which_predicates_the_proof_evaluates() -> None:
    assert {spec.name for spec in PREDICATES.values() if spec.counter} == {"visits_over", "limit"}
    assert all(spec.doc and inspect.isfunction(spec.build) for spec in PREDICATES.values())
