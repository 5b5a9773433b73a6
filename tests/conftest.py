"""Hypothesis profiles: `fast` while working, `ci` in `make test`, `nightly` to search longer."""

import asyncio
import atexit
import gc
import inspect
import os
import re
import signal
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture import engine as shrinking

from fsm_rollout.concurrency.garbage_collection import YOUNG
from fsm_rollout.testing.plugin.profiles import register
from fsm_rollout.testing.simulation.virtual_time import run_virtual
from tests import fork_server

pytest_plugins = ["pytester", "tests.leftovers", "tests.model_fixtures", "tests.ray_fixtures"]

register()  # by itself where the package is installed; a stale build folder in the working directory can hide that
# Hypothesis has a `ci` of its own, which does not keep as quiet.
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
# Each mutant of the catalogue is caught by as few examples; `nightly` looks for what is rarer.
settings.register_profile(
    "ci", max_examples=25, deadline=None, suppress_health_check=QUIET, derandomize=True,
    phases=[phase for phase in Phase if phase is not Phase.explain], report_multiple_bugs=False,
)  # fmt: skip
# A failing property is reported within seconds. Hypothesis has no setting for how long it shrinks (300 s by default).
assert hasattr(shrinking, "MAX_SHRINKING_SECONDS"), "Hypothesis has changed how it limits shrinking"
shrinking.MAX_SHRINKING_SECONDS = 8
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
# Else Ray's actors have niceness 15: beside four busy processes they got a fiftieth of a core, and starts took minutes.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # Ray spells it so


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """Fork pytest-xdist's workers from one process: each would import for seconds what all of them need."""
    os.environ[fork_server.ADDRESS] = fork_server.ForkServer([*fork_server.HEAVY, *fork_server.COLLECTED]).address
    for spec in filter(lambda spec: spec.popen, specs):
        spec.python = f"{sys.executable} -S -P {fork_server.__file__}"


def pytest_configure() -> None:
    """Collect garbage as rarely as a run does: searching tests spent a fifth of their CPU time on it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # behind `&`, and what tests interrupt inherits it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own, in virtual time where it is marked so."""
    if not inspect.iscoroutinefunction(pyfuncitem.function):
        return None
    run = run_virtual if pyfuncitem.get_closest_marker("virtual_time") else asyncio.run
    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True


@pytest.hookimpl(trylast=True)  # after the fixtures
def pytest_sessionfinish() -> None:
    """Look for what tests have left behind once; pytest does so thrice, each a walk through all that was imported."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # libraries tell of what the interpreter's end does not find


@pytest.hookimpl(tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Fail where more was skipped than `MAY_SKIP` (a pattern of reasons) allows: `.ci/run` misses nothing unsaid."""
    if (allowed := os.environ.get("MAY_SKIP")) is None:
        return
    reasons = [report.longrepr[2] for report in terminalreporter.getreports("skipped")]
    if missed := [reason for reason in reasons if not re.search(allowed, reason)]:
        terminalreporter.write_line(f"skipped, and could be installed: {missed}", red=True)
        terminalreporter._session.exitstatus = pytest.ExitCode.TESTS_FAILED  # it has no public name


@pytest.fixture
def pytester(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A pytest within a test, without the plugins that pyproject.toml leaves out: each would import them anew."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:langsmith_plugin -p no:anyio")
    return pytester
