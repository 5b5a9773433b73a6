"""Bad input to `fsm-rollout run`: exit code 2, one line per problem, no traceback, nothing written."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fsm_rollout import TrajectoryBatch
from fsm_rollout.cli import app
from tests.cases import FILES, PROGRAMS, table
from tests.kit import CONFIGS
from tests.programs import fsm_rollout

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


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text("utf-8")
    assert old in text
    file.write_text(text.replace(old, new), "utf-8")


def set_engine(place: Path, engine: str) -> None:
    """Give the run another engine, in its fourth line."""
    edit(place / "run.yaml", (place / "run.yaml").read_text("utf-8").splitlines()[3], engine)


def write_prompts(place: Path, *prompts: Mapping[str, object]) -> None:
    (place / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts), "utf-8")


def ran(place: Path, *options: str, code: int = 0) -> str:
    """Run, and return what was printed."""
    done = CliRunner().invoke(app, ["run", str(place / "run.yaml"), *options])
    assert done.exit_code == code, done.output
    return done.output


def summary_of(place: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((place / "out/summary.json").read_text("utf-8"))
    return found


def refused(place: Path, *overrides: str) -> str:
    done = CliRunner().invoke(app, ["run", str(place / "run.yaml"), *overrides])
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert not (place / "out").exists(), "something was written"
    return done.output


def test_the_place_is_sound(place: Path) -> None:
    ran(place)


@pytest.mark.parametrize("case", table("run_mistakes")["cases"], ids=str)
def test_one_mistake_one_clear_message(place: Path, case: dict[str, Any]) -> None:
    if "file" in case:
        edit(place / case["file"], case["old"], case["new"])
    if "prompt" in case:
        write_prompts(place, PROMPT | case["prompt"])
    shown = refused(place, *([case["override"]] if "override" in case else []))
    assert case["said"] in shown
    assert "starting the engines" not in shown or "interaction_kwargs" in shown  # it is found before that


def test_a_kind_given_on_the_command_line_is_to_blame_for_the_file_s_keys(place: Path) -> None:
    assert refused(place, "engine.kind=openai").splitlines() == [
        "override 'engine.kind=openai': engine 'policy': 'urls' is missing",
        f"override 'engine.kind=openai': engine 'policy': unknown key 'turns' ({place / 'run.yaml'}:4; "
        "engine.turns=null takes it out)",
    ]
    ran(place, "engine.kind=transformers", "engine.turns=null")


def test_empty_and_missing_files(place: Path) -> None:
    (place / "prompts.jsonl").write_text("", "utf-8")
    assert "prompts.jsonl" in refused(place)
    (place / "run.yaml").unlink()
    assert "run.yaml" in refused(place)


def test_a_prompt_longer_than_the_window_ends_alone(place: Path) -> None:
    """It is no mistake of form: its trajectories end with their own stop reason, the others go on."""
    long = {**PROMPT, "messages": [{"role": "user", "content": "many words " * 400}]}
    write_prompts(place, PROMPT, long)
    ran(place, "engine.max_context=300")
    assert summary_of(place)["stop_reasons"] == {"answered": 1, "prompt_too_long": 1}


@pytest.mark.parametrize(("setting", "says"), [("null", "not set"), ("4096", "4,096"), ("200", None)])
def test_a_window_that_ends_a_trajectory_is_named(place: Path, setting: str, says: str | None) -> None:
    """A limit of the agent needs no explanation."""
    set_engine(place, 'engine: {kind: scripted, turns: ["' + "word " * 200 + '"], max_context: 200}')
    shown = ran(place, f"agent.limits.context_tokens={setting}", "agent.states.GENERATING.sampling.max_tokens=null")
    assert "limit:context_tokens 1" in shown
    line = f"the window of engine 'policy' is 200 tokens, and context_tokens is {says}"
    assert (f"limit:context_tokens (1 of 1): {line}" in shown) == ("the window of" in shown) == (says is not None)
    assert summary_of(place).get("details", {}) == ({} if says is None else {"limit:context_tokens": line})


GENEROUS = FILES["a tool that rewards"]
LOOK = '<tool_call>\n{"name": "look", "arguments": {"place": "here"}}\n</tool_call>'


def test_its_end_says_what_tools_gave_what_was_filtered_and_what_is_missing(place: Path) -> None:
    (place / "generous.py").write_text(GENEROUS, "utf-8")
    edit(place / "agent.yaml", "fsm_rollout.tools.calculator:calculate", "generous:look")
    edit(place / "agent.yaml", "calculate:", "look:")
    set_engine(place, f"engine: {json.dumps({'kind': 'scripted', 'turns': [LOOK * 2, 'It is 3.']})}")
    write_prompts(place, *[PROMPT] * 3)
    options = ["n=2", "reward=tool_rewards", "group_filter=generous:only_first", "target_groups=3", "max_filtered=9"]
    shown = " ".join(ran(place, *options).split())
    assert "score 0.500 ± 0.000" in shown
    assert "tool rewards 0.500 per trajectory that was given any; 12 in all" in shown
    assert "left out 2 of 3 groups: turned down by the group filter 2" in shown
    assert "1 of 3 groups came, then the prompts ran out" in shown
    summary = summary_of(place)
    assert (summary["groups_dropped"], summary["target_groups"], summary["delivered_groups"]) == (2, 3, 1)
    looked_at = " ".join(CliRunner().invoke(app, ["show", str(place / "out")]).output.split())
    assert "score: 0.500 ± 0.000 tool rewards: 0.5 per trajectory that was given any; 12 in all" in looked_at
    one = CliRunner().invoke(app, ["show", str(place / "out"), "--trajectory", "0/0"]).output
    assert "score 0.5 (tool rewards 0.25, 0.25)" in " ".join(one.split())
    assert one.count("nothing reward 0.25") + one.count("nothing  reward 0.25") == 2


ESCAPES = "[/x]\x1b[31m"


def test_names_from_files_are_printed_as_text(place: Path) -> None:
    write_prompts(place, PROMPT | {"prompt_id": ESCAPES})
    for options in ([], ["--replace", "reward=json:dumps"]):
        shown = ran(place, *options, code=1 if options else 0)
        assert "[/x]␛[31m/0" in shown
        assert "\x1b" not in shown
    write_prompts(place, PROMPT | {"prompt_id": ESCAPES, "tools_kwargs": {"x": 1}})
    shown = ran(place, "--replace", code=2)
    assert ("\x1b" in shown, "␛[31m" in shown) == (False, True)


def test_what_a_prompt_replaces_or_nearly_says_is_told_once(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    (place / "agent.yaml").write_text(AGENT.replace("main: {}", 'main: {system: "Be brief."}'), "utf-8")
    own = {"messages": [{"role": "system", "content": "Shout."}, *PROMPT["messages"]], "limit": 3}
    write_prompts(place, *(PROMPT, PROMPT | own) * 2)
    ran(place)
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
        ran(place, *options)
        (place / "out" / "notes.txt").write_text("mine", "utf-8")
    assert (place / "out" / "notes.txt").exists()


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["check", "--help"], ["new", "--help"]])
def test_help_teaches_by_example(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0
    assert "fsm-rollout" in done.output


def test_a_target_and_a_filter_from_the_run_file(place: Path) -> None:
    prompts = [PROMPT | {"prompt_id": str(i), "answer": 3 if i % 2 else 4} for i in range(8)]
    write_prompts(place, *prompts)
    set_engine(place, 'engine: {kind: scripted, max_running: 1, turns: [{text: "The answer is 3.", delay: 0.01}]}')
    asked = ["target_groups=2", "over_sample=4", "group_filter=tests.integration.test_cli_run:solved"]
    asked.append("reward=fsm_rollout.rewards:exact_answer")
    ran(place, *asked)
    summary = summary_of(place)
    aside = summary["stop_reasons"]["suspended"]
    assert 1 <= aside <= 8 - 4, "on a busy machine another one may end before the rest is set aside"
    assert summary["stop_reasons"]["answered"] == 8 - aside
    assert 2 <= summary["groups_dropped"] <= 8 - aside - 2
    assert sorted(TrajectoryBatch.load(place / "out/batch").tensordict["group_id"]) == ["1", "3"]


REWARD = PROGRAMS["a reward that mostly fails"]


def test_rewards_that_mostly_fail_make_a_failed_run(place: Path) -> None:
    (place / "rewards_of_mine.py").write_text(REWARD, "utf-8")
    write_prompts(place, *[PROMPT] * 8)
    shown = ran(place, "reward=rewards_of_mine:correct", code=1)
    # A busy machine's table has a row more, whose name is longer.
    assert "score 1.000 ± 0.000 (scored 2 of 8); length 5.000" in " ".join(shown.split())
    first = "scored 2 of 8; the first without a score: 1/0: KeyError: 'answer' (at rewards_of_mine.py:3, in correct)"
    assert first in shown
    assert "the reward failed for 6 of 8" in shown
    summary = summary_of(place)
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
    assert "scored 0 of 1" in ran(place, "reward=broken_rewards:broken", code=1)
    again = CliRunner().invoke(app, ["resume", str(place / "out"), "reward=tests.integration.test_cli_run:always"])
    assert (again.exit_code, "score 1.000" in " ".join(again.output.split())) == (0, True), again.output


def always(trajectory: object) -> float:
    return 1.0


def test_a_filter_that_turns_everything_down_fails_the_run(place: Path) -> None:
    write_prompts(place, *[PROMPT] * 8)
    shown = ran(
        place, "target_groups=1", "max_filtered=3", "group_filter=fsm_rollout.rewards:scores_differ", "n=2", code=1
    )
    assert "group filter 'scores_differ' has turned down 4 groups, and 0 of the 1 that were asked for" in shown
    again = (
        f"to continue: fsm-rollout resume {place / 'out'} group_filter=fsm_rollout.rewards:scores_differ max_filtered=…"
    )
    assert again in shown
    assert "Traceback" not in shown


def solved(group: list[object]) -> bool:
    return any(getattr(trajectory, "score", 0.0) for trajectory in group)


def test_a_folder_of_somebody_else_s_is_left_alone(place: Path) -> None:
    mine = place / "mine"
    (mine / "batch").mkdir(parents=True)
    (mine / "batch/precious.txt").write_text("keep me", "utf-8")
    assert "holds 'batch', and no journal" in refused(place, f"out={mine}")
    assert (mine / "batch/precious.txt").read_text("utf-8") == "keep me"
    for options in ([], ["--replace"]):  # a run's own folder is written again
        ran(place, *options)


def test_a_run_of_which_everything_failed_says_why_and_fails(place: Path) -> None:
    edit(place / "run.yaml", '"The answer is 3."', '{text: x, error: "Overload: no room"}')
    shown = ran(place, "failures={engine: {attempts: 1}}", code=1)
    assert "failed:Overload (1 of 1): Overload: no room" in shown
    assert "every trajectory failed" in shown


GRADED = FILES["graded by a module of its own"]
GRADER = FILES["a handler that grades"]


@pytest.mark.parametrize("beside", ["the agent", "the command"])
def test_code_is_found_beside_the_agent_and_where_the_command_is_given(place: Path, beside: str) -> None:
    folder = place / "elsewhere"
    folder.mkdir()
    (place / "agent.yaml").write_text(GRADED, "utf-8")
    write_prompts(place, {"messages": PROMPT["messages"]})
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
    set_engine(place, "engine: {kind: scripted, trns: []}\nengines:\n  judge:\n    kind: skripted\n")
    first, second = refused(place).splitlines()
    assert f"{place / 'run.yaml'}:4: engine 'policy': unknown key 'trns'; did you mean 'turns'" in first
    assert f"{place / 'run.yaml'}:7: engine 'judge': engine kind 'skripted' does not exist" in second
    problems = refused(place, "engine={kind: scripted, turns: [a], tps: 1}", "engines={}")
    assert problems.startswith(
        "override 'engine={kind: scripted, turns: [a], tps: 1}': engine 'policy': unknown key 'tps'"
    )


OWN_ENGINE = FILES["an engine of a run's own"]


def test_an_engine_of_ones_own_runs_from_the_run_file(place: Path) -> None:
    (place / "engine_of_mine.py").write_text(OWN_ENGINE, "utf-8")
    own = 'engine: {kind: "engine_of_mine:Echo", says: The answer is 3., replicas: 2}'
    set_engine(place, own)
    for changes, line in (("engine.times=many", "times should be"), ("engine.sayz=a", "did you mean 'says'?")):
        assert line in refused(place, changes)
    set_engine(place, own.replace("says", "sayz"))
    assert f"{place / 'run.yaml'}:4: engine 'policy': unknown key 'sayz'; did you mean 'says'?" in refused(place)
    set_engine(place, own)
    ran(place)
    summary = summary_of(place)
    assert (summary["trajectories"], summary["stop_reasons"]) == (1, {"answered": 1})
