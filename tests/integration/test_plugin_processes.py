"""The plugin in a pytest of its own: what it loads, and what it reports across processes."""

import pytest

from tests.laws.plugin_agents import GOOD, GRADED, RAISES, grader
from tests.laws.test_plugin import FEW, agent, assert_told_once

pytestmark = pytest.mark.process


def test_without_the_option_nothing_is_collected_and_nothing_loaded(pytester: pytest.Pytester) -> None:
    agent(pytester, GOOD)
    pytester.makepyfile(
        test_one="""
        import sys
        def test_nothing_heavy():
            heavy = {"torch", "transformers", "hypothesis", "fsm_rollout.agent.graph", "numpy"} & set(sys.modules)
            assert not heavy
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:hypothesispytest", "-p", "no:anyio", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)


def test_a_ci_log_tells_the_story_once_across_processes(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")  # pytest's summary is then not cut to the width of the screen
    agent(pytester, GRADED, grader=grader(RAISES))
    assert_told_once(
        pytester.runpytest_inprocess("--fsm-agents", "agent.yaml", "-k", "ends", *FEW, "-n", "1").stdout.str()
    )
