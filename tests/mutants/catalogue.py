"""The mistakes of ``tests/cases/mutants.yaml``.

Invariant: each ``old`` occurs exactly once in its file (a test holds that), and each mutant breaks the law that it
names, so a test of that law fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

TABLE = Path(__file__).resolve().parents[1] / "cases" / "mutants.yaml"
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
    table: dict[str, Any] = yaml.safe_load(TABLE.read_text("utf-8"))
    lists = table["tests"]
    return tuple(
        Mutant(
            **entry | {"tests": tuple(test for name in entry.get("tests", DEFAULT) for test in lists.get(name, [name]))}
        )
        for section in table["mutants"].values()
        for entry in section
    )


MUTANTS = catalogue()
