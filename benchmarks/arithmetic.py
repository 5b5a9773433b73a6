"""The arithmetic the embedded model is trained and tested on, and the split between the two.

**Held back** is a property of an unordered pair of numbers: a tenth of all pairs, chosen by a checksum of their
text, so the split is the same on every machine and for ever. Two statements hold, and
`tests/unit/model/test_model.py` holds them:

- *Training never meets a held-back pair.* Not between neighbouring numbers of a question, not as the operands of
  any calculator call (those on computed, intermediate results included), not as the sum of a dialogue without tools.
- *A held-back dialogue meets them wherever its text decides:* every two neighbouring numbers of its first question
  are held back (hence the operands of its first call, which are always such neighbours), and so are the operands of
  the first call of every follow-up. Its calls on intermediate results are computed, so they are held back only by
  chance: about one in ten is; the others may have occurred in training.

Numbers written by the user are never negative; results, and so the operands of later calls, may be.
"""

from __future__ import annotations

import operator as operators
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any, Final, TypeAlias
from zlib import crc32

Message: TypeAlias = dict[str, Any]
"""One chat message: `role`, `content` and, for a call, `tool_calls`."""

SYSTEM_PROMPT: Final = "You solve arithmetic with the calculator, one operation at a time."

TOOL_SCHEMA: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Apply one arithmetic operation to two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "left": {"type": "integer", "description": "The first number."},
                "operator": {"type": "string", "enum": ["+", "-", "*"], "description": "What to do with them."},
                "right": {"type": "integer", "description": "The second number."},
            },
            "required": ["left", "operator", "right"],
        },
    },
}
"""The calculator as the chat template shows it to the model: same keys, same order as in training."""

HELD_BACK_ONE_IN: Final = 10
LARGEST_RESULT: Final = 9_999
"""No result of a generated dialogue, intermediate ones included, is larger than this in absolute value."""

_APPLY: Final[dict[str, Callable[[int, int], int]]] = {"+": operators.add, "-": operators.sub, "*": operators.mul}

# An expression tree: a pair is an operation, None in it a number still to be drawn.
_Shape: TypeAlias = "tuple[_Shape | None, _Shape | None]"
_ONE: Final[_Shape] = (None, None)
_SHAPES: Final[dict[int, tuple[_Shape, ...]]] = {
    1: (_ONE,),
    2: ((_ONE, None), (None, _ONE)),
    3: (((_ONE, None), None), ((None, _ONE), None), (_ONE, _ONE), (None, (_ONE, None)), (None, (None, _ONE))),
}

_QUESTIONS: Final = ("What is {}?", "What is {}?", "What is {}?", "Compute {}.", "Please work out {}.")
_FOLLOW_UPS: Final[dict[str, tuple[str, ...]]] = {
    "+": ("Now add {}.", "Add {} to that.", "Now add {} to it."),
    "-": ("Now subtract {}.", "Subtract {} from that.", "Now take away {}."),
    "*": ("Now multiply that by {}.", "Multiply it by {}.", "Now multiply by {}."),
}
_THEN: Final[dict[str, str]] = {"+": "add {}", "-": "subtract {}", "*": "multiply by {}"}


def is_held_back(left: int, right: int) -> bool:
    """Tell whether a pair of numbers belongs to the held-back side of the split, in either order."""
    low, high = sorted((left, right))
    return crc32(f"{low},{high}".encode()) % HELD_BACK_ONE_IN == 0


@dataclass(frozen=True, slots=True)
class Call:
    """One calculator call of the model solution."""

    left: int
    operator: str
    right: int

    @property
    def result(self) -> int:
        """What the calculator returns for it."""
        return _APPLY[self.operator](self.left, self.right)

    @property
    def arguments(self) -> dict[str, int | str]:
        """The arguments in the order the model writes them."""
        return {"left": self.left, "operator": self.operator, "right": self.right}


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user asks at once, and the calls that answer it.

    `numbers` are those written in `text`, in order; the last call's result is the answer.
    """

    text: str
    numbers: tuple[int, ...]
    calls: tuple[Call, ...]

    @property
    def answer(self) -> int:
        """The result of the last call."""
        return self.calls[-1].result

    @property
    def written_pairs(self) -> tuple[tuple[int, int], ...]:
        """The pairs of numbers next to each other in the text."""
        return tuple(pairwise(self.numbers))

    @property
    def called_pairs(self) -> tuple[tuple[int, int], ...]:
        """The operands of every call, in order."""
        return tuple((call.left, call.right) for call in self.calls)


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A question and its follow-ups; each turn's calls begin with the answer of the turn before."""

    turns: tuple[Turn, ...]

    def messages(self) -> list[Message]:
        """Write the whole dialogue as the model should: calls, their results, answers. No system message."""
        return [message for turn in self.turns for message in solution(turn)]

    def prompt(self) -> dict[str, Any]:
        """Give the dialogue as a line of a prompts file: the first question, the rest as the user's script."""
        first, *rest = self.turns
        return {
            "messages": [{"role": "user", "content": first.text}],
            "answer": str(first.answer),
            "interaction_kwargs": {
                "turns": [turn.text for turn in rest],
                "answers": [str(turn.answer) for turn in rest],
            },
        }


def answer_text(answer: int) -> str:
    """Give the sentence that states an answer."""
    return f"The answer is {answer}."


def call_message(arguments: dict[str, Any]) -> Message:
    """Give the assistant message that makes one calculator call."""
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "calculate", "arguments": arguments}}],
    }


def solution(turn: Turn) -> Iterator[Message]:
    """Yield the user's message of one turn, then a call and its result per operation, then the answer."""
    yield {"role": "user", "content": turn.text}
    for call in turn.calls:
        yield call_message(dict(call.arguments))
        yield {"role": "tool", "content": str(call.result)}
    yield {"role": "assistant", "content": answer_text(turn.answer)}


def problem(rng: Random, held_back: bool, operations: int | None = None) -> Turn:
    """Draw a first question of 1 to 3 operations, on one side of the split.

    Args:
        rng: The only source of randomness.
        held_back: True: every two neighbouring numbers are held back. False: neither they nor the operands of any
            call are.
        operations: How many; None draws 1, 2 or 3 with 20, 40 and 40 %.
    """
    if operations is None:
        operations = rng.choices((1, 2, 3), (20, 40, 40))[0]
    while True:
        numbers: list[int] = []
        calls: list[Call] = []
        text, _ = _expression(rng, rng.choice(_SHAPES[operations]), held_back, numbers, calls, outer=True)
        turn = Turn(rng.choice(_QUESTIONS).format(text), tuple(numbers), tuple(calls))
        if _fits(turn) and (held_back or not _meets_held_back(turn)):
            return turn


def follow_up(rng: Random, answer: int, held_back: bool) -> Turn:
    """Draw a request to go on from an answer with one operation or, one time in five, with two.

    Args:
        rng: The only source of randomness.
        answer: What the turn before ended with: the left operand of this turn's first call.
        held_back: True: the operands of the first call, and the numbers written, if two, are held back. False: no
            call's operands are, nor the numbers written.
    """
    while True:
        numbers: list[int] = []
        calls: list[Call] = []
        symbols = rng.choices("+-*", k=rng.choices((1, 2), (4, 1))[0])
        for symbol in symbols:
            numbers.append(_number(rng, symbol))
            calls.append(Call(calls[-1].result if calls else answer, symbol, numbers[-1]))
        if len(symbols) == 1:
            text = rng.choice(_FOLLOW_UPS[symbols[0]]).format(*numbers)
        else:
            text = f"Now {_THEN[symbols[0]]}, then {_THEN[symbols[1]]}.".format(*numbers)
        turn = Turn(text, tuple(numbers), tuple(calls))
        wanted = all(is_held_back(*pair) for pair in (*turn.written_pairs, turn.called_pairs[0]))
        if _fits(turn) and (wanted if held_back else not _meets_held_back(turn)):
            return turn


def dialogue(rng: Random, held_back: bool, operations: int | None = None, follow_ups: int | None = None) -> Dialogue:
    """Draw a question and its follow-ups, all on one side of the split.

    Args:
        rng: The only source of randomness.
        held_back: Which side, see `problem` and `follow_up`.
        operations: Of the first question; None draws 1, 2 or 3.
        follow_ups: How many; None draws 0, 1 or 2.
    """
    turns = [problem(rng, held_back, operations)]
    for _ in range(rng.randrange(3) if follow_ups is None else follow_ups):
        turns.append(follow_up(rng, turns[-1].answer, held_back))
    return Dialogue(tuple(turns))


def small_sum(rng: Random) -> tuple[str, int]:
    """Draw a question on two single digits, for answering without tools, from the training side: text, answer."""
    while True:
        call = Call(rng.randrange(1, 10), rng.choice("+-*"), rng.randrange(1, 10))
        if not is_held_back(call.left, call.right):
            return f"What is {call.left} {call.operator} {call.right}?", call.result


def held_back_dialogues(n: int, seed: int = 0) -> list[Dialogue]:
    """Draw n held-back dialogues with one follow-up and different questions.

    With the default seed the first 512 are, written by `Dialogue.prompt`, the lines of
    `configs/data/arithmetic.jsonl`.
    """
    return _dialogues(n, Random(f"held-back dialogues {seed}"), held_back=True)


def training_dialogues(n: int, seed: int = 0) -> list[Dialogue]:
    """Draw n dialogues of the training side, otherwise like held-back ones.

    With the default seed the first 2048 are, written by `Dialogue.prompt`, the lines of
    `configs/data/arithmetic_train.jsonl`.
    """
    return _dialogues(n, Random(f"training dialogues {seed}"), held_back=False)


def _dialogues(n: int, rng: Random, held_back: bool) -> list[Dialogue]:
    drawn: dict[str, Dialogue] = {}
    while len(drawn) < n:
        operations = rng.choices((1, 2, 3), (10, 45, 45))[0]
        found = dialogue(rng, held_back=held_back, operations=operations, follow_ups=1)
        drawn.setdefault(found.turns[0].text, found)
    return list(drawn.values())


def _expression(
    rng: Random, shape: _Shape, held_back: bool, numbers: list[int], calls: list[Call], *, outer: bool = False
) -> tuple[str, int]:
    """Fill a tree with operators and numbers, inner calls first; give its text and value."""
    symbol = rng.choice("+-*")
    texts: list[str] = []
    values: list[int] = []
    for child in shape:
        if child is None:
            number = _number(rng, symbol)
            while held_back and numbers and not is_held_back(numbers[-1], number):
                number = _number(rng, symbol)
            numbers.append(number)
            texts.append(str(number))
            values.append(number)
        else:
            text, value = _expression(rng, child, held_back, numbers, calls)
            texts.append(text)
            values.append(value)
    calls.append(Call(values[0], symbol, values[1]))
    text = f"{texts[0]} {symbol} {texts[1]}"
    return (text if outer else f"({text})"), calls[-1].result


def _number(rng: Random, symbol: str) -> int:
    """Draw a number a user may write beside an operator; factors are mostly small so that products stay so."""
    if symbol == "*":
        return rng.randrange(2, 10) if rng.random() < 0.7 else rng.randrange(10, 100)
    return rng.randrange(1, 100) if rng.random() < 0.9 else rng.randrange(100, 1000)


def _fits(turn: Turn) -> bool:
    return all(abs(call.result) <= LARGEST_RESULT for call in turn.calls)


def _meets_held_back(turn: Turn) -> bool:
    return any(is_held_back(*pair) for pair in (*turn.written_pairs, *turn.called_pairs))
