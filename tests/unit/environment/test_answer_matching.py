"""What counts as a stated answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.environment.answer_matching import gives_answer, stated_answers


@pytest.mark.parametrize(
    ("text", "expected", "gives"),
    [
        ("The answer is 380.", "380", True),
        ("The answer is 380.", 380, True),
        ("The answer is 380.", "38", False),
        ("The answer is -15.", "-15", True),
        ("The answer is −15.", "-15", True),
        ("The answer is -15.", "15", False),
        ("The answer is 1,234.50!", "1234.5", True),
        ("The answer is 3.0", 3, True),
        ("The answer is 12 + 3 = 15.", "15", True),
        ("The answer is 12 + 3 = 15.", "12", False),
        ("The answer is 10-5", "-5", False),
        ("The answer is 7. No, the answer is 8.", "8", True),
        ("The answer is 7. No, the answer is 8.", "7", False),
        ("The ANSWER IS: **42**. Shall I do 7 more?", "42", True),
        ("The answer is 42\nand 43", "42", True),
        ("So it is 41 and then 42", "42", True),
        ("42", "42", True),
        ("I called it 3 times. It is 42.", "42", True),
        ("The answer is Paris.", "paris", True),
        ("The answer is New York.", "New  York", True),
        ("The answer is New York.", "york", True),
        ("The answer is London.", "Paris", False),
        ("The answer is twenty-one.", "twenty-one", True),
        ("The answer is A380.", "380", False),
        ("The answer is", "", False),
        ("", "1", False),
        ("   ", "", False),
        ("The answer is nan", "nan", True),
        ("The answer is 1e999999999", "1", False),
        ("The answer is 1, 2, 3", "123", False),
    ],
)
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
