"""The calculator the embedded model was trained to use: one binary operation a call, on whole numbers."""

from __future__ import annotations

from typing import Literal


def calculate(left: int, operator: Literal["+", "-", "*"], right: int) -> int:
    """Apply one arithmetic operation to two whole numbers.

    Args:
        left: The first number.
        operator: What to do with them.
        right: The second number.
    """
    match operator:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
