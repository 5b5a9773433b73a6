"""The rules: what passes passes, each mistake breaks its rule, and each message says where and what to try."""

from typing import Any

import pytest
from hypothesis import given

from fsm_rollout.agent.graph import AgentGraph, TransitionSpec
from fsm_rollout.agent.handlers import TEMPLATE_FACTS
from fsm_rollout.agent.proof import prove
from fsm_rollout.agent.verify import verify
from fsm_rollout.errors import ConfigError
from tests.cases import cases, says, table
from tests.graphs import graphs

RULES = table("rules")
CASES = [(group["base"], case) for group in RULES.values() for case in group["cases"]]


@given(graphs())
def test_drawn_graphs_break_no_rule_and_have_a_bound(graph: AgentGraph) -> None:
    assert verify(graph) == []
    assert prove(graph).transitions > 0


@given(graphs(plain=True))
def test_what_verification_lets_pass_without_limits_ends_too(graph: AgentGraph) -> None:
    loose = graph.model_copy(update={"limits": type(graph.limits)()})
    if verify(loose):
        return
    prove(loose)


@given(graphs(max_states=4, plain=True))
def test_what_may_run_for_ever_is_a_problem(graph: AgentGraph) -> None:
    states = {name: state.model_copy(update={"max_visits": None}) for name, state in graph.states.items()}
    loose = graph.model_copy(update={"states": states})
    try:
        prove(loose, situations=20_000)
    except ConfigError:
        assert {problem.rule for problem in verify(loose)} & {9, 10}


def changed(base: dict[str, Any], case: dict[str, Any]) -> AgentGraph:
    """Return the agent of a case: see the table."""
    agent = base | case.get("instead", {})
    for key, value in case.get("with", {}).items():
        agent[key] = agent.get(key, {}) | value if isinstance(value, dict) and key != "interaction" else value
    if "row" in case:
        agent["transitions"] = [*agent["transitions"][:-1], case["row"], agent["transitions"][-1]]
    return AgentGraph.model_validate(agent)


@pytest.mark.parametrize(("base", "case"), CASES, ids=[case["name"] for _, case in CASES])
def test_the_rules_say_what_is_wrong(base: dict[str, Any], case: dict[str, Any]) -> None:
    graph = changed(base, case)
    found = [str(problem) for problem in verify(graph)]
    assert says(case.get("says", []), found), "\n".join(found)
    for figure in case.get("proven", ()):
        assert getattr(prove(graph), figure) is not None


REVIEWED = RULES["a solver that is reviewed"]["base"]


def reviewed(**review: Any) -> list[str]:
    state = REVIEWED["states"]["REVIEWING"] | review
    return [str(problem) for problem in verify(changed(REVIEWED, {"with": {"states": {"REVIEWING": state}}}))]


@pytest.mark.parametrize(
    ("predicate", "limit"), [("context_over", "context_tokens"), ("response_over", "response_tokens")]
)
@pytest.mark.parametrize(("argument", "holds"), [(99, True), (100, False), (0.99, True), (1.0, False)])
def test_7_tokens_that_limits_do_not_allow(predicate: str, limit: str, argument: float, holds: bool) -> None:
    tested = {"trigger": "generated", "source": "REVIEWING", "dest": "TERMINATED", "conditions": {predicate: argument}}
    graph = changed(REVIEWED, {"row": tested, "with": {"limits": {limit: 100}}})
    why = f"transition 6 never fires: limits.{limit} (100) is reached before that [rule 7]"
    assert [str(problem) for problem in verify(graph)] == ([] if holds else [why])
    routed = TransitionSpec(trigger="limit_reached", source="GENERATING", dest="REVIEWING")
    assert verify(graph.model_copy(update={"transitions": (*graph.transitions, routed)})) == []


@cases("agent", ("".join(f"{{{{ {fact} }}}}" for fact in TEMPLATE_FACTS), None))
def test_20_templates_name_facts_and_their_parts(prompt: str, message: str | None) -> None:
    assert says([] if message is None else [f"…{message}…"], reviewed(prompt=prompt))
