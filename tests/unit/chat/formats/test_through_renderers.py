"""Formats that the renderers package reads, and ours against its own."""

import sys
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken

from fsm_rollout.chat.formats import Parsed, get_format
from fsm_rollout.errors import ChatTemplateError
from tests.cases import table
from tests.unit.chat import chat_zoo as zoo
from tests.unit.chat.formats.test_formats import TOOLS, check

TOKENS: list[str] = table("chat")["tokens that renderers know"]


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "renderers", None)
    with pytest.raises(ChatTemplateError, match=r"pip install fsm-rollout\[renderers\]") as refusal:
        get_format("kimi", object())
    assert refusal.value.rule == "missing-extra"


def test_formats_through_renderers_have_places_problems_and_ids() -> None:
    pytest.importorskip("renderers")
    tokenizer = oracle_tokenizer()
    kimi = get_format("kimi", tokenizer)
    text = (
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        '{"text": "a"}<|tool_call_end|><|tool_call_begin|>functions.f:1<|tool_call_argument_begin|>{bad'
        "<|tool_call_end|><|tool_calls_section_end|>"
    )
    ids = tokenizer(text, add_special_tokens=False).input_ids
    parsed = kimi.parse(text, ids, TOOLS)
    check(parsed, text)
    assert [(call.name, call.arguments, call.id) for call in parsed.calls] == [("f", {"text": "a"}, "functions.f:0")]
    assert [problem.kind for problem in parsed.problems] == ["invalid_json"]
    assert [type(attempt).__name__ for attempt in parsed.attempts] == ["Call", "CallProblem"]
    with pytest.raises(ChatTemplateError) as refusal:
        kimi.parse(text)
    assert refusal.value.rule == "format-needs-tokenizer"
    with pytest.raises(ChatTemplateError) as refusal:
        get_format("kimi")
    assert refusal.value.rule == "format-needs-tokenizer"
    with pytest.raises(ChatTemplateError) as refusal:
        get_format("kimi", zoo.tokenizer_for(zoo.CHATML))
    assert refusal.value.rule == "tokenizer-mismatch"


THROUGH_RENDERERS: dict[str, list[str]] = table("chat")["formats through renderers"]


@pytest.mark.parametrize("name", THROUGH_RENDERERS)
def test_each_format_through_renderers_reads_calls_and_names_what_is_unclosed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("renderers")
    if name == "gpt_oss":
        # Its encoder is downloaded when it is built; parsing does not use it.
        harmony = pytest.importorskip("renderers.gpt_oss", reason="openai-harmony is not installed")
        monkeypatch.setattr(harmony, "load_harmony_encoding", lambda *_: object())
    tokens, section, block, argument, stop = THROUGH_RENDERERS[name]
    tokenizer = zoo.tokenizer_for(zoo.CHATML)
    new = [token for token in tokens.split() if token not in tokenizer.get_vocab()]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in new])
    format_ = get_format(name, tokenizer)

    def read(text: str) -> Parsed:
        parsed = format_.parse(text, tokenizer(text, add_special_tokens=False).input_ids, TOOLS)
        check(parsed, text)
        return parsed

    one = block % argument
    for text in (section % one, section % one + stop):
        parsed = read(text)
        assert [(call.name, call.arguments) for call in parsed.calls] == [("f", {"text": "a"})]
        assert (parsed.content, parsed.problems) == ("", ())
    if name != "gpt_oss":  # stops after each call, and says nothing outside its channels
        parsed = read("I look." + section % (one * 2) + stop)
        assert [call.arguments for call in parsed.calls] == [{"text": "a"}] * 2
        assert parsed.content == "I look."
        assert read("I look.") == Parsed("I look.")
    assert read("") == Parsed("")
    whole = section % one
    for cut in range(len(whole)):  # whatever a length limit leaves
        parsed = read(whole[:cut])
        assert all((call.name, call.arguments) == ("f", {"text": "a"}) for call in parsed.calls)


@cache
def oracle_tokenizer() -> Any:
    tokenizer = zoo.tokenizer_for(zoo.CHATML)
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in TOKENS if t not in tokenizer.get_vocab()])
    return tokenizer
