"""Bad input to `fsm-rollout run`: exit code 2, one line per problem, no traceback, nothing written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fsm_rollout import TrajectoryBatch
from fsm_rollout.cli import app
from tests.kit import ROOT
from tests.programs import fsm_rollout

CONFIGS = ROOT / "configs"
AGENT = (CONFIGS / "agents/tool_user.yaml").read_text("utf-8").replace("{system: solver.md}", "{}")
PROMPT = {"messages": [{"role": "user", "content": "What is 1 + 2?"}], "interaction_kwargs": {"turns": []}}
RUN = """
agent: agent.yaml
prompts: prompts.jsonl
engine: {kind: scripted, turns: ["The answer is 3."]}
out: OUT
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "agent.yaml").write_text(AGENT, "utf-8")
    (tmp_path / "prompts.jsonl").write_text(json.dumps(PROMPT) + "\n", "utf-8")
    (tmp_path / "run.yaml").write_text(RUN.replace("OUT", str(tmp_path / "out")), "utf-8")
    return tmp_path


def refused(place: Path, *overrides: str) -> str:
    done = CliRunner().invoke(app, ["run", str(place / "run.yaml"), *overrides])
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert not (place / "out").exists(), "something was written"
    return done.output


def test_the_place_is_sound(place: Path) -> None:
    done = CliRunner().invoke(app, ["run", str(place / "run.yaml")])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        ("run.yaml", "agent.yaml", "agnet.yaml", "agnet.yaml"),
        ("run.yaml", "prompts.jsonl", "nothing.jsonl", "nothing.jsonl"),
        ("run.yaml", "engine:", "engin:", "did you mean 'engine'"),
        ("run.yaml", "engine:", "limits: {}\nengine:", "'limits' is the agent's, not the run's; set it in"),
        ("run.yaml", "kind: scripted", "kind: skripted", "scripted"),
        ("run.yaml", "{kind: scripted, turns: ", "{kind: transformers, model: no/such/model, x: ", "x"),
        ("run.yaml", 'kind: scripted, turns: ["The answer is 3."]', "kind: transformers, model: no/such", "no/such"),
        ("run.yaml", "prompts.jsonl", "prompts.csv", "prompts.csv"),
        ("run.yaml", "out:", 'reward: "fsm_rollout.rewards:exact_anser"\nout:', "did you mean 'exact_answer'"),
        ("agent.yaml", "GENERATING: {", "GENERATNG: {", "GENERATING"),
        ("agent.yaml", "calculator:calculate", "calculator:calculat", "did you mean 'calculate'"),
        ("agent.yaml", "fsm_rollout.tools.calculator:calculate", "json:dumps", "json:dumps"),
        ("agent.yaml", "dest: TERMINATED", "dest: TERMINTED", "did you mean 'TERMINATED'"),
        ("prompts.jsonl", "messages", "mesages", "'messages' is missing; is it 'mesages'?"),
        ("run.yaml", "out:", 'reward: "fsm_rollout.rewards:exact_answer"\nout:', "has no 'answer', which reward"),
        ("run.yaml", "out:", 'group_filter: "fsm_rollout.rewards:scores_difer"\nout:', "run.yaml:5: 'fsm_rollout.rewa"),
        ("prompts.jsonl", '{"messages"', '{"messages', "prompts.jsonl:1"),
        ("prompts.jsonl", "turns", "turn", "turn"),
        ("prompts.jsonl", '"turns": []', '"turns": "not a list"', "turns"),
        ("prompts.jsonl", '"role": "user"', '"role": "usr"', "usr"),
    ],
)  # fmt: skip
def test_one_mistake_one_clear_message(place: Path, file: str, old: str, new: str, says: str) -> None:
    text = (place / file).read_text("utf-8")
    assert old in text
    (place / file).write_text(text.replace(old, new), "utf-8")
    shown = refused(place)
    assert says in shown
    assert "starting the engines" not in shown or "interaction_kwargs" in shown  # it is found before that


def test_a_kind_given_on_the_command_line_is_to_blame_for_the_file_s_keys(place: Path) -> None:
    assert refused(place, "engine.kind=openai").splitlines() == [
        "override 'engine.kind=openai': engine 'policy': 'urls' is missing",
        f"override 'engine.kind=openai': engine 'policy': unknown key 'turns' ({place / 'run.yaml'}:4; "
        "engine.turns=null takes it out)",
    ]
    done = CliRunner().invoke(app, ["run", str(place / "run.yaml"), "engine.kind=transformers", "engine.turns=null"])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("sed=4", "did you mean 'seed'"),
        ("n=zero", "n"),
        ("n=0", "n"),
        ("engine.kindd=x", "kindd"),
        ("agent.limits.tool_cals=3", "override 'agent.limits.tool_cals=3': limits: unknown key 'tool_cals'; did"),
        ("agent.limits.tool_calls=many", "override 'agent.limits.tool_calls=many': limits.tool_calls"),
        ("engine.kind=vllm", "override 'engine.kind=vllm': engine 'policy': engine kind 'vllm' does not exist; use"),
        ("engine.tokenizer=no/such", "override 'engine.tokenizer=no/such': engine 'policy': model 'no/such': there"),
        ("track=wandbb", "override 'track=wandbb': track: tracker 'wandbb' does not exist; did you mean 'wandb'?"),
        ("nonsense", "nonsense"),
        ("limits.tool_calls=3", "is the agent's; write agent.limits.tool_calls=3"),
        ("states.GENERATING.timeout=3", "is the agent's; write agent.states.GENERATING.timeout=3"),
    ],
)
def test_wrong_overrides(place: Path, override: str, says: str) -> None:
    assert says in refused(place, override)


def test_an_agent_and_a_run_are_told_apart(place: Path) -> None:
    agent, run = str(place / "agent.yaml"), str(place / "run.yaml")
    for command, file, says in (("run", agent, "is an agent's YAML, which `fsm-rollout check` takes"),
                                ("check", run, "is a run's YAML, which `fsm-rollout run` takes")):  # fmt: skip
        done = CliRunner().invoke(app, [command, file])
        (line,) = done.output.splitlines()
        assert (done.exit_code, line.startswith(f"{file}: {says}")) == (2, True), line


def test_empty_and_missing_files(place: Path) -> None:
    (place / "prompts.jsonl").write_text("", "utf-8")
    assert "prompts.jsonl" in refused(place)
    (place / "run.yaml").unlink()
    assert "run.yaml" in refused(place)


def test_a_prompt_longer_than_the_window_ends_alone(place: Path) -> None:
    """It is no mistake of form: its trajectories end with their own stop reason, the others go on."""
    long = {**PROMPT, "messages": [{"role": "user", "content": "many words " * 400}]}
    (place / "prompts.jsonl").write_text(json.dumps(PROMPT) + "\n" + json.dumps(long) + "\n", "utf-8")
    done = CliRunner().invoke(app, ["run", str(place / "run.yaml"), "engine.max_context=300"])
    assert done.exit_code == 0, done.output
    summary = json.loads((place / "out/summary.json").read_text("utf-8"))
    assert summary["stop_reasons"] == {"answered": 1, "prompt_too_long": 1}


@pytest.mark.parametrize(("setting", "says"), [("null", "not set"), ("4096", "4,096")])
def test_a_window_that_ends_a_trajectory_is_named(place: Path, setting: str, says: str) -> None:
    talks = 'engine: {kind: scripted, turns: ["' + "word " * 200 + '"], max_context: 200}'
    (place / "run.yaml").write_text(
        (place / "run.yaml").read_text("utf-8").replace(RUN.splitlines()[3], talks), "utf-8"
    )
    options = [f"agent.limits.context_tokens={setting}", "agent.states.GENERATING.sampling.max_tokens=null"]
    done = CliRunner().invoke(app, ["run", str(place / "run.yaml"), *options])
    assert done.exit_code == 0, done.output
    line = f"the window of engine 'policy' is 200 tokens, and context_tokens is {says}"
    assert f"limit:context_tokens (1 of 1): {line}" in done.output
    summary = json.loads((place / "out/summary.json").read_text("utf-8"))
    assert summary["details"] == {"limit:context_tokens": line}


def test_a_limit_of_the_agent_needs_no_explanation(place: Path) -> None:
    talks = 'engine: {kind: scripted, turns: ["' + "word " * 200 + '"], max_context: 200}'
    (place / "run.yaml").write_text(
        (place / "run.yaml").read_text("utf-8").replace(RUN.splitlines()[3], talks), "utf-8"
    )
    options = ["agent.limits.context_tokens=200", "agent.states.GENERATING.sampling.max_tokens=null"]
    done = CliRunner().invoke(app, ["run", str(place / "run.yaml"), *options])
    assert "limit:context_tokens 1" in done.output
    assert "window" not in done.output


ESCAPES = "[/x]\x1b[31m"


def test_names_from_files_are_printed_as_text(place: Path) -> None:
    (place / "prompts.jsonl").write_text(json.dumps(PROMPT | {"prompt_id": ESCAPES}) + "\n", "utf-8")
    failing = ["reward=json:dumps"]
    for options in ([], ["--replace", *failing]):
        done = CliRunner().invoke(app, ["run", str(place / "run.yaml"), *options])
        assert done.exit_code == (1 if options else 0), done.output
        assert "[/x]␛[31m/0" in done.output
        assert "\x1b" not in done.output
    (place / "prompts.jsonl").write_text(json.dumps(PROMPT | {"prompt_id": ESCAPES, "tools_kwargs": {"x": 1}}) + "\n")
    done = CliRunner().invoke(app, ["run", str(place / "run.yaml"), "--replace"])
    assert (done.exit_code, "\x1b" in done.output, "␛[31m" in done.output) == (2, False, True)


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ({"tool_kwargs": {}}, ":1: nothing reads 'tool_kwargs'; did you mean 'tools_kwargs'?"),
        ({"interactions_kwargs": {}}, ":1: nothing reads 'interactions_kwargs'; did you mean 'interaction_kwargs'?"),
        ({"tools_kwargs": 7}, ":1: tools_kwargs must be a mapping, got 7"),
        ({"interaction_kwargs": [1]}, ":1: interaction_kwargs must be a mapping, got [1]"),
    ],
)
def test_misspelt_and_wrong_kwargs_of_prompts(place: Path, field: dict[str, object], says: str) -> None:
    (place / "prompts.jsonl").write_text(json.dumps(PROMPT | field) + "\n", "utf-8")
    assert f"prompts.jsonl{says}" in refused(place)


def test_what_a_prompt_replaces_or_nearly_says_is_told_once(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    (place / "agent.yaml").write_text(AGENT.replace("main: {}", 'main: {system: "Be brief."}'), "utf-8")
    own = {"messages": [{"role": "system", "content": "Shout."}, *PROMPT["messages"]], "limit": 3}
    (place / "prompts.jsonl").write_text(
        "".join(json.dumps(each) + "\n" for each in (PROMPT, PROMPT | own) * 2), "utf-8"
    )
    assert CliRunner().invoke(app, ["run", str(place / "run.yaml")]).exit_code == 0
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "system message" in line] == [
        "2 prompts (the first is '1') have a system message of their own; it replaces that of agent 'tool_user' "
        "(in main)"
    ]
    assert [line for line in lines if "'limit'" in line] == [
        "only your own code reads the prompts' field 'limit'; did you mean 'limits'?"
    ]


def test_out_must_be_a_folder(place: Path) -> None:
    (place / "taken").write_text("mine", "utf-8")
    assert "taken" in refused(place, f"out={place / 'taken'}")
    assert (place / "taken").read_text("utf-8") == "mine"


def test_a_run_that_replaces_another_leaves_other_files_alone(place: Path) -> None:
    for options in ([], ["--replace"]):
        assert CliRunner().invoke(app, ["run", str(place / "run.yaml"), *options]).exit_code == 0
        (place / "out" / "notes.txt").write_text("mine", "utf-8")
    assert (place / "out" / "notes.txt").exists()


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["check", "--help"], ["new", "--help"]])
def test_help_teaches_by_example(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0
    assert "fsm-rollout" in done.output


def test_a_target_and_a_filter_from_the_run_file(place: Path) -> None:
    prompts = [PROMPT | {"prompt_id": str(i), "answer": 3 if i % 2 else 4} for i in range(8)]
    (place / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts), "utf-8")
    kept = 'engine: {kind: scripted, max_running: 1, turns: [{text: "The answer is 3.", delay: 0.01}]}'
    (place / "run.yaml").write_text((place / "run.yaml").read_text("utf-8").replace(RUN.splitlines()[3], kept), "utf-8")
    asked = ["target_groups=2", "over_sample=4", "group_filter=tests.integration.test_cli_run:solved"]
    asked.append("reward=fsm_rollout.rewards:exact_answer")
    done = CliRunner().invoke(app, ["run", str(place / "run.yaml"), *asked])
    assert done.exit_code == 0, done.output
    summary = json.loads((place / "out/summary.json").read_text("utf-8"))
    aside = summary["stop_reasons"]["suspended"]
    assert 1 <= aside <= 8 - 4, "on a busy machine another one may end before the rest is set aside"
    assert summary["stop_reasons"]["answered"] == 8 - aside
    assert 2 <= summary["groups_dropped"] <= 8 - aside - 2
    assert sorted(TrajectoryBatch.load(place / "out/batch").tensordict["group_id"]) == ["1", "3"]


REWARD = """
def correct(trajectory):
    if int(trajectory.group_id) % 4:
        raise KeyError("answer")
    return {"score": 1.0, "length": 5}
"""


def test_rewards_that_mostly_fail_make_a_failed_run(place: Path) -> None:
    (place / "rewards_of_mine.py").write_text(REWARD, "utf-8")
    (place / "prompts.jsonl").write_text((json.dumps(PROMPT) + "\n") * 8, "utf-8")
    done = CliRunner().invoke(app, ["run", str(place / "run.yaml"), "reward=rewards_of_mine:correct"])
    assert done.exit_code == 1
    assert "score           1.000 (scored 2 of 8); length 5.000" in done.output
    first = "scored 2 of 8; the first without a score: 1/0: KeyError: 'answer' (at rewards_of_mine.py:4, in correct)"
    assert first in done.output
    assert "the reward failed for 6 of 8" in done.output
    summary = json.loads((place / "out/summary.json").read_text("utf-8"))
    assert (summary["scored"], summary["reward_parts"], len(summary["reward_errors"])) == (2, {"length": 5.0}, 6)
    batch = TrajectoryBatch.load(place / "out/batch").tensordict
    assert batch["token_level_scores"].sum(1).isnan().tolist() == [bool(i % 4) for i in range(8)]
    assert batch["reward_parts"][:2] == [{"length": 5.0}, {}]
    again = CliRunner().invoke(app, ["resume", str(place / "out"), "reward=fsm_rollout.rewards:exact_answer"])
    assert again.exit_code == 2
    assert "2 trajectories of the run" in again.output
    assert "were scored by rewards_of_mine:correct, and a run has one reward" in again.output


def test_a_reward_that_never_worked_may_be_replaced(place: Path) -> None:
    (place / "broken_rewards.py").write_text("def broken(trajectory):\n    return 1 / 0\n", "utf-8")
    done = CliRunner().invoke(app, ["run", str(place / "run.yaml"), "reward=broken_rewards:broken"])
    assert (done.exit_code, "scored 0 of 1" in done.output) == (1, True)
    again = CliRunner().invoke(app, ["resume", str(place / "out"), "reward=tests.integration.test_cli_run:always"])
    assert (again.exit_code, "score           1.000" in again.output) == (0, True), again.output


def always(trajectory: object) -> float:
    return 1.0


def test_a_filter_that_turns_everything_down_fails_the_run(place: Path) -> None:
    (place / "prompts.jsonl").write_text((json.dumps(PROMPT) + "\n") * 8, "utf-8")
    asked = ["target_groups=1", "max_filtered=3", "group_filter=fsm_rollout.rewards:scores_differ", "n=2"]
    done = CliRunner().invoke(app, ["run", str(place / "run.yaml"), *asked])
    assert done.exit_code == 1
    assert "group filter 'scores_differ' has turned down 4 groups, and 0 of the 1 that were asked for" in done.output
    assert f"to continue: fsm-rollout resume {place / 'out'} max_filtered=" in done.output
    assert "Traceback" not in done.output


def solved(group: list[object]) -> bool:
    return any(getattr(trajectory, "score", 0.0) for trajectory in group)


def test_a_folder_of_somebody_else_s_is_left_alone(place: Path) -> None:
    mine = place / "mine"
    (mine / "batch").mkdir(parents=True)
    (mine / "batch/precious.txt").write_text("keep me", "utf-8")
    assert "holds 'batch', and no journal" in refused(place, f"out={mine}")
    assert (mine / "batch/precious.txt").read_text("utf-8") == "keep me"
    for options in ([], ["--replace"]):  # a run's own folder is written again
        done = CliRunner().invoke(app, ["run", str(place / "run.yaml"), *options])
        assert done.exit_code == 0, done.output


def test_a_run_of_which_everything_failed_says_why_and_fails(place: Path) -> None:
    text = (
        (place / "run.yaml").read_text("utf-8").replace('"The answer is 3."', '{text: x, error: "Overload: no room"}')
    )
    (place / "run.yaml").write_text(text + "failures: {engine: {attempts: 1}}\n", "utf-8")
    done = CliRunner().invoke(app, ["run", str(place / "run.yaml")])
    assert done.exit_code == 1
    assert "failed:Overload (1 of 1): Overload: no room" in done.output
    assert "every trajectory failed" in done.output


GRADED = """
agent: graded
limits: {assistant_turns: 2, response_tokens: 64}
states:
  PENDING: {}
  GENERATING: {timeout: 60}
  GRADING: {handler: "grader_of_mine:Grade", timeout: 5, max_visits: 2}
transitions:
  - {trigger: prompted, source: PENDING, dest: GENERATING}
  - {trigger: generated, source: GENERATING, dest: GRADING}
  - {trigger: graded, source: GRADING, dest: TERMINATED, stop_reason: graded}
"""
GRADER = """
from fsm_rollout import Outcome, State
class Grade(State):
    triggers = ("graded",)
    async def run(self, trajectory, ctx):
        return Outcome("graded")
"""


@pytest.mark.parametrize("beside", ["the agent", "the command"])
def test_code_is_found_beside_the_agent_and_where_the_command_is_given(place: Path, beside: str) -> None:
    folder = place / "elsewhere"
    folder.mkdir()
    (place / "agent.yaml").write_text(GRADED, "utf-8")
    (place / "prompts.jsonl").write_text(json.dumps({"messages": PROMPT["messages"]}) + "\n", "utf-8")
    (place if beside == "the agent" else folder).joinpath("grader_of_mine.py").write_text(GRADER, "utf-8")

    def command(*arguments: str, cwd: Path) -> str:
        done = fsm_rollout(*arguments, cwd=cwd)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "ends within" in command("check", "../agent.yaml", cwd=folder)
    assert "graded 1" in command("run", "../run.yaml", cwd=folder)
    page = place / "page.html"
    command("show", "out", "-o", "page.html", cwd=place)
    assert "which fails here" not in page.read_text("utf-8"), "pages find it again"


def test_wrong_keys_of_engines_are_named_with_their_line(place: Path) -> None:
    text = (place / "run.yaml").read_text("utf-8")
    several = "engine: {kind: scripted, trns: []}\nengines:\n  judge:\n    kind: skripted\n"
    (place / "run.yaml").write_text(text.replace(text.splitlines()[3], several), "utf-8")
    first, second = refused(place).splitlines()
    assert f"{place / 'run.yaml'}:4: engine 'policy': unknown key 'trns'; did you mean 'turns'" in first
    assert f"{place / 'run.yaml'}:7: engine 'judge': engine kind 'skripted' does not exist" in second
    problems = refused(place, "engine={kind: scripted, turns: [a], tps: 1}", "engines={}")
    assert problems.startswith(
        "override 'engine={kind: scripted, turns: [a], tps: 1}': engine 'policy': unknown key 'tps'"
    )


OWN_ENGINE = """
from fsm_rollout import ScriptedEngine
from fsm_rollout.model.folders import load_tokenizer, model_folder

class Echo(ScriptedEngine):
    def __init__(self, says: str, times: int = 1):
        super().__init__([says * times], tokenizer=load_tokenizer(model_folder("embedded")))
"""


def test_an_engine_of_ones_own_runs_from_the_run_file(place: Path) -> None:
    (place / "engine_of_mine.py").write_text(OWN_ENGINE, "utf-8")
    text = (place / "run.yaml").read_text("utf-8")
    own = 'engine: {kind: "engine_of_mine:Echo", says: The answer is 3., replicas: 2}'
    (place / "run.yaml").write_text(text.replace(text.splitlines()[3], own), "utf-8")
    for changes, line in (("engine.times=many", "times should be"), ("engine.sayz=a", "did you mean 'says'?")):
        assert line in refused(place, changes)
    (place / "run.yaml").write_text(text.replace(text.splitlines()[3], own.replace("says", "sayz")), "utf-8")
    assert f"{place / 'run.yaml'}:4: engine 'policy': unknown key 'sayz'; did you mean 'says'?" in refused(place)
    (place / "run.yaml").write_text(text.replace(text.splitlines()[3], own), "utf-8")
    done = CliRunner().invoke(app, ["run", str(place / "run.yaml")])
    assert done.exit_code == 0, done.output
    summary = json.loads((place / "out/summary.json").read_text("utf-8"))
    assert (summary["trajectories"], summary["stop_reasons"]) == (1, {"answered": 1})
