"""Apply each mistake of the catalogue to a copy of the package, and print which law caught it.

    python -m tests.mutants [NAME…]     from the repository's root; a NAME is a part of a mutant's name

Invariant: a mutant is caught when one of the tests that it names fails, and by nothing else: a copy without mutants
must pass those tests first. It is to be caught within 20 seconds of CPU time, by a test that is about it. Exit status 1
when one survives, or is caught late.
"""

import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path

from tests.mutants.catalogue import MUTANTS, Mutant
from tests.mutants.runner import FAILED, PASSED, in_a_child, warm_up

PROCESSES = 2
WITHIN = 20.0
"""Seconds of CPU time in which a mutant is to be caught; those of a busy machine's clock would say little."""


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
        sound = pool.submit(in_a_child, unchanged, tuple(needed))
        under_way = {pool.submit(in_a_child, partial(apply, mutant), mutant.tests): mutant for mutant in chosen}
        width = max(len(mutant.name) for mutant in chosen)
        for done in as_completed(under_way):
            mutant, verdict = under_way[done], done.result()
            caught = verdict.status == FAILED
            survivors += not caught
            late += caught and verdict.seconds > WITHIN
            by = verdict.test if caught else f"SURVIVES (pytest: {verdict.status}) {verdict.test}"
            by = f"LATE {by}" if caught and verdict.seconds > WITHIN else by
            print(f"{mutant.name:<{width}}  {verdict.seconds:5.1f} s  {by}\n{'':<{width}}           {mutant.law}",
                  flush=True)  # fmt: skip
        clean = sound.result()
    if clean.status != PASSED:
        print(f"without any mutant a test fails: {clean.test}; what was caught above proves nothing")
        return 1
    print(
        f"{len(chosen) - survivors} of {len(chosen)} caught, {late} of them after more than {WITHIN:g} s of CPU time; "
        "without a mutant the same tests pass"
    )
    return 1 if survivors or late else 0


def unchanged(_: Path) -> None:
    """Leave a copy as it is."""


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
