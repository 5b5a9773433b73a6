"""Data sets that were made for others are prompts as they are, and any other by the names of its columns."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fsm_rollout as fr
from fsm_rollout.errors import ConfigError
from fsm_rollout.jobs.run_config import PromptFile, load_run, recorded_run
from fsm_rollout.trajectory.prompt import as_prompts, read_prompts
from tests.cases import cases, table
from tests.kit import ROOT

QUESTION = [{"role": "user", "content": "What is 1 + 3?"}]
VERL = table("trajectory")["a row of verl"]
OTHER = {"id": 7, "question": "What is 1 + 3?", "solution": {"text": "1 + 3", "final": "4"}}


def parquet(rows: list[Mapping[str, Any]], folder: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), folder / "train.parquet")
    return folder / "train.parquet"


def jsonl(rows: list[Mapping[str, Any]], folder: Path) -> Path:
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "train.jsonl"


@pytest.mark.parametrize("write", [parquet, jsonl])
def test_a_file_of_verl_s_is_read_as_it_is(write: Callable[[Any, Path], Path], tmp_path: Path) -> None:
    (prompt,) = read_prompts(write([VERL], tmp_path))
    assert list(prompt.messages) == VERL["prompt"]
    kept = {key: value for key, value in VERL.items() if key != "prompt"}
    assert prompt.extra == kept | {"answer": "4"}


def test_the_agent_of_verl_s_row_is_chosen_where_there_are_several() -> None:
    script = {"kind": "scripted", "turns": ["4"]}
    one = fr.load_agent(ROOT / "configs/agents/single_turn.yaml")
    another = one.model_copy(update={"agent": "tool_agent"})
    with fr.Rollout(one, script) as rollout:
        assert rollout.run([VERL]).rows()[0].agent == one.agent
    with fr.Rollout({agent.agent: agent for agent in (one, another)}, script) as rollout:
        assert rollout.run([VERL]).rows()[0].agent == "tool_agent"


@cases("trajectory")
def test_a_row_of_trl_s_is_a_prompt(row: dict[str, Any], messages: list[Any]) -> None:
    (prompt,) = as_prompts([row])
    assert list(prompt.messages) == messages
    assert ("prompt" in prompt.extra) == isinstance(row["prompt"], str)


@pytest.mark.parametrize("write", [parquet, jsonl])
def test_columns_are_named(write: Callable[[Any, Path], Path], tmp_path: Path) -> None:
    columns = {"messages": "question", "answer": "solution.final"}
    (prompt,) = read_prompts(write([OTHER], tmp_path), columns=columns)
    assert list(prompt.messages) == QUESTION
    assert prompt.extra == OTHER | {"answer": "4"}


def test_a_run_names_columns_and_its_journal_keeps_them(tmp_path: Path) -> None:
    jsonl([OTHER], tmp_path)
    text = (ROOT / "configs/runs/scripted.yaml").read_text()
    named = "prompts: {file: train.jsonl, messages: question, answer: solution.final}\n"
    (tmp_path / "run.yaml").write_text(
        "\n".join(line for line in text.splitlines() if not line.startswith("prompts:")) + "\n" + named
    )
    config = load_run(tmp_path / "run.yaml")
    for read in (config, recorded_run(config.to_json(), tmp_path)):
        assert isinstance(read.prompts, PromptFile)
        assert read.prompts.file == tmp_path / "train.jsonl"
        assert read.prompts.columns == {"messages": "question", "answer": "solution.final"}


class Table:
    """What of a `datasets.Dataset` is looked at; the real one is tried with the trainers."""

    column_names = ("prompt", "answer", "limits")

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


def test_null_columns_of_a_table_are_not_there() -> None:
    rows = Table([{"prompt": [{"role": "user", "content": "Hi", "tool_calls": None}], "answer": "4", "limits": None}])
    (prompt,) = as_prompts(rows)
    assert list(prompt.messages) == [{"role": "user", "content": "Hi"}]


@cases("trajectory")
def test_a_hundred_equal_mistakes_are_one_line(columns: dict[str, str] | None, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        read_prompts(jsonl([OTHER] * 100, tmp_path), columns=columns)
    assert len(error.value.problems) == 1
