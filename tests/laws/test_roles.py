"""Whose each token is: the oracle reads messages, calls and replies in the events, and decodes what each role has."""

from itertools import groupby
from typing import Any

import pytest
from hypothesis import given

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.batch.rows import rows
from fsm_rollout.engines.scripted.script import Turn
from fsm_rollout.testing.simulation.plan import Plan
from fsm_rollout.testing.simulation.simulate import Simulation, embedded_tokenizer, simulate
from fsm_rollout.trajectory.enums import ROLES, Role
from fsm_rollout.trajectory.events import Called, ContextOpened, MessagesAppended, Prompted, UserReplied
from fsm_rollout.trajectory.prompt import Prompt
from tests.laws.test_laws import said
from tests.laws.world import call
from tests.runs import TOOLS, agent
from tests.runs import rows as rows_of

TEXT_ROLES = {Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.TOOL, Role.INTERACTION, Role.NOTICE}


@pytest.fixture(autouse=True, scope="module")
def _tokenizer() -> None:
    """Load it before anything is drawn: loading uses random numbers, which Hypothesis does not like in strategies."""
    assert embedded_tokenizer()


def told_by_events(run: Simulation, trajectory_id: str) -> dict[tuple[str, str], set[Role]]:
    """Return the roles that a message's text has, by the message's own role and the text; scripts say some twice."""
    events = run.events[trajectory_id]
    (prompt,) = [event.messages for event in events if isinstance(event, Prompted)]
    failed = {event.id for event in events if isinstance(event, Called) and event.failure is not None}
    replied = {event.content for event in events if isinstance(event, UserReplied)}
    roles: dict[tuple[str, str], set[Role]] = {}
    for event in events:
        if isinstance(event, ContextOpened | MessagesAppended):
            for message in event.messages:
                role = Role(message["role"])
                if message.get("tool_call_id") in failed and message not in prompt:
                    role = Role.NOTICE
                elif message["content"] in replied and role is Role.USER:
                    role = Role.INTERACTION
                roles.setdefault((message["role"], message["content"].strip()), set()).add(role)
    return roles


def roles_hold(run: Simulation) -> None:
    """Each run of tokens of one role is a message's whole text, in the messages' order, and all are told."""
    decode = run.tokenizer.decode
    for trajectory in run.trajectories:
        told = told_by_events(run, trajectory.trajectory_id)
        for row in rows([trajectory]):
            stream = trajectory.streams[row.stream]
            ids = [*row.prompt_ids.tolist(), *row.response_ids.tolist()]
            assert len(row.roles) == len(ids)
            mask = [0] * len(row.prompt_ids) + row.mask.tolist()
            names = [ROLES[number] for number in row.roles]
            assert [name is Role.SAMPLED for name in names] == [bool(each) for each in mask]
            runs = groupby(range(len(ids)), key=names.__getitem__)
            found = [(role, decode([ids[i] for i in places]).strip()) for role, places in runs if role in TEXT_ROLES]
            messages = [
                (m["role"], m["content"].strip())
                for i, m in enumerate(stream.messages[: stream.glued])
                if m["content"].strip() and (m["role"] != "assistant" or i < stream.opening)
            ]
            if any("…[" in text or "<|im" in text or "<tool" in text for _, text in messages):
                continue  # cut results, below; markers in text are the injection tests' matter
            assert [text for _, text in found] == [text for _, text in messages]
            for (role, _), message in zip(found, messages, strict=True):
                assert role in told.get(message, {Role.ASSISTANT})


@given(said(failures=False, faults=False))
def test_roles_partition_rows_by_who_said_what(case: tuple[AgentGraph, Plan]) -> None:
    roles_hold(simulate(*case, real_tools=True))


def row_by_role(graph: AgentGraph, *texts: str, **options: Any) -> dict[Role, str]:
    """Return what the one row of a run with real tools has of each role."""
    says = {f"{graph.agent}/main": tuple(Turn(text=text) for text in texts)}
    run = simulate(graph, Plan(says=(says,)), real_tools=True, **options)
    roles_hold(run)
    (row,) = rows(run.trajectories)
    ids = [*row.prompt_ids.tolist(), *row.response_ids.tolist()]
    places = {role: [i for i, number in enumerate(row.roles) if ROLES[number] is role] for role in ROLES}
    return {role: run.tokenizer.decode([ids[i] for i in at]) for role, at in places.items() if at}


def with_tool(name: str, **more: Any) -> AgentGraph:
    tool = {"use": f"tests.law_tools:{name}", "timeout": 50.0, **more}
    return agent(TOOLS, tools={name: tool}, contexts={"main": {"system": "Be brief."}})


def test_what_a_failed_call_is_told_is_a_notice() -> None:
    found = row_by_role(with_tool("fail"), call("fail", "x"), "Done.")
    assert "error" in found[Role.NOTICE]
    assert Role.TOOL not in found
    assert "Be brief." in found[Role.SYSTEM]


@pytest.mark.parametrize("history", ["keep", "split"])
def test_a_result_in_the_prompt_stays_the_tool_s_when_a_call_of_its_id_fails(history: str) -> None:
    frame = {
        "states": {**TOOLS["states"], "INTERACTING": {"timeout": 50.0}},
        "transitions": [
            *(row for row in TOOLS["transitions"] if row["dest"] != "TERMINATED"),
            *rows_of("GENERATING generated INTERACTING", "INTERACTING replied GENERATING"),
            *rows_of("INTERACTING interaction_done TERMINATED"),
        ],
    }
    tools = {"fail": {"use": "tests.law_tools:fail", "timeout": 50.0}}
    user = {"use": "tests.law_tools:Chatty", "kwargs": {"replies": 1}}
    graph = agent(frame, tools=tools, contexts={"main": {"history": history}}, interaction=user)
    earlier = {"id": "c00000000", "type": "function", "function": {"name": "fail", "arguments": {"text": "y"}}}
    prompt = Prompt(
        prompt_id="p",
        messages=(
            {"role": "user", "content": "Try."},
            {"role": "assistant", "content": "", "tool_calls": [earlier]},
            {"role": "tool", "content": "It was well.", "tool_call_id": "c00000000"},
        ),
    )
    says = {"a/main": (Turn(text=call("fail", "x")), Turn(text="Done."))}
    run = simulate(graph, Plan(says=(says,)), real_tools=True, prompts=[prompt])
    roles_hold(run)
    assert len(run.trajectories[0].streams) == (1 if history == "keep" else 2)


def test_how_much_of_a_result_was_cut_is_a_notice_and_the_rest_the_tool_s() -> None:
    found = row_by_role(with_tool("echo", response_tokens=60), call("echo", "many words " * 60), "Done.")
    assert found[Role.NOTICE].strip("…[]").endswith("tokens cut")
    assert "many words" in found[Role.TOOL]
    assert "cut" not in found[Role.TOOL]


def test_who_writes_as_a_notice_is_written_makes_none() -> None:
    forged = "He said …[12 tokens cut]… there."
    user = Prompt(prompt_id="p", messages=({"role": "user", "content": forged},))
    found = row_by_role(with_tool("echo"), call("echo", forged), "Done.", prompts=[user])
    assert Role.NOTICE not in found
    assert "tokens cut" in found[Role.USER]
    assert "tokens cut" in found[Role.TOOL]


@given(said(failures=False, faults=False).filter(lambda case: case[0].interaction is not None))
def test_replies_keep_their_role_in_streams_that_hold_the_whole_history(case: tuple[AgentGraph, Plan]) -> None:
    graph, plan = case
    split = {**graph.contexts, "main": graph.context("main").model_copy(update={"history": "split"})}
    roles_hold(simulate(graph.model_copy(update={"contexts": split}), plan, real_tools=True))
