"""Apply each mistake of the catalogue to a copy of the package, and print which law caught it.

    python -m tests.mutants [NAME…]     from the repository's root; a NAME is a part of a mutant's name

Invariant: the repository itself is never changed. A mutant is caught when one of the tests that it names fails, and by
nothing else: a copy without mutants must pass those tests first. It is to be caught within 20 seconds of CPU time, by a
test that is about it. Exit status 1 when one survives, or is caught late.
"""

from __future__ import annotations

import importlib
import io
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.catalogue import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("fsm_rollout", "tests", "configs", "pyproject.toml", "README.md")
EXAMPLES = 25
"""As few as `make test` draws of anything."""
PROCESSES = 2
WITHIN = 20.0
"""Seconds of CPU time in which a mutant is to be caught; those of a busy machine's clock would say little."""
PASSED, FAILED = 0, 1
"""Exit statuses of pytest."""
BROKE_DOWN = 99


@dataclass(frozen=True)
class Verdict:
    """What became of one mutant."""

    name: str
    status: int
    caught_by: str
    seconds: float
    """Of CPU time, with the programs that its tests started."""


def main(names: Sequence[str]) -> int:
    """Run the mutants whose names hold one of ``names`` (all, without any) and print the table."""
    chosen = [mutant for mutant in MUTANTS if not names or any(name in mutant.name for name in names)]
    if not chosen:
        sys.exit(f"no mutant's name holds {' or '.join(names)}; there are: {', '.join(m.name for m in MUTANTS)}")
    print(f"{len(chosen)} mutants on {PROCESSES} processes", flush=True)
    warm_up()
    # Forked, with all that is heavy imported already (and nothing of ours); a fresh process for each copy.
    pool = ProcessPoolExecutor(
        PROCESSES, mp_context=multiprocessing.get_context("fork"), initializer=os.nice, initargs=(1,),
    )  # fmt: skip
    with pool:
        needed = sorted({test for mutant in chosen for test in mutant.tests})
        survivors = late = 0
        sound = pool.submit(in_a_child, None, tuple(needed))
        under_way = {pool.submit(in_a_child, mutant, mutant.tests): mutant for mutant in chosen}
        width = max(len(mutant.name) for mutant in chosen)
        for done in as_completed(under_way):
            mutant, verdict = under_way[done], done.result()
            caught = verdict.status == FAILED
            survivors += not caught
            late += caught and verdict.seconds > WITHIN
            by = verdict.caught_by if caught else f"SURVIVES (pytest: {verdict.status}) {verdict.caught_by}"
            by = f"LATE {by}" if caught and verdict.seconds > WITHIN else by
            print(f"{mutant.name:<{width}}  {verdict.seconds:5.1f} s  {by}\n{'':<{width}}           {mutant.law}",
                  flush=True)  # fmt: skip
        clean = sound.result()
    if clean.status != PASSED:
        print(f"without any mutant a test fails: {clean.caught_by}; what was caught above proves nothing")
        return 1
    print(
        f"{len(chosen) - survivors} of {len(chosen)} caught, {late} of them after more than {WITHIN:g} s of CPU time; "
        "without a mutant the same tests pass"
    )
    return 1 if survivors or late else 0


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


def in_a_child(mutant: Mutant | None, tests: Iterable[str]) -> Verdict:
    """Fork once more, so that each run imports the package afresh, and wait for the verdict."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receiver)
        status, caught_by = BROKE_DOWN, ""
        try:
            status, caught_by = judge(mutant, tests)
        except BaseException as error:  # whatever it is, it is told in the table
            caught_by = f"{type(error).__name__}: {error}"
        finally:
            os.write(sender, f"{status}\n{caught_by}".encode())
            os._exit(0)
    os.close(sender)
    with os.fdopen(receiver, encoding="utf-8") as pipe:
        status, _, caught_by = pipe.read().partition("\n")
    _, _, used = os.wait4(child, 0)
    name = mutant.name if mutant else "(none)"
    return Verdict(name, int(status or BROKE_DOWN), caught_by, used.ru_utime + used.ru_stime)


def judge(mutant: Mutant | None, tests: Iterable[str]) -> tuple[int, str]:
    """Run tests on a copy of the package with a mutant in it; return pytest's status and the first test that failed."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, copy / name)
        if mutant is not None:
            apply(mutant, copy)
        return run_tests(copy, tests)


def apply(mutant: Mutant, root: Path) -> None:
    """Change the text of a copy.

    Raises:
        ValueError: what is to be changed does not stand there exactly once.
    """
    path = root / "fsm_rollout" / mutant.file
    text = path.read_text("utf-8")
    if text.count(mutant.old) != 1:
        raise ValueError(f"mutant '{mutant.name}': its text occurs {text.count(mutant.old)} times in {mutant.file}")
    path.write_text(text.replace(mutant.old, mutant.new), "utf-8")


def run_tests(root: Path, tests: Iterable[str]) -> tuple[int, str]:
    """Run pytest in this process, on the copy in ``root``."""
    import pytest
    from hypothesis import Phase, settings

    class First:
        """Keeps the first test that failed."""

        failed = ""

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed and not self.failed:
                self.failed = report.nodeid

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if report.failed and not self.failed:
                self.failed = f"{report.nodeid} cannot be collected"

    os.chdir(root)
    sys.path.insert(0, str(root))
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # this runner's own; the copy's tests are imported
    importlib.invalidate_caches()
    package = importlib.import_module("fsm_rollout")
    assert Path(str(package.__file__)).is_relative_to(root), "the tests would run on another copy of the package"
    # The same examples every time, and no shrinking: that a test fails is all that matters here.
    settings.register_profile(
        "mutants", max_examples=EXAMPLES, derandomize=True, database=None, deadline=None, phases=[Phase.generate]
    )
    os.environ["HYPOTHESIS_PROFILE"] = "mutants"
    first, said = First(), io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={root}", "-c", "pyproject.toml"]
        options += ["-p", "no:unraisableexception"]  # what a mutant leaves behind is not what it is tried for
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # it was imported before the fork
        status = pytest.main([*options, *tests], plugins=[first])
    return int(status), first.failed.removeprefix("tests/")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
