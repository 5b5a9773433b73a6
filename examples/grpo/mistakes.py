"""Where an arithmetic dialogue goes wrong: a reward that points at the first wrong token, as a compiler does.

``mistaken`` is the predicate with which `until_mistake.yaml` ends a dialogue there.

A turn is right when it is the next call that its question needs, or, after all calls, the answer. Inner operations come
before outer ones: in ``94 + (9 * 8)``, ``94 + 72`` cannot be known before ``9 * 8``. Of two that are independent, as in
``(1 + 2) * (3 + 4)``, the left one comes first, as in the dialogues that the checkpoint has learned from.
The first token with which a turn cannot become right any more is its mistake; what comes after cannot be judged.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from operator import attrgetter

import fsm_rollout as fr

Call = tuple[int, str, int]
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"left": %d, "operator": "%s", "right": %d}}\n</tool_call>'
END = "<|im_end|>"
APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul}
SYMBOLS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}


def right_tokens(trajectory: fr.Trajectory) -> float:
    """Return how many tokens the model sampled before its first wrong one."""
    return float(_tokens(trajectory)[0])


def mistaken(trajectory: fr.Trajectory) -> bool:
    """Whether one of the model's tokens was wrong."""
    right, sampled = _tokens(trajectory)
    return right < sampled


def _tokens(trajectory: fr.Trajectory) -> tuple[int, int]:
    """Return how many sampled tokens stand before the first mistake, and how many there are."""
    script = trajectory.extra["interaction_kwargs"]
    given = (trajectory.extra.get("before", 0), trajectory.extra["answer"], *script["answers"])
    answers = [int(answer) for answer in given]  # the one before each question's, then its own
    stream = trajectory.streams[0]
    turns = groupby(stream.tokens.sampled(), key=attrgetter("turn"))
    ids, sampled = stream.tokens.ids, stream.tokens.sampled_length
    right, asked, needed = 0, -1, list[Call]()
    for message in stream.messages[stream.opening - 1 :]:
        if message["role"] == "user":
            asked += 1
            needed = list(operations(str(message["content"]), answers[asked]))
        elif message["role"] == "assistant":
            wanted = (CALL % needed[0] if needed else f"The answer is {answers[asked + 1]}.") + END
            text = ""
            for span in next(turns)[1]:
                for token in ids[span.start : span.end]:
                    text += _texts()[token]
                    if not wanted.startswith(text):
                        return right, sampled
                    right += 1
            if text != wanted:
                return right, sampled + 1  # the turn was cut
            del needed[:1]
    return right, sampled


@cache
def _texts() -> list[str]:
    """Return what each token says."""
    _, tokenizer = fr.load_model("embedded:early")
    return [tokenizer.decode([token]) for token in range(len(tokenizer))]


def operations(question: str, value: int) -> Iterator[Call]:
    """Yield the calls that a question needs, in their order; ``value`` is the answer before it."""
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
