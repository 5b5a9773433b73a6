"""``pytest --fsm-engine module:factory``, as somebody meets it who has written an engine."""

import sys

import pytest

from tests.cases import FILES, table

GOOD = FILES["an engine that echoes"]
QUIET = ("-p", "no:cacheprovider")


@pytest.fixture
def folder(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder with the engines above as ``my_engine.py``, which is forgotten again."""
    monkeypatch.delitem(sys.modules, "my_engine", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (pytester.path / "my_engine.py").write_text(GOOD, "utf-8")
    return pytester


def test_a_good_engine_keeps_its_promises(folder: pytest.Pytester) -> None:
    result = folder.runpytest_inprocess("-v", "--fsm-engine", "my_engine:make", *QUIET)
    result.assert_outcomes(passed=10)
    result.stdout.fnmatch_lines(["my_engine.py::4-abort PASSED*"])
    result.stdout.fnmatch_lines(["my_engine.py::4-abort: abort: abort() ends a request and keeps all that was*"])


def test_a_broken_promise_is_named_with_number_and_sentence(folder: pytest.Pytester) -> None:
    result = folder.runpytest_inprocess("--fsm-engine", "my_engine:DropsStopTokens", *QUIET)
    counts = result.parseoutcomes()
    assert counts["failed"] >= 1
    assert counts["failed"] + counts.get("passed", 0) == 10
    result.stdout.fnmatch_lines(
        [
            "my_engine.py::3-stop-tokens: promise 3: *the stop token was dropped (check 'stop tokens')",
            "  it says: A sampled stop token is part of the ids*",
        ]
    )


def test_one_promise_is_run_by_its_name(folder: pytest.Pytester) -> None:
    result = folder.runpytest_inprocess("--fsm-engine", "my_engine:make_later", "my_engine.py::3-stop-tokens", *QUIET)
    result.assert_outcomes(passed=1)


@pytest.mark.parametrize(("factory", "message"), table("laws")["what makes no engine is said"])
def test_what_makes_no_engine_is_said(folder: pytest.Pytester, factory: str, message: str) -> None:
    result = folder.runpytest_inprocess("--fsm-engine", factory, "-k", "stop-tokens", *QUIET)
    usage = result.ret == pytest.ExitCode.USAGE_ERROR
    if not usage:
        result.assert_outcomes(failed=1, deselected=9)
    (result.stderr if usage else result.stdout).fnmatch_lines([message])


def test_the_help_says_what_it_does(folder: pytest.Pytester) -> None:
    folder.runpytest_inprocess("--help").stdout.fnmatch_lines(["*--fsm-engine=MODULE:FACTORY*", "*engine protocol*"])
