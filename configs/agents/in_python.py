"""A tool that computes by running code: what `code_user.yaml` calls."""

from __future__ import annotations

from typing import Literal

from fsm_rollout.tools.sandbox import python


class Calculate(python):
    """The embedded model's calculator, as a line of Python that runs in the trajectory's sandbox.

    A model that writes code calls ``fsm_rollout.tools.sandbox:python`` itself. This one has learnt to call a
    calculator, so the tool writes the line.
    """

    async def execute(self, left: int, operator: Literal["+", "-", "*"], right: int) -> str:  # type: ignore[override]
        """Apply one arithmetic operation to two whole numbers.

        Args:
            left: The first number.
            operator: What to do with them.
            right: The second number.
        """
        return await super().execute(f"{left} {operator} {right}")
