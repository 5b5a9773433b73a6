"""What counts as a stated answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.environment.answer_matching import gives_answer, stated_answers
from tests.cases import table


@pytest.mark.parametrize(("text", "expected", "gives"), table("answers")["stated"])
def test_answers(text: str, expected: object, gives: bool):
    assert gives_answer(text, expected) is gives


NUMBERS = st.integers(-(10**12), 10**12)


@given(NUMBERS, NUMBERS, st.booleans())
def test_a_number_is_recognised_by_its_value(number: int, other: int, grouped: bool):
    text = f"The answer is {number:,}." if grouped else f"The answer is {number}."
    assert gives_answer(text, str(number))
    assert gives_answer(text, f"{number}.00")
    assert gives_answer(text, other) == (number == other)


@given(st.text(max_size=80), st.text(max_size=20))
def test_any_text_can_be_read(text: str, expected: str):
    assert gives_answer(text, expected) in (True, False)
    assert len(stated_answers(f"The answer is {text}")) in (0, 1, 2)
