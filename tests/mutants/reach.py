"""Which test runs which line of the core, and how long it takes: measured once for each file of tests as it is now.

What tests leave in programs of their own is not seen.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from coverage import Coverage
from coverage.numbits import num_in_numbits, numbits_to_nums

from tests.mutants.runner import FAILED, PASSED, ROOT, in_a_child

SEARCHED = ("tests/unit/**/test_*.py", "tests/laws/test_*.py", "tests/trainers/test_laws.py")
ELSEWHERE = {
    "tools/sandbox/": ["test_sandbox.py"],
    "tools/mcp_server.py": ["test_mcp.py"],
    "tools/placement.py": ["test_process_placement.py"],
    "tools/commands.py": ["test_foreign_programs.py"],
    "states/external/handler.py": ["test_foreign_programs.py"],
    "scheduler/worker": ["test_workers.py"],
    "jobs/tracking.py": ["test_trackers.py"],
    "jobs/": ["test_cli_run.py", "test_demo_run.py", "test_cli_resume.py"],
    "trajectory/journal/": ["test_journal_tools.py"],
}
"""Tests of `tests/integration` for what begins so: those that start programs, which cannot be measured."""
CACHE = ROOT / ".mutation"


class Measure:
    """A plugin of pytest: writes a file of coverage, with tests as its contexts, for each file of tests."""

    def __init__(self) -> None:
        self._file, self._seconds = "", dict[str, float]()
        self._coverage: Coverage | None = None

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if (file := nodeid.partition("::")[0]) != self._file:
            self.pytest_sessionfinish()
            self._file, self._seconds = file, {}
            place(file, "sqlite").unlink(missing_ok=True)
            self._coverage = Coverage(place(file, "sqlite"), source=["fsm_rollout"], config_file=False, messages=False)
            self._coverage.start()
        assert self._coverage is not None
        self._coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration
        if report.outcome != "passed":
            self._seconds[report.nodeid] = float("inf")  # shows nothing

    def pytest_sessionfinish(self) -> None:
        if self._coverage is not None:
            self._coverage.stop()
            self._coverage.save()
            ran = [self._file, *(of_package(name) for name in self._coverage.get_data().measured_files())]
            known = {"seconds": self._seconds, "files": {name: digest(Path.cwd() / name) for name in ran}}
            place(self._file, "json").write_text(json.dumps(known), "utf-8")


def place(file: str, end: str) -> Path:
    """Return where something is kept of a file of tests."""
    return CACHE / f"{file.removesuffix('.py').replace('/', '.')}.{end}"


def of_package(path: str) -> str:
    """Return the path of a module of the package within the repository, from one in any copy."""
    return f"fsm_rollout/{path.rpartition('/fsm_rollout/')[2]}"


def digest(path: Path) -> str:
    """Return what changes when a file does."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


def known_of(file: str) -> dict[str, Any] | None:
    """Return what was measured of a file of tests, if it and all that it runs are as they were."""
    if not (kept := place(file, "json")).exists():
        return None
    known: dict[str, Any] = json.loads(kept.read_text("utf-8"))
    return known if all(digest(ROOT / name) == old for name, old in known["files"].items()) else None


class Reach:
    """What is known of the tests."""

    def __init__(self) -> None:
        CACHE.mkdir(exist_ok=True)
        programs = sorted({f"tests/integration/{name}" for names in ELSEWHERE.values() for name in names})
        files = [str(path.relative_to(ROOT)) for name in SEARCHED for path in sorted(ROOT.glob(name))] + programs
        if new := [file for file in files if known_of(file) is None]:
            print(f"{len(new)} files of tests are measured", flush=True)
            verdict = in_a_child(lambda _: None, new, plugins=[Measure()])
            if verdict.status not in (PASSED, FAILED):
                raise SystemExit(f"the tests cannot be measured: {verdict.test}")
        self.seconds: dict[str, float] = {}
        self._lines: dict[str, list[tuple[str, bytes]]] = defaultdict(list)
        self._weight: dict[str, int] = defaultdict(int)
        for file in files:
            if (known := known_of(file)) is not None:  # else all its tests are skipped here
                self.seconds |= known["seconds"]
                self._read(place(file, "sqlite"))

    def _read(self, kept: Path) -> None:
        with closing(sqlite3.connect(kept)) as database:
            for file, test, bits in database.execute(
                "select path, context, numbits from line_bits join file on file.id = file_id "
                "join context on context.id = context_id where context != ''"
            ):
                self._lines[of_package(file).partition("/")[2]].append((test, bits))
                self._weight[test] += len(numbits_to_nums(bits))

    def tests_of(self, file: str, lines: Iterable[int] | None) -> Sequence[str]:
        """Return the tests that run one of the lines (any, without), those that are about the file first.

        Then come those that run little else, and are quick; then those of programs.
        """
        found = {
            test for test, bits in self._lines[file]
            if lines is None or any(num_in_numbits(line, bits) for line in lines)
        }  # fmt: skip
        mirror = f"tests/unit/{Path(file).parent}"
        programs = tuple(
            f"tests/integration/{name}::"
            for begins, names in ELSEWHERE.items()
            if file.startswith(begins)
            for name in names
        )
        return [
            *sorted(
                filter(self._passes, found),
                key=lambda test: (not test.startswith(mirror), self._weight[test] * (1 + self.seconds[test])),
            ),
            *(
                test
                for test in self.seconds
                if test.startswith(programs or "-") and test not in found and self._passes(test)
            ),
        ]

    def _passes(self, test: str) -> bool:
        return self.seconds.get(test, float("inf")) < float("inf")
