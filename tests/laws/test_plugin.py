"""The plugin, as a user meets it: in a pytest of its own, on agents in a folder of their own."""

import re
import shlex
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from fsm_rollout.testing.plugin import agent_checks
from fsm_rollout.testing.plugin.agent_checks import CHECKS, CheckedAgent
from fsm_rollout.testing.simulation.laws import LawBroken
from tests.cases import FILES, table
from tests.kit import ROOT
from tests.laws.plugin_agents import DEAD_ROW, GOOD, GRADED, LOOKS_UP, RAISES, TOOLS, UNLOADABLE, grader

HANDLERS = table("plugin")
SHIPPED = sorted((ROOT / "configs/agents").glob("*.yaml"))
FEW = ("--fsm-examples", "8", "--fsm-seed", "1", "-p", "no:cacheprovider")


@pytest.fixture
def folder(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder whose modules are forgotten again."""
    monkeypatch.delitem(sys.modules, "grader", raising=False)
    monkeypatch.delitem(sys.modules, "words", raising=False)
    return pytester


def agent(folder: pytest.Pytester, text: str, **modules: str) -> None:
    (folder.path / "agent.yaml").write_text(text, "utf-8")
    for name, source in modules.items():
        (folder.path / f"{name}.py").write_text(source, "utf-8")


def fails(folder: pytest.Pytester, check: str, *lines: str) -> str:
    """Run one check of the folder's agent, which fails and says these lines; return all that it says."""
    result = folder.runpytest_inprocess("--fsm-agents", "agent.yaml", "-k", check, *FEW)
    result.assert_outcomes(failed=1, deselected=7)
    result.stdout.re_match_lines(lines)
    return result.stdout.str()


def assert_told_once(text: str) -> None:
    assert text.count("to see it again:") == 1
    assert text.count("GENERATING: generated -> GRADING") == 1
    assert "\nFAILED agent.yaml::ends - the handler of 'GRADING' (grader:Grade) raised Index" in text


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
@pytest.mark.parametrize("check", sorted(CHECKS.keys() - {"coverage"}))
def test_the_shipped_agents_pass(path: Path, check: str) -> None:
    assert CHECKS[check](CheckedAgent(path, examples=max(5, settings().max_examples // 8)))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_no_transition_of_a_shipped_agent_is_left_out_by_chance(path: Path) -> None:
    """Not that of a late state either, which hears a turn that is cut."""
    subject = CheckedAgent(path, examples=20, seed=1)
    assert CHECKS["coverage"](subject)
    assert "missed" not in subject.notes


def test_items_run_without_a_test_file_and_say_which_rows_were_taken(folder: pytest.Pytester) -> None:
    agent(folder, GOOD)
    result = folder.runpytest_inprocess("--fsm-agents", "*.yaml", *FEW)
    result.assert_outcomes(passed=8)
    result.stdout.fnmatch_lines(["*transitions taken in drawn runs*", "agent.yaml: 3 of 3 transitions taken in 8 runs"])


def test_agents_run_with_other_tests_by_name_and_by_expression(folder: pytest.Pytester) -> None:
    agent(folder, GOOD)
    folder.makepyfile(test_one="def test_one(): pass")
    result = folder.runpytest_inprocess("--fsm-agents", "*.yaml", "test_one.py", "-k", "bound or one", *FEW)
    result.assert_outcomes(passed=2, deselected=7)
    result = folder.runpytest_inprocess("--fsm-agents", "*.yaml", "agent.yaml::rules", *FEW)
    result.assert_outcomes(passed=1)


def test_in_addopts_agents_join_the_other_tests(folder: pytest.Pytester) -> None:
    agent(folder, GOOD)
    folder.makepyfile(test_one="def test_one(): pass")
    folder.makeini("[pytest]\naddopts = --fsm-agents *.yaml")
    folder.runpytest_inprocess("-k", "rules or one", *FEW).assert_outcomes(passed=2, deselected=7)


def test_a_pattern_without_a_file_is_said(folder: pytest.Pytester) -> None:
    result = folder.runpytest_inprocess("--fsm-agents", "nowhere/*.yaml")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*'nowhere/[*].yaml' matches no file*"])


def test_an_agent_that_does_not_load_is_one_failing_item(folder: pytest.Pytester) -> None:
    agent(folder, UNLOADABLE)
    result = folder.runpytest_inprocess("--fsm-agents", "agent.yaml", *FEW)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["agent.yaml:7: transition 1: dest 'GENERATIN' is not defined; did you mean 'GENERATING'? [[]rule 1]"]
    )


@pytest.mark.parametrize(("code", "told"), HANDLERS["at fault"].values(), ids=HANDLERS["at fault"])
def test_a_handler_at_fault_is_named_with_its_story_and_a_line_that_replays_it(
    folder: pytest.Pytester, code: str, told: str
) -> None:
    told = told if told.startswith("the run") else f"the handler of 'GRADING' (grader:Grade) {told}"
    agent(folder, GRADED, grader=grader(code))
    text = fails(folder, "ends", r".*0s  GENERATING: the engine says '.*' \(\d+ tokens, stop\)")
    assert told in text
    assert re.search(r"0s  GENERATING: generated -> GRADING", text)
    (line,) = re.findall(r"^  pytest (agent.yaml::ends .*)$", text, re.MULTILINE)
    again = folder.runpytest_inprocess(*shlex.split(line), "-p", "no:cacheprovider")
    again.assert_outcomes(failed=1)
    assert told in again.stdout.str()


def test_a_ci_log_tells_the_story_once(folder: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")  # pytest's summary is then not cut to the width of the screen
    agent(folder, GRADED, grader=grader(RAISES))
    assert_told_once(fails(folder, "ends", "FAILED .*"))


@pytest.mark.parametrize(
    ("text", "code", "check", "told"),
    [
        (DEAD_ROW, "", "coverage", [r"  GENERATING --generated \[visits_over .*PENDING.*\]--> TERMINATED"]),
        (
            GOOD.replace("limits: {", "limits: {context_tokens: 5, "), "", "coverage",
            [".*no transition was ever taken in 32 runs: every trajectory ended as .*prompt_too_long.*"],
        ),
        (
            GRADED,
            HANDLERS["keeps state"]["on itself"],
            "schedule", [r"agent.yaml::schedule: law 6: (concurrency|max_running|replicas|slow) .* changes its"],
        ),
        (
            GRADED,
            HANDLERS["keeps state"]["on its class"],
            "schedule",
            ["agent.yaml::schedule: law 6: .*", "  and not when the same case ran again: something is kept .*"],
        ),
    ],
    ids=["a row that can never fire", "rows that never do", "state kept on the handler", "kept between runs"],
)  # fmt: skip
def test_what_an_agent_lacks_is_named(
    folder: pytest.Pytester, text: str, code: str, check: str, told: list[str]
) -> None:
    agent(folder, text, grader=grader(code))
    fails(folder, check, *told)


@pytest.mark.parametrize("code", HANDLERS["no fault"].values(), ids=HANDLERS["no fault"])
def test_what_handlers_may_do_is_no_fault(folder: pytest.Pytester, code: str) -> None:
    agent(folder, GRADED.replace("states:", "contexts: {left: {}, right: {}}\nstates:"), grader=grader(code))
    folder.runpytest_inprocess("--fsm-agents", "agent.yaml", *FEW).assert_outcomes(passed=8)


SESAME = FILES["opens"]


def test_a_vocabulary_lets_text_predicates_of_ones_own_hold(folder: pytest.Pytester) -> None:
    agent(folder, SESAME, words='def opens(trajectory):\n    return trajectory.text[::-1] == "emases nepo"\n')
    (folder.path / "said.txt").write_text("open sesame\nlet me in\n", "utf-8")
    options = ("--fsm-agents", "agent.yaml", "-k", "coverage", *FEW)
    result = folder.runpytest_inprocess("-rx", *options)
    result.assert_outcomes(xfailed=1, deselected=7)
    result.stdout.fnmatch_lines(
        ["*2 of 3 transitions taken in 32 runs", "*NEVER*", "XFAIL *never: *opens*--fsm-texts*"]
    )
    result = folder.runpytest_inprocess(*options, "--fsm-texts", "said.txt")
    result.stdout.fnmatch_lines(["agent.yaml: 3 of 3 transitions taken in 8 runs"])
    (folder.path / "said.json").write_text("[]", "utf-8")
    result = folder.runpytest_inprocess(*options, "--fsm-texts", "said.json")
    result.stdout.fnmatch_lines(["*--fsm-texts said.json: give a text a line, or a JSON list of texts*"])


def test_without_a_seed_the_same_runs_are_drawn_each_time(folder: pytest.Pytester) -> None:
    agent(folder, GOOD)
    options = ("-v", "--fsm-agents", "agent.yaml", "--fsm-examples", "8", "-k", "coverage", "-p", "no:cacheprovider")
    first, second = (
        [line for line in folder.runpytest_inprocess(*options).outlines if "-->" in line] for _ in range(2)
    )
    assert len(first) == 3
    assert first == second


def test_the_names_that_v_prints_can_be_pasted(folder: pytest.Pytester) -> None:
    agent(folder, GOOD)
    folder.runpytest_inprocess("-v", "--fsm-agents", "agent.yaml", "-k", "rules", *FEW).stdout.fnmatch_lines(
        ["agent.yaml::rules PASSED*"]
    )


@pytest.mark.parametrize("count", ["0", "-3", "many"])
def test_a_count_of_examples_is_a_count(folder: pytest.Pytester, count: str) -> None:
    agent(folder, GOOD)
    result = folder.runpytest_inprocess("--fsm-agents", "agent.yaml", "--fsm-examples", count)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*--fsm-examples: a number from 1 on, got '{count}'*"])


@pytest.mark.parametrize(("code", "told"), HANDLERS["blocks the loop"].values(), ids=HANDLERS["blocks the loop"])
def test_a_handler_that_blocks_the_loop_is_named_with_its_line(folder: pytest.Pytester, code: str, told: str) -> None:
    agent(folder, GRADED, grader=grader(code))
    folder.syspathinsert()
    subject = CheckedAgent(folder.path / "agent.yaml", examples=3, blocking_seconds=0.2)
    with pytest.raises(LawBroken, match=f"the event loop is blocked: .*{told}"):
        agent_checks.ends(subject)


def test_tools_of_the_users_are_not_called_for_real(folder: pytest.Pytester) -> None:
    agent(folder, LOOKS_UP, words=TOOLS)
    result = folder.runpytest_inprocess("--fsm-agents", "agent.yaml", "-k", "ends or coverage", *FEW)
    result.assert_outcomes(passed=2, deselected=6)


def test_the_fixture_runs_an_agent_in_virtual_time(folder: pytest.Pytester) -> None:
    agent(folder, GOOD)
    folder.makepyfile(
        """
        def test_trajectory(fsm_trajectory):
            trajectory = fsm_trajectory("agent.yaml", ["Hm.", "ANSWER 4"])
            assert (trajectory.stop_reason, trajectory.generations) == ("answered", 2)

        def test_profiles():
            from hypothesis import settings

            assert settings.get_profile("nightly").max_examples == 2000
        """
    )
    folder.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=2)
