"""Which roles have followed which in a history: what templates that insist on an order look at.

Invariant: equal to a scan of the whole history, but a history that goes on from one seen before costs only its
new messages. Histories are recognised by the identity of their assistant turns, which are kept alive here, some
``MOST_CHARACTERS`` of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fsm_rollout.chat.scaffold import Recent

Pairs = frozenset[tuple[str, str]]
MOST_CHARACTERS = 2**24


class Adjacency:
    """Answers for the histories of many trajectories."""

    def __init__(self, size: int = 8192) -> None:
        self._seen: Recent[int, tuple[Mapping[str, Any], int, Pairs]] = Recent(size)
        self._characters = 0
        """At least as many as the turns that are kept have."""
        self._same: dict[Pairs, Pairs] = {}

    def pairs(self, history: Sequence[Mapping[str, Any]]) -> Pairs:
        """Return the set of (role, next role) in ``history``, a turn with one call told from one with several.

        Raises:
            KeyError, TypeError, AttributeError: for messages that are not OpenAI-style.

        """
        size = len(history)
        start, known = 0, frozenset[tuple[str, str]]()
        for position in range(size - 1, -1, -1):
            message = history[position]
            if message["role"] != "assistant":
                continue
            seen = self._seen.get(id(message))
            if seen is not None and seen[0] is message and seen[1] == position:
                start, known = position + 1, seen[2]
                break
            if position < size - 1:  # the turn before the last was not seen: nothing before it will be
                break
        if start == size:
            return known
        before = _kind(history[start - 1]) if start else ""
        kinds = [_kind(message) for message in history[start:]]
        pairs = known.union(zip([before, *kinds], kinds, strict=False))
        if len(self._same) > 4096:
            self._same.clear()
        pairs = self._same.setdefault(pairs, pairs)  # one object for equal sets: dict lookups compare by identity
        self._characters += _characters(history[-1])
        if self._characters > MOST_CHARACTERS:  # what still goes on is scanned once more
            self._seen.clear()
            self._characters = _characters(history[-1])
        self._seen.put(id(history[-1]), (history[-1], size - 1, pairs))
        return pairs


def _characters(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list | tuple) else 0


def _kind(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is not None and type(content) is not str:
        raise TypeError("content that is not text is for the reference to refuse")
    calls = message.get("tool_calls")
    role = message["role"]
    names = [call["function"]["name"] for call in calls or ()]
    if type(role) is not str or not all(type(name) is str for name in names):
        raise TypeError("so is this")
    return f"{role}{min(len(names), 2)}" if names else role
