"""`export`, `rescore` and `replay`: what a journal gives without a model, also while its run goes on."""

import json
import re
import sqlite3
from array import array
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from pyarrow.parquet import read_table
from typer.testing import CliRunner

from fsm_rollout import TrajectoryBatch
from fsm_rollout.agent.loader import dump, load_agent
from fsm_rollout.cli import app
from fsm_rollout.jobs.replay import first_difference, replay
from fsm_rollout.jobs.rescore import rescore
from fsm_rollout.jobs.run_config import load_run
from fsm_rollout.jobs.runner import execute
from fsm_rollout.scheduler.recorder import Listener
from fsm_rollout.trajectory.events import AnyEvent, Ended, Generated
from fsm_rollout.trajectory.journal import events, read
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.embedded import tokenizer
from tests.kit import CONFIGS
from tests.programs import fsm_rollout

CALL = '<tool_call>\n{"name": "calculate", "arguments": {"left": 1, "operator": "+", "right": 2}}\n</tool_call>'
AGENT = CONFIGS / "agents/tool_agent.yaml"


@contextmanager
def quiet(total: int, done: int) -> Iterator[Listener]:
    yield lambda trajectory, event: None


def config(folder: Path, **keys: Any) -> Path:
    prompts = [{"messages": [{"role": "user", "content": f"What is 1 + 2? ({i})"}], "answer": 3} for i in range(4)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts), "utf-8")
    run = {
        "agent": str(AGENT), "prompts": "prompts.jsonl", "n": 2, "out": str(folder / "out"),
        "engine": {"kind": "scripted", "turns": [CALL, CALL, "The answer is 3."]},
        "reward": "fsm_rollout.rewards:first_answer",
    }  # fmt: skip
    (folder / "run.yaml").write_text(json.dumps(run | keys), "utf-8")
    return folder / "run.yaml"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder, to be read only."""
    folder = tmp_path_factory.mktemp("run")
    execute(load_run(config(folder)), quiet)
    return folder / "out"


def command(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == code, done.output
    return done.output


def test_rows_are_those_of_the_batch(out: Path, tmp_path: Path) -> None:
    said = command("export", out, "-o", tmp_path / "rows.jsonl")
    assert "8 rows of 8 trajectories" in said
    lines = {
        line["trajectory_id"]: line
        for line in map(json.loads, (tmp_path / "rows.jsonl").read_text("utf-8").splitlines())
    }
    rows = TrajectoryBatch.load(out / "batch").rows()
    assert len(rows) == len(lines) == 8
    for row in rows:
        line = lines[row.trajectory_id]
        for name, key in (
            ("prompt_ids", "prompts"), ("response_ids", "responses"), ("mask", "response_mask"),
            ("logprobs", "rollout_log_probs"), ("versions", "weight_versions"), ("scores", "token_level_scores"),
        ):  # fmt: skip
            array = getattr(row, name)
            assert np.array_equal(np.array(line[key], array.dtype), array), name
        assert (line["score"], line["stop_reason"], line["group_id"]) == (1.0, "answered", row.group_id)
        assert [line["state_names"][i] for i in line["state_ids"]] == [row.state_names[i] for i in row.state_ids]
        ids = line["prompts"] + line["responses"]
        assert tokenizer()(line["text"], add_special_tokens=False)["input_ids"] == ids, "its text is that of its tokens"
        assert [message["role"] for message in line["messages"][:2]] == ["system", "user"]
        assert all(message["content"] in line["text"] for message in line["messages"] if message["content"])
    # The same as a table.
    command("export", out, "--format", "parquet", "-o", tmp_path / "rows.parquet")
    table = read_table(tmp_path / "rows.parquet").to_pylist()
    for record in table:
        line = lines[record["trajectory_id"]]
        for key, value in record.items():
            same = value if not isinstance(line[key], list | dict) or isinstance(value, list) else json.loads(value)
            assert same == line[key], key
    first = command("export", out, "-o", "-").splitlines()[0]
    assert json.loads(first)["trajectory_id"] == "0/0"


def half(trajectory: Trajectory) -> dict[str, float]:
    """A reward that gives half, and says what it saw."""
    return {"score": 0.5, "turns": trajectory.generations}


def by_rank(group: list[Trajectory]) -> list[float]:
    """A reward of a whole group."""
    return [float(place) for place in range(len(group))]


def fails(trajectory: Trajectory) -> float:
    """A reward that fails."""
    raise ValueError(f"no score for {trajectory.trajectory_id}")


CALLS: list[object] = []


def calculate(left: int, operator: str, right: int) -> str:
    """A calculator that is never to be asked.

    Args:
        left: a number.
        operator: what to do.
        right: a number.
    """
    CALLS.append((left, operator, right))
    return "no"


def test_another_reward_judges_what_has_been(out: Path, tmp_path: Path) -> None:
    before = (out / "journal.sqlite").read_bytes()
    scores = tmp_path / "scores.jsonl"
    said = command("rescore", out, "--reward", f"{__name__}:half", "-o", scores)
    assert "8 scores, 8 of them changed; mean 1.000 to 0.500" in said
    assert (out / "journal.sqlite").read_bytes() == before, "the run keeps its own scores"
    lines = list(map(json.loads, scores.read_text("utf-8").splitlines()))
    assert {(line["score"], line["recorded"], line["parts"]["turns"]) for line in lines} == {(0.5, 1.0, 3)}
    command("export", out, "--scores", scores, "-o", tmp_path / "rows.jsonl")
    rows = list(map(json.loads, (tmp_path / "rows.jsonl").read_text("utf-8").splitlines()))
    assert {(row["score"], row["token_level_scores"][-1], sum(row["token_level_scores"])) for row in rows} == {
        (0.5, 0.5, 0.5)
    }
    _, by_group = rescore(out, f"{__name__}:by_rank", tmp_path / "ranks.jsonl", report=pytest.fail)
    assert [score.score for score in by_group] == [0.0, 1.0] * 4
    assert "the reward failed for 8 of 8" in command(
        "rescore", out, "--reward", f"{__name__}:fails", "-o", tmp_path / "f.jsonl", code=1
    )
    assert "did you mean 'half'" in command("rescore", out, "--reward", f"{__name__}:hal", code=2)


def test_a_replay_of_an_unchanged_run_is_the_same(out: Path) -> None:
    assert "8 trajectories replayed, 0 of them differ" in command("replay", out)
    lines: list[object] = []
    result = replay(out, only="2/1", report=lines.append)
    assert (result.replayed, result.differences) == (1, [])
    assert all("code is imported as" in str(line) for line in lines)
    assert "did you mean '2/1'" in command("replay", out, "--trajectory", "2/11", code=2)


def test_a_replay_shows_the_text_of_the_first_tokens_that_differ(out: Path, tmp_path: Path) -> None:
    graph = load_agent(CONFIGS / "agents/tool_agent.yaml")
    (tmp_path / "changed.yaml").write_text(dump(graph).replace("one operation", "two operations"), "utf-8")
    said = command("replay", out, "--agent", tmp_path / "changed.yaml", "--trajectory", "0/0", code=1)
    assert re.search(r"has the ids \[[\d, ]+\] \('[^']*two.*, the recording \[[\d, ]+\] \('[^']*one operation", said)


def test_a_replay_says_where_a_change_shows_first(out: Path, tmp_path: Path) -> None:
    # 1. Another system prompt: the first tokens differ, in the state that opens the context.
    changed = tmp_path / "changed.yaml"
    changed.write_text(dump(load_agent(AGENT, ["contexts.main.system=You are terse."])), "utf-8")
    said = command("replay", out, "--agent", changed, code=1)
    assert "8 of them differ" in said
    assert "0/0: in PENDING, generation 0, token" in said
    # 2. Another row fires, and no token differs.
    rows = load_agent(AGENT).transitions
    last = next(place for place, row in enumerate(rows) if row.dest == "TERMINATED")
    changed.write_text(dump(load_agent(AGENT, [f"transitions.{last}.stop_reason=finished"])), "utf-8")
    said = command("replay", out, "--agent", changed, code=1)
    assert "0/0: in GENERATING, generation 3: stop_reason of 'transitioned' is 'finished', in the recording" in said
    # 3. Tools are not called: what they said is recorded, whatever they would say now.
    changed.write_text(
        dump(load_agent(AGENT)).replace("fsm_rollout.tools.calculator:calculate", f"{__name__}:calculate")
    )
    CALLS.clear()
    assert "token" in command("replay", out, "--agent", changed, code=1), "the tool's description is another"
    assert CALLS == []


def test_a_replay_says_which_token_is_another(out: Path, tmp_path: Path) -> None:
    """A recorded answer in which one token is another: the state, the turn and the token."""
    recorded = events(out / "journal.sqlite", "0/0")
    again = list(recorded)
    at = [place for place, event in enumerate(again) if isinstance(event, Generated)][1]
    generated = again[at]
    assert isinstance(generated, Generated)
    again[at] = replace(generated, ids=array("i", [*generated.ids[:5], 7, *generated.ids[6:]]))
    difference = first_difference("0/0", recorded, again)
    assert difference is not None
    assert (difference.state, difference.turn, difference.token) == ("GENERATING", 1, 5)


def test_all_of_them_on_a_run_that_is_going_on(tmp_path: Path) -> None:
    """At the third end of eight: what has ended by then is there, and the run is not disturbed."""
    said: list[str] = []

    class Meanwhile:
        ended = 0

        @contextmanager
        def __call__(self, total: int, done: int) -> Iterator[Listener]:
            yield self.hear

        def hear(self, trajectory: Trajectory, event: AnyEvent) -> None:
            self.ended += isinstance(event, Ended)
            if self.ended == 3 and not said:
                for arguments in (
                    ["export", "-o", str(tmp_path / "rows.jsonl")],
                    ["rescore", "--reward", "fsm_rollout.rewards:first_answer", "-o", str(tmp_path / "s.jsonl")],
                    ["replay"],
                    ["show"],
                ):
                    name, *options = arguments
                    done = fsm_rollout(name, tmp_path / "out", *options)
                    assert done.returncode == 0, done.stderr
                    said.append(done.stdout + done.stderr)

    execute(load_run(config(tmp_path, concurrency=2)), Meanwhile())
    assert "rows of" in said[0]
    assert "left out" in said[0]
    assert "0 of them changed" in said[1] or "scores" in said[1]
    assert " 0 of them differ" in said[2]
    assert "the run has not ended" in said[3].replace("\n", " ")
    assert len(list(read(tmp_path / "out/journal.sqlite"))) == 8


def test_what_is_damaged_is_said_and_the_rest_is_there(out: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "journal.sqlite"
    damaged.write_bytes((out / "journal.sqlite").read_bytes())
    with closing(sqlite3.connect(damaged)) as connection, connection:
        connection.execute(
            "UPDATE events SET payload = x'00' WHERE id = "
            "(SELECT id FROM events WHERE trajectory_id = '1/0' AND seq > 0 ORDER BY seq LIMIT 1)"
        )
    said = command("export", tmp_path, "-o", tmp_path / "rows.jsonl")
    assert " of trajectory 1/0 is damaged" in said
    assert "7 rows of 7 trajectories; 1 that have not ended are left out" in said
    assert " 0 of them differ" in command("replay", tmp_path, "--agent", AGENT)
