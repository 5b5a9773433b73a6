"""Every mutant of the catalogue still has its text to change, and changing it gives Python."""

import ast

import pytest

from tests.kit import ROOT
from tests.mutants.catalogue import MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_applied(mutant: Mutant) -> None:
    text = (ROOT / "fsm_rollout" / mutant.file).read_text("utf-8")
    assert text.count(mutant.old) == 1, f"{mutant.file} has changed; choose another text for '{mutant.name}'"
    assert mutant.old != mutant.new
    ast.parse(text.replace(mutant.old, mutant.new))
    assert mutant.tests
    assert all(_stands(test) for test in mutant.tests)


def _stands(test: str) -> bool:
    file, _, name = test.partition("[")[0].partition("::")
    return (ROOT / file).exists() and f"def {name}(" in (ROOT / file).read_text("utf-8") + "def ("


def test_mutants_have_names_of_their_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 24
