"""How many turns of an arithmetic dialogue were right before the first mistake: a reward that says where it happened.

``mistaken`` is the predicate with which `until_mistake.yaml` ends a dialogue there.

A call is right when its question needs it and it was not made yet; a turn without a call is right when it states the
answer after all calls. What comes after the first mistake cannot be judged, as it goes on from wrong numbers.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator

import fsm_rollout as fr

Call = tuple[int, str, int]
APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul}
SYMBOLS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}


def right_turns(trajectory: fr.Trajectory) -> float:
    """Return the number of the model's turns before its first mistake."""
    return float(_turns(trajectory)[0])


def mistaken(trajectory: fr.Trajectory) -> bool:
    """Whether one of the model's turns was wrong."""
    right, turns = _turns(trajectory)
    return right < turns


def _turns(trajectory: fr.Trajectory) -> tuple[int, int]:
    """Return how many of the model's turns were right before the first mistake, and how many there are."""
    script = trajectory.extra["interaction_kwargs"]
    answers = [int(answer) for answer in (trajectory.extra["answer"], *script["answers"])]
    stream, right, asked = trajectory.streams[0], 0, -1
    messages = stream.messages[stream.opening - 1 :]
    turns = sum(message["role"] == "assistant" for message in messages)
    needed: list[Call] = []
    for message in messages:
        if message["role"] == "user":
            asked += 1
            needed = list(operations(str(message["content"]), answers[asked - 1]))
        elif message["role"] == "assistant":
            if calls := message.get("tool_calls"):
                call = tuple(calls[0]["function"]["arguments"].values())
                if len(calls) > 1 or call not in needed:
                    break
                needed.remove(call)
            elif needed or message["content"] != f"The answer is {answers[asked]}.":
                break
            right += 1
    return right, turns


def operations(question: str, value: int) -> Iterator[Call]:
    """Yield the calls that a question needs, in one of the possible orders; ``value`` is the answer before it."""
    for verb, number in re.findall(r"(add|subtract|take away|multiply)\D*(\d+)", question.lower()):
        symbol = {"add": "+", "multiply": "*"}.get(verb, "-")  # "Now add 3, then multiply by 4."
        yield value, symbol, int(number)
        value = APPLY[symbol](value, int(number))
    if asked := re.search(r"[(\d].*[+*-].*[\d)]", question):  # "What is (81 + 8) + 79?"
        yield from _walk(ast.parse(asked[0], mode="eval").body)


def _walk(node: ast.expr) -> Iterator[Call]:
    if isinstance(node, ast.BinOp):
        yield from _walk(node.left)
        yield from _walk(node.right)
        yield _value(node.left), SYMBOLS[type(node.op)], _value(node.right)


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp):
        return APPLY[SYMBOLS[type(node.op)]](_value(node.left), _value(node.right))
    assert isinstance(node, ast.Constant)
    return int(node.value)
