"""Where a turn's text first holds a string, found from its tokens as they come.

Invariant: the answer is the fewest tokens of the turn whose text holds one of the strings, however they come in pieces;
so whoever looks (an engine while it samples, the ledger of requests) finds the same end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsm_rollout.engines.protocol import Request


class StopStrings:
    """Looks for strings in what is sampled.

    Args:
        strings: at least one.
        tokenizer: the model's.
        before: the tokens of the turn before; strings that those hold do not count, one that begins there does.
    """

    def __init__(self, strings: Sequence[str], tokenizer: Any, before: Sequence[int] = ()) -> None:
        self._strings, self._tokenizer = strings, tokenizer
        # As many tokens before as a string can begin in: a character is at most four of them.
        self._reach = 4 * max(map(len, strings))
        self._before: list[int] = list(before[-self._reach :])
        while self._before and self._holds(self._before):
            del self._before[0]

    @classmethod
    def of(cls, request: Request, tokenizer: Any) -> StopStrings:
        """Return what looks for a request's ``sampling.stop``."""
        return cls(request.sampling.stop, tokenizer, request.ids[len(request.ids) - request.of_turn :])

    def end(self, ids: Sequence[int]) -> int | None:
        """Take the next tokens; return how many of them it takes to complete a string, ``None``: none is."""
        text_ids = [*self._before, *ids]
        if not self._holds(text_ids):
            self._before = text_ids[-self._reach :]
            return None
        too_few, enough = 0, len(ids)
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            if self._holds(text_ids[: len(self._before) + middle]):
                enough = middle
            else:
                too_few = middle
        return enough

    def _holds(self, ids: list[int]) -> bool:
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(string in text for string in self._strings)
