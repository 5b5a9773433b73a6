"""How much a turn has thought, found from its tokens as they come.

Invariant: no more than ``Thinking.tokens`` tokens of a turn stand within its thinking, from behind the token that
completes the opening text to the one that completes the closing text, and what comes behind the last of them is due to
be the closing. That depends on the turn's tokens alone, so it is the same however they come in pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsm_rollout.engines.protocol import Request, Thinking
from fsm_rollout.engines.stop_strings import StopStrings


class ThinkingBudget:
    """The budget of one request's turn; ``tokenizer`` is the model's."""

    def __init__(self, request: Request, tokenizer: Any) -> None:
        assert request.sampling.thinking is not None
        self.thinking: Thinking = request.sampling.thinking
        self.cut = False  # whether tokens have come that are behind where it has to come
        self._tokenizer = tokenizer
        self._left = self.thinking.tokens
        self._turn(inside=self.thinking.inside)
        said = request.ids[len(request.ids) - request.of_turn :]
        self._silent = not said  # whether nothing of the turn is there yet
        while True:
            found = self._tag.end(said)
            if self._inside:
                self._left = max(0, self._left - (len(said) if found is None else found))
            if found is None:
                break
            said = said[found:]
            self._turn(inside=not self._inside)
        self.due = self._inside and not self._left  # whether the closing has to come next

    def _turn(self, *, inside: bool) -> None:
        self._inside = inside
        self._tag = StopStrings([self.thinking.closing if inside else self.thinking.opening], self._tokenizer)

    def end(self, ids: Sequence[int]) -> int | None:
        """Take the next tokens; return how many of them may stand before the closing, ``None``: all, without one."""
        at = 0
        self._silent = self._silent and not len(ids)
        while True:
            found = self._tag.end(ids[at:])
            count = len(ids) - at if found is None else found
            if self._inside:
                if count > self._left or (count == self._left and found is None):
                    at, self._left, self.due = at + self._left, 0, True
                    self.cut = at < len(ids)
                    return at
                self._left -= count
            if found is None:
                return None
            at += found
            self._turn(inside=not self._inside)

    def close(self) -> None:
        """Take note that the closing has been written."""
        self.due = False
        self._turn(inside=False)

    @property
    def bound(self) -> int | None:
        """How many tokens may be asked for before it is known whether the closing is due; ``None``: any number."""
        if self._inside:
            return self._left
        return self.thinking.lead + self._left if self._silent and self.thinking.lead else None
