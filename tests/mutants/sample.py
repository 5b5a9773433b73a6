"""Draw mutants of the core at random, and have the tests that run the changed lines try to notice each.

    python -m tests.mutants.sample COUNT SEED     from the repository's root: `make mutation N=60 SEED=1`

A mutant has 60 seconds. It is caught when a test fails or hangs in them; what no test notices survives, and is shown as
a difference. `tests/cases/equivalent.yaml` names changes that nobody can notice, each with its reason: they count for
neither side. Exit status 1 below 85 of 100.

Invariant: the same COUNT and SEED draw the same mutants of the same code, whatever changes beside it.
"""

import difflib
import sys
from functools import partial
from pathlib import Path

from tests.cases import table
from tests.mutants.reach import Reach
from tests.mutants.runner import OUT_OF_TIME, PASSED, ROOT, Verdict, in_a_child, warm_up
from tests.mutants.sites import Site, draw

SECONDS = 60.0
PASS_MARK = 0.85
NOT_USED, NO_TESTS = 4, 5
"""Exit statuses of pytest: its command line was wrong; no test was collected."""
TRAINERS = {
    "verl": ("verl", ["test_laws.py", "test_verl.py"]),
    "trl": ("others", ["test_laws.py", "test_trl.py"]),
    "openenv": ("others", ["test_laws.py", "test_openenv.py"]),
    "": ("others", ["test_laws.py", "test_validators.py"]),
}
"""Adapters by how their names begin; the environment that has their trainer's packages; tests in `tests/trainers`."""


def main(count: int, seed: int) -> int:
    """Try a sample; print what survives, and the score."""
    mutants, equivalent = draw(count, seed), table("equivalent")
    warm_up()
    reach = Reach()
    caught, survivors, known = 0, 0, 0
    for site, operator, text in mutants:
        path = f"fsm_rollout/{site.file}"
        old = (ROOT / path).read_text("utf-8")
        changed = list(difflib.unified_diff(old.splitlines(), text.splitlines(), lineterm="", n=0))[2:]
        if any(reason["file"] == site.file and is_said(reason["becomes"], changed) for reason in equivalent):
            known += 1
            continue
        tests, python = chosen(reach, site)
        verdict = Verdict(NO_TESTS, "", 0.0)
        if tests:
            verdict = in_a_child(partial(write, path, text), tests, SECONDS, python=python)
        what = outcome(verdict, reach)
        caught += bool(what)
        survivors += not what
        said = [
            f"{'caught' if what else 'SURVIVES'}  {path}:{site.start[0]}  {operator}  {what or why(verdict, tests)}"
        ]
        said += [] if what else [f"    {line}" for line in changed if line[0] in "+-"]
        print(*said, sep="\n", flush=True)
    score = caught / max(1, caught + survivors)
    print(f"seed {seed}: {caught} of {caught + survivors} caught ({score:.0%}); {known} more change nothing")
    return 0 if score >= PASS_MARK else 1


def chosen(reach: Reach, site: Site) -> tuple[list[str], Path | None]:
    """Return as many of the tests as may end in time; and what runs them, where that is another Python."""
    for begins, (environment, names) in TRAINERS.items():
        if site.file.startswith(f"adapters/{begins}"):
            python = ROOT / ".venv-over" / environment / "bin" / "python"
            if not python.exists():
                raise SystemExit(f"the adapters are tested with the trainers' own packages: make {python.parents[1]}")
            return ["tests/unit/adapters", *(f"tests/trainers/{name}" for name in names)], python
    tests, left = [], SECONDS
    for test in reach.tests_of(site.file, site.lines):
        if left <= 0:
            break
        tests.append(test)
        left -= reach.seconds[test]
    return tests, None


def outcome(verdict: Verdict, reach: Reach) -> str:
    """Return what has noticed; nothing, if nothing has."""
    if verdict.status == OUT_OF_TIME and not verdict.test:
        hangs = verdict.last and verdict.last_seconds > 10 + 5 * reach.seconds.get(verdict.last, 0.0)
        return f"{verdict.last} hangs" if hangs and ends_unchanged(verdict) else ""
    if verdict.status == NOT_USED:
        raise SystemExit(f"pytest does not take its command line; {verdict.test}")
    return "" if verdict.status in (PASSED, NO_TESTS) else verdict.test or f"pytest: {verdict.status}"


def ends_unchanged(verdict: Verdict) -> bool:
    """Whether the test that was running at the end passes in less time now, without the mutant: machines are busy."""
    return in_a_child(lambda _: None, [verdict.last], verdict.last_seconds).status == PASSED


def why(verdict: Verdict, tests: list[str]) -> str:
    """Return what was tried."""
    if not tests:
        return "no test of units or laws runs it"
    return f"{len(tests)} tests" + (", not all of them in time" if verdict.status == OUT_OF_TIME else "")


def is_said(becomes: str, changed: list[str]) -> bool:
    """Whether a line of the difference is that of a known mutant, whatever its spaces."""
    return any("".join(line[1:].split()) == "".join(becomes.split()) for line in changed if line.startswith("+"))


def write(path: str, text: str, root: Path) -> None:
    """Change a copy."""
    (root / path).write_text(text, "utf-8")


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:3])))
