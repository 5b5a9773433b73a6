"""The mistakes of ``tests/cases/mutants.yaml``.

Invariant: each ``old`` occurs exactly once in its file (a test holds that), and each mutant breaks the law that it
names, so a test of that law fails.
"""

from dataclasses import dataclass
from itertools import chain

from tests.cases import table

DEFAULT = ["LAWS"]
"""The tests of a mutant that names none."""


@dataclass(frozen=True)
class Mutant:
    """One mistake: where, what stands there, what it becomes, and what that breaks."""

    name: str
    file: str
    """Within ``fsm_rollout/``."""
    old: str
    new: str
    law: str
    tests: tuple[str, ...]
    """Where its law is held, relative to the repository."""


def catalogue() -> tuple[Mutant, ...]:
    """Return all mutants, in the order of the file."""
    found = table("mutants")
    lists = found["tests"]
    mutants: list[Mutant] = []
    for entry in chain.from_iterable(found["mutants"].values()):
        tests = [test for name in entry.pop("tests", DEFAULT) for test in lists.get(name, [name])]
        mutants.append(Mutant(**entry, tests=tuple(tests)))
    return tuple(mutants)


MUTANTS = catalogue()
