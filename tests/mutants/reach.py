"""Which test runs which line of the core, and how long it takes: measured once for each file of tests as it is now.

What tests leave in programs of their own is not seen.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from coverage import Coverage
from coverage.numbits import num_in_numbits, numbits_to_nums

from tests.mutants.runner import FAILED, PASSED, ROOT, in_a_child

SEARCHED = ("tests/unit/**/test_*.py", "tests/laws/test_*.py", "tests/trainers/test_laws.py")
CACHE = ROOT / ".mutation"


class Measure:
    """A plugin of pytest: writes one file of coverage, with tests as its contexts, for each file of tests."""

    def __init__(self, keys: dict[str, str]) -> None:
        self._keys, self._file, self._seconds = keys, "", dict[str, float]()
        self._coverage: Coverage | None = None

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        file = nodeid.partition("::")[0]
        if file != self._file:
            self.pytest_sessionfinish()
            self._file = file
            place = CACHE / f"{self._keys[file]}.sqlite"
            place.unlink(missing_ok=True)
            self._coverage = Coverage(place, source=["fsm_rollout"], config_file=False, messages=False)
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
            mine = {test: seconds for test, seconds in self._seconds.items() if test.startswith(f"{self._file}::")}
            (CACHE / f"{self._keys[self._file]}.json").write_text(json.dumps(mine), "utf-8")


class Reach:
    """What is known of the tests."""

    def __init__(self) -> None:
        CACHE.mkdir(exist_ok=True)
        code = hashlib.sha256(b"".join(path.read_bytes() for path in sorted((ROOT / "fsm_rollout").rglob("*.py"))))
        files = [path for name in SEARCHED for path in sorted(ROOT.glob(name))]
        keys = {
            str(file.relative_to(ROOT)): hashlib.sha256(code.digest() + file.read_bytes()).hexdigest() for file in files
        }
        if new := sorted(file for file, key in keys.items() if not (CACHE / f"{key}.json").exists()):
            print(f"{len(new)} files of tests are measured", flush=True)
            verdict = in_a_child(lambda _: None, new, plugins=[Measure(keys)])
            if verdict.status not in (PASSED, FAILED):
                raise SystemExit(f"the tests cannot be measured: {verdict.test}")
        self.seconds: dict[str, float] = {}
        self._lines: dict[str, list[tuple[str, bytes]]] = defaultdict(list)
        self._weight: dict[str, int] = defaultdict(int)
        for key in keys.values():
            if (CACHE / f"{key}.json").exists():  # else all its tests are skipped here
                self.seconds |= json.loads((CACHE / f"{key}.json").read_text("utf-8"))
                self._read(CACHE / f"{key}.sqlite")

    def _read(self, place: Path) -> None:
        with sqlite3.connect(place) as database:
            for file, test, bits in database.execute(
                "select path, context, numbits from line_bits join file on file.id = file_id "
                "join context on context.id = context_id where context != ''"
            ):
                self._lines[file.rpartition("/fsm_rollout/")[2]].append((test, bits))
                self._weight[test] += len(numbits_to_nums(bits))

    def tests_of(self, file: str, lines: Iterable[int] | None) -> Sequence[str]:
        """Return the tests that run one of the lines (any, without), those that are about the file first.

        Then come those that run little else, and are quick.
        """
        found = {
            test for test, bits in self._lines[file]
            if lines is None or any(num_in_numbits(line, bits) for line in lines)
        }  # fmt: skip
        mirror = f"tests/unit/{Path(file).parent}"
        return sorted(
            (test for test in found if self.seconds.get(test, float("inf")) < float("inf")),
            key=lambda test: (not test.startswith(mirror), self._weight[test] * (1 + self.seconds[test])),
        )
