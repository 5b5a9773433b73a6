"""How a conversation with a hosted model stands in a stream: as text, between control tokens of a plain tokenizer.

Invariant: reading a stream gives back the messages, tools and calls that were written, character by character; a
message's text is never taken for structure, as only the ids of the control tokens are. So whatever works with streams
works with models that give no token ids: the journal, its pages, replay, resume. The ids themselves are nobody's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from fsm_rollout.chat.formats.base import BadCallError, Collector, Parsed, call_of, read_whole_json
from fsm_rollout.chat.markers import Part, encoder_for
from fsm_rollout.chat.render import Tools
from fsm_rollout.errors import ChatTemplateError
from fsm_rollout.trajectory.events import Message
from fsm_rollout.trajectory.tokens import Ids

START, CALL, END = "<|chat:message|>", "<|chat:call|>", "<|chat:end|>"
CONTROLS = (START, CALL, END)
TEMPLATE = Path(__file__).with_name("hosted.jinja").read_text("utf-8").removesuffix("\n")
# In JSON of the template's own, `<` is written as an escape, so that no schema and no argument spells a control token.
NO_RESULT = "(no result: the call was not made)"  # what a model is told of a call that nobody has answered
_OURS = re.compile(r"c\d{4,}(\d{4})")  # the id of a sampled call, which ends in its place among those of its turn


def hosted_tokenizer(tokenizer: Any) -> Any:
    """Return a tokenizer made one that conversations with hosted models are written in.

    Raises:
        ChatTemplateError: it changes texts, so that they could not be read back.
    """
    missing = [control for control in CONTROLS if control not in tokenizer.get_added_vocab()]
    if missing:
        tokenizer.add_special_tokens({"additional_special_tokens": missing})
    tokenizer.backend_tokenizer.normalizer = None  # Qwen's composes accents
    tokenizer.chat_template, tokenizer.eos_token = TEMPLATE, END
    encoder, sample = encoder_for(tokenizer), "  É e\u0301 ﬁ\t\r\n\n 日本 🙂 \u200b"
    if encoder.decode(encoder.encode(sample).ids) != sample:
        raise ChatTemplateError("lossy-tokenizer", "this tokenizer changes texts; name a byte-level one as `tokenizer`")
    return tokenizer


class HostedFormat:
    """Calls as a hosted model's API gives them: each behind a control token, as a JSON object in OpenAI's form."""

    name = "hosted"

    def __init__(self, tokenizer: Any) -> None:
        self._encoder = encoder_for(tokenizer)
        self._start, self._call, self._end = (self._encoder.by_text[control].id for control in CONTROLS)

    def parse(self, text: str, ids: Sequence[int] = (), tools: Tools | None = None) -> Parsed:
        """Return what an answer says and calls, from its ids; see the protocol."""
        said, *calls = self._split(self._without_end(ids), self._call)
        collector = Collector(text)
        for place, call in enumerate(calls):
            span = (place, place)
            try:
                value = read_whole_json(self._encoder.decode(call))
                collector.calls.append(call_of(value.get("function") if isinstance(value, dict) else value, span))
            except BadCallError as error:
                collector.problem(error, span)
        return Parsed(self._encoder.decode(said), tuple(collector.calls), tuple(collector.problems))

    def write(self, text: str, calls: Sequence[Message], *, ended: bool) -> Ids:
        """Return the ids of an answer; one that has not ``ended`` was cut."""
        parts = [Part(text, environment=True)]
        for call in calls:
            parts += [Part(CALL), Part(json.dumps(call, ensure_ascii=False), environment=True)]
        ids = self._encoder.encode_parts([part for part in parts if part.text] + [Part(END)], "guard").ids
        return ids if ended or len(ids) == 1 else ids[:-1]  # a generation has a token at least

    def read(self, ids: Sequence[int]) -> tuple[list[Message], list[Message]]:
        """Return the messages of a prompt, in OpenAI's form with every call answered, and the tools.

        Raises:
            ValueError: it does not end where a new answer of the model begins.
        """
        _, *segments = self._split(ids, self._start)
        if not segments or self._encoder.decode(segments.pop()) != "assistant\n":
            raise ValueError("a hosted model cannot go on with a turn that was cut, it can only begin another")
        messages: list[Message] = []
        tools: list[Message] = []
        for segment in segments:
            text, *calls = self._split(self._without_end(segment), self._call)
            header, _, content = self._encoder.decode(text).partition("\n")
            role, _, call_id = header.partition(" ")
            if role == "tools":
                tools = json.loads(content)
                continue
            message: Message = {"role": role, "content": content}
            if role == "tool":
                message["tool_call_id"] = call_id
            if calls:
                message["tool_calls"] = [
                    {"id": f"call_{len(messages)}_{place}"} | json.loads(self._encoder.decode(call))
                    for place, call in enumerate(calls)
                ]
            messages.append(message)
        return list(_answered(messages)), tools

    def _without_end(self, ids: Sequence[int]) -> Sequence[int]:
        end = next((at for at, id_ in enumerate(ids) if id_ == self._end), len(ids))
        return ids[:end]

    @staticmethod
    def _split(ids: Sequence[int], at: int) -> list[Sequence[int]]:
        bounds = [-1, *(place for place, id_ in enumerate(ids) if id_ == at), len(ids)]
        return [ids[start + 1 : end] for start, end in pairwise(bounds)]


def _answered(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield messages so that each result has its call's id, and each call a result: the APIs insist on both."""
    calls: list[str] = []  # those of the latest turn
    unanswered: list[str] = []
    for message in [*messages, None]:
        if message is None or message["role"] != "tool":
            yield from ({"role": "tool", "content": NO_RESULT, "tool_call_id": id_} for id_ in unanswered)
            calls = [] if message is None else [call["id"] for call in message.get("tool_calls", ())]
            unanswered = list(calls)
        elif calls:
            id_, place = message["tool_call_id"], _OURS.fullmatch(message["tool_call_id"])
            if id_ not in calls:
                named = place is not None and int(place[1]) < len(calls)
                id_ = calls[int(place[1])] if place and named else (unanswered or calls)[0]
            message["tool_call_id"] = id_
            unanswered = [other for other in unanswered if other != id_]
        if message is not None:
            yield message
