"""The shape of a step: all that decides its glue except the text that is filled in.

Invariant: computed from the last turn and the new messages, in time that does not grow with a known history
or the tools. Anything out of the ordinary has no shape, and so goes to the reference.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsm_rollout.chat.adjacency import Adjacency, Pairs
from fsm_rollout.chat.messages import made_id

_TURN_KEYS = frozenset({"role", "content", "tool_calls", "reasoning_content", "reasoning", "thinking"})
_NEW_KEYS = frozenset({"role", "content", "name", "tool_call_id"})


@dataclass(frozen=True, slots=True)
class Shape:
    """``key`` equal means: the same scaffold, if it holds after this order of roles. The values fill it."""

    key: Hashable
    pairs: Pairs
    contents: list[str]
    ids: list[str]

    def values(self) -> list[str]:
        """Return what the slots of a scaffold are filled with."""
        return self.contents + self.ids


def shape_of(
    history: Sequence[Mapping[str, Any]], new_messages: Sequence[Mapping[str, Any]], adjacency: Adjacency
) -> Shape | None:
    """Return the shape of a step, or None if it is not an ordinary one."""
    try:
        last = history[-1]
        if last["role"] != "assistant" or not last.keys() <= _TURN_KEYS or len(new_messages) == 0:
            return None
        said = last["content"]
        if said is not None and type(said) is not str:
            return None
        position = len(history) - 1
        call_ids: list[str] = []
        key: list[Hashable] = [tuple(last), bool(said)]
        for number, call in enumerate(last.get("tool_calls") or ()):
            function = call["function"]
            arguments = function["arguments"]
            if type(arguments) is str:
                arguments = json.loads(arguments)
            if type(arguments) is not dict or len(call) > 3 or len(function) > 2:
                return None
            id_, name = call.get("id"), function["name"]
            if type(name) is not str or not (id_ is None or type(id_) is str):
                return None
            call_ids.append(id_ or made_id(position, number))
            key.append(name)
        open_ids = call_ids.copy()
        contents: list[str] = []
        ids: list[str] = []
        for index, message in enumerate(new_messages, position + 1):
            role, content = message["role"], message["content"]
            if type(content) is not str or role == "assistant" or not message.keys() <= _NEW_KEYS:
                return None
            if content and content.isspace():
                return None
            name = message.get("name")
            if type(role) is not str or not (name is None or type(name) is str):
                return None
            id_ = message.get("tool_call_id")
            if role == "tool":
                if id_ is None:
                    id_ = open_ids.pop(0) if open_ids else made_id(index, 0)
                elif id_ in open_ids:
                    open_ids.remove(id_)
                if not id_.isalnum():
                    return None
            elif id_ is not None:
                return None
            contents.append(content)
            ids.append(id_ or "")
            key.append((role, tuple(message), name, bool(content), len(id_ or "")))
        names = call_ids + ids
        key.append(tuple([names.index(name) for name in names]))
        hash(tuple_key := tuple(key))
        pairs = adjacency.pairs(history)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RecursionError):
        return None
    return Shape(tuple_key, pairs, contents, ids)
