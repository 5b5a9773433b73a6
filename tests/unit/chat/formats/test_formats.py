"""Tool formats: what was written comes back, what is broken is reported, and nothing is ever raised."""

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.chat import ChatTemplate
from fsm_rollout.chat.formats import FORMAT_NAMES, Parsed, ToolFormat, detect_format, get_format
from fsm_rollout.chat.formats.base import MAX_DEPTH
from fsm_rollout.errors import ChatTemplateError
from fsm_rollout.testing.strategies.calls import WRITERS
from tests.cases import table
from tests.unit.chat import chat_zoo as zoo

BUILT_IN = ("hermes", "qwen3_coder", "llama3_json", "glm", "mistral")
SCHEMA = {
    "text": {"type": "string"},
    "number": {"type": "number"},
    "count": {"type": "integer", "enum": [5, "many"]},
    "flag": {"type": "boolean"},
    "items": {"type": "array"},
    "nested": {"type": "object"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": SCHEMA}}}]

words = st.text(st.characters(codec="utf-8", exclude_categories=("Cc",)), max_size=12)


def write(name: str, arguments: dict[str, Any]) -> str:
    """Write a call as the models of a format do, Mistral's as those do that write lists."""
    if name == "mistral":
        return f'[TOOL_CALLS][{{"name": "f", "arguments": {json.dumps(arguments)}, "id": "abcdefghi"}}]'
    return WRITERS[name]("f", arguments)


def joined(name: str, calls: Sequence[str]) -> str:
    return ("; " if name == "llama3_json" else "\n").join(calls)


def parse(name: str, text: str) -> Parsed:
    return get_format(name).parse(text, (), TOOLS)


def check(parsed: Parsed, text: str) -> None:
    """Check what holds of every result: places in order and inside the text, JSON arguments."""
    spans = [attempt.span for attempt in parsed.attempts]
    assert all(0 <= start <= end <= len(text) for start, end in spans)
    assert all(first[1] <= second[0] for first, second in pairwise(spans))
    for call in parsed.calls:
        assert call.name
        json.dumps(call.arguments, allow_nan=False)


@pytest.mark.parametrize("name", BUILT_IN)
def test_calls_stand_where_they_were_written_and_what_is_around_them_is_said(name: str) -> None:
    calls = [write(name, {"text": text}) for text in "ab"]
    text = f"first\n{joined(name, calls)}\nand then"
    parsed = parse(name, text)
    check(parsed, text)
    assert [call.arguments for call in parsed.calls] == [{"text": "a"}, {"text": "b"}]
    assert parsed.content.split() == ["first", "and", "then"]
    assert name == "mistral" or [text[slice(*call.span)] for call in parsed.calls] == calls


@pytest.mark.parametrize("name", BUILT_IN)
@given(data=st.data())
def test_nothing_a_model_writes_raises(name: str, data: st.DataObject) -> None:
    tags = table("chat")["pieces of calls"]
    text = data.draw(st.lists(st.sampled_from(tags) | words, max_size=14).map("".join))
    if data.draw(st.booleans()):
        whole = write(name, {"text": data.draw(words), "count": 5, "items": [{"a": None}]})
        cut = data.draw(st.integers(0, len(whole)))
        text = f"{whole[:cut]}{text}{whole[cut:]}"
    parsed = parse(name, text)
    check(parsed, text)
    kept = "".join(parsed.content.split())
    assert all(
        "".join(text[slice(*problem.span)].split()) in kept for problem in parsed.problems if name != "llama3_json"
    )


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_call_cut_short_is_a_problem_and_never_an_answer(name: str) -> None:
    good = write(name, {"text": "a", "count": 5})
    begun = {"hermes": 11, "qwen3_coder": 11, "glm": 11, "mistral": 12, "llama3_json": 8}[name]
    end = len(good) - len(good.rstrip("]"))  # Mistral's calls are whole before their list is
    for cut in range(begun, len(good) - end):
        parsed = parse(name, f"Let me see. {good}\n{good[:cut]}")
        assert len(parsed.calls) == 1
        assert [problem.kind for problem in parsed.problems] == ["unclosed"], good[:cut]


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_broken_call_hides_no_good_one(name: str) -> None:
    good = write(name, {"text": "a"})
    broken = table("chat")["calls broken"][name]
    runs_on = table("chat")["calls of which one runs on"].get(name, broken)
    assert len(parse(name, joined(name, [good, runs_on, good])).attempts) == 3
    for order in ([good, broken, good], [broken, good], [good, broken]):
        parsed = parse(name, joined(name, order))
        assert [type(attempt).__name__ for attempt in parsed.attempts] == [
            "Call" if item == good else "CallProblem" for item in order
        ]
        assert parsed.problems[0].message
        assert "f" in parsed.content


@pytest.mark.parametrize("name", BUILT_IN)
def test_calls_in_thoughts_are_thoughts(name: str) -> None:
    call = write(name, {"text": "a"})
    for thought in (f"<think>\n{call}\n</think>\n\n", f"{call}</think>", f"<think>a</think>b<think>{call}</think>"):
        assert parse(name, thought).attempts == ()
        assert len(parse(name, thought + call).calls) == 1
        assert parse(name, thought).content == thought.strip()
    assert parse(name, f"<think>{call}").attempts == ()
    assert len(parse(name, f"plain {call}").calls) == 1


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_thought_that_a_call_mentions_hides_no_call(name: str) -> None:
    other = write(name, {"text": "c"})
    for text in ("a <think> b", "a </think> b"):
        mentions = write(name, {"text": text})
        for calls in ([mentions], [mentions, other], [other, mentions]):
            assert len(parse(name, joined(name, calls)).calls) == len(calls)
        assert parse(name, mentions).calls[0].arguments == {"text": text}
    assert len(parse(name, f"{other}<think>{other}</think>{other}").calls) == 2


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        *table("chat")["odd json is a problem"],
        ("[" * 100_000 + "]" * 100_000, "invalid_json"),
        ('{"a":' * (MAX_DEPTH + 2) + "1" + "}" * (MAX_DEPTH + 2), "invalid_json"),
        ('{"a": ' + "9" * 5000 + "}", "invalid_json"),
    ],
)
@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral"])
def test_odd_json_is_a_problem(name: str, arguments: str, kind: str) -> None:
    text = write(name, {}).replace("{}", arguments)
    parsed = parse(name, text)
    assert parsed.calls == ()
    assert [problem.kind for problem in parsed.problems] == [kind]
    assert " at at " not in parsed.problems[0].message


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral"])
def test_json_a_tool_may_mean_is_taken(name: str) -> None:
    deep: Any = 1
    for _ in range(MAX_DEPTH - 4):
        deep = [deep]
    for arguments in (
        {"a": deep},
        {"a": [[]] * 200},
        {"a": "}</tool_call>]"},
        {"a": '{"name": "x", "parameters": {}}'},
    ):
        assert [call.arguments for call in parse(name, write(name, arguments)).calls] == [arguments]
    quoted = write(name, {}).replace("{}", json.dumps('{"a": 1}'))
    assert parse(name, quoted).calls[0].arguments == {"a": 1}


@pytest.mark.parametrize("call", ['{"arguments": {}}', '{"name": 5, "arguments": {}}', '{"name": "", "arguments": {}}'])
def test_a_call_without_a_name(call: str) -> None:
    assert [p.kind for p in parse("hermes", f"<tool_call>{call}</tool_call>").problems] == ["no_name"]
    assert [p.kind for p in parse("mistral", f"[TOOL_CALLS][{call}]").problems] == ["no_name"]
    assert [p.kind for p in parse("hermes", "<tool_call>[]</tool_call>").problems] == ["not_an_object"]
    assert [p.kind for p in parse("glm", "<tool_call></tool_call>").problems] == ["no_name"]
    assert [p.kind for p in parse("qwen3_coder", "<tool_call><function=></function></tool_call>").problems] == [
        "no_name"
    ]


def test_values_without_quotes_get_their_declared_type() -> None:
    texts = {"text": "5", "count": "5", "flag": "True", "number": "many", "maybe": "None", "items": "[1]", "other": "5"}
    wanted = {"text": "5", "count": 5, "flag": True, "number": "many", "maybe": None, "items": [1], "other": 5}
    for name in ("glm", "qwen3_coder"):
        assert parse(name, write(name, texts)).calls[0].arguments == wanted
        assert get_format(name).parse(write(name, {"text": "5"})).calls[0].arguments == {"text": 5}
        assert [p.kind for p in parse(name, write(name, texts).replace("other", "text")).problems] == ["malformed"]


def test_qwen3_coder_calls_may_lack_the_outer_tag() -> None:
    inner = write("qwen3_coder", {"text": "a\n\nb"}).removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    parsed = parse("qwen3_coder", f"see {inner} done")
    assert [call.arguments for call in parsed.calls] == [{"text": "a\n\nb"}]
    assert parsed.content == "see  done"


def test_llama_answers_in_json_are_answers() -> None:
    for text in ('{"answer": 5}', '{"name": "Ada"}', 'see {"a": {"name": "f"}}', '{"type": "point", "x": 1}'):
        assert parse("llama3_json", text) == Parsed(text)
    tagged = '<|python_tag|>{"name": "f", "parameters": {}}<|eom_id|>'
    assert parse("llama3_json", tagged).calls[0].span == (0, tagged.index("<|eom"))
    assert parse("llama3_json", '{"type": "function", "function": "f", "parameters": {}}').calls[0].name == "f"
    assert parse("llama3_json", '<|python_tag|>{"name": "f"}').problems[0].kind == "malformed"


def test_mistral_writes_lists_or_one_call_after_each_marker() -> None:
    two = '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "a"}, {"name": "g", "arguments": {"a": 1}}, 5]</s>'
    parsed = parse("mistral", two)
    assert [(call.name, call.id) for call in parsed.calls] == [("f", "a"), ("g", None)]
    assert [type(attempt).__name__ for attempt in parsed.attempts] == ["Call", "Call", "CallProblem"]
    new = 'see[TOOL_CALLS]f[CALL_ID]x1[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}</s>'
    assert [(call.name, call.id, call.arguments) for call in parse("mistral", new).calls] == [
        ("f", "x1", {"a": 1}),
        ("g", None, {}),
    ]


# --- by name, and from the template -------------------------------------------------------------------------------


def test_formats_by_name() -> None:
    for name in BUILT_IN:
        assert get_format(name).name == name
        assert isinstance(get_format(name), ToolFormat)
        assert name in FORMAT_NAMES
    with pytest.raises(ChatTemplateError, match="did you mean 'hermes'") as refusal:
        get_format("hermse")
    assert refusal.value.rule == "unknown-tool-format"


def test_formats_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine:
        name = "mine"

        def parse(self, text: str, ids: Any = (), tools: Any = None) -> Parsed:
            return Parsed(text.upper())

    module = ModuleType("my_formats")
    module.Mine, module.Not = Mine, object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_formats", module)
    assert get_format("my_formats:Mine").parse("a").content == "A"
    for name in ("my_formats:Not", "my_formats:Gone", "no_such_module_here:X"):
        with pytest.raises(ChatTemplateError) as refusal:
            get_format(name)
        assert refusal.value.rule == "unknown-tool-format"


def test_a_template_with_the_marks_of_two_grammars_or_none_is_ambiguous() -> None:
    assert detect_format("<tool_call>{{ c | tojson }}</tool_call>") == "hermes"
    assert detect_format("<tool_call><function={{ n }}><parameter=k>") == "qwen3_coder"
    for template in ("{{ m.content }}", "<tool_call></tool_call>[TOOL_CALLS]", "<arg_key><arg_value>[TOOL_CALLS]"):
        with pytest.raises(ChatTemplateError) as refusal:
            detect_format(template)
        assert refusal.value.rule == "ambiguous-tool-format"


# --- against the templates themselves ----------------------------------------------------------------------------

CORPORA = {"shared": zoo.SHARED, "trl": zoo.TRL}


@pytest.mark.parametrize("corpus", [name for name, paths in CORPORA.items() if paths])
def test_each_zoo_template_has_at_most_one_format(corpus: str) -> None:
    counts: Counter[str] = Counter()
    for path in CORPORA[corpus].values():
        try:
            counts[detect_format(path.read_text("utf-8"))] += 1
        except ChatTemplateError as refusal:
            counts["none" if refusal.rule == "ambiguous-tool-format" else refusal.rule] += 1
    assert counts == table("chat")["formats of templates"][corpus]


WRITES_NO_CALLS = {"mistralrs__smollm3.jinja", "axolotl__falcon_h1.jinja"}
"""They tell the model how to call, and then leave the calls of past turns out."""


def format_of(name: str) -> str | None:
    try:
        found = detect_format(zoo.source(name))
    except ChatTemplateError:
        return None
    return found if found in BUILT_IN else None


@zoo.needs_zoo
@pytest.mark.parametrize("name", [name for name in zoo.NAMES if format_of(name) and name not in WRITES_NO_CALLS])
def test_what_a_template_writes_its_format_reads(name: str) -> None:
    format_ = get_format(format_of(name) or "")
    tokenizer = zoo.tokenizer_of(name)
    chat = ChatTemplate(tokenizer)
    arguments = {"key": 'a "b" é', "extra": "x\ny"}
    turn = zoo.called("k")
    turn["tool_calls"][0]["function"]["arguments"] = arguments
    step = [zoo.user(), turn], [zoo.result("r")]
    stop = zoo.stop_of(name, tokenizer, True)
    glue = chat.decode(chat.glue(*step, zoo.TOOLS, sampled_ids=[stop], finish_reason="stop"))
    whole = chat.decode(chat.prompt([*step[0], *step[1]], zoo.TOOLS))
    start = chat.decode(chat.prompt([zoo.user()], zoo.TOOLS))
    assert whole.endswith(glue)
    shared = len(os.path.commonprefix([whole, start]))  # noqa: RUF071 (characters are meant)
    written = whole[max(whole.rfind(end, 0, shared) for end in "\n>") + 1 : -len(glue)]
    parsed = format_.parse(written, (), zoo.TOOLS)
    assert [(call.name, call.arguments) for call in parsed.calls] == [("lookup", arguments)]
    assert parsed.problems == ()
