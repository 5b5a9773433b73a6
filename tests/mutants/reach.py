"""Which test runs which line of the core, and how long it takes: measured once for each file of tests as it is now.

What tests leave in programs of their own is not seen. Nor is what runs on import: it is for whoever runs any line of
the file, and for the tests that mirror its folder.

Invariant: lines are those of the files as they are now. A file of tests is measured again when it changes, not when the
package does: lines that moved since are followed, and what was changed or came in is run by whoever ran what stood
there.
"""

import difflib
import hashlib
import json
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

from coverage import Coverage
from coverage.numbits import numbits_to_nums

from tests.mutants.runner import FAILED, PASSED, ROOT, in_a_child

SEARCHED = ("tests/unit/**/test_*.py", "tests/laws/test_*.py", "tests/trainers/test_laws.py")
ELSEWHERE = {
    "tools/sandbox/": ["test_sandbox.py"],
    "tools/mcp_server.py": ["test_mcp.py"],
    "tools/placement.py": ["test_process_placement.py"],
    "tools/commands.py": ["test_foreign_programs.py"],
    "states/external/handler.py": ["test_foreign_programs.py"],
    "scheduler/shard": ["test_shards.py", "test_lost_shards.py"],
    "jobs/tracking.py": ["test_trackers.py"],
    "jobs/": ["test_cli_run.py", "test_demo_run.py", "test_cli_resume.py", "test_cli_eval.py"],
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
            data = self._coverage.get_data()
            files = [self._file, *(of_package(name) for name in data.measured_files() if data.lines(name))]
            known = {"seconds": self._seconds, "files": {name: kept(Path.cwd() / name) for name in files}}
            place(self._file, "json").write_text(json.dumps(known), "utf-8")


def place(file: str, end: str) -> Path:
    """Return where something is kept of a file of tests."""
    return CACHE / f"{file.removesuffix('.py').replace('/', '.')}.{end}"


def of_package(path: str) -> str:
    """Return the path of a module of the package within the repository, from one in any copy."""
    return f"fsm_rollout/{path.rpartition('/fsm_rollout/')[2]}"


def kept(path: Path) -> str:
    """Return the digest of a file, which is kept by it."""
    text = path.read_bytes()
    digest = hashlib.sha256(text).hexdigest()
    (CACHE / digest).write_bytes(text)
    return digest


def known_of(file: str) -> dict[str, Any] | None:
    """Return what was measured of a file of tests, if it is as it was and all that it runs still exists."""
    if not place(file, "json").exists():
        return None
    known: dict[str, Any] = json.loads(place(file, "json").read_text("utf-8"))
    is_same = kept(ROOT / file) == known["files"][file]
    return known if is_same and all((ROOT / name).exists() for name in known["files"]) else None


@cache
def followed(name: str, digest: str) -> dict[int, set[int]]:
    """Return for each line of a file as it was those of today that stand in its place."""
    old, new = (path.read_text("utf-8").splitlines() for path in (CACHE / digest, ROOT / name))
    now: dict[int, set[int]] = defaultdict(set)
    for kind, start, end, new_start, new_end in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "equal":
            for line in range(start, end):
                now[line + 1].add(line + 1 + new_start - start)
        else:  # what came in alone goes with the line before it
            for line in range(start, end) or (start - 1,):
                now[line + 1].update(range(new_start + 1, new_end + 1))
    return now


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
        self._lines: dict[str, list[tuple[str, set[int]]]] = defaultdict(list)
        self._weight: dict[str, int] = defaultdict(int)
        for file in files:
            if (known := known_of(file)) is not None:  # else all its tests are skipped here
                self.seconds |= known["seconds"]
                self._read(file, known["files"])

    def _read(self, tests: str, files: dict[str, str]) -> None:
        with closing(sqlite3.connect(place(tests, "sqlite"))) as database:
            for file, test, bits in database.execute(
                "select path, context, numbits from line_bits join file on file.id = file_id "
                "join context on context.id = context_id where context != ''"
            ):
                old, now = numbits_to_nums(bits), followed(of_package(file), files[of_package(file)])
                self._lines[of_package(file).partition("/")[2]].append((test, set().union(*map(now.__getitem__, old))))
                self._weight[test] += len(old)

    def tests_of(self, file: str, lines: Iterable[int] | None) -> Sequence[str]:
        """Return the tests that run one of the lines (on import, without): those first that are about the file.

        Then come those that run little else, and are quick; then those of programs.
        """
        folder = next(up for up in Path(file).parents if (ROOT / "tests/unit" / up).is_dir())
        mirror = f"tests/unit/{folder}/"
        own = f"{mirror}test_{Path(file).stem}.py::"
        found = {test for test, ran in self._lines[file] if lines is None or not ran.isdisjoint(lines)}
        if not found:  # what only runs on import
            found = {test for test, _ in self._lines[file]}
        if lines is None:
            found.update(test for test in self.seconds if test.startswith(mirror))
        programs = tuple(
            f"tests/integration/{name}::"
            for begins, names in ELSEWHERE.items()
            if file.startswith(begins)
            for name in names
        )

        def rank(test: str) -> tuple[bool, bool, float]:
            return not test.startswith(own), not test.startswith(mirror), self._weight[test] * (1 + self.seconds[test])

        return [
            *sorted(filter(self._passes, found), key=rank),
            *(
                test
                for test in self.seconds
                if test.startswith(programs or "-") and test not in found and self._passes(test)
            ),
        ]

    def _passes(self, test: str) -> bool:
        return self.seconds.get(test, float("inf")) < float("inf")
