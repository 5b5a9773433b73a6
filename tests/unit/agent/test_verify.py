"""The rules: what passes passes, each mistake breaks its rule, and each message says where and what to try."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.agent.handlers import TEMPLATE_FACTS
from fsm_rollout.agent.loader import loads
from fsm_rollout.agent.proof import prove
from fsm_rollout.agent.verify import verify
from fsm_rollout.errors import ConfigError
from fsm_rollout.testing.strategies.graphs import CALCULATOR, SCRIPTED_USER, graphs
from tests.unit.agent.broken_graphs import broken_graphs

Data = dict[str, Any]


@given(graphs())
def test_drawn_graphs_break_no_rule_and_have_a_bound(graph: AgentGraph) -> None:
    assert verify(graph) == []
    assert prove(graph).transitions > 0


@given(broken_graphs())
def test_a_mistake_breaks_its_rule(broken: tuple[AgentGraph, int]) -> None:
    graph, rule = broken
    assert rule in {problem.rule for problem in verify(graph)}


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


def base() -> Data:
    return {
        "agent": "solver",
        "limits": {"assistant_turns": 8, "tool_calls": 16},
        "tools": {"calculate": {"use": CALCULATOR, "timeout": 5}},
        "states": {"PENDING": {}, "GENERATING": {"timeout": 9}, "PROCESSING_TOOLS": {}},
        "transitions": [
            row("prompted", "PENDING", "GENERATING"),
            row("generated", "GENERATING", "PROCESSING_TOOLS", conditions=["has_tool_calls"]),
            row("generated", "GENERATING", "TERMINATED"),
            row("tools_done", "PROCESSING_TOOLS", "GENERATING"),
        ],
    }


def row(trigger: str, source: str | list[str], dest: str, **more: Any) -> Data:
    for key in ("conditions", "unless"):
        if key in more:
            more[key] = [{"name": p} if isinstance(p, str) else {"name": p[0], "argument": p[1]} for p in more[key]]
    return {"trigger": trigger, "source": source, "dest": dest, **more}


def found(data: Data) -> list[str]:
    return [str(problem) for problem in verify(AgentGraph.model_validate(data))]


def expect(data: Data, *messages: str) -> None:
    assert found(data) == list(messages)


def test_the_base_is_right() -> None:
    expect(base())


def test_1_names() -> None:
    data = base()
    data["initial"] = "PENDNG"
    data["contexts"] = {"main": {"tools": ["calculat"]}}
    data["states"]["GENERATING"] |= {"context": "mian", "on_error": "PENDIN"}
    data["transitions"][1] = row("generatd", ["GENERATIN", "GENERATING"], "NOWHERE", conditions=["has_calls"])
    assert found(data)[:8] == [
        "initial 'PENDNG' is not defined; did you mean 'PENDING'? [rule 1]",
        "context 'main': tool 'calculat' is not defined; did you mean 'calculate'? [rule 1]",
        "state 'GENERATING': context 'mian' is not defined; did you mean 'main'? [rule 1]",
        "state 'GENERATING': on_error 'PENDIN' is not defined; did you mean 'PENDING'? [rule 1]",
        "transition 2: no state raises trigger 'generatd'; did you mean 'generated'? [rule 1]",
        "transition 2: source 'GENERATIN' is not defined; did you mean 'GENERATING'? [rule 1]",
        "transition 2: dest 'NOWHERE' is not defined; known: GENERATING, PENDING, "
        "PROCESSING_TOOLS, TERMINATED [rule 1]",
        "transition 2: predicate 'has_calls' is not defined; did you mean 'has_tool_calls'? [rule 1]",
    ]
    assert not any(f"[rule {rule}]" in line for line in found(data) for rule in (2, 3, 9, 10))


def test_1_handlers() -> None:
    data = base()
    data["states"]["GENERATNG"] = {}
    data["states"]["OTHER"] = {}
    data["states"]["WRONG"] = {"handler": "generat"}
    messages = [line for line in found(data) if "[rule 1]" in line]
    assert messages == [
        "state 'GENERATNG' names no handler; did you mean 'GENERATING'? [rule 1]",
        "state 'OTHER' names no handler; give it one, or `final: true` [rule 1]",
        "state 'WRONG': handler 'generat' does not exist; did you mean 'generate'? Or give 'module:Class' [rule 1]",
    ]


def test_2_unreachable() -> None:
    data = base()
    data["states"] |= {"LOST": {"final": True}, "TERMINATED": {}}
    expect(data, "state 'LOST' is never entered; add a transition with dest: LOST, or remove it [rule 2]")


def test_2_rows_that_cannot_fire_lead_nowhere() -> None:
    data = base()
    data["states"]["LOST"] = {"final": True}
    data["transitions"].append(row("truncated", "*", "LOST"))
    expect(data)
    data["transitions"][-1] = row("cancelled", "*", "LOST")
    assert {problem.rule for problem in verify(AgentGraph.model_validate(data))} == {2, 8}


def test_3_endless() -> None:
    data = base()
    data["transitions"][2]["dest"] = "PROCESSING_TOOLS"
    messages = found(data)
    assert len(messages) == 3
    assert (
        "state 'PENDING' cannot end: no transitions lead from it to a final state; add one "
        "with dest: TERMINATED [rule 3]" in messages
    )
    data["transitions"].append(row("limit_reached", "GENERATING", "TERMINATED"))
    expect(data)


def test_4_and_6_outcomes() -> None:
    data = base()
    del data["transitions"][2]
    assert found(data)[0] == (
        "transition 2: the last transition for 'generated' from 'GENERATING' is conditional; "
        "add one without conditions after it [rule 6]"
    )
    del data["transitions"][2]
    message = (
        "state 'PROCESSING_TOOLS' may raise 'tools_done', which no transition takes; add one "
        "with source: PROCESSING_TOOLS"
    )
    assert f"{message} [rule 4]" in found(data)


def test_5_never_raised() -> None:
    data = base()
    data["transitions"] += [row("tools_done", ["GENERATING", "PROCESSING_TOOLS"], "TERMINATED")]
    assert (
        "transition 5: state 'GENERATING' never raises 'tools_done'; its handler raises generated, truncated [rule 5]"
    ) in found(data)
    data["transitions"][-1] = row("truncated", "PENDING", "TERMINATED")
    expect(data, "transition 5: state 'PENDING' never raises 'truncated'; its handler raises prompted [rule 5]")


def test_7_shadowed() -> None:
    data = base()
    data["transitions"].append(row("generated", "GENERATING", "TERMINATED", conditions=[("text_contains", "x")]))
    expect(
        data,
        "transition 5 never fires from 'GENERATING': transition 3 takes all its cases; put it "
        "before, or remove it [rule 7]",
    )
    data["transitions"].insert(
        2, row("generated", "GENERATING", "PENDING", conditions=[("text_contains", "x"), "has_tool_calls"])
    )
    assert found(data)[0].startswith("transition 3 never fires from 'GENERATING': transition 2 takes all its cases")
    data["transitions"][2:] = [
        row("generated", "GENERATING", "TERMINATED", unless=["all_calls_bad"], conditions=["all_calls_bad"]),
        *base()["transitions"][2:],
    ]
    expect(data, "transition 3 never fires: it wants 'all_calls_bad' both to hold and not to hold [rule 7]")


def test_7_a_star_may_be_taken_in_part() -> None:
    data = base()
    data["transitions"] += [
        row("failed", "GENERATING", "TERMINATED"),
        row("failed", "*", "TERMINATED", stop_reason="x"),
    ]
    expect(data)
    data["transitions"].append(row("failed", ["*", "PENDING"], "TERMINATED"))
    assert [line[:23] for line in found(data)] == ["transition 7 never fire"]
    data["transitions"][-2:] = [row("failed", ["PENDING", "GENERATING"], "TERMINATED", stop_reason="x")]
    assert [line[:41] for line in found(data)] == ["transition 6 never fires from 'GENERATING"]
    data["transitions"][-1] = row("failed", "*", "TERMINATED", stop_reason="x")
    data["states"]["PENDING"]["on_error"] = "TERMINATED"
    expect(
        data, "state 'PENDING': on_error never holds: transition 6 takes every 'failed'; remove one of them [rule 7]"
    )


def test_8_cancelled() -> None:
    data = base()
    data["transitions"].append(row("cancelled", "GENERATING", "TERMINATED"))
    expect(data, "transition 5: 'cancelled' cannot be routed; it always ends the trajectory [rule 8]")


def test_9_free_cycles() -> None:
    data = base()
    data["states"] |= {"A": {"handler": "write", "prompt": "x"}, "B": {"handler": "write", "prompt": "x"}}
    data["transitions"] += [
        row("failed", "PENDING", "A"),
        row("written", "A", "B", unless=[("visits_over", 3)]),
        row("written", "A", "TERMINATED"),
        row("written", "B", "A"),
    ]
    expect(
        data,
        "the cycle A -> B -> A spends nothing that is counted, so it may never end; "
        "give one of its states max_visits [rule 9]",
    )
    data["states"]["B"]["max_visits"] = 2
    expect(data)
    del data["states"]["B"]["max_visits"]
    data["limits"]["wall_seconds"] = 60
    data["transitions"][-1] = row("limit_reached", "B", "A")
    data["transitions"].append(row("written", "B", "TERMINATED"))
    expect(data)
    data["transitions"][-2] = row("failed", "B", "B")
    assert "the cycle B -> B spends nothing" in found(data)[0]


def test_9_what_a_custom_handler_spends_counts() -> None:
    data = base()
    data["initial"], data["tools"] = "OWN", {}
    data["states"] = {"OWN": {"handler": "tests.custom_code:Free", "timeout": 1}}
    data["transitions"] = [
        row("done", "OWN", "OWN", conditions=[("text_contains", "x")]),
        row("done", "OWN", "TERMINATED"),
    ]
    assert [line[:19] for line in found(data)] == ["the cycle OWN -> OW"]
    data["states"]["OWN"]["handler"] = "tests.custom_code:Search"
    data["transitions"] = [row("found", "OWN", "OWN"), row("lost", "OWN", "TERMINATED")]
    expect(data)


def test_10_limits_that_are_not_set() -> None:
    data = base()
    data["limits"] = {"response_tokens": 100, "wall_seconds": 5, "bad_calls": 1}
    expect(
        data,
        "the cycle GENERATING -> PROCESSING_TOOLS -> GENERATING may never end: limits.assistant_turns and "
        "limits.tool_calls are not set; set them, or give one of its states max_visits [rule 10]",
    )
    data["limits"] = {"tool_calls": 3}
    expect(data)


def test_10_agents_as_tools() -> None:
    data = base()
    data["tools"] = {"solve": {"agent": base(), "description": "Solves.", "timeout": 5}}
    expect(data)
    data["limits"] = {"assistant_turns": 3}
    expect(data, "tool 'solve' is an agent, so its calls must be bounded; set limits.tool_calls [rule 10]")
    data["limits"] = base()["limits"]
    data["states"]["PROCESSING_TOOLS"]["max_visits"] = 3
    expect(data)
    data["transitions"].append(row("limit_reached", "*", "GENERATING"))
    (refused,) = found(data)
    assert refused.startswith("state 'PROCESSING_TOOLS' has max_visits, so tool_calls no longer bounds its calls")
    for other in (
        row("limit_reached", "*", "GENERATING", conditions=[("limit", "assistant_turns")]),
        row("limit_reached", "*", "GENERATING", unless=[("limit", "tool_calls")]),
        row("limit_reached", "GENERATING", "GENERATING"),  # where tool_calls is never reached
    ):
        data["transitions"][-1] = other
        expect(data)
        assert prove(AgentGraph.model_validate(data)).tool_calls is not None
    data["transitions"][-1] = row("limit_reached", "*", "GENERATING", conditions=[("limit", "tool_calls")])
    assert found(data) == [refused]


def test_problems_of_agents_as_tools() -> None:
    data = base()
    data["tools"]["solve"] = {"agent": {**base(), "initial": "PENDNG"}, "description": "Solves.", "timeout": 5}
    expect(data, "tool 'solve': agent: initial 'PENDNG' is not defined; did you mean 'PENDING'? [rule 1]")


def test_11_waits() -> None:
    data = base()
    del data["states"]["GENERATING"]["timeout"]
    del data["tools"]["calculate"]["timeout"]
    expect(
        data,
        "state 'GENERATING' may wait for ever; give it a timeout, or set limits.wall_seconds [rule 11]",
        "state 'PROCESSING_TOOLS' may wait for ever; give it a timeout, or set limits.wall_seconds [rule 11]",
    )
    data["limits"]["wall_seconds"] = 5
    expect(data)


def test_12_arguments() -> None:
    data = base()
    data["transitions"][1] = row("generated", "GENERATING", "PROCESSING_TOOLS", conditions=[("text_matches", "(")])
    (message,) = found(data)
    assert message.startswith("transition 2: predicate 'text_matches': '(' is no regular expression")
    data["transitions"][1] = row("generated", "GENERATING", "PROCESSING_TOOLS", unless=[("limit", "tool_calls")])
    expect(data, "transition 2: predicate 'limit' says nothing about 'generated', only 'limit_reached' [rule 12]")


def test_13_stop_reasons() -> None:
    data = base()
    data["transitions"][0]["stop_reason"] = "lost"
    expect(data, "transition 1: stop_reason 'lost' would be lost, as 'GENERATING' is not final [rule 13]")


def test_14_code() -> None:
    data = base()
    data["tools"]["calculate"]["use"] = "fsm_rollout.tools.calculator:calculat"
    (message,) = found(data)
    assert "did you mean 'calculate'?" in message
    assert message.endswith("[rule 14]")
    data["tools"]["calculate"] = {"timeout": 5}
    assert "give either `use`" in found(data)[0]
    data = base()
    data["interaction"] = {"use": "tests.custom_code:NOT_A_FUNCTION"}
    data["states"]["PROCESSING_TOOLS"]["interaction"] = {"use": "tests.custom_code:missing"}
    messages = [line for line in found(data) if "[rule 14]" in line]
    assert (
        messages[0]
        == "interaction 'tests.custom_code:NOT_A_FUNCTION' cannot be called; name a class or a function [rule 14]"
    )
    assert messages[1].startswith("interaction: 'tests.custom_code' has no 'missing'")


def test_14_an_interaction_s_arguments_are_those_of_its_class() -> None:
    data = base()
    data["interaction"] = {"use": "openenv", "ulr": "http://127.0.0.1:1"}
    takes = "interaction 'fsm_rollout.environment.openenv:OpenEnv' takes no 'ulr'; did you mean 'url'? [rule 14]"
    expect(data, takes)
    data["interaction"] = {"use": "openenv", "url": "http://127.0.0.1:1"}
    expect(data)


def test_15_trained() -> None:
    data = base()
    data["contexts"] = {"critic": {"engine": "judge", "trainable": True}}
    expect(data, "context 'critic': only contexts of engine 'policy' can be trained, this one has 'judge' [rule 15]")


def test_16_keys() -> None:
    data = base()
    data["states"]["PENDING"] = {"sampling": {"top_k": 1}}
    data["states"]["GENERATING"]["parallel"] = 3
    data["states"]["PROCESSING_TOOLS"]["options"] = {"a": 1}
    expect(
        data,
        "state 'PENDING': sampling means nothing to handler 'prompt'; it has no keys of its own [rule 16]",
        "state 'GENERATING': parallel means nothing to handler 'generate'; it takes sampling [rule 16]",
        "state 'PROCESSING_TOOLS': options means nothing to handler 'call_tools'; it takes parallel [rule 16]",
    )
    data = base()
    data["states"]["W"] = {"handler": "write"}
    data["transitions"] += [row("failed", "PENDING", "W"), row("written", "W", "TERMINATED")]
    expect(data, "state 'W' writes nothing; give it a prompt [rule 16]")


def test_17_finals() -> None:
    data = base()
    data["states"]["TERMINATED"] = {"final": False, "timeout": 3}
    data["transitions"].append(row("failed", "TERMINATED", "PENDING"))
    expect(
        data,
        "state 'TERMINATED' is always final; give another state the transitions [rule 17]",
        "state 'TERMINATED' is final, so its timeout would never be used [rule 17]",
        "transition 5: state 'TERMINATED' is final; nothing leaves it [rule 17]",
    )


def test_18_initial() -> None:
    data = base()
    data["initial"] = "TERMINATED"
    assert "initial state 'TERMINATED' is final; a trajectory would end before it began [rule 18]" in found(data)


def test_19_nobody() -> None:
    data = base()
    data["states"]["INTERACTING"] = {"timeout": 5}
    data["transitions"] += [
        row("failed", "PENDING", "INTERACTING"),
        row("replied", "INTERACTING", "GENERATING"),
        row("interaction_done", "INTERACTING", "TERMINATED"),
    ]
    expect(
        data, "state 'INTERACTING' has nobody to answer; give it (or the agent) an `interaction: {use: …}` [rule 19]"
    )
    data["states"]["INTERACTING"]["interaction"] = {"use": SCRIPTED_USER}
    expect(data)


@pytest.mark.parametrize("prompt", ["{{ a", "{% if %}", "{# open"])
def test_20_templates(prompt: str) -> None:
    data = base()
    data["states"]["GENERATING"]["prompt"] = prompt
    (message,) = found(data)
    assert message.startswith("state 'GENERATING': prompt is no Jinja template: ")


def test_20_templates_name_facts() -> None:
    data = base()
    every = "".join(f"{{{{ {fact} }}}}" for fact in TEMPLATE_FACTS)
    data["states"]["GENERATING"]["prompt"] = (
        every + "{% for i in range(generations) %}{{ loop.index }}{{ i }}{% endfor %}"
    )
    expect(data)
    data["states"]["GENERATING"]["prompt"] = "{{ texs.main }} {{ foo.bar }}"
    fact_names = ", ".join(TEMPLATE_FACTS)
    expect(
        data,
        f"state 'GENERATING': prompt names 'foo', which no trajectory has; known: {fact_names} [rule 20]",
        "state 'GENERATING': prompt names 'texs', which no trajectory has; did you mean 'texts'? [rule 20]",
    )


AGAIN = (
    "transition {row}: 'GENERATING' has let the model speak in context 'main', and "
    "nothing answers before '{dest}' asks it "
    "again; give '{dest}' a prompt, or write a message on the way [rule 21]"
)


def speaking(*between: dict[str, Any], **states: Any) -> dict[str, Any]:
    """An agent whose GENERATING goes on to ``between`` where the text says so, else ends."""
    data = base()
    data["contexts"] = {"judge": {}}
    data["states"] |= states
    data["transitions"][1:1] = between
    return data


def test_21_speaking_twice() -> None:
    more = row("generated", "GENERATING", "GENERATING", conditions=[("text_contains", "more")])
    expect(speaking(more), AGAIN.format(row=2, dest="GENERATING"))
    expect(speaking(more, GENERATING={"timeout": 5, "prompt": "Go on."}))
    expect(speaking(more, GENERATING={"timeout": 5, "reset": True}))
    expect(speaking(row("truncated", "GENERATING", "GENERATING")))  # which goes on with the turn


def test_21_through_states_that_write_elsewhere() -> None:
    rows = [
        row("generated", "GENERATING", "JUDGING", conditions=[("text_contains", "more")]),
        row("generated", "JUDGING", "GENERATING", conditions=[("text_contains", "no")]),
        row("generated", "JUDGING", "TERMINATED"),
    ]
    judge = {"handler": "generate", "context": "judge", "prompt": "Right?", "timeout": 5}
    expect(speaking(*rows, JUDGING=judge), AGAIN.format(row=3, dest="GENERATING"))
    itself = AGAIN.format(row=3, dest="GENERATING").replace("'GENERATING' has", "'JUDGING' has")
    expect(speaking(*rows, JUDGING={**judge, "context": "main"}), itself)
    again = row("written", "TELLING", "GENERATING")
    rows[1] = row("generated", "JUDGING", "TELLING", conditions=[("text_contains", "no")])
    telling = {"handler": "write", "prompt": "Wrong."}
    expect(speaking(*rows, again, JUDGING=judge, TELLING=telling))
    expect(
        speaking(*rows, again, JUDGING=judge, TELLING={**telling, "context": "judge"}),
        AGAIN.format(row=5, dest="GENERATING"),
    )
    expect(speaking(*rows, again, JUDGING={**judge, "on_error": "GENERATING"}, TELLING=telling), (
        AGAIN.format(row=0, dest="GENERATING").replace("transition 0", "state 'JUDGING': on_error")
    ))  # fmt: skip


def test_21_keeps_quiet_about_what_may_write() -> None:
    rows = [
        row("generated", "GENERATING", "MINE", conditions=[("text_contains", "more")]),
        row("done", "MINE", "GENERATING"),
    ]
    expect(speaking(*rows, MINE={"handler": "tests.custom_code:Free", "timeout": 5}))
    tools = row("generated", "GENERATING", "PROCESSING_TOOLS", conditions=[("text_contains", "more")])
    expect(speaking(tools))


def test_a_context_of_a_tool_state_is_not_silently_ignored() -> None:
    text = """
agent: a
contexts: {critic: {tools: [calculate]}}
limits: {assistant_turns: 3, tool_calls: 3}
tools: {calculate: {use: "fsm_rollout.tools.calculator:calculate"}}
states:
  PENDING: {context: critic}
  GENERATING: {context: critic, timeout: 5}
  PROCESSING_TOOLS: {context: critic}
transitions:
  - {trigger: prompted,   source: PENDING,          dest: GENERATING}
  - {trigger: generated,  source: GENERATING,       dest: PROCESSING_TOOLS, conditions: has_tool_calls}
  - {trigger: generated,  source: GENERATING,       dest: TERMINATED}
  - {trigger: tools_done, source: PROCESSING_TOOLS, dest: GENERATING}
"""
    with pytest.raises(ConfigError) as caught:
        loads(text)
    assert {problem.rule for problem in caught.value.problems} == {11, 16}, "it also waits without a timeout"


def test_a_handler_may_not_raise_what_the_scheduler_raises() -> None:
    spec = {"handler": "tests.custom_code:Impostor", "timeout": 5.0}
    rows = [{"trigger": "limit_reached", "source": "OWN", "dest": "OWN"}]
    graph = AgentGraph(agent="a", initial="OWN", states={"OWN": spec}, transitions=rows)
    assert any("the scheduler alone raises limit_reached" in problem.message for problem in verify(graph))


REVIEWED = {"REVIEWING": {"handler": "generate", "prompt": "Right?", "timeout": 5}}


def adding(*rows: Data, **changes: Any) -> Data:
    """The base with one more state, which speaks, and further rows before its own."""
    data = base()
    data["states"] |= REVIEWED | {"TERMINATED": {}}
    data["limits"] |= changes.pop("limits", {})
    data["transitions"] += [
        row("truncated", "GENERATING", "REVIEWING"), *rows, row("generated", "REVIEWING", "TERMINATED")
    ]  # fmt: skip
    return data | changes


NO_RESULTS = "a turn that has just ended has no results yet; ask when its calls are done"
NO_SCORES = "nothing gives scores while the trajectory runs: no state interacts, and rewards come after its end"


@pytest.mark.parametrize(
    ("source", "limit", "reason"),
    [
        ("REVIEWING", "max_visits", "state 'REVIEWING' has no max_visits"),
        ("*", "user_turns", "limits.user_turns is not set"),
        ("*", "wall_seconds", "limits.wall_seconds is not set"),
        ("*", "bad_calls", "limits.bad_calls is not set"),
        ("*", "response_tokens", "limits.response_tokens is not set"),
        ("REVIEWING", "tool_calls", "tool_calls is not reached in 'REVIEWING', only in PROCESSING_TOOLS"),
        (
            "PROCESSING_TOOLS", "context_tokens",
            "context_tokens is not reached in 'PROCESSING_TOOLS', only in GENERATING, REVIEWING",
        ),
    ],
)  # fmt: skip
def test_7_limits_that_are_reached_nowhere(source: str, limit: str, reason: str) -> None:
    tested = row("limit_reached", source, "TERMINATED", conditions=[("limit", limit)])
    expect(adding(tested), f"transition 6 never fires: {reason} [rule 7]")


@pytest.mark.parametrize(
    ("conditions", "unless", "reason"),
    [
        (["all_calls_bad"], [], NO_RESULTS),
        (["last_tool_failed"], [], NO_RESULTS),
        ([("score_at_least", 0.5)], [], NO_SCORES),
        ([("visits_over", {"TERMINATED": 0})], [], "'TERMINATED' is final, so it ends with its first visit"),
        ([], [("visits_over", 0)], "'visits_over' always holds there"),
    ],
)
def test_7_what_never_holds(conditions: list[Any], unless: list[Any], reason: str) -> None:
    tested = row("generated", "REVIEWING", "TERMINATED", conditions=conditions, unless=unless)
    expect(adding(tested), f"transition 6 never fires: {reason} [rule 7]")


def test_7_the_only_limit() -> None:
    tested = row("limit_reached", "PROCESSING_TOOLS", "TERMINATED", unless=[("limit", "tool_calls")])
    expect(adding(tested), "transition 6 never fires: 'limit' always holds there [rule 7]")


def test_7_tokens_that_limits_do_not_allow() -> None:
    for name, limit in (("context_over", "context_tokens"), ("response_over", "response_tokens")):
        for argument, holds in ((99, True), (100, False), (0.99, True), (1.0, False)):
            data = adding(
                row("generated", "REVIEWING", "TERMINATED", conditions=[(name, argument)]), limits={limit: 100}
            )
            why = f"transition 6 never fires: limits.{limit} (100) is reached before that [rule 7]"
            expect(data, *([] if holds else [why]))
            data["transitions"].append(row("limit_reached", "GENERATING", "REVIEWING"))
            expect(data)


def test_7_visits_that_max_visits_does_not_allow() -> None:
    for count, holds in ((1, True), (2, False)):
        data = adding(row("generated", "REVIEWING", "TERMINATED", conditions=[("visits_over", count)]))
        data["states"]["REVIEWING"] = REVIEWED["REVIEWING"] | {"max_visits": 2}
        why = "transition 6 never fires: state 'REVIEWING' has max_visits: 2, which is reached before that [rule 7]"
        expect(data, *([] if holds else [why]))
    data["transitions"][5] = row("limit_reached", "REVIEWING", "TERMINATED", conditions=[("limit", "max_visits")])
    expect(data)
    data["transitions"][5]["source"] = "*"
    expect(data)


def test_7_tools_that_are_not_shown() -> None:
    data = adding(row("generated", "REVIEWING", "TERMINATED", conditions=["has_tool_calls"]))
    expect(data)
    data["contexts"] = {"critic": {}}
    data["states"]["REVIEWING"] = REVIEWED["REVIEWING"] | {"context": "critic"}
    expect(data, "transition 6 never fires: context 'critic' has no tools to call [rule 7]")
    data["tools"]["other"] = data["tools"]["calculate"]
    data["contexts"] = {"critic": {"tools": ["other"]}}
    expect(data)
    data["transitions"][5] = row("generated", "REVIEWING", "TERMINATED", conditions=[("tool_called", "calculate")])
    expect(data, "transition 6 never fires: tool 'calculate' is not shown in context 'critic' [rule 7]")


def test_5_what_the_scheduler_never_raises() -> None:
    data = adding(row("timed_out", "PROCESSING_TOOLS", "TERMINATED"))
    reason = "never raises 'timed_out': it has no timeout; give it one [rule 5]"
    expect(data, f"transition 6: state 'PROCESSING_TOOLS' {reason}")
    data["states"]["PROCESSING_TOOLS"] = {"timeout": 5}
    expect(data)
    data["transitions"][5] = row("limit_reached", "PENDING", "TERMINATED")
    reason = "no limit holds there; give it max_visits, or set limits.wall_seconds [rule 5]"
    expect(data, f"transition 6: state 'PENDING' never raises 'limit_reached': {reason}")
    data["limits"]["wall_seconds"] = 5
    expect(data)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("{{ texts.mian }}", "prompt names 'texts.mian', and there is no such context; did you mean 'main'?"),
        ("{{ texts['mian'][-1] }}", "prompt names 'texts.mian', and there is no such context; did you mean 'main'?"),
        ("{% if history.critc %}x{% endif %}", "'history.critc', and there is no such context; known: main"),
        ("{{ visits.REVIEWNG }}", "'visits.REVIEWNG', and there is no such state; did you mean 'REVIEWING'?"),
        ("{{ spent.tool_cals }}", "'spent.tool_cals', and there is no such limit; did you mean 'tool_calls'?"),
        ("{{ task.uper() }}", "prompt names 'task.uper', and 'task' is a text"),
        ("{{ generations.first }}", "prompt names 'generations.first', and 'generations' is a number"),
        ("{{ messages.last }}", "prompt names 'messages.last', and 'messages' is a list"),
    ],
)
def test_20_parts_of_facts(prompt: str, message: str) -> None:
    data = adding()
    data["states"]["REVIEWING"] = REVIEWED["REVIEWING"] | {"prompt": prompt}
    (problem,) = found(data)
    assert message in problem


def test_20_parts_that_there_are() -> None:
    data = adding()
    for prompt in (
        "{{ texts.main[-1] }} {{ texts['main'] | length }} {{ texts.items() | list }} {{ texts.get('x') }}",
        "{{ extra.answer }} {{ extra['anything'].at.all }} {{ task.upper() }} {{ visits.TERMINATED }}",
        "{% for text in texts.values() %}{{ text.whatever }}{% endfor %}",
        "{{ spent.bad_calls }} {{ history.main[0].content }} {{ messages.0.role }}",
    ):
        data["states"]["REVIEWING"] = REVIEWED["REVIEWING"] | {"prompt": prompt}
        expect(data)
