"""Whether a tool format reads what models write: all of it, and nothing else.

Invariant: the oracle is the calls that were to be written; the text of them comes from the caller's ``render`` or from
the model's own chat template, never from the format under check.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from fsm_rollout.chat.formats import Call, CallProblem, Parsed, ToolFormat, get_format
from fsm_rollout.errors import ChatTemplateError
from fsm_rollout.testing.conformance.runner import Checked, ConformanceError, Subject, Suite, demand
from fsm_rollout.testing.strategies.calls import calls_of_template, plain_data

Written = tuple[str, dict[str, object]]  # a call as it is to be written: the tool's name and its arguments
Render = Callable[[Sequence[Written]], str]

_TYPES = {
    "text": "string", "count": "integer", "ratio": "number", "flag": "boolean", "items": "array", "nested": "object"
}  # fmt: skip
_PARAMETERS = {"type": "object", "properties": {name: {"type": kind} for name, kind in _TYPES.items()}}
# The schemas that the format is told of: every JSON type, so that values written without quotes can be read.
TOOLS: Sequence[dict[str, object]] = tuple(
    {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": _PARAMETERS}}
    for name in ("lookup", "write_note")
)

_words = st.text("ab Zé漢🙂09.,:;'\"\\/{}[]()!?=-_\n", max_size=10)
_values = plain_data(_words, st.integers(-99, 99), max_leaves=4)
_arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": _words,
        "count": st.integers(-(10**6), 10**6),
        "ratio": st.sampled_from([0.5, -2.25, 1e6]),
        "flag": st.booleans(),
        "items": st.lists(_values, max_size=2),
        "nested": st.dictionaries(st.sampled_from("abc"), _values, max_size=2),
    },
)
_calls = st.lists(st.tuples(st.sampled_from(["lookup", "write_note"]), _arguments), min_size=1, max_size=3)
_prose = st.sampled_from(["", "I will look.", "It is 5 < 6, so.", "déjà vu 🙂", "one\n\ntwo"])


def check_tool_format(
    tool_format: ToolFormat | str,
    render: Render | None = None,
    *,
    tokenizer: Any = None,
    calls: st.SearchStrategy[list[Written]] | None = None,
    surrounded: bool = True,
    examples: int = 100,
) -> Checked:
    r"""Hold a tool format to its promises, on generated calls.

    1. never raises: `parse` never raises for what a model wrote: any text, calls cut off anywhere.
    2. places: Spans lie within the text, in order, and do not overlap; a problem has a message.
    3. round trip: Calls come back as they were written, once, in order, with their JSON types.
    4. content: Text around calls is the content, text without calls is nothing but content.
    5. cut calls: A call that was cut off after its name is an attempt, never dropped, never another.
    6. no memory: Reading a turn depends on that turn alone: each further reading gives the same.
    7. stop token: The stop token at a turn's end, there or not, changes no attempt.
    8. plain JSON: Arguments are plain JSON (no NaN), ready to be recorded.

    Example::

        check_tool_format(
            "my_formats:Angle",
            lambda calls: "\n".join(f"<<{name} {json.dumps(arguments)}>>" for name, arguments in calls),
        )

    Args:
        tool_format: the format, or its name (``hermes``, ``module:Class``).
        render: writes calls as the model does, between any control tokens it puts around them; default: what the
            tokenizer's chat template writes.
        tokenizer: the model's. With it the format is given each text's ids, and promise 7 is checked.
        calls: draws the calls, as (name, arguments) of :data:`TOOLS`; default: all of JSON.
        surrounded: whether the model may write text before its calls (promise 4).
        examples: how many cases each promise is tried on.

    Raises:
        ConformanceError: a promise does not hold; with the simplest text that shows it.
        ChatTemplateError: the name is no format's, or there is neither ``render`` nor a template that writes calls.
    """
    parser = tool_format if not isinstance(tool_format, str) else get_format(tool_format, tokenizer)
    render = render or _rendered_by(tokenizer)
    with SUITE.judging():
        drawn = _calls if calls is None else calls
        return SUITE.hold(_Format(parser, render, tokenizer, drawn, surrounded, examples))


SUITE = Suite[Callable[["_Format"], "int | None"]](check_tool_format)


def _pieces_of(text: str) -> st.SearchStrategy[str]:
    """Draw what is left of a text that was cut at both ends."""
    ends = st.integers(0, len(text))
    return st.tuples(ends, ends).map(lambda cut: text[min(cut) : max(cut)])


def _rendered_by(tokenizer: Any) -> Render:
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise ChatTemplateError("no-render", "give `render`, or a tokenizer whose chat template writes tool calls")
    return partial(calls_of_template, tokenizer, TOOLS)


class _Format(Subject):
    def __init__(
        self, parser: ToolFormat, render: Render, tokenizer: Any, calls: st.SearchStrategy[list[Written]],
        surrounded: bool, examples: int,
    ) -> None:  # fmt: skip
        super().__init__(parser.name, "parse", 0.0, examples)
        self.format, self.render, self.tokenizer, self.calls = parser, render, tokenizer, calls
        self.prose = _prose if surrounded else st.just("")
        self.unmade = {7} if tokenizer is None else set()
        self.tools = copy.deepcopy(TOOLS)
        self.first: dict[str, Parsed] = {}  # each text as it was read for the first time

    def parse(self, text: str) -> Parsed:
        """Read a text, and check what holds of every reading."""
        ids = self.tokenizer(text, add_special_tokens=False).input_ids if self.tokenizer is not None else ()
        read = f"; the text: {text!r}"
        try:
            parsed = self.format.parse(text, ids, self.tools)
        except Exception as error:
            raise ConformanceError(1, f"parse raised {type(error).__name__}: {error}{read}") from error
        is_parsed = isinstance(parsed, Parsed) and isinstance(parsed.content, str)
        demand(is_parsed, 1, f"parse returned {parsed!r}; it must be Parsed, with text{read}")
        spans = [attempt.span for attempt in parsed.attempts]
        inside = all(0 <= start <= end <= len(text) for start, end in spans)
        demand(inside, 2, f"the places {spans} are not within the {len(text)} characters of {text!r}")
        apart = all(first[1] <= second[0] for first, second in pairwise(spans))
        demand(apart, 2, f"the places {spans} overlap{read}")
        explained = all(problem.message for problem in parsed.problems)
        demand(explained, 2, f"a problem without a message for the model{read}")
        for call in parsed.calls:
            try:
                json.dumps(call.arguments, allow_nan=False)
            except (TypeError, ValueError) as error:
                no_json = f"the arguments of {call.name} are no JSON ({error}): {call.arguments!r}"
                raise ConformanceError(8, f"{no_json}{read}") from None
        demand(self.tools == TOOLS, 6, f"parse changed the tools that it was given{read}")
        first = self.first.setdefault(text, copy.deepcopy(parsed))
        demand(first == parsed, 6, f"{text!r} was read as {first}, and the second time as {parsed}")
        return parsed

    # -- the checks -----------------------------------------------------------------------------------------------

    @SUITE.check(1, 2, 6)
    def survives_any_text(self) -> int:
        """Read any text, twice, with another one between."""

        def hold(text: str) -> None:
            self.parse(text)
            self.parse(self.render([("lookup", {"text": "between"})]))
            self.parse(text)

        pieces = st.one_of(_words, self.calls.map(self.render).flatmap(_pieces_of))
        return self.search(st.lists(pieces, max_size=4).map("".join), hold)

    @SUITE.check(4)
    def leaves_plain_text(self) -> int:
        """Read text in which no call is begun (braces and brackets begin some)."""

        def hold(text: str) -> None:
            text = "".join(character for character in text if character not in "{}[]<>")
            parsed = self.parse(text)
            demand(not parsed.attempts, 4, f"plain text was read as {parsed.attempts}; the text: {text!r}")
            same = parsed.content.split() == text.split()
            demand(same, 4, f"plain text {text!r} became the content {parsed.content!r}")

        return self.search(_words, hold)

    @SUITE.check(3, 7)
    def reads_what_was_written(self) -> int:
        """Read calls, alone and after prose, with and without a stop token."""
        return self.search(st.tuples(self.prose, self.calls), self._round_trip)

    def _round_trip(self, drawn: tuple[str, list[Written]]) -> None:
        text_before, calls = drawn
        text = f"{text_before}\n{self.render(calls)}" if text_before else self.render(calls)
        parsed = self.parse(text)
        for problem in parsed.problems:
            raise ConformanceError(3, f"well-written calls were read with the problem {problem}: {text!r}")
        got = [(call.name, call.arguments) for call in parsed.calls]
        # Compared as JSON text: 1 is not True, and 1.0 is another number than 1.
        same = [(name, _json(args)) for name, args in got] == [(name, _json(args)) for name, args in calls]
        demand(same, 3, f"{calls} was written, {got} was read; the text: {text!r}")
        around = f"the text around the calls is {text_before!r}, the content {parsed.content!r}"
        demand(parsed.content.split() == text_before.split(), 4, around)
        if self.tokenizer is not None and self.tokenizer.eos_token:
            stopped = self.parse(text + self.tokenizer.eos_token)
            same = [*map(_facts, stopped.attempts)] == [*map(_facts, parsed.attempts)]
            demand(same, 7, f"with the stop token the attempts are {stopped.attempts}; without {parsed.attempts}")

    @SUITE.check(5)
    def keeps_cut_calls(self) -> int:
        """Cut a call everywhere: from its name on it is an attempt."""
        return self.search(self.calls.map(lambda drawn: drawn[0]), self._cut, 10)

    def _cut(self, written: Written) -> None:
        name, arguments = written
        text = self.render([written])
        named = text.index(name) + len(name)
        begun = False
        for end in range(len(text)):
            part = text[:end]
            parsed = self.parse(part)
            for call in parsed.calls:
                same = (call.name, _json(call.arguments)) == (name, _json(arguments))
                demand(same, 5, f"{written} was cut off, and read as {(call.name, call.arguments)}: {part!r}")
            begun = begun or bool(parsed.attempts)
            dropped = not parsed.attempts and (begun or end > named)
            demand(not dropped, 5, f"a call that was cut off was dropped in silence: {part!r}")

    @SUITE.check(8)
    def refuses_other_json(self) -> None:
        """Read what Python takes for JSON and nobody else, twice."""
        text = self.render([("lookup", {"count": 7})])
        for number in ("NaN", "-Infinity") * 2:
            self.parse(text.replace("7", number))


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _facts(attempt: Call | CallProblem) -> tuple[str, str | None, str]:
    return type(attempt).__name__, attempt.name, _json(getattr(attempt, "arguments", None))
