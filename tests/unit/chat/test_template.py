"""The rules one by one, on small templates written here."""

import copy
import enum
import json
import logging
from array import array
from collections import OrderedDict, UserDict, UserList, deque
from dataclasses import replace
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
from fsm_rollout.chat.markers import AUDIT_EVERY, AUDIT_TOKENS, CacheEntry, MarkerEncoder
from fsm_rollout.chat.reference import FollowUp, Opening
from fsm_rollout.errors import ChatTemplateError
from tests.unit.chat import chat_zoo as zoo

TOKENIZER = zoo.tokenizer_for(zoo.CHATML + "{#- <tool_call></tool_call> -#}")
CHAT = ChatTemplate(TOKENIZER)
STOP = TOKENIZER.eos_token_id
USER_TURN = "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
TEXT = [zoo.user(), zoo.said()]
MORE = [zoo.user("more")]

ROLES = "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
ASK = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
GLM = (
    "{%- for m in messages %}{%- if m.role == 'tool' %}{{ '<|observation|>' }}{%- else %}{{ '<|' + m.role + '|>' }}"
    "{%- endif %}{{ '\\n' + m.content }}{%- for c in m.tool_calls or [] %}{{ '<tool_call>' + c.function.name }}"
    "{%- for k, v in c.function.arguments.items() %}{{ '<arg_key>' + k + '</arg_key>' + v }}{%- endfor %}"
    "{{ '</tool_call>' }}{%- endfor %}{%- endfor %}{%- if add_generation_prompt %}{{ '<|assistant|>' }}{%- endif %}"
    "{#- <|user|><|system|><|endoftext|> -#}"
)
HARMONY = (
    "{%- for m in messages %}{%- if m.role == 'assistant' and m.tool_calls %}"
    "{{ '<|start|>assistant<|message|>' + (m.tool_calls[0].function.arguments | tojson) + '<|call|>' }}"
    "{%- elif m.role == 'assistant' %}{{ '<|start|>assistant<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{%- endif %}"
)


def chat_for(template: str, *, eos: str | None = None, **kwargs: Any) -> ChatTemplate:
    return ChatTemplate(zoo.tokenizer_for(template, eos), **kwargs)


def text_of(chat: ChatTemplate, history: list[Any], new: list[Any], stop: str | None, tools: Any = None) -> str:
    """Return the glue as text, the same from the reference, while learning and from the cache."""
    id_ = None if stop is None else chat.tokenizer.convert_tokens_to_ids(stop)
    arguments: dict[str, Any] = {
        "sampled_ids": [5] if id_ is None else [5, id_],
        "finish_reason": "length" if id_ is None else "stop",
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


def test_a_sampled_close_is_not_written_again_and_a_cut_turn_gets_one() -> None:
    assert text_of(CHAT, TEXT, MORE, "<|im_end|>") == "\n" + USER_TURN
    assert text_of(CHAT, TEXT, MORE, None) == "<|im_end|>\n" + USER_TURN
    assert CHAT.glue(TEXT, MORE, None, sampled_ids=[], finish_reason="abort")[0] == STOP


def test_another_stop_token_stands_for_the_close() -> None:
    chat = chat_for(zoo.CHATML + "{#- <|endoftext|> -#}", eos="<|endoftext|>")
    assert text_of(chat, TEXT, MORE, "<|endoftext|>") == "\n" + USER_TURN
    assert text_of(chat, TEXT, MORE, None) == "<|im_end|>\n" + USER_TURN
    assert {chat.tokenizer.convert_tokens_to_ids(t) for t in ("<|endoftext|>", "<|im_end|>")} == chat.stop_ids


def test_a_stop_inside_the_turn_leaves_the_rest_of_it_to_the_glue() -> None:
    """An engine told to stop at ``</tool_call>``: what the template writes after it is still missing."""
    chat = ChatTemplate(TOKENIZER)
    ids = chat.glue(
        [zoo.user(), zoo.called("k")],
        [zoo.result("r")],
        None,
        sampled_ids=[TOKENIZER.convert_tokens_to_ids("</tool_call>")],
        finish_reason="stop",
    )
    assert chat.decode(ids) == "<|im_end|>\n<|im_start|>tool\nr<|im_end|>\n<|im_start|>assistant\n"
    cut_short = chat.glue(
        TEXT, MORE, None, sampled_ids=[TOKENIZER.convert_tokens_to_ids("</tool_call>")], finish_reason="stop"
    )
    assert chat.decode(cut_short) == "<|im_end|>\n" + USER_TURN


def test_an_opener_is_sampled_once_and_never_missing() -> None:
    chat = chat_for(GLM, eos="<|endoftext|>")
    opener = {chat.tokenizer.convert_tokens_to_ids(token) for token in ("<|user|>", "<|observation|>")}
    assert chat.close_ids == opener
    assert text_of(chat, TEXT, MORE, "<|user|>") == "\nmore<|assistant|>"
    assert text_of(chat, TEXT, MORE, "<|endoftext|>") == "<|user|>\nmore<|assistant|>"
    assert text_of(chat, TEXT, MORE, "<|observation|>") == "<|user|>\nmore<|assistant|>"
    assert text_of(chat, TEXT, MORE, None) == "<|user|>\nmore<|assistant|>"
    called = [zoo.user(), zoo.called("k")]
    assert text_of(chat, called, [zoo.result("r")], "<|observation|>") == "\nr<|assistant|>"
    assert text_of(chat, called, [zoo.result("r")], "<|user|>") == "<|observation|>\nr<|assistant|>"
    assert text_of(chat, called, [zoo.result("r")], None) == "<|observation|>\nr<|assistant|>"


def test_text_turns_and_tool_turns_may_close_differently() -> None:
    chat = chat_for(HARMONY, eos="<|return|>")
    follow = "<|start|>user<|message|>more<|end|><|start|>assistant"
    assert text_of(chat, TEXT, MORE, "<|return|>") == follow
    assert text_of(chat, TEXT, MORE, "<|end|>") == follow
    assert text_of(chat, TEXT, MORE, None) == "<|end|>" + follow
    expected = "<|start|>tool<|message|>r<|end|><|start|>assistant"
    assert text_of(chat, [zoo.user(), zoo.called("k")], [zoo.result("r")], "<|call|>") == expected
    assert text_of(chat, [zoo.user(), zoo.called("k")], [zoo.result("r")], None) == "<|call|>" + expected


def test_of_a_run_of_closing_tokens_the_last_is_the_close_and_a_cut_turn_gets_all() -> None:
    template = ROLES.replace("<|im_end|>", "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>") + ASK
    chat = chat_for(template)
    rest = "\n<|im_start|>user\nmore<|END_RESPONSE|><|END_OF_TURN_TOKEN|>\n<|im_start|>assistant\n"
    assert text_of(chat, TEXT, MORE, "<|END_OF_TURN_TOKEN|>") == rest
    assert text_of(chat, TEXT, MORE, None) == "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>" + rest


def test_a_prefilled_thought_is_part_of_the_glue() -> None:
    template = zoo.CHATML.replace(
        "assistant\\n' }}{%- endif %}", "assistant\\n' }}{%- if think %}<think>{% endif %}{%- endif %}"
    )
    chat = chat_for(template, template_kwargs={"think": True})
    assert text_of(chat, TEXT, MORE, "<|im_end|>").endswith("<|im_start|>assistant\n<think>")


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


def test_what_a_template_does_wrong_is_refused_by_name() -> None:
    def rule(template: str, history: list[Any] = TEXT, new: list[Any] = MORE) -> str:
        chat = chat_for(template, eos="<|im_end|>")
        return rule_of(chat.glue, history, new, None, sampled_ids=[chat.tokenizer.eos_token_id], finish_reason="stop")

    tool_step = [zoo.user(), zoo.called("k", content="see")], [zoo.result("r")]
    no_end = ROLES.replace("<|im_end|>", "") + ASK + "{#- <|im_end|> -#}"
    drops = "{%- for m in messages if m.role != 'tool' %}"
    assert rule(no_end) == "no-close-token"
    assert rule(ROLES.replace("{%- for m in messages %}", drops) + ASK, *tool_step) == "message-dropped"
    assert rule(ROLES.replace("m.content", "(m.content if m.role == 'user' else '-')") + ASK) == "turn-dropped"
    early = "{{ messages[-1].content }}" + ROLES.replace("m.content", "(m.content if not loop.last else '')")
    assert rule(early + ASK) == "text-moved"
    assert rule(ROLES + "{{ messages[0].missing.deeper }}") == "template-raised"
    assert rule("{%- if messages[-1].role %}{{ raise_exception('no') }}{%- endif %}" + ROLES) == "template-raised"
    upper = "(m.content | upper if m.content == 'more' else m.content)"
    assert rule(ROLES.replace("m.content", upper) + ASK) == "message-altered"
    depends = "<|im_end|>' ~ ('\\n' if messages[1].content == 'an answer' else ' ') }}"
    assert rule(ROLES.replace("<|im_end|>\\n' }}", depends) + ASK) == "text-moved"
    header = "(' ' if messages[-1].content == 'more' else '') ~ '<|im_end|>\\n' }}"
    assert rule(ROLES.replace("'<|im_end|>\\n' }}", header) + ASK) == "text-moved"
    header = "('A' if messages[-1].content == 'more' else 'B') ~ '<|im_end|>\\n' }}"
    assert rule(ROLES.replace("'<|im_end|>\\n' }}", header) + ASK) == "text-moved"


def test_what_a_tokenizer_lacks_is_refused_by_name() -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=TOKENIZER.backend_tokenizer)
    assert rule_of(ChatTemplate, bare) == "no-template"
    assert rule_of(ChatTemplate, bare, chat_template="{% if %}") == "template-syntax"
    assert rule_of(ChatTemplate, object(), chat_template=zoo.CHATML) == "slow-tokenizer"
    assert rule_of(ChatTemplate, TOKENIZER, injection="hope") == "unknown-option"
    assert rule_of(ChatTemplate, TOKENIZER, history="forget") == "unknown-option"


def test_what_a_caller_does_wrong_is_refused_by_name() -> None:
    def rule(history: Any, new: Any, sampled: Any = (STOP,), finish: Any = "stop") -> str:
        return rule_of(CHAT.glue, history, new, None, sampled_ids=list(sampled), finish_reason=finish)

    assert rule(TEXT, MORE, sampled=[5]) == "not-a-stop-token"
    assert rule(TEXT, MORE, sampled=[]) == "not-a-stop-token"
    assert rule(TEXT, MORE, finish="error") == "unknown-option"
    assert rule(TEXT, []) == "no-new-message"
    assert rule(TEXT, [zoo.said()]) == "assistant-in-new"
    assert rule([], MORE) == "malformed-message"
    assert rule([zoo.user()], MORE) == "malformed-message"
    for message in (7, {"content": "x"}, {"role": 3, "content": "x"}, {"role": "user", "content": 5}):
        assert rule(TEXT, [message]) == "malformed-message"
        assert rule_of(CHAT.prompt, [message], None) == "malformed-message"
    listed = {"function": {"name": "f", "arguments": [1]}}
    numbered = {"id": 5, "function": {"name": "f", "arguments": {}}}
    for calls in ("lookup", [7], [{"function": {}}], [listed], [numbered]):
        assert rule([zoo.user(), {**zoo.said(), "tool_calls": calls}], MORE) == "malformed-message"
    assert rule(TEXT, [{**zoo.result(), "tool_call_id": 5}]) == "malformed-message"
    assert rule_of(CHAT.prompt, [], None) == "malformed-message"
    assert rule_of(CHAT.prompt, "hello", None) == "malformed-message"


def test_pictures_are_refused_and_text_parts_are_joined() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:"}}
    parts = [{"type": "text", "text": "more"}, {"type": "text", "text": " still"}]
    for content in ([picture], [*parts, picture], ["text"], [{"type": "text"}]):
        message = {"role": "user", "content": content}
        assert rule_of(CHAT.prompt, [message], None) == "multimodal-content"
        arguments: dict[str, Any] = {"sampled_ids": [STOP], "finish_reason": "stop"}
        assert rule_of(CHAT.glue, TEXT, [message], None, **arguments) == "multimodal-content"
        assert rule_of(CHAT.glue, [message, zoo.said()], MORE, None, **arguments) == "multimodal-content"
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
        lambda: CHAT.glue(history, new, tools, sampled_ids=[STOP], finish_reason="stop"),
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
    CHAT.glue(TEXT, MORE, None, sampled_ids=[STOP], finish_reason="stop")
    fast = outcome(lambda: CHAT.glue(outer(history), inner(new), tools, **arguments))
    slow = outcome(lambda: CHAT.reference.encode(FollowUp(outer(history), inner(new), tools, **arguments)).ids.tolist())
    assert fast == slow
    outcome(lambda: CHAT.must_split(outer(history), inner(new), tools))
    prompts = [outcome(lambda: CHAT.prompt(outer([*history, *new]), tools)) for _ in range(2)]
    assert prompts[0] == prompts[1]
    prompt = outcome(lambda: CHAT.prompt(outer(history[:1]), tools))
    assert prompt == outcome(lambda: CHAT.reference.encode(Opening(outer(history[:1]), tools)).ids.tolist())


def test_what_is_equal_to_a_plain_message_gives_its_ids() -> None:
    plain = CHAT.glue(TEXT, MORE, None, sampled_ids=[STOP], finish_reason="stop")
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
    tokenizer = zoo.tokenizer_for(zoo.CHATML)
    tokenizer.chat_template = {entry_named["name"]: entry_named["template"] for entry_named in listed}
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
    glue = text_of(chat, history, new, "<|im_end|>")
    ids = [
        line.split()[1].removesuffix("<|im_end|>") for line in glue.splitlines() if line.startswith(("first", "second"))
    ]
    assert len(set(ids)) == 2
    assert all(len(id_) == 9 and id_.isalnum() for id_ in ids)
    prompt = chat.decode(chat.prompt([*history, *new], None))
    assert all(prompt.count(id_) == 2 for id_ in ids)
    later = text_of(chat, [zoo.user(), zoo.said(), *history], new, "<|im_end|>")
    assert ids[0] not in later  # another position, another id: also from the cache
    given_ids = [{**message, "tool_call_id": f"abcdefgh{i}"} for i, message in enumerate(new)]
    assert "first abcdefgh0" in text_of(chat, [zoo.user(), zoo.called("a", "b")], given_ids, "<|im_end|>")


def test_nothing_given_is_changed() -> None:
    history = [zoo.user(), zoo.called("k")]
    del history[1]["tool_calls"][0]["id"]
    new = [{"role": "tool", "content": "r"}]
    kept = copy.deepcopy((history, new, zoo.TOOLS))
    text_of(CHAT, history, new, "<|im_end|>", zoo.TOOLS)
    CHAT.prompt(history, zoo.TOOLS)
    assert (history, new, zoo.TOOLS) == kept


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


def test_a_tokenizer_may_have_one_template_for_tools_and_one_without() -> None:
    chat = chat_for(zoo.CHATML, chat_template={"default": zoo.CHATML, "tool_use": "T" + zoo.CHATML})
    assert chat.decode(chat.prompt([zoo.user()], zoo.TOOLS)).startswith("T<|im_start|>")
    assert chat.decode(chat.prompt([zoo.user()], None)).startswith("<|im_start|>")
    assert chat.source == "T" + zoo.CHATML


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


def test_an_audit_that_fails_turns_the_cache_off_and_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    chat = ChatTemplate(TOKENIZER)
    arguments: dict[str, Any] = {"sampled_ids": [STOP], "finish_reason": "stop"}
    rendered, served, again = (chat.encode_here(FollowUp(TEXT, MORE, None, **arguments)) for _ in range(3))
    assert rendered.entry is None
    assert served.entry is not None
    assert served.entry is again.entry
    assert chat.encode_here(FollowUp(TEXT, MORE, None, **arguments)).entry is not None
    assert chat.audit(FollowUp(TEXT, MORE, None, **arguments), served) is None
    assert not chat.audit_failures
    wrong = replace(served, ids=array("i", [*served.ids, 7]))
    with caplog.at_level(logging.WARNING):
        mismatch = chat.audit(FollowUp(TEXT, MORE, None, **arguments), wrong)
    assert mismatch is not None
    assert mismatch.entry is served.entry
    assert mismatch.rule == "glue-mismatch"
    assert len(chat.audit_failures) == 1
    assert "audit failed" in caplog.text
    assert chat.encode_here(FollowUp(TEXT, MORE, None, **arguments)).entry is None
    assert chat.encode_here(FollowUp(TEXT, MORE, None, **arguments)) == served
    assert chat.encode_here(FollowUp(TEXT, MORE, None, **arguments)).entry is None
    refused = ChatTemplate(TOKENIZER).audit(FollowUp(TEXT, [], None, **arguments), served)
    assert refused is not None
    assert "no-new-message" in str(refused)


def test_the_first_uses_of_each_entry_are_audited_and_then_one_in_so_many() -> None:
    for entry in (CacheEntry(), CacheEntry()):
        assert [use for use in range(1, 200) if entry.audit_due(AUDIT_TOKENS)] == [1, 2, 64, 128, 192]


def test_long_streams_are_audited_more_rarely_in_proportion_and_short_ones_always() -> None:
    entry = CacheEntry()
    audited = [use for use in range(1, 7 * AUDIT_EVERY) if entry.audit_due(3 * AUDIT_TOKENS)]
    assert audited == [1, 2, 3 * AUDIT_EVERY, 6 * AUDIT_EVERY]  # the first uses, whatever it takes


def test_glue_that_came_before_is_not_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = ChatTemplate(TOKENIZER)
    encoded: list[str] = []
    encode = MarkerEncoder.encode
    monkeypatch.setattr(MarkerEncoder, "encode", lambda self, text: encoded.append(text) or encode(self, text))
    arguments: dict[str, Any] = {"sampled_ids": [STOP], "finish_reason": "stop"}
    results = [chat.encode_here(FollowUp(TEXT, MORE, None, **arguments)) for _ in range(3)]
    encoded.clear()
    again = chat.encode_here(FollowUp(TEXT, MORE, None, **arguments))
    assert encoded == []
    again.ids.append(0)  # what was handed out is the caller's own
    assert [*results, chat.encode_here(FollowUp(TEXT, MORE, None, **arguments))] == [results[0]] * 4
