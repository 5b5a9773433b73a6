"""Tasksets of verifiers itself: prompts, tools and rewards by a run YAML, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf

import fsm_rollout as fr
from fsm_rollout.agent.loader import dump, loads
from fsm_rollout.environment.verifiers import prompts, score
from fsm_rollout.errors import ConfigError, ToolError
from fsm_rollout.jobs.run_config import load_run
from fsm_rollout.jobs.runner import execute
from fsm_rollout.tools import Toolbox
from fsm_rollout.trajectory import journal
from tests.cases import FILES

HERE = Path(__file__).parent
TOOLS = "tools: {sums: {verifiers: {taskset: sums-taskset}}}"
AGENT = FILES["calls tools"].replace("TOOLS", TOOLS, 1)
RUN = FILES["run of a taskset"]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(autouse=True)
def taskset(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give the module of the taskset, which is found as an installed one is."""
    monkeypatch.syspath_prepend(str(HERE))
    import sums_taskset

    sums_taskset.CLOSED.clear()
    sums_taskset.Facts.made = 0
    return sums_taskset


def test_a_run_has_a_taskset_s_prompts_tools_and_rewards(taskset: Any, tmp_path: Path) -> None:
    entry = taskset.sums()[0]
    turns = [call("calculator_add", a=2, b=40) + call("fact"), call("calculator_add", a=1), entry["answer"]]
    (tmp_path / "agent.yaml").write_text(AGENT)
    text = RUN.replace("TURNS", json.dumps(turns)).replace("OUT", str(tmp_path / "run"))
    (tmp_path / "run.yaml").write_text(text)
    summary = execute(load_run(tmp_path / "run.yaml"), lambda *_: Silent())
    assert (summary["trajectories"], summary["tool_calls"], summary["tool_failures"]) == (4, 12, 0)
    batch = fr.TrajectoryBatch.load(tmp_path / "run/batch")
    right = [row for row in batch.rows() if row.extra["verifiers"]["data"]["idx"] == 0]
    assert [row.score for row in right] == [2.0, 2.0]
    assert right[0].reward_parts == {"correct": 1.0, "calls": 3.0, "turns": 3.0}
    wrong = [row for row in batch.rows() if row.extra["verifiers"]["data"]["idx"] == 1]
    assert [row.score for row in wrong] == [2 * taskset.sums().score_answer(entry["answer"], taskset.sums()[1])] * 2
    for trajectory in journal.read(tmp_path / "run/journal.sqlite"):
        system, user, *_ = trajectory.messages
        own = trajectory.extra["verifiers"]["data"]["entry"]
        assert (system["content"], user["content"]) == ("Answer with a number.", own["question"])
        results = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
        assert results[0] == f"{own['metadata']['expression']}: call 1 gives 42"
        assert results[2] == f"{own['metadata']['expression']}: call 2 gives 2"
        assert results[1].startswith("fact ")
    assert taskset.Facts.made == 1, "what is the taskset's is shared"
    assert len(taskset.CLOSED) == 4, "what is the task's is closed with its trajectory"


class Silent:
    def __enter__(self) -> Any:
        return lambda trajectory, event: None

    def __exit__(self, *_: object) -> None:
        pass


def test_scores_are_those_of_verifiers(taskset: Any) -> None:
    """The oracle makes its own trace, through verifiers' own loader."""
    (first, *_) = list(taskset.SumsTaskset(taskset.SumsConfig(id="sums-taskset")))
    (prompt, *_) = prompts("sums-taskset", limit=1)
    assert vf.TaskData.model_validate(prompt["verifiers"]["data"]).idx == first.data.idx == 0
    with fr.Rollout(loads(AGENT), {"kind": "scripted", "turns": ["7", "8"]}, reward=score) as rollout:
        (row,) = rollout.run([prompt]).rows()
    assert row.score == 2 * taskset.sums().score_answer("7", first.data.entry)


def test_tools_are_shown_as_verifiers_shows_them() -> None:
    graph = loads(AGENT)
    assert loads(dump(graph)) == graph
    shown = {schema["function"]["name"]: schema["function"] for schema in Toolbox(graph).schemas("main")}
    assert set(shown) == {"calculator_add", "fact"}
    add = shown["calculator_add"]
    assert add["description"] == "Add two numbers."
    assert add["parameters"]["required"] == ["a"]
    assert set(add["parameters"]["properties"]) == {"a", "b"}


def test_what_is_wrong_is_told() -> None:
    with pytest.raises(ConfigError, match="taskset 'no-such': ModuleNotFoundError: taskset 'no-such' not found"):
        prompts("no-such")
    with pytest.raises(ConfigError, match="its tasks have a container; run it with verifiers itself"):
        prompts("sums-taskset", {"container": True})
    with pytest.raises(ConfigError, match="sise"):
        prompts("sums-taskset", {"sise": 3})
    with pytest.raises(ConfigError, match="tool 'sums': verifiers: unknown key 'tasksett'; did you mean 'taskset'"):
        loads(AGENT.replace("taskset:", "tasksett:"))
    with pytest.raises(ToolError, match="'no-such' not found"):
        Toolbox(loads(AGENT.replace("sums-taskset", "no-such")))
