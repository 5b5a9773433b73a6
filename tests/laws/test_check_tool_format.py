"""The tool format check passes all formats there are, and names the fault of broken ones."""

from __future__ import annotations

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
from tests.embedded import tokenizer as embedded_tokenizer

Written = tuple[str, dict[str, Any]]


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def hermes(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def llama3_json(name: str, arguments: dict[str, Any]) -> str:
    return json.dumps({"name": name, "parameters": arguments})


def glm(name: str, arguments: dict[str, Any]) -> str:
    pairs = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{as_text(value)}</arg_value>\n" for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{pairs}</tool_call>"


def qwen3_coder(name: str, arguments: dict[str, Any]) -> str:
    lines = "".join(f"<parameter={key}>\n{as_text(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>"


def mistral(name: str, arguments: dict[str, Any]) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}"


def mistral_list(calls: Sequence[Written]) -> str:
    return "[TOOL_CALLS]" + json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])


def joined(write: Callable[[str, dict[str, Any]], str], between: str = "\n") -> Callable[[Sequence[Written]], str]:
    return lambda calls: between.join(write(name, arguments) for name, arguments in calls)


@pytest.mark.parametrize(
    ("name", "render"),
    [
        ("hermes", joined(hermes)),
        ("llama3_json", joined(llama3_json, "; ")),
        ("glm", joined(glm)),
        ("qwen3_coder", joined(qwen3_coder)),
        ("mistral", joined(mistral, "")),
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
    return "".join(f"\n{qwen3_coder(name, arguments)}" for name, arguments in calls)


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


class Fragile(Angle):
    """Does not think of calls that end early."""

    def parse(self, text: str, ids: Sequence[int] = (), tools: Sequence[Any] | None = None) -> Parsed:
        if "<<" in text:
            text[text.index("<<") + 6]
        return super().parse(text, ids, tools)


class ReturnsAList(Angle):
    def parse(self, *args: Any, **kwargs: Any) -> Any:
        return list(super().parse(*args, **kwargs).calls)


class Spoiled(Angle):
    """A good format whose results are spoiled."""

    def spoil(self, parsed: Parsed, text: str) -> Parsed:
        return parsed

    def parse(self, text: str, ids: Sequence[int] = (), tools: Sequence[Any] | None = None) -> Parsed:
        return self.spoil(super().parse(text, ids, tools), text)


class LosesPlaces(Spoiled):
    def spoil(self, parsed: Parsed, text: str) -> Parsed:
        return replace(parsed, calls=tuple(replace(call, span=(-1, -1)) for call in parsed.calls))


class OnePlaceForAll(Spoiled):
    def spoil(self, parsed: Parsed, text: str) -> Parsed:
        return replace(parsed, calls=tuple(replace(call, span=(0, len(text))) for call in parsed.calls))


class SaysNothing(Spoiled):
    def spoil(self, parsed: Parsed, text: str) -> Parsed:
        return replace(parsed, problems=tuple(replace(problem, message="") for problem in parsed.problems))


class FirstOnly(Spoiled):
    def spoil(self, parsed: Parsed, text: str) -> Parsed:
        return replace(parsed, calls=parsed.calls[:1])


class Stringly(Spoiled):
    def spoil(self, parsed: Parsed, text: str) -> Parsed:
        calls = (replace(c, arguments={k: as_text(v) for k, v in c.arguments.items()}) for c in parsed.calls)
        return replace(parsed, calls=tuple(calls))


class Suspicious(Spoiled):
    def spoil(self, parsed: Parsed, text: str) -> Parsed:
        problem = CallProblem("malformed", "are you sure?", (len(text), len(text)))
        return replace(parsed, problems=(*parsed.problems, problem)) if parsed.calls else parsed


class DropsText(Spoiled):
    def spoil(self, parsed: Parsed, text: str) -> Parsed:
        return replace(parsed, content="") if parsed.calls else parsed


class KeepsCallsInText(Spoiled):
    def spoil(self, parsed: Parsed, text: str) -> Parsed:
        return replace(parsed, content=text)


class SeesCallsEverywhere(Spoiled):
    def spoil(self, parsed: Parsed, text: str) -> Parsed:
        return parsed if parsed.attempts or ":" not in text else replace(parsed, calls=(Call("text", {}, (0, 0)),))


class DropsUnfinished(Spoiled):
    def spoil(self, parsed: Parsed, text: str) -> Parsed:
        return replace(parsed, problems=())


class Completes(Spoiled):
    """Takes what there is of an unfinished call for the whole."""

    def spoil(self, parsed: Parsed, text: str) -> Parsed:
        half = re.search(r"<<(\w+) ", text)
        if parsed.calls or half is None:
            return parsed
        return Parsed(parsed.content, (Call(half.group(1), {"guess": 1}, (half.start(), len(text))),))


class Remembers(Angle):
    def __init__(self) -> None:
        self.seen = 0

    def parse(self, text: str, ids: Sequence[int] = (), tools: Sequence[Any] | None = None) -> Parsed:
        parsed = super().parse(text, ids, tools)
        self.seen += len(parsed.calls)
        return replace(parsed, content=f"{parsed.content} {self.seen}".strip() if self.seen > 9 else parsed.content)


class Memoises(Angle):
    """Says of a text that it was read before, for all time."""

    def __init__(self) -> None:
        self.read: set[str] = set()

    def parse(self, text: str, ids: Sequence[int] = (), tools: Sequence[Any] | None = None) -> Parsed:
        parsed = super().parse(text, ids, tools)
        again = text in self.read
        self.read.add(text)
        return replace(parsed, content="again") if again else parsed


class StumblesOnce(Angle):
    """Fails at the first call that it is to read, and never again."""

    stumbled = False

    def parse(self, text: str, ids: Sequence[int] = (), tools: Sequence[Any] | None = None) -> Parsed:
        if "<<" in text and not self.stumbled:
            self.stumbled = True
            raise KeyError("tools")
        return super().parse(text, ids, tools)


class StopsAtTheStop(Angle):
    def parse(self, text: str, ids: Sequence[int] = (), tools: Sequence[Any] | None = None) -> Parsed:
        if text.endswith("<|im_end|>"):
            return Parsed(text)
        return super().parse(text, ids, tools)


class RenamesTheTools(Angle):
    def parse(self, text: str, ids: Sequence[int] = (), tools: Sequence[Any] | None = None) -> Parsed:
        for tool in tools or ():
            tool["function"]["name"] = tool["function"]["name"].lower().strip("_ ") + "_tool"
        return super().parse(text, ids, tools)


class PythonsJson(Angle):
    def parse(self, text: str, ids: Sequence[int] = (), tools: Sequence[Any] | None = None) -> Parsed:
        if (found := re.fullmatch(r"<<(\w+) (.*)>>", text)) and "NaN" in text:
            return Parsed("", (Call(found.group(1), json.loads(found.group(2)), (0, len(text))),))
        return super().parse(text, ids, tools)


@pytest.mark.parametrize(
    ("broken", "invariant", "message"),
    [
        (Fragile, 1, "parse raised IndexError: .*; the text: "),
        (ReturnsAList, 1, r"it must be Parsed"),
        (LosesPlaces, 2, "are not within"),
        (OnePlaceForAll, 2, "overlap"),
        (SaysNothing, 2, "without a message"),
        (FirstOnly, 3, "was written"),
        (Stringly, 3, "was written"),
        (Suspicious, 3, "read with the problem"),
        (DropsText, 4, "the text around the calls is"),
        (KeepsCallsInText, 4, "the text around the calls is"),
        (SeesCallsEverywhere, 4, "plain text was read as"),
        (DropsUnfinished, 5, "dropped in silence: '<<"),
        (Completes, 5, "was cut off, and read as"),
        (Remembers, 6, "and the second time as"),
        (Memoises, 6, "and the second time as"),
        (RenamesTheTools, 6, "parse changed the tools that it was given"),
        (StumblesOnce, 1, "KeyError(?s:.*) not when the same case ran again: something is kept between runs"),
        (StopsAtTheStop, 7, "with the stop token"),
        (PythonsJson, 8, "are no JSON"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_broken_format_is_found(broken: Any, invariant: int, message: str) -> None:
    tokenizer = embedded_tokenizer() if broken is StopsAtTheStop else None
    with pytest.raises(ConformanceError, match=message) as found:
        check_tool_format(broken(), angles, tokenizer=tokenizer, examples=30)
    assert found.value.invariant == invariant


def test_without_a_way_to_write_calls_there_is_nothing_to_check() -> None:
    with pytest.raises(ChatTemplateError, match="give `render`"):
        check_tool_format("hermes")
    with pytest.raises(ChatTemplateError, match="did you mean 'hermes'"):
        check_tool_format("hermse", angles)
