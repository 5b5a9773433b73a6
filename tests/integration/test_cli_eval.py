"""`fsm-rollout eval`: variants side by side, an end when the score is known, and going on where it was interrupted."""

import json
import shlex
import signal
from itertools import repeat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fsm_rollout.cli import app
from fsm_rollout.errors import ConfigError
from fsm_rollout.jobs import runner
from fsm_rollout.jobs.evaluate import evaluations
from fsm_rollout.trajectory.journal import metadata, trajectory_ids
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.kit import CONFIGS
from tests.unit.engines.http.stand_ins import ChatStandIn
from tests.unit.engines.http.test_chat import openai_answer

INTERRUPTED = Path("interrupted")  # is there until a reward has been interrupted
RUN = f"""
agent: {CONFIGS}/agents/single_turn.yaml
prompts: prompts.jsonl
n: 2
reward: exact_answer
engine: {{kind: scripted, turns: ["It is 4."]}}
variants:
  right: {{}}
  wrong: {{engine: {{turns: ["It is 5."]}}, n: 1}}
out: runs/sums
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    prompts = [
        {"messages": [{"role": "user", "content": f"What is 2 + 2, asked {i}?"}], "answer": "4"} for i in range(70)
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts), "utf-8")
    (tmp_path / "run.yaml").write_text(RUN, "utf-8")
    return tmp_path


def evaluated(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["eval", *arguments])
    assert done.exit_code == code, done.output
    return done.stdout


def test_variants_run_beside_one_another_each_in_a_folder_of_its_own(place: Path) -> None:
    right, wrong = json.loads(evaluated("run.yaml", "--json", "limit=5"))
    assert (right["run"], right["prompts"], right["samples"], right["score"]["value"]) == ("right", 5, 10, 1.0)
    assert (wrong["run"], wrong["prompts"], wrong["samples"], wrong["score"]["value"]) == ("wrong", 5, 5, 0.0)
    assert json.loads(metadata(place / "runs/sums-eval/right")["run"])["validate"] is True


def test_an_agent_alone_is_told_how_to_name_prompts(place: Path) -> None:
    with pytest.raises(ConfigError, match=r"tool_agent.yaml: is an agent's, which names no prompts; .* --data FILE"):
        evaluations(CONFIGS / "agents/tool_agent.yaml", ["n=2"])


def test_it_ends_when_the_score_is_known_and_the_prompts_of_a_look_are_drawn(place: Path) -> None:
    """All are right, so 32 of 70 prompts are enough for ± 0.1, at 98.3% since there are three looks."""
    stats = json.loads(evaluated("run.yaml", "--json", "--until", "0.1"))[0]
    assert (stats["prompts"], stats["samples"]) == (32, 64)
    assert stats["confidence"] == pytest.approx(1 - 0.05 / 3)
    assert stats["score"]["high"] - stats["score"]["low"] <= 0.2
    taken = {int(name.partition("/")[0]) for name in trajectory_ids(place / "runs/sums-eval/right")}
    assert max(taken) > 40, "the first of the file would have been the easy ones"
    # One that was cut off after its samples, before its results, ends at the same look, with the same promise.
    (place / "runs/sums-eval/right/summary.json").unlink()
    assert json.loads(evaluated("run.yaml", "--json", "--until", "0.1"))[0] == stats


def test_what_is_finished_is_not_done_again_and_what_is_not_goes_on(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated("run.yaml", "limit=5")
    monkeypatch.setattr(runner, "Rollout", None)  # whatever ran now would fail
    assert [each["samples"] for each in json.loads(evaluated("run.yaml", "--json", "limit=5"))] == [10, 5]
    monkeypatch.undo()
    monkeypatch.chdir(place)
    assert "finished run" in CliRunner().invoke(app, ["eval", "run.yaml", "limit=6"]).output
    (place / "runs/sums-eval/right/summary.json").unlink()
    assert json.loads(evaluated("run.yaml", "--json", "limit=5"))[0]["samples"] == 10
    assert (place / "runs/sums-eval/right/summary.json").is_file()


def test_prompts_that_have_come_to_the_file_since_are_evaluated_too(place: Path) -> None:
    prompts = (place / "prompts.jsonl").read_text("utf-8").splitlines(keepends=True)
    for count in (2, 3):
        (place / "prompts.jsonl").write_text("".join(prompts[:count]), "utf-8")
        assert [each["samples"] for each in json.loads(evaluated("run.yaml", "--json"))] == [2 * count, count]


def test_an_agents_file_is_enough_with_prompts_and_a_reward(place: Path) -> None:
    agent = str(CONFIGS / "agents/single_turn.yaml")
    engine = 'engine={kind: scripted, turns: ["It is 4."]}'
    stats = json.loads(
        evaluated(agent, engine, "reward=exact_answer", "limit=3", "--data", "prompts.jsonl", "-n", "4", "--json")
    )[0]
    assert (stats["prompts"], stats["samples"], list(stats["pass@k"])) == (3, 12, ["1", "2", "4"])
    assert (place / "runs/single_turn-eval").is_dir()
    assert "prompts" in CliRunner().invoke(app, ["eval", agent]).output


def test_looks_and_a_target_do_not_go_together(place: Path) -> None:
    output = CliRunner().invoke(app, ["eval", "run.yaml", "target_groups=3", "--until", "0.1"]).output
    assert "leave out 'target_groups'" in output


@pytest.mark.parametrize(
    ("text", "temperature"), [("n: 1", 0.0), ("n: 4", None), ("n: 4\nvalidation_sampling: {temperature: 0.3}", 0.3)]
)
def test_samples_of_one_prompt_are_not_all_the_same(place: Path, text: str, temperature: float | None) -> None:
    (place / "run.yaml").write_text(RUN.replace("n: 2", text).partition("variants:")[0] + "out: runs/sums", "utf-8")
    (config,) = evaluations(place / "run.yaml", [])
    assert config.validation_sampling.temperature == temperature


def interrupts(trajectory: Trajectory) -> float:
    if INTERRUPTED.is_file():
        signal.raise_signal(signal.SIGINT)
        INTERRUPTED.unlink()
    return 1.0


def test_the_command_that_goes_on_where_an_agents_evaluation_was_interrupted(place: Path) -> None:
    INTERRUPTED.touch()
    engine = 'engine={kind: scripted, turns: ["It is 4."]}'
    words = ["eval", str(CONFIGS / "agents/single_turn.yaml"), engine, "limit=3", f"reward={__name__}:interrupts"]
    words += ["--data", "prompts.jsonl", "-n", "2", "--by", "answer"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        done = CliRunner().invoke(app, [*words, "--replace"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.exit_code == 130
    assert done.output.endswith(f"interrupted; to continue: {shlex.join(['fsm-rollout', *words])}\n")
    again = CliRunner().invoke(app, words)
    assert (again.exit_code, "3 × 2" in again.output) == (0, True), again.output


def test_a_hosted_model_stands_in_the_table_with_what_it_cost(place: Path) -> None:
    server = ChatStandIn(repeat(openai_answer("It is 4.")))
    try:
        hosted = (
            f"{{kind: chat, turns: null, model: o4-mini, base_url: '{server.url}/v1', price: {{input: 1, output: 2}}}}"
        )
        (place / "run.yaml").write_text(RUN.replace("right: {}", f"hosted: {{engine: {hosted}}}"), "utf-8")
        table = evaluated("run.yaml", "limit=5")
        hosted_stats, wrong = json.loads(evaluated("run.yaml", "--json", "limit=5"))
    finally:
        server.stop()
    assert (hosted_stats["score"]["value"], hosted_stats["samples"], len(server.asked)) == (1.0, 10, 10)
    assert hosted_stats["cost"] == pytest.approx(10 * 160 / 1e6)
    assert "cost" not in wrong
    assert "0.00016 (0.0016 in all)" in table
    runs = [str(place / "runs/sums-eval" / name) for name in ("wrong", "hosted")]
    compared = CliRunner().invoke(app, ["compare", *runs, "--json"])
    assert json.loads(compared.stdout)[0]["figures"]["cost"]["value"] == pytest.approx(160 / 1e6)
    for arguments in (["show", runs[1]], ["show", runs[1], "-o", str(place / "report.html")], ["replay", runs[1]]):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
    assert "<dt>cost</dt><dd>0.0016</dd>" in (place / "report.html").read_text("utf-8")
    refused = CliRunner().invoke(app, ["export", runs[1]])
    assert refused.exit_code == 2, refused.output
    assert "there is nothing to train on" in " ".join(refused.output.split())
