"""The cache answers what the reference answers, for any conversation: same ids, same counts, same refusals."""

import logging
import weakref
from array import array
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import Environment

from fsm_rollout.chat import ChatTemplate, glue_cache
from fsm_rollout.chat.glue_cache import MOST_CHARACTERS, Histories
from fsm_rollout.chat.markers import AUDIT_EVERY, AUDIT_TOKENS, CacheEntry, MarkerEncoder
from fsm_rollout.chat.reference import FollowUp, Opening
from fsm_rollout.errors import ChatTemplateError
from tests.cases import cases, table
from tests.unit.chat import chat_zoo as zoo

ASK = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
TURN = "{{ '<|im_start|>' + m.role + '\\n' + %s + '<|im_end|>\\n' }}"


def loop(text: str, turn: str = "%s") -> str:
    """Return a template that writes ``text`` for each message, with ``turn`` around its block."""
    return "{%- for m in messages %}" + turn.replace("%s", TURN.replace("%s", text)) + "{%- endfor %}" + ASK


REFUSE = "{%- if m.role == 'user' and loop.previtem.role == 'user' %}{{ raise_exception('two') }}{%- endif %}%s"
TRICKY = {
    "counts turns": loop("m.content ~ loop.index0"),
    "keeps a flag": "{%- set ns = namespace(tools=0) %}"
    + loop("m.content ~ ns.tools", "{%- if m.role == 'tool' %}{%- set ns.tools = ns.tools + 1 %}{%- endif %}%s"),
    "repeats the system prompt": loop("(messages[0].content ~ m.content if loop.last else m.content)"),
    "looks for a word": loop("('thinking: ' if '/think' in m.content else '') ~ m.content"),
    "cuts at a word": loop("m.content.split('</think>')[-1]"),
    "looks through a name": "{%- set mark = '/think' %}"
    + loop("(m.content.replace(mark, '!') if m.role == 'user' else m.content)"),
    "compares whole texts": loop("('!' if m.content == 'x' else '') ~ m.content"),
    "trims": loop("m.content | trim"),
    "trims ends": loop("m.content.rstrip('\\n')"),
    "writes JSON": loop("m.content | tojson"),
    "wraps in an object": loop("({'role': m.role, 'text': m.content} | tojson(indent=1))"),
    "puts tools last": loop("((tools | tojson) if loop.last else '') ~ m.content"),
    "shows ids and names": loop(
        "(m.tool_call_id or '-') ~ (m.name or '-') ~ m.content ~ (m.tool_calls[0].id if m.tool_calls else '')"
    ),
    "skips empty text": loop("m.content", "{%- if m.content %}%s{%- endif %}"),
    "insists on an order": loop("m.content", REFUSE),
    "chatml with calls": zoo.CHATML,
}
CHATS: dict[str, ChatTemplate] = {}


def chat_of(name: str) -> ChatTemplate:
    if name not in CHATS:
        extra = "{#- <tool_call></tool_call><|im_end|> -#}"
        CHATS[name] = ChatTemplate(zoo.tokenizer_for(TRICKY[name] + extra, "<|im_end|>"))
    return CHATS[name]


MADE = table("chat")["texts that a template may take for something"]
texts = st.sampled_from(MADE) | st.text(max_size=6).filter(str.isprintable)
ids = st.none() | st.sampled_from(["abcdefghi", "0", "call_1-x", "zyxwvutsrqp"])


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Any], list[Any]]:
    """Draw a history that ends in an assistant turn, and what follows: mostly as agents have it, sometimes odd."""
    history: list[Any] = [{"role": "system", "content": draw(texts)}] if draw(st.booleans()) else []
    history.append(zoo.user(draw(texts)))
    for _ in range(draw(st.integers(0, 2))):
        history += draw(
            st.sampled_from([[zoo.said(), zoo.user("u")], [zoo.called("k"), zoo.result()], [zoo.user("v")]])
        )
    turn = zoo.called(*draw(st.lists(st.sampled_from("ab"), max_size=2)), content=draw(texts))
    if not turn["tool_calls"]:
        del turn["tool_calls"]
    new: list[Any] = []
    for index, call in enumerate(turn.get("tool_calls", ())):
        id_ = draw(ids)
        call["id"] = id_
        new.append({"role": "tool", "content": draw(texts), "tool_call_id": id_} | ({"name": "f"} if index else {}))
        if id_ is None:
            del call["id"], new[-1]["tool_call_id"]
    if not new or draw(st.booleans()):
        new.append(zoo.user(draw(texts)))
    return [*history, turn], new


def outcome(call: Any) -> Any:
    try:
        return call()
    except ChatTemplateError as error:
        return error.rule


@pytest.mark.parametrize("name", TRICKY)
@given(data=st.data())
@settings(max_examples=min(30, settings().max_examples))
def test_glue_is_the_references(name: str, data: st.DataObject) -> None:
    chat = chat_of(name)
    history, new = data.draw(steps())
    tools = data.draw(st.sampled_from([None, zoo.TOOLS, tuple(zoo.TOOLS), zoo.TOOLS * 2]))
    cut = data.draw(st.booleans())
    arguments: dict[str, Any] = {
        "sampled_ids": [5] if cut else [5, chat.tokenizer.eos_token_id],
        "finish_reason": "length" if cut else "stop",
    }
    want = outcome(lambda: chat.reference.encode(FollowUp(history, new, tools, **arguments)))
    for _ in range(2):
        assert outcome(lambda: chat.encode_here(FollowUp(history, new, tools, **arguments))) == want


@pytest.mark.parametrize("name", TRICKY)
@given(system=st.none() | texts, user=texts, tools=st.sampled_from([None, zoo.TOOLS, tuple(zoo.TOOLS * 2)]))
@settings(max_examples=min(20, settings().max_examples))
def test_prompts_are_the_references(name: str, system: str | None, user: str, tools: Any) -> None:
    chat = chat_of(name)
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append(zoo.user(user))
    want = outcome(lambda: chat.reference.encode(Opening(messages, tools)))
    for _ in range(2):
        assert outcome(lambda: chat.encode_here(Opening(messages, tools))) == want


@cases("chat")
def test_dependence_on_history_is_found_out(name: str, served: bool) -> None:
    chat = chat_of(name)
    arguments: dict[str, Any] = {"sampled_ids": [chat.tokenizer.eos_token_id], "finish_reason": "stop"}
    step = [zoo.user(), zoo.called("k", content="see")], [zoo.result("r")]
    chat.glue(*step, zoo.TOOLS, **arguments)
    assert (chat.encode_here(FollowUp(*step, zoo.TOOLS, **arguments)).entry is not None) is served


def test_an_empty_turn_that_is_skipped_is_refused_after_an_empty_history_too() -> None:
    chat = chat_of("skips empty text")
    arguments: dict[str, Any] = {"sampled_ids": [chat.tokenizer.eos_token_id], "finish_reason": "stop"}
    chat.glue([zoo.user("written"), zoo.said("")], [zoo.user("")], None, **arguments)
    with pytest.raises(ChatTemplateError) as refusal:
        chat.glue([zoo.user(""), zoo.said("")], [zoo.user("")], None, **arguments)
    assert refusal.value.rule == "text-moved"


def test_a_text_compared_as_a_whole_takes_the_long_way() -> None:
    chat = chat_of("compares whole texts")
    arguments: dict[str, Any] = {"sampled_ids": [chat.tokenizer.eos_token_id], "finish_reason": "stop"}
    history = [zoo.user(), zoo.said()]
    for text, shown in (("y", "\ny<"), ("x", "\n!x<"), ("xx", "\nxx<")):
        for _ in range(2):
            assert shown in chat.decode(chat.glue(history, [zoo.user(text)], None, **arguments))


def test_text_the_template_looks_at_takes_the_long_way() -> None:
    chat = chat_of("looks for a word")
    arguments: dict[str, Any] = {"sampled_ids": [chat.tokenizer.eos_token_id], "finish_reason": "stop"}
    history = [zoo.user(), zoo.said()]
    chat.glue(history, [zoo.user("plain")], None, **arguments)
    assert chat.encode_here(FollowUp(history, [zoo.user("other")], None, **arguments)).entry is not None
    assert chat.encode_here(FollowUp(history, [zoo.user("a /think b")], None, **arguments)).entry is None
    assert "thinking: a /think b" in chat.decode(chat.glue(history, [zoo.user("a /think b")], None, **arguments))


def test_equal_tools_in_other_objects_share_and_unequal_ones_do_not() -> None:
    chat = ChatTemplate(zoo.tokenizer_for(TRICKY["puts tools last"]))
    arguments: dict[str, Any] = {"sampled_ids": [chat.tokenizer.eos_token_id], "finish_reason": "stop"}
    step = [zoo.user(), zoo.said()], [zoo.user("more")]

    def tools(name: str) -> list[Any]:
        return [{"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}]

    chat.glue(*step, tools("one"), **arguments)
    assert chat.encode_here(FollowUp(*step, tools("one"), **arguments)).entry is not None
    assert chat.encode_here(FollowUp(*step, tuple(tools("one")), **arguments)).entry is not None
    assert chat.encode_here(FollowUp(*step, tools("two"), **arguments)).entry is None
    assert '"two"' in chat.decode(chat.glue(*step, tools("two"), **arguments))
    for value in (1, True, 1.0):  # equal in Python, not in JSON
        odd = tools("n")
        odd[0]["function"]["default"] = value
        want = chat.reference.encode(FollowUp(*step, odd, **arguments)).ids.tolist()
        assert chat.glue(*step, odd, **arguments) == want


roles = st.sampled_from(["user", "tool", "assistant", "system", "call", "calls"])


@given(st.lists(roles, max_size=12), st.lists(st.integers(1, 14)))
def test_adjacency_of_a_growing_history_is_that_of_a_scan(kinds: list[str], stops: list[int]) -> None:
    made = {"call": zoo.called("k"), "calls": zoo.called("a", "b")}
    history = [dict(made.get(kind) or {"role": kind, "content": "x"}) for kind in [*kinds, "assistant"]]
    growing = Histories(sees=False)
    for stop in [*sorted(stops), len(history)]:
        assert growing.pairs(history[:stop]) == Histories(sees=False).pairs(history[:stop])
        if len(history[:stop]) > 1:  # the same turn at another place, as in a stream opened afresh
            assert growing.pairs(history[1:stop]) == Histories(sees=False).pairs(history[1:stop])


def test_turns_are_kept_alive_by_their_size_not_by_their_number() -> None:
    """Both ways to write a long turn: as text, and as what a tool is called with."""

    class Message(dict[str, Any]):
        """A message whose end can be seen."""

    def turn(index: int) -> Message:
        text = f"{index} " + "x" * 100_000
        call = {"id": "c", "type": "function", "function": {"name": "write", "arguments": {"lines": [text]}}}
        return Message(role="assistant", content=text) if index % 2 else Message(role="assistant", tool_calls=[call])

    histories = Histories(sees=False)
    made: list[weakref.ref[Message]] = []
    for index in range(500):
        last = turn(index)
        made.append(weakref.ref(last))
        assert histories.pairs([zoo.user(), last]) == Histories(sees=False).pairs([zoo.user(), last])
    kept = [message for ref in made if (message := ref()) is not None]
    assert 1 < len(kept) < 1.01 * MOST_CHARACTERS / 100_000


def test_caches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = ChatTemplate(zoo.tokenizer_for(TRICKY["trims"]))
    monkeypatch.setattr(glue_cache, "MOST_ENTRIES", 16)
    for index in range(40):
        chat.prompt([{"role": "system", "content": str(index)}, zoo.user()], None)
        chat.glue([zoo.user(), zoo.said()], [zoo.user()], [{"n": index}], sampled_ids=[1], finish_reason="length")
        assert all(len(kept) <= 16 for kept in vars(chat._cache).values() if isinstance(kept, dict))


def test_what_is_remembered_of_a_prompt_does_not_grow_with_its_tools() -> None:
    """Nor does the time: what the template writes itself is there once, as ids, for all prompts."""
    chat = ChatTemplate(zoo.tokenizer_for(TRICKY["trims"].replace("{%- for", "{{ tools | tojson }}{%- for", 1)))
    schemas = [{"type": "function", "function": {"name": f"look{index}"}} for index in range(30)]
    for text in ("one", "two", "three", "one"):
        prompt = chat.prompt([zoo.user(text)], schemas)
        assert prompt == chat.reference.encode(Opening([zoo.user(text)], schemas)).ids.tolist()
    (learned,) = (template for template in chat._cache.templates.values() if template is not None)
    assert 0 < max(len(ids) for ids, _ in learned._known.values()) < 100 < len(prompt)


def test_results_in_another_order_than_their_calls_keep_their_ids() -> None:
    chat = chat_of("shows ids and names")
    arguments: dict[str, Any] = {"sampled_ids": [chat.tokenizer.eos_token_id], "finish_reason": "stop"}
    history, new = [zoo.user(), zoo.called("k", "l")], [zoo.result("r", 1), zoo.result("s", 0)]
    for _ in range(2):
        said = chat.decode(chat.glue(history, new, None, **arguments))
        assert 0 < said.index("abcdefgh1") < said.index("abcdefgh0")


def test_texts_that_a_template_looks_for_are_found_through_names() -> None:
    tree = Environment().parse("{% set mark = '/think' %}{{ text.replace(mark, '') }}{{ text == mark }}")
    assert glue_cache.tested_texts([tree]) == (("/think",), frozenset({"/think"}))


def test_a_call_nobody_answered_does_not_lend_its_id_to_a_later_turn() -> None:
    chat = chat_of("shows ids and names")
    arguments: dict[str, Any] = {"sampled_ids": [chat.tokenizer.eos_token_id], "finish_reason": "stop"}
    history = [zoo.user(), zoo.called("k"), zoo.said()]
    new = [{"role": "tool", "content": "r"}]
    want = chat.reference.encode(FollowUp(history, new, None, **arguments)).ids.tolist()
    assert "abcdefgh" not in chat.decode(want)
    for _ in range(2):
        assert chat.glue(history, new, None, **arguments) == want


TOKENIZER = zoo.tokenizer_for(zoo.CHATML + "{#- <tool_call></tool_call> -#}")
MORE = [zoo.user("more")]


def asked(new: list[Any] = MORE) -> FollowUp:
    """Ask what follows a turn that ended."""
    text = [zoo.user(), zoo.said()]
    return FollowUp(text, new, None, sampled_ids=[TOKENIZER.eos_token_id], finish_reason="stop")


def test_an_audit_that_fails_turns_the_cache_off_and_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    chat = ChatTemplate(TOKENIZER)
    rendered, served, again = (chat.encode_here(asked()) for _ in range(3))
    assert rendered.entry is None
    assert served.entry is not None
    assert served.entry is again.entry
    assert chat.encode_here(asked()).entry is not None
    assert chat.audit(asked(), served) is None
    assert not chat.audit_failures
    wrong = replace(served, ids=array("i", [*served.ids, 7]))
    with caplog.at_level(logging.WARNING):
        mismatch = chat.audit(asked(), wrong)
    assert mismatch is not None
    assert mismatch.entry is served.entry
    assert mismatch.rule == "glue-mismatch"
    assert len(chat.audit_failures) == 1
    assert "audit failed" in caplog.text
    assert chat.encode_here(asked()).entry is None
    assert chat.encode_here(asked()) == served
    assert chat.encode_here(asked()).entry is None
    refused = ChatTemplate(TOKENIZER).audit(asked([]), served)
    assert refused is not None
    assert "no-new-message" in str(refused)


def test_the_first_uses_of_each_entry_are_audited_and_then_one_in_so_many() -> None:
    """Of long streams more rarely, in proportion; of short ones always."""
    for length, last in ((1, 199), (3, 7 * AUDIT_EVERY - 1)):
        for entry in (CacheEntry(), CacheEntry()):
            audited = [use for use in range(1, last + 1) if entry.audit_due(length * AUDIT_TOKENS)]
            assert audited == [1, 2, *range(length * AUDIT_EVERY, last + 1, length * AUDIT_EVERY)]


def test_glue_that_came_before_is_not_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = ChatTemplate(TOKENIZER)
    encoded: list[str] = []
    encode = MarkerEncoder.encode
    monkeypatch.setattr(MarkerEncoder, "encode", lambda self, text: encoded.append(text) or encode(self, text))
    results = [chat.encode_here(asked()) for _ in range(3)]
    encoded.clear()
    again = chat.encode_here(asked())
    assert encoded == []
    again.ids.append(0)  # what was handed out is the caller's own
    assert [*results, chat.encode_here(asked())] == [results[0]] * 4
