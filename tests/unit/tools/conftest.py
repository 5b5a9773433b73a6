"""Every test has an empty log, and a gate that opens after it."""

from collections.abc import Iterator

import pytest

from tests.unit.tools.kit import ENTERED, GATE, LOG


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    LOG.clear()
    GATE.clear()
    ENTERED.clear()
    yield
    GATE.set()
