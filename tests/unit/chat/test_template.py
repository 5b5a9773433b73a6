"""The rules one by one, on small templates written here."""

import copy
import enum
import json
from array import array
from collections import OrderedDict, UserDict, UserList, deque
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from fsm_rollout.chat import ChatTemplate
from fsm_rollout.chat.reference import FollowUp, Opening
from fsm_rollout.errors import ChatTemplateError
from tests.cases import cases, table
from tests.unit.chat import chat_zoo as zoo

TOKENIZER = zoo.tokenizer_for(zoo.CHATML + "{#- <tool_call></tool_call> -#}")
CHAT = ChatTemplate(TOKENIZER)
STOP = TOKENIZER.eos_token_id
TEXT = [zoo.user(), zoo.said()]
MORE = [zoo.user("more")]

ROLES = "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
ASK = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
CALLED, RESULT = [zoo.user(), zoo.called("k")], [zoo.result("r")]
STOPPED: dict[str, Any] = {"sampled_ids": [STOP], "finish_reason": "stop"}
TURNS = {"text": (TEXT, MORE), "call": (CALLED, RESULT)}
ENDS: dict[str, dict[str, Any]] = table("chat")["ends of turns"]


def changed(template: str, another: dict[str, str]) -> str:
    for old, new in another.items():
        template = template.replace(old, new)
    return template


def chat_for(template: str, *, eos: str | None = None, **kwargs: Any) -> ChatTemplate:
    return ChatTemplate(zoo.tokenizer_for(template, eos), **kwargs)


def text_of(chat: ChatTemplate, history: list[Any], new: list[Any], stop: str, tools: Any = None) -> str:
    """Return the glue as text, the same from the reference, while learning and from the cache.

    ``stop`` is the turn's last token, or ``cut``, or ``aborted`` before it had any.
    """
    sampled, finish = {"cut": ([5], "length"), "aborted": ([], "abort")}.get(stop, ([5, stop], "stop"))
    arguments: dict[str, Any] = {
        "sampled_ids": [id_ if isinstance(id_, int) else chat.tokenizer.convert_tokens_to_ids(id_) for id_ in sampled],
        "finish_reason": finish,
    }
    ids = chat.reference.encode(FollowUp(history, new, tools, **arguments)).ids.tolist()
    for _ in range(2):
        assert chat.glue(history, new, tools, **arguments) == ids
    return chat.decode(ids)


def rule_of(call: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(ChatTemplateError) as refusal:
        call(*arguments, **named)
    assert str(refusal.value).startswith(f"[{refusal.value.rule}] ")
    return refusal.value.rule


# --- how turns end --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENDS)
def test_what_follows_a_turn_however_its_template_closes_it(name: str) -> None:
    case = ENDS[name]
    template = changed(case.get("template", zoo.CHATML), case.get("another", {})) + case.get("behind", "")
    chat = chat_for(template, eos=case.get("eos"), template_kwargs=case.get("template_kwargs"))
    if "stops" in case:
        assert set(chat.tokenizer.convert_tokens_to_ids(case["stops"])) == chat.stop_ids
    for turn, (history, new) in TURNS.items():
        for stop, follows in case.get(turn, {}).items():
            assert text_of(chat, history, new, stop) == follows


def test_close_tokens_may_be_named() -> None:
    template = ROLES.replace("<|im_end|>", "<|stop|><|after|>") + ASK
    for token in ("<|after|>", zoo.tokenizer_for(template).convert_tokens_to_ids("<|after|>")):
        chat = chat_for(template, close_tokens=[token])
        assert chat.decode(chat.glue(TEXT, MORE, None, sampled_ids=[1], finish_reason="length")).count("<|after|>") == 2
    assert rule_of(ChatTemplate, TOKENIZER, close_tokens=["<|nowhere|>"]) == "unknown-close-token"
    assert rule_of(ChatTemplate, TOKENIZER, close_tokens=[3]) == "unknown-close-token"


def test_a_generation_config_beside_the_tokenizer_names_stop_tokens(tmp_path: Path) -> None:
    tokenizer = zoo.tokenizer_for(zoo.CHATML + "{#- <|endoftext|><|eom_id|> -#}")
    named = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|eom_id|>"])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    tokenizer.name_or_path = str(tmp_path)
    assert ChatTemplate(tokenizer).stop_ids == {*named, tokenizer.eos_token_id}
    (tmp_path / "generation_config.json").write_text("not json")
    assert ChatTemplate(tokenizer).stop_ids == {tokenizer.eos_token_id}


# --- what is refused ------------------------------------------------------------------------------


@cases("chat")
def test_what_a_template_does_wrong_is_refused_by_name(rule: str, turn: str, another: dict[str, str]) -> None:
    chat = chat_for(changed(ROLES + ASK, another), eos="<|im_end|>")
    arguments: dict[str, Any] = {"sampled_ids": [chat.tokenizer.eos_token_id], "finish_reason": "stop"}
    assert rule_of(chat.glue, *TURNS[turn], None, **arguments) == rule


def test_what_a_tokenizer_lacks_is_refused_by_name() -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=TOKENIZER.backend_tokenizer)
    assert rule_of(ChatTemplate, bare) == "no-template"
    assert rule_of(ChatTemplate, bare, chat_template="{% if %}") == "template-syntax"
    assert rule_of(ChatTemplate, object(), chat_template=zoo.CHATML) == "slow-tokenizer"
    assert rule_of(ChatTemplate, TOKENIZER, injection="hope") == "unknown-option"
    assert rule_of(ChatTemplate, TOKENIZER, history="forget") == "unknown-option"


@pytest.mark.parametrize("case", table("chat")["what a caller does wrong"], ids=str)
def test_what_a_caller_does_wrong_is_refused_by_name(case: dict[str, Any]) -> None:
    good = {"history": TEXT, "new_messages": MORE, "tools": None, **STOPPED}
    assert rule_of(CHAT.glue, **good | {name: given for name, given in case.items() if name != "rule"}) == case["rule"]


def test_what_is_no_message_is_refused() -> None:
    for message in table("chat")["what is no message"]:
        assert rule_of(CHAT.prompt, [message], None) == "malformed-message"
        assert rule_of(CHAT.glue, TEXT, [message], None, **STOPPED) == "malformed-message"
    for conversation in ([], "hello"):
        assert rule_of(CHAT.prompt, conversation, None) == "malformed-message"


def test_pictures_are_refused_and_text_parts_are_joined() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:"}}
    parts = [{"type": "text", "text": "more"}, {"type": "text", "text": " still"}]
    for content in ([picture], [*parts, picture], ["text"], [{"type": "text"}]):
        message = {"role": "user", "content": content}
        assert rule_of(CHAT.prompt, [message], None) == "multimodal-content"
        assert rule_of(CHAT.glue, TEXT, [message], None, **STOPPED) == "multimodal-content"
        assert rule_of(CHAT.glue, [message, zoo.said()], MORE, None, **STOPPED) == "multimodal-content"
    assert CHAT.prompt([{"role": "user", "content": parts}], None) == CHAT.prompt([zoo.user("more still")], None)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
oddities = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "tool", "system", "", "x"]) | values,
        "content": values,
        "tool_calls": values | st.lists(st.fixed_dictionaries({"function": values, "id": values}), max_size=2),
        "name": values,
        "tool_call_id": values,
    },
)


@given(st.lists(oddities | values, max_size=3), st.lists(oddities | values, max_size=3), st.data())
@settings(max_examples=150)
def test_nothing_but_a_refusal_is_ever_raised(history: list[Any], new: list[Any], data: st.DataObject) -> None:
    tools = data.draw(st.none() | st.just(zoo.TOOLS) | st.lists(values, max_size=2))
    kept = copy.deepcopy((history, new))
    finish = data.draw(st.sampled_from(["stop", "length"]))
    for call in (
        lambda: CHAT.prompt(history, tools),
        lambda: CHAT.glue([*history, zoo.said()], new, tools, sampled_ids=[STOP], finish_reason=finish),
        lambda: CHAT.glue(history, new, tools, **STOPPED),
    ):
        try:
            ids = call()
        except ChatTemplateError:
            continue
        assert all(isinstance(id_, int) for id_ in ids)
    assert repr((history, new)) == repr(kept)


class Role(str, enum.Enum):  # noqa: UP042 (an older kind than StrEnum)
    """As client libraries have it: equal to its text, but printed as ``Role.USER``."""

    USER = "user"
    ASSISTANT = "assistant"


class Given(UserDict[str, Any]):
    """A mapping that is no dict."""


dressed = st.sampled_from(
    [
        dict, OrderedDict, Given, MappingProxyType, lambda m: {**m, "role": Role(m["role"])},
        lambda m: {**m, "tool_calls": []}, lambda m: {**m, "tool_calls": None}, lambda m: {**m, "content": None},
        lambda m: {**m, "content": 5}, lambda m: {k: v for k, v in m.items() if k != "content"},
        lambda m: {**m, "name": 1}, lambda m: {**m, "name": True}, lambda m: {**m, 3: 4}, lambda m: list(m),
    ]
)  # fmt: skip
listed = st.sampled_from([list, tuple, deque, iter, UserList, lambda messages: None, lambda messages: messages[0]])
numbered = st.sampled_from(
    [
        list, tuple, lambda ids: array("i", ids), np.array, lambda ids: [np.int64(id_) for id_ in ids],
        lambda ids: None, lambda ids: [str(id_) for id_ in ids], lambda ids: [None], lambda ids: 5, lambda ids: {},
    ]
)  # fmt: skip
tooled = st.sampled_from([None, (), zoo.TOOLS, tuple(zoo.TOOLS), UserList(zoo.TOOLS), 5, "f", {"f": 1}, [None], [{1}]])


def outcome(call: Any) -> Any:
    try:
        return call()
    except ChatTemplateError as refusal:
        return refusal.rule


@given(st.data())
@settings(max_examples=150)
def test_odd_containers_give_the_same_ids_or_a_refusal_also_from_a_warm_cache(data: st.DataObject) -> None:
    def dress(messages: list[Any]) -> Any:
        return [data.draw(dressed)(message) if data.draw(st.booleans()) else message for message in messages]

    history, new = dress([zoo.user(), zoo.said()]), dress(MORE)
    outer, inner, ids = data.draw(listed), data.draw(listed), data.draw(numbered)([5, STOP])
    tools, finish = data.draw(tooled), data.draw(st.sampled_from(["stop", "stop", "length", None, 3, ["stop"]]))
    arguments: dict[str, Any] = {"sampled_ids": ids, "finish_reason": finish}
    CHAT.glue(TEXT, MORE, None, **STOPPED)
    fast = outcome(lambda: CHAT.glue(outer(history), inner(new), tools, **arguments))
    slow = outcome(lambda: CHAT.reference.encode(FollowUp(outer(history), inner(new), tools, **arguments)).ids.tolist())
    assert fast == slow
    outcome(lambda: CHAT.must_split(outer(history), inner(new), tools))
    prompts = [outcome(lambda: CHAT.prompt(outer([*history, *new]), tools)) for _ in range(2)]
    assert prompts[0] == prompts[1]
    prompt = outcome(lambda: CHAT.prompt(outer(history[:1]), tools))
    assert prompt == outcome(lambda: CHAT.reference.encode(Opening(outer(history[:1]), tools)).ids.tolist())


def test_what_is_equal_to_a_plain_message_gives_its_ids() -> None:
    plain = CHAT.glue(TEXT, MORE, None, **STOPPED)
    for ids in (np.array([5, STOP]), array("i", [5, STOP]), (5, STOP)):
        history = (Given(zoo.user()), {"role": Role.ASSISTANT, "content": "an answer", "tool_calls": []})
        new = (MappingProxyType({"role": Role.USER, "content": "more"}),)
        assert CHAT.glue(history, new, (), sampled_ids=ids, finish_reason="stop") == plain
    call = Given(zoo.called("k")["tool_calls"][0])
    call["function"] = MappingProxyType({"name": "lookup", "arguments": MappingProxyType({"key": "k"})})
    odd = [zoo.user(), {"role": "assistant", "tool_calls": (call,)}, zoo.result()]
    assert CHAT.prompt(odd, None) == CHAT.prompt([zoo.user(), zoo.called("k"), zoo.result()], None)


def test_options_of_the_wrong_type_are_refused() -> None:
    assert rule_of(ChatTemplate, TOKENIZER, template_kwargs=[1]) == "unknown-option"
    assert rule_of(ChatTemplate, TOKENIZER, close_tokens=[["x"]]) == "unknown-close-token"
    for template in ([{"name": "default"}], 5, {"default": 5}):
        assert rule_of(ChatTemplate, TOKENIZER, chat_template=template) == "no-template"
    assert rule_of(CHAT.prompt, [zoo.user()], "f") == "malformed-tools"
    assert rule_of(ChatTemplate(TOKENIZER, history="split").must_split, TEXT, [5], None) == "malformed-message"


def test_templates_may_be_given_as_configs_list_them_and_chosen_by_name() -> None:
    listed = [{"name": name, "template": f"{name}:{zoo.CHATML}"} for name in ("default", "tool_use", "rag")]
    chat = chat_for(zoo.CHATML, chat_template=listed)
    assert chat.decode(chat.prompt([zoo.user()], zoo.TOOLS)).startswith("tool_use:")
    assert chat.decode(chat.prompt([zoo.user()], None)).startswith("default:")
    assert chat.source.startswith("tool_use:")
    tokenizer = zoo.tokenizer_for(zoo.CHATML)
    tokenizer.chat_template = {entry["name"]: entry["template"] for entry in listed}
    named = ChatTemplate(tokenizer, chat_template="rag")
    assert named.decode(named.prompt([zoo.user()], None)).startswith("rag:")


def test_a_system_message_that_is_dropped_is_refused_and_one_that_is_moved_is_not() -> None:
    system = [{"role": "system", "content": "be brief"}, zoo.user()]
    dropping = ROLES.replace("for m in messages", "for m in messages if m.role != 'system'") + ASK
    assert rule_of(chat_for(dropping).prompt, system, None) == "message-dropped"
    long = [{"role": "system", "content": "be brief, and answer in one word only"}, zoo.user()]
    assert rule_of(chat_for(dropping).prompt, long, None) == "message-dropped"
    moving = ROLES.replace("messages %}", "messages[1:] %}").replace("m.content", "messages[0].content + m.content")
    assert "be briefhi there" in (chat := chat_for(moving + ASK)).decode(chat.prompt(system, None))
    insisting = "{%- if messages[0].content != 'be brief' %}{{ raise_exception('no') }}{%- endif %}" + ROLES + ASK
    assert "be brief" in (chat := chat_for(insisting)).decode(chat.prompt(system, None))
    cutting = ROLES.replace("m.content", "m.content.split('/think')[-1]") + ASK
    assert "brief" in (chat := chat_for(cutting)).decode(
        chat.prompt([{"role": "system", "content": "/think brief"}, zoo.user()], None)
    )


# --- tool calls -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    ["c.function.arguments.items() | list | length ~ ''", "'(' + c.function.arguments + ')'", "c.function.arguments"],
)
@pytest.mark.parametrize("given_as_text", [False, True])
def test_call_arguments_are_given_as_the_template_takes_them(arguments: str, given_as_text: bool) -> None:
    template = zoo.CHATML.replace("(call.function | tojson)", arguments.replace("c.", "call."))
    chat = chat_for(template + "{#- <tool_call></tool_call> -#}")
    history = [zoo.user(), zoo.called("k"), zoo.result(), zoo.called("l")]
    if given_as_text:
        for turn in (history[1], history[3]):
            function = turn["tool_calls"][0]["function"]
            function["arguments"] = json.dumps(function["arguments"])
    if "items" in arguments:  # shows no argument at all, so there is nothing to hold on to but the text
        history[3]["content"] = "see"
    assert text_of(chat, history, [zoo.result("r")], "<|im_end|>") == (
        "\n<|im_start|>tool\nr<|im_end|>\n<|im_start|>assistant\n"
    )
    shown = chat.decode(chat.prompt(history, None))
    assert "{'key'" not in shown
    if "items" not in arguments:
        assert '{"key": "k"}' in shown


def test_a_template_that_wants_no_text_beside_a_call_gets_none() -> None:
    template = zoo.CHATML.replace(
        "message.tool_calls or []", "(message.tool_calls or [] if message.content is none else [])"
    )
    chat = chat_for(template + "{#- <tool_call></tool_call> -#}")
    assert '"key": "k"' in chat.decode(chat.prompt([zoo.user(), zoo.called("k"), zoo.result()], None))


def test_ids_are_made_where_none_are_given_and_answer_each_other() -> None:
    template = zoo.CHATML.replace(
        "{{ message.content }}", "{{ message.content ~ (message.tool_call_id or '') }}"
    ).replace("(call.function | tojson)", "(call | tojson)")
    chat = chat_for(template + "{#- <tool_call></tool_call> -#}")
    history = [zoo.user(), zoo.called("a", "b")]
    for call in history[1]["tool_calls"]:
        del call["id"]
    new = [{"role": "tool", "content": text} for text in ("first ", "second ")]
    kept = copy.deepcopy((history, new))
    glue = text_of(chat, history, new, "<|im_end|>")
    ids = [
        line.split()[1].removesuffix("<|im_end|>") for line in glue.splitlines() if line.startswith(("first", "second"))
    ]
    assert len(set(ids)) == 2
    assert all(len(id_) == 9 and id_.isalnum() for id_ in ids)
    prompt = chat.decode(chat.prompt([*history, *new], None))
    assert all(prompt.count(id_) == 2 for id_ in ids)
    assert (history, new) == kept, "what is given is not changed"
    later = text_of(chat, [zoo.user(), zoo.said(), *history], new, "<|im_end|>")
    assert ids[0] not in later  # another position, another id: also from the cache
    given_ids = [{**message, "tool_call_id": f"abcdefgh{i}"} for i, message in enumerate(new)]
    assert "first abcdefgh0" in text_of(chat, [zoo.user(), zoo.called("a", "b")], given_ids, "<|im_end|>")


# --- rendering ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template",
    [
        zoo.CHATML,
        "{{ bos_token }}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "{%- for m in messages %}{%- if loop.last %}{% break %}{% endif %}{{ m | tojson(indent=2) }}{% endfor %}",
        "  {% if tools is not none %}\n  tools\n  {% endif %}\n{{ messages[0].content | trim }} {{ '<é>' | tojson }}",
    ],
)
@pytest.mark.parametrize("tools", [None, zoo.TOOLS])
def test_rendering_is_that_of_transformers(template: str, tools: Any) -> None:
    tokenizer = zoo.tokenizer_for(template)
    messages = [zoo.user(zoo.UNICODE), zoo.user("  second\n")]
    want = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    chat = ChatTemplate(tokenizer)
    assert chat._renderer.render(messages, tools, datetime(2026, 1, 2)) == want


def test_no_tools_is_the_same_as_none() -> None:
    chat = chat_for("{{ 'no tools' if tools is none else 'tools' }}" + zoo.CHATML)
    assert chat.prompt([zoo.user()], []) == chat.prompt([zoo.user()], None)
    assert chat.decode(chat.prompt([zoo.user()], ())).startswith("no tools")


def test_the_clock_is_given_and_a_date_in_the_glue_is_not_kept() -> None:
    dated = ROLES.replace("m.role + '", "m.role + ' ' + strftime_now('%Y') + '")
    chat = chat_for(dated, now=datetime(1999, 1, 1))
    years = [datetime(2001, 1, 1), datetime(2002, 2, 2), None]
    for year in years * 2:
        shown = str(year.year) if year else "1999"
        assert f"user {shown}\n" in chat.decode(chat.prompt([zoo.user()], None, now=year))
        glue = chat.glue(TEXT, MORE, None, sampled_ids=[chat.tokenizer.eos_token_id], finish_reason="stop", now=year)
        assert f"user {shown}\nmore" in chat.decode(glue)


def test_decoding_keeps_markers_and_spaces() -> None:
    text = "<|im_start|>user\n a , b  's  <tool_call>é漢"
    assert CHAT.decode(TOKENIZER(text, add_special_tokens=False).input_ids) == text
    assert CHAT.decode(CHAT._encoder.encode("漢").ids[:1]) == "\ufffd"


# --- policies, audit ------------------------------------------------------------------------------


def test_split_opens_a_new_stream_where_a_user_speaks_and_nowhere_else() -> None:
    split = ChatTemplate(TOKENIZER, history="split")
    assert split.must_split(TEXT, MORE, None)
    assert split.must_split([zoo.user(), zoo.called("k")], [zoo.result(), zoo.user()], None)
    assert not split.must_split([zoo.user(), zoo.called("k")], [zoo.result()], None)
    assert not CHAT.must_split(TEXT, MORE, None)
