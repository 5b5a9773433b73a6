"""Agents from text and from mappings, and tools that are functions: nothing has to be a file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import fsm_rollout as fr
from fsm_rollout.agent.graph import AgentGraph, Predicate, StateSpec, ToolSpec, TransitionSpec
from fsm_rollout.agent.loader import dump, load_agent, loads
from fsm_rollout.agent.verify import verify
from fsm_rollout.errors import ConfigError
from fsm_rollout.names import objects
from fsm_rollout.names.objects import load_object, path_of
from fsm_rollout.tools.bound_tools import tool_schema_of
from fsm_rollout.trajectory.settings import Limits, Sampling
from tests.cases import FILES
from tests.embedded import tokenizer

TEXT = FILES["adds"]
CALL = '<tool_call>\n{"name": "add", "arguments": {"left": 2, "right": 3}}\n</tool_call>'


def add(left: int, right: int) -> int:
    """Add two numbers."""
    return left + right


def local() -> Callable[..., int]:
    offset = 100

    def add_more(left: int, right: int) -> int:
        """Add two numbers, and some more."""
        return left + right + offset

    return add_more


class Adder:
    """Adds."""

    def execute(self, left: int, right: int) -> int:
        """Add two numbers."""
        return left + right


@pytest.mark.parametrize(("tool", "result"), [(add, "5"), (local(), "105"), (Adder, "5"), (f"{__name__}:add", "5")])
def test_a_callable_is_a_tool(tool: Any, result: str) -> None:
    agent = load_agent(TEXT).with_tools(add=tool)
    scored: list[fr.Trajectory] = []
    engine = fr.ScriptedEngine([CALL, "done"], tokenizer=tokenizer())
    with fr.Rollout(agent, engine, reward=lambda trajectory: scored.append(trajectory) or 1.0) as rollout:
        rollout.run([fr.Prompt(messages=({"role": "user", "content": "2 + 3?"},))])
    (trajectory,) = scored
    assert [turn.results[0].result for turn in trajectory.assistant_turns if turn.results] == [result]
    assert loads(dump(agent)) == agent, "an agent stays plain data"


def test_tools_are_added_and_replaced_and_the_agent_stays_as_it_was() -> None:
    agent = load_agent(TEXT)
    first = agent.with_tools(add=add, solve=agent.with_tools(add=add), slow={"use": add, "timeout": 3})
    second = first.with_tools(add=ToolSpec(use=f"{__name__}:Adder"))
    assert agent.tools == {}
    assert list(second.tools) == ["add", "solve", "slow"]
    assert (first.tools["add"].use, second.tools["add"].use) == (f"{__name__}:add", f"{__name__}:Adder")
    assert second.tools["slow"].timeout == 3
    assert isinstance(second.tools["solve"].agent, AgentGraph)
    assert tool_schema_of("slow", second.tools["slow"])["function"]["description"] == "Add two numbers."


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        ({"add": 5}, "tool 'add': got 5; give a function or class, its `module:name`, an agent, or a mapping"),
        ({"add": {"usse": add}}, "unknown key 'usse'"),
        ({"add": "nowhere"}, "use"),
    ],
)
def test_what_is_no_tool_is_refused(tools: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_agent(TEXT).with_tools(**tools)


CIRCLE: list[object] = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (object(), "state 'PENDING': options: <object .*> is a object; give text, a number, true or false, a list"),
        ({1, 2}, r"state 'PENDING': options: \{1, 2\} is a set; "),
        ([b"x"], "state 'PENDING': options.0: b'x' is a bytes; "),
        (CIRCLE, "Circular reference detected; "),
    ],
)
def test_a_mapping_that_is_no_plain_data_is_refused(value: object, says: str) -> None:
    with pytest.raises(ConfigError, match=f"the agent's mapping is not plain data: {says}"):
        load_agent({**load_agent(TEXT).model_dump(mode="json"), "states": {"PENDING": {"options": value}}})


def test_a_function_that_only_this_process_knows_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = local()
    name = str(path_of(tool))
    assert path_of(tool) == name, "one object, one name"
    agent = load_agent(TEXT).with_tools(add={"use": tool, "placement": "process"})
    (problem,) = verify(agent)
    assert "write it into a module and name that, or leave `placement` out" in problem.message
    monkeypatch.delattr(objects.given, name.rpartition(".")[2])  # as in any other process
    with pytest.raises(ConfigError, match="was given as an object to the process that began with it"):
        load_object(name)


def test_an_agent_is_loaded_from_text_from_a_mapping_and_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(TEXT, "utf-8")
    (tmp_path / "be.md").write_text("Be kind.", "utf-8")
    agent = load_agent(TEXT)
    assert agent == load_agent(tmp_path / "a.yaml") == load_agent(str(tmp_path / "a.yaml"))
    data = {
        "agent": "adder", "limits": {"assistant_turns": 4, "tool_calls": 4, "wall_seconds": 60},
        "states": {"PENDING": {}, "GENERATING": {"timeout": 9}, "PROCESSING_TOOLS": {"timeout": 9}},
        "transitions": [row.model_dump(exclude_defaults=True) for row in agent.transitions],
    }  # fmt: skip
    for row in data["transitions"]:  # type: ignore[attr-defined]
        row["conditions"] = ["has_tool_calls"] if "conditions" in row else []
    assert load_agent(data) == agent
    with_system = load_agent({**data, "contexts": {"main": {"system": "be.md"}}}, base=tmp_path)
    assert with_system.contexts["main"].system == "Be kind."
    assert load_agent({**data, "tools": {"add": {"use": add}}}).tools["add"].use == f"{__name__}:add"
    assert load_agent(data, ["limits.assistant_turns=2"]).limits.assistant_turns == 2
    with pytest.raises(ConfigError, match="states"):
        load_agent({"agent": "x", "transitions": []})
    with pytest.raises(ConfigError, match=r"<text>:2: "):
        load_agent(TEXT.replace("tool_calls: 4", "tool_cals: 4"))


def test_an_agent_built_in_python_takes_what_a_yaml_takes() -> None:
    built = AgentGraph(
        agent="solver",
        limits={"assistant_turns": 2},
        tools={"calculate": {"use": "fsm_rollout.tools.calculator:calculate", "timeout": 5}},
        states={"PENDING": None, "GENERATING": {"timeout": 1}, "PROCESSING_TOOLS": {"timeout": 1}},
        transitions=[
            {"trigger": "prompted", "source": "PENDING", "dest": "GENERATING"},
            {
                "trigger": "generated",
                "source": "GENERATING",
                "dest": "PROCESSING_TOOLS",
                "conditions": "has_tool_calls",
                "unless": [{"text_contains": "DONE"}, "all_calls_bad"],
            },
            TransitionSpec(
                trigger="generated", source="GENERATING", dest="TERMINATED", conditions={"text_contains": "STOP"}
            ),
            {"trigger": "generated", "source": "GENERATING", "dest": "TERMINATED"},
            {"trigger": "tools_done", "source": ["PROCESSING_TOOLS"], "dest": "GENERATING"},
        ],
    )
    first, second = built.transitions[1], built.transitions[2]
    assert first.conditions == (Predicate(name="has_tool_calls"),)
    assert first.unless == (Predicate(name="text_contains", argument="DONE"), Predicate(name="all_calls_bad"))
    assert second.conditions == (Predicate(name="text_contains", argument="STOP"),)
    assert loads(json.dumps(yaml.safe_load(dump(built)))) == built


def test_a_custom_state_built_in_python_takes_its_own_keys() -> None:
    state = StateSpec(handler="mine:Grade", timeout=3, depth=4, options={"wide": True})
    assert state == StateSpec(handler="mine:Grade", timeout=3, options={"depth": 4, "wide": True})
    with pytest.raises(ConfigError, match=r"^StateSpec: unknown key 'tiemout'; did you mean 'timeout'\?$"):
        StateSpec(handler="generate", tiemout=3)


def graph_of(**keys: Any) -> AgentGraph:
    return AgentGraph(**{"agent": "a", "states": {}, "transitions": [], **keys})


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: graph_of(agnet="a"), "AgentGraph: unknown key 'agnet'; did you mean 'agent'?"),
        (lambda: graph_of(states={"A": {"tiemout": 1}}), "state 'A': unknown key 'tiemout'"),
        (lambda: graph_of(transitions=[{"triger": "x"}]), "transition 1: unknown key 'triger'; did you"),
        (lambda: Sampling(temprature=1), "Sampling: unknown key 'temprature'; did you mean 'temperature'?"),
        (lambda: Limits(tool_calls=-1), "Limits: tool_calls should be greater than or equal to 0, got -1"),
        (lambda: Sampling(0.5), "Sampling takes its keys by name: Sampling(temperature=…), got 0.5"),
    ],
)
def test_typos_in_python_are_told_as_those_in_a_yaml(build: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build()
    assert says in str(caught.value)
