"""Tests on a changed copy of the repository, in a process of their own.

Invariant: the repository itself is never changed. The package is imported afresh in each process, from the copy alone;
what is heavy and not ours was imported before the fork. Nothing that the tests started outlives their process.
"""

import importlib
import io
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("fsm_rollout", "tests", "configs", "examples", "benchmarks", "diagrams", "docs")
"""Folders, and all files beside them."""
EXAMPLES = 25
"""As few as `make test` draws of anything."""
MEMORY = 24 << 30
"""Bytes of addresses that a mutant may take: one that never ends must not take the machine with it."""
PASSED, FAILED = 0, 1
"""Exit statuses of pytest."""
BROKE_DOWN, OUT_OF_TIME = 99, 124


@dataclass(frozen=True)
class Verdict:
    """What became of a copy."""

    status: int
    """Pytest's, or one of the above."""
    test: str
    """The first that failed."""
    seconds: float
    """Of CPU time, with the programs that its tests started."""
    last: str = ""
    """The test that was begun last, and how long it had run at the end, in seconds."""
    last_seconds: float = 0.0


def warm_up() -> None:
    """Import what takes long and is not ours."""
    import hypothesis
    import pytest
    import tensordict
    import torch
    import transformers

    assert all((hypothesis, pytest, tensordict, torch.__version__, transformers.AutoTokenizer))
    for name in [name for name in sys.modules if name.partition(".")[0] == "fsm_rollout"]:
        del sys.modules[name]  # what an entry point has brought in is ours, and not mutated


def in_a_child(
    change: Callable[[Path], None],
    tests: Iterable[str],
    within: float = 3600,
    plugins: Iterable[object] = (),
    python: Path | None = None,
) -> Verdict:
    """Fork, so that the package is imported afresh, change a copy there, and run tests on it until one fails.

    Args:
        change: What becomes of the copy; it is given its root.
        tests: As pytest takes them.
        within: Seconds after which all is ended.
        plugins: Of pytest; with any, all tests are run, also after one that fails.
        python: The program that runs the tests, if it is another than this one.
    """
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receiver)
        status = BROKE_DOWN
        try:
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
                _copy(Path(folder))
                change(Path(folder))
                if python is None:
                    status = _run(Path(folder), list(tests), list(plugins), sender)
                else:
                    status = _run_by(python, Path(folder), list(tests), sender)
        except BaseException as error:  # whatever it is, it is told in the table
            os.write(sender, f"FAILED {type(error).__name__}: {error}\n".encode())
        finally:
            os.write(sender, f"STATUS {status}\n".encode())
            os._exit(0)
    os.close(sender)
    over = threading.Timer(within, _kill, [child])
    over.start()
    status, failed, running, since = OUT_OF_TIME, "", "", time.monotonic()
    with os.fdopen(receiver, encoding="utf-8", errors="replace") as pipe:
        for kind, _, text in (line.rstrip("\n").partition(" ") for line in pipe):
            if kind == "RUNS":
                running, since = text, time.monotonic()
            elif kind == "FAILED":
                failed = failed or text.removeprefix("tests/")
            elif kind == "STATUS":
                status = int(text)
    last_seconds = time.monotonic() - since
    over.cancel()
    _, _, used = os.wait4(child, 0)
    return Verdict(status, failed, used.ru_utime + used.ru_stime, running, last_seconds)


def _kill(pid: int) -> None:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for member in [*process.children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                member.send_signal(signal.SIGKILL)


def _copy(root: Path) -> None:
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, root)
        elif path.name in COPIED:
            shutil.copytree(path, root / path.name, ignore=shutil.ignore_patterns("__pycache__"))


def _run_by(python: Path, root: Path, tests: list[str], told: int) -> int:
    """Run another environment's pytest on the copy in ``root``; tell which test failed."""
    words = [str(python), "-m", "pytest", "-qx", "-p", "no:cacheprovider", "-W", "default", *tests]
    environment = os.environ | {"PYTHONPATH": str(root), "HYPOTHESIS_PROFILE": "fast"}
    done = subprocess.run(words, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for line in done.stdout.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            os.write(told, f"FAILED {line.partition(' ')[2]}\n".encode())
    return done.returncode


def _run(root: Path, tests: list[str], plugins: list[object], told: int) -> int:
    """Run pytest in this process, on the copy in ``root``; tell which test runs, and which failed."""
    import pytest
    from hypothesis import Phase, settings

    class Told:
        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            """Keep what was asked for, in that order: by ids on its command line pytest does not find all."""
            place = {test: number for number, test in enumerate(tests)}
            found = [
                (min((place[name] for name in _names(item) if name in place), default=None), item) for item in items
            ]
            items[:] = [item for number, item in sorted(((n, i) for n, i in found if n is not None), key=itemgetter(0))]

        def pytest_runtest_logstart(self, nodeid: str) -> None:
            os.write(told, f"RUNS {nodeid}\n".encode())

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
            """Take a test that is named itself and does not run for one that fails: it has run before."""
            report = yield
            if report.skipped and item.nodeid in tests:
                report.outcome, report.longrepr = "failed", "it is skipped"
            return report

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                os.write(told, f"FAILED {report.nodeid}\n".encode())

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if report.failed:
                os.write(told, f"FAILED {report.nodeid} cannot be collected\n".encode())

    os.chdir(root)
    sys.path.insert(0, str(root))
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # this runner's own; the copy's tests are imported
    importlib.invalidate_caches()
    package = importlib.import_module("fsm_rollout")
    assert Path(str(package.__file__)).is_relative_to(root), "the tests would run on another copy of the package"
    # The same examples every time, and no shrinking: that a test fails is all that matters here.
    settings.register_profile(
        "mutants",
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
    )
    os.environ["HYPOTHESIS_PROFILE"] = "mutants"
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={root}", "-c", "pyproject.toml"]
        options += ["-p", "no:unraisableexception"]  # what a mutant leaves behind is not what it is tried for
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # it was imported before the fork
        options += ["-m", "not ray and not sglang"]  # they would take all the time there is
        options += [] if plugins else ["-x"]
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        return int(pytest.main([*options, *files], plugins=[Told(), *plugins]))


def _names(item: Any) -> tuple[str, str, str]:
    """Return what may stand for a test: its file, its function, itself."""
    return item.nodeid.partition("::")[0], item.nodeid.partition("[")[0], item.nodeid
