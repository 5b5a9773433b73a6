"""A small draw of `make nightly`'s fuzzing: mutated inputs are taken, or refused in words."""

import logging
from collections.abc import Iterator

import pytest

from tests.fuzz import example


@pytest.fixture
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_mutated_inputs_are_taken_or_refused(first: int) -> None:
    assert [found for number in range(first, first + 20) if (found := example(7, number))] == []
