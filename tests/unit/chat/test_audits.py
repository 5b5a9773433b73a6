"""Glue from the cache is compared with a full render now and then, and whoever is wrong is not asked again."""

import logging
from array import array
from dataclasses import replace
from typing import Any

import pytest

from fsm_rollout.chat import ChatTemplate
from fsm_rollout.chat.markers import AUDIT_EVERY, AUDIT_TOKENS, CacheEntry, MarkerEncoder
from fsm_rollout.chat.reference import FollowUp
from tests.unit.chat import chat_zoo as zoo

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
