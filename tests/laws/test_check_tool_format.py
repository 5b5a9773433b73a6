"""The tool format check passes all formats there are, and names the fault of broken ones."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from fsm_rollout.chat.formats import Call, Parsed
from fsm_rollout.chat.formats.base import BadCallError, Collector, read_json
from fsm_rollout.errors import ChatTemplateError
from fsm_rollout.testing import ConformanceError, check_tool_format
from fsm_rollout.testing.strategies.calls import WRITERS, plain_data
from tests.cases import mistakes, written
from tests.embedded import tokenizer as embedded_tokenizer

Written = tuple[str, dict[str, Any]]


def mistral_list(calls: Sequence[Written]) -> str:
    return "[TOOL_CALLS]" + json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])


def joined(tool_format: str, between: str = "\n") -> Callable[[Sequence[Written]], str]:
    return lambda calls: between.join(WRITERS[tool_format](name, arguments) for name, arguments in calls)


# Texts that models may put into arguments, with what stands for something in the grammars.
texts = st.text(st.characters(codec="utf-8", exclude_categories=("Cc",)), max_size=12) | st.sampled_from(
    ["5", "true", "</parameter>", "<tool_call>", " padded ", "a\nb", "{}", "None"]
)
numbers = st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False)
values = plain_data(texts, numbers, max_leaves=6)
tricky_arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": texts,
        "ratio": numbers,
        "items": st.lists(values, max_size=2),
        "nested": st.dictionaries(texts, values, max_size=3),
    },
)
tricky_calls = st.lists(st.tuples(st.sampled_from(["lookup", "write_note"]), tricky_arguments), min_size=1, max_size=3)


@pytest.mark.parametrize("calls", [None, tricky_calls], ids=["any", "tricky"])
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
def test_the_built_in_formats_conform(name: str, render: Any, calls: Any) -> None:
    checked = check_tool_format(name, render, calls=calls, examples=30)
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
    from tests.unit.chat.formats.test_through_renderers import oracle_tokenizer

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


def as_strings(call: Call) -> Call:
    return replace(call, arguments={k: v if isinstance(v, str) else json.dumps(v) for k, v in call.arguments.items()})


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
        changed = self.change(text, tools or (), parsed)  # type: ignore[attr-defined]
        return parsed if changed is None else changed


@pytest.mark.parametrize(("name", "promise", "message"), mistakes("broken_formats"))
def test_a_broken_format_is_found(name: str, promise: int, message: str, tmp_path: Path) -> None:
    change = written("broken_formats", name, tmp_path, "def change(self, text, tools, parsed)")
    broken = type("Broken", (Broken,), {"change": change})
    found(promise, message, broken(), embedded_tokenizer() if name == "StopsAtTheStop" else None)


def test_without_a_way_to_write_calls_there_is_nothing_to_check() -> None:
    with pytest.raises(ChatTemplateError, match="give `render`"):
        check_tool_format("hermes")
    with pytest.raises(ChatTemplateError, match="did you mean 'hermes'"):
        check_tool_format("hermse", angles)
