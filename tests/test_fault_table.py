"""The table of faults names tests that there are."""

import re

from tests.kit import ROOT


def test_every_fault_of_the_table_has_its_test() -> None:
    text = (ROOT / "docs/faults.md").read_text("utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", text)
    assert len(named) >= 53, "verl's thirteen, and forty more"
    missing = [f"{file}::{name}" for file, name in named if f"def {name}(" not in (ROOT / file).read_text("utf-8")]
    assert missing == []
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| fault")]
    assert len(rows) == len(named), "each row has its test"
