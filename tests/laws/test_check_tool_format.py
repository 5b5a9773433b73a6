"""The tool format check passes all formats there are, and names the fault of broken ones."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st

from fsm_rollout.chat.formats import Call, CallProblem, Parsed
from fsm_rollout.chat.formats.base import BadCallError, Collector, read_json
from fsm_rollout.errors import ChatTemplateError
from fsm_rollout.testing import ConformanceError, check_tool_format
from fsm_rollout.testing.strategies.calls import WRITERS
from tests.embedded import tokenizer as embedded_tokenizer

Written = tuple[str, dict[str, Any]]


def mistral_list(calls: Sequence[Written]) -> str:
    return "[TOOL_CALLS]" + json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])


def joined(tool_format: str, between: str = "\n") -> Callable[[Sequence[Written]], str]:
    return lambda calls: between.join(WRITERS[tool_format](name, arguments) for name, arguments in calls)


@pytest.mark.parametrize(
    ("name", "render"),
    [
        ("hermes", joined("hermes")),
        ("llama3_json", joined("llama3_json", "; ")),
        ("glm", joined("glm")),
        ("qwen3_coder", joined("qwen3_coder")),
        ("mistral", joined("mistral", "")),
        ("mistral", mistral_list),
    ],
)
def test_the_built_in_formats_conform(name: str, render: Any) -> None:
    checked = check_tool_format(name, render, examples=30)
    assert checked.examples > 90


def test_what_the_embedded_models_template_writes_is_read() -> None:
    assert "stop token" in check_tool_format("hermes", tokenizer=embedded_tokenizer(), examples=20).promises


# What each renderer's own grammar looks like: the call, what stands around all calls, and its control tokens.
def kimi(calls: Sequence[Written]) -> str:
    inside = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{json.dumps(arguments)}"
        "<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inside}<|tool_calls_section_end|>"


def nemotron(calls: Sequence[Written]) -> str:
    return "".join(f"\n{WRITERS['qwen3_coder'](name, arguments)}" for name, arguments in calls)


plain_arguments = st.fixed_dictionaries(
    {}, optional={"text": st.text("abé 5", max_size=5).map(str.strip).filter(bool), "count": st.integers(0, 99)}
)
plain_calls = st.lists(st.tuples(st.sampled_from(["lookup", "write_note"]), plain_arguments), min_size=1, max_size=2)


@pytest.mark.parametrize(("name", "render"), [("kimi", kimi), ("nemotron", nemotron)])
def test_formats_of_the_renderers_package_conform(name: str, render: Any) -> None:
    pytest.importorskip("renderers")
    from tests.unit.chat.formats.test_formats import oracle_tokenizer

    check_tool_format(name, render, tokenizer=oracle_tokenizer(), calls=plain_calls, examples=30)


class Angle:
    """A good format of somebody's own: ``<<name {…}>>``."""

    name = "angle"
    START = re.compile(r"<<(\w+)? ?")

    def parse(self, text: str, ids: Sequence[int] = (), tools: Sequence[Any] | None = None) -> Parsed:
        collector, at = Collector(text), 0
        while found := self.START.search(text, at):
            start, at = found.span()
            try:
                arguments, end = read_json(text, at)
                if not isinstance(arguments, dict) or found.group(1) is None or not text.startswith(">>", end):
                    raise BadCallError("malformed", "a call is <<name {…}>>")
                at = end + 2
                collector.call(Call(found.group(1), arguments, (start, at)))
            except BadCallError as error:
                following = text.find("<<", at)
                at = following if following >= 0 else len(text)
                collector.problem(error, (start, at))
        return collector.done()


def angles(calls: Sequence[Written]) -> str:
    return "\n".join(f"<<{name} {json.dumps(arguments)}>>" for name, arguments in calls)


def test_a_good_format_of_ones_own_conforms() -> None:
    check_tool_format(Angle(), angles, examples=30)


def completed(parsed: Parsed, text: str) -> Parsed:
    """Take what there is of an unfinished call for the whole."""
    half = re.search(r"<<(\w+) ", text)
    if parsed.calls or half is None:
        return parsed
    return Parsed(parsed.content, (Call(half.group(1), {"guess": 1}, (half.start(), len(text))),))


def as_strings(call: Call) -> Call:
    return replace(call, arguments={k: v if isinstance(v, str) else json.dumps(v) for k, v in call.arguments.items()})


# What a good format's reading of a text becomes, the promise that this breaks, and what is said.
SPOILED: dict[str, tuple[Callable[[Parsed, str], Any], int, str]] = {
    "a list": (lambda parsed, _: list(parsed.calls), 1, "it must be Parsed"),
    "no places": (
        lambda parsed, _: replace(parsed, calls=tuple(replace(call, span=(-1, -1)) for call in parsed.calls)),
        2, "are not within",
    ),
    "one place for all": (
        lambda parsed, text: replace(parsed, calls=tuple(replace(c, span=(0, len(text))) for c in parsed.calls)),
        2, "overlap",
    ),
    "no message": (
        lambda parsed, _: replace(parsed, problems=tuple(replace(each, message="") for each in parsed.problems)),
        2, "without a message",
    ),
    "the first only": (lambda parsed, _: replace(parsed, calls=parsed.calls[:1]), 3, "was written"),
    "strings": (lambda parsed, _: replace(parsed, calls=tuple(map(as_strings, parsed.calls))), 3, "was written"),
    "a suspicion": (
        lambda parsed, _: replace(parsed, problems=(CallProblem("malformed", "sure?", (0, 0)),) * bool(parsed.calls)),
        3, "read with the problem",
    ),
    "no text": (
        lambda parsed, _: replace(parsed, content="") if parsed.calls else parsed, 4, "the text around the calls is"
    ),
    "calls in the text": (lambda parsed, text: replace(parsed, content=text), 4, "the text around the calls is"),
    "calls everywhere": (
        lambda parsed, text: parsed if parsed.attempts or ":" not in text else
        replace(parsed, calls=(Call("text", {}, (0, 0)),)),
        4, "plain text was read as",
    ),
    "no problems": (lambda parsed, _: replace(parsed, problems=()), 5, "dropped in silence: '<<"),
    "what was cut off, completed": (completed, 5, "was cut off, and read as"),
}  # fmt: skip


@pytest.mark.parametrize(("spoil", "promise", "message"), SPOILED.values(), ids=SPOILED)
def test_a_reading_that_is_spoiled_is_found(spoil: Any, promise: int, message: str) -> None:
    class Spoiled(Angle):
        def parse(self, text: str, *given: Any) -> Any:
            return spoil(super().parse(text, *given), text)

    found(promise, message, Spoiled())


def found(promise: int, message: str, broken: Any, tokenizer: Any = None) -> None:
    with pytest.raises(ConformanceError, match=message) as caught:
        check_tool_format(broken, angles, tokenizer=tokenizer, examples=30)
    assert caught.value.invariant == promise


class Broken(Angle):
    """A format with something of its own on the way; ``seen`` is kept between readings."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def parse(self, text: str, ids: Sequence[int] = (), tools: Sequence[Any] | None = None) -> Parsed:
        parsed = super().parse(text, ids, tools)
        return self.change(text, tools or (), parsed) or parsed


class Fragile(Broken):
    """Does not think of calls that end early."""

    def change(self, text: str, tools: Any, parsed: Parsed) -> Any:
        if "<<" in text:
            text[text.index("<<") + 6]


class Remembers(Broken):
    def change(self, text: str, tools: Any, parsed: Parsed) -> Any:
        self.seen += [call.name for call in parsed.calls]
        return replace(parsed, content=f"{parsed.content} {len(self.seen)}".strip()) if len(self.seen) > 9 else None


class Memoises(Broken):
    """Says of a text that it was read before, for all time."""

    def change(self, text: str, tools: Any, parsed: Parsed) -> Any:
        self.seen.append(text)
        return replace(parsed, content="again") if self.seen.count(text) > 1 else None


class StumblesOnce(Broken):
    """Fails at the first call that it is to read, and never again."""

    def change(self, text: str, tools: Any, parsed: Parsed) -> Any:
        if "<<" in text and not self.seen:
            self.seen.append(text)
            raise KeyError("tools")


class StopsAtTheStop(Broken):
    def change(self, text: str, tools: Any, parsed: Parsed) -> Any:
        return Parsed(text) if text.endswith("<|im_end|>") else None


class RenamesTheTools(Broken):
    def change(self, text: str, tools: Any, parsed: Parsed) -> Any:
        for tool in tools:
            tool["function"]["name"] = tool["function"]["name"].lower().strip("_ ") + "_tool"


class PythonsJson(Broken):
    def change(self, text: str, tools: Any, parsed: Parsed) -> Any:
        if (match := re.fullmatch(r"<<(\w+) (.*)>>", text)) and "NaN" in text:
            return Parsed("", (Call(match.group(1), json.loads(match.group(2)), (0, len(text))),))
        return None


@pytest.mark.parametrize(
    ("broken", "promise", "message"),
    [
        (Fragile, 1, "parse raised IndexError: .*; the text: "),
        (Remembers, 6, "and the second time as"),
        (Memoises, 6, "and the second time as"),
        (RenamesTheTools, 6, "parse changed the tools that it was given"),
        (StumblesOnce, 1, "KeyError(?s:.*) not when the same case ran again: something is kept between runs"),
        (StopsAtTheStop, 7, "with the stop token"),
        (PythonsJson, 8, "are no JSON"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_broken_format_is_found(broken: Any, promise: int, message: str) -> None:
    found(promise, message, broken(), embedded_tokenizer() if broken is StopsAtTheStop else None)


def test_without_a_way_to_write_calls_there_is_nothing_to_check() -> None:
    with pytest.raises(ChatTemplateError, match="give `render`"):
        check_tool_format("hermes")
    with pytest.raises(ChatTemplateError, match="did you mean 'hermes'"):
        check_tool_format("hermse", angles)
