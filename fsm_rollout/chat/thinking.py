"""How a model's thinking stands in its turn: learned from the chat template by probes, not looked up by model name.

A turn is rendered whose reasoning and whose answer are sentinels. What stands between a turn's header and the reasoning
opens it; what stands between that and the answer closes it, with the template's own line breaks. A template that writes
no reasoning may still know where it ends, since it cuts it out of earlier turns: of the texts that it looks for, that
is taken before which nothing of a turn is left. Or it opens it in the header, with a tag whose counterpart is a token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from fsm_rollout.chat.glue_cache import tested_texts
from fsm_rollout.chat.markers import MarkerEncoder
from fsm_rollout.chat.render import Renderer
from fsm_rollout.chat.turn_ends import common_prefix
from fsm_rollout.errors import ChatTemplateError
from fsm_rollout.trajectory.events import Message
from fsm_rollout.trajectory.tokens import Ids, as_ids

THOUGHT, ANSWER, QUESTION = "zqThoughtProbe1", "zqAnswerProbe2", "zqQuestionProbe3"
USER: Message = {"role": "user", "content": QUESTION}
REASONING = ("reasoning_content", "reasoning", "thinking")  # the keys of a message that hold it
_LAST_TAG = re.compile(r"(<[^<>\s]+>|\[[^\[\]\s]+\])\Z")


@dataclass(frozen=True, slots=True)
class ThinkingTags:
    """What opens and closes thinking, as text and as ids."""

    opening: str
    """The text that opens it, without white space around."""
    closing: str
    """The text that ends it: up to its first control token, if it has one."""
    opening_ids: Ids
    close: Ids
    """What closes it, with the template's own line breaks."""
    encoder: MarkerEncoder

    def opened_by(self, header: Sequence[int]) -> bool:
        """Whether a turn begins within its thinking, behind these ids."""
        return self._end(header).endswith(self.opening)

    def closed_by(self, header: Sequence[int]) -> bool:
        """Whether a turn begins behind its thinking, which these ids have closed."""
        return self._end(header).endswith(self.closing)

    def _end(self, ids: Sequence[int]) -> str:
        # White space of a few tokens may follow; a character is at most four tokens.
        reach = 4 * max(len(self.opening), len(self.closing)) + 8
        return self.encoder.decode(ids[-reach:]).rstrip()


def find_thinking(renderer: Renderer, encoder: MarkerEncoder, stop_ids: frozenset[int], now: datetime) -> ThinkingTags:
    """Return how a template writes thinking; ChatTemplateError ``no-thinking``: in no way that can be closed."""
    opening, close = _written(renderer, encoder, now) or _cut_out(renderer, encoder, now) or ("", "")
    markers = encoder.find(close)
    closing = close[: markers[0][0] + len(markers[0][1].text)].strip() if markers else close.strip()
    if not (opening and closing):
        raise ChatTemplateError("no-thinking", "the chat template writes no thinking, so there is none to be closed")
    ids = encoder.encode(close).ids
    if not stop_ids.isdisjoint(ids):
        raise ChatTemplateError(
            "no-thinking", f"the chat template closes thinking with {close!r}, which holds a token that ends the turn"
        )
    if encoder.decode(ids) != close:
        raise ChatTemplateError("no-thinking", f"this tokenizer does not give {close!r} back, which closes thinking")
    return ThinkingTags(opening, closing, as_ids(encoder.encode(opening).ids), as_ids(ids), encoder)


def _written(renderer: Renderer, encoder: MarkerEncoder, now: datetime) -> tuple[str, str] | None:
    """Return what opens and what closes the reasoning that the template writes."""
    turn: Message = {"role": "assistant", "content": ANSWER, **dict.fromkeys(REASONING, THOUGHT)}
    try:
        header = renderer.render([USER], None, now).rpartition(QUESTION)[2]
        text = renderer.render([USER, turn], None, now, generation=False)
    except ChatTemplateError:
        return None
    before, _, behind = text.partition(THOUGHT)
    close, answer, _ = behind.partition(ANSWER)
    if not answer or not close.strip():
        return None
    before = before.rpartition(QUESTION)[2]
    return before[len(common_prefix(header, before)) :].strip() or _last_tag(encoder, before), close


def _cut_out(renderer: Renderer, encoder: MarkerEncoder, now: datetime) -> tuple[str, str] | None:
    """Return what opens and what closes the reasoning that the template cuts out of earlier turns, or only opens."""
    try:
        header = renderer.render([USER], None, now).rpartition(QUESTION)[2]
    except ChatTemplateError:
        return None
    opened = re.sub(r"^(\W+)", r"\1/", _last_tag(encoder, header))
    found = opened if opened in encoder.by_text else None
    for tag in map(str.strip, tested_texts(renderer.trees())[0]):
        turn: Message = {"role": "assistant", "content": f"{THOUGHT}{tag}{ANSWER}"}
        try:
            text = renderer.render([USER, turn, USER], None, now)
        except ChatTemplateError:
            continue
        if "/" in tag and ANSWER in text and THOUGHT not in text:
            found = tag
    if found is None:
        return None
    opening = found.replace("/", "", 1)
    gap = "" if header.endswith(opening) else "\n"
    return opening, f"{gap}{found}{2 * gap}"


def _last_tag(encoder: MarkerEncoder, text: str) -> str:
    """Return the control token, or what looks like one, that a text ends with."""
    text = text.rstrip()
    markers = encoder.find(text)
    if markers and markers[-1][0] + len(markers[-1][1].text) == len(text):
        return markers[-1][1].text
    found = _LAST_TAG.search(text)
    return found.group() if found else ""
