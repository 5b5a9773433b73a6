"""Which histories are the same, as their callers see them, and what stands for one.

Invariants: what a caller may change without meaning anything by it counts for nothing: what the model thought before it
spoke, white space around what it said, the order of a call's arguments, the names of calls. What stands for a history
is made of its messages in order, so it stands for each beginning of it, too. Text of system messages that changes from
call to call (:class:`Pins`) is taken as it first was.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import msgspec

from fsm_rollout.trajectory.event_bytes import comparable
from fsm_rollout.trajectory.events import Message
from fsm_rollout.trajectory.stream import media_of, text_of

# The tools of a call by what stands for each; one object for all calls, since caches know them by identity.
Tools = tuple[dict[str, Any], ...]
Schemas = dict[tuple[str, ...], Tools]
# Between so many bytes a message's hash is remembered: of instructions, say, which each call brings again.
LONG, HUGE = 4_096, 2**18
Chain = bytes  # a hash that stands for a history: of its start, and of its messages in order

_encode = json.JSONEncoder(sort_keys=True).encode  # one for all: a history's messages are encoded in each of its calls
_encode_quickly = msgspec.json.Encoder(order="sorted").encode


def key_of(message: Message) -> str:
    """Return what makes two messages the same, as text."""
    role, said = message["role"], message.get("content")
    if not isinstance(said, str):
        said = _encode(comparable([{"content": said}])) if media_of(message) else text_of(message)
    if role == "assistant":
        said = said.strip()
    others = message.get("tool_call_id") or ""
    if calls := message.get("tool_calls"):
        functions = [(call["function"]["name"], _settled(call["function"].get("arguments"))) for call in calls]
        others = f"{_encode(functions)}\0{others}"
    return f"{role}\0{len(others)}\0{others}{said}"  # the length keeps apart what would read the same end to end


def _settled(value: Any) -> Any:
    """Return plain data with whole numbers as integers: what parses and writes it again may not keep 1.0 from 1."""
    match value:
        case dict():
            return {key: _settled(item) for key, item in value.items()}
        case list():
            return [_settled(item) for item in value]
        case float() if value.is_integer():
            return int(value)
    return value


def _digest(long: bytes) -> bytes:
    return _known_digest(long) if len(long) < HUGE else _known_digest.__wrapped__(long)


@lru_cache(maxsize=256)  # to find what came before takes a fifth of the time of hashing it
def _known_digest(long: bytes) -> bytes:
    return b"\0" + hashlib.sha256(long).digest()  # no message begins so


def extend_chain(before: Chain, message: Message) -> Chain:
    """Return that of a history with one message more; results of tools name their calls as :func:`placed` has it."""
    said = key_of(message).encode("utf-8", "surrogatepass")
    return hashlib.sha256(before + (said if len(said) < LONG else _digest(said))).digest()


def chains_of(data: object, messages: Iterable[Message]) -> list[Chain]:
    """Return those of all prefixes of a history, the empty one first; ``data`` must be the same beside the messages."""
    try:
        beside = _encode_quickly(data)  # tools, which come again with each call
    except (UnicodeEncodeError, OverflowError):  # no valid Unicode, or a number beyond 64 bits
        beside = _encode(data).encode()
    return list(accumulate(placed(messages), extend_chain, initial=_digest(beside)))


def placed(messages: Iterable[Message]) -> Iterator[Message]:
    """Yield messages where each result of a tool names its call by the place among those of its turn."""
    places: dict[str, str] = {}
    for message in messages:
        if message["role"] == "tool":
            name = message.get("tool_call_id", "")
            yield message | {"tool_call_id": places.get(name, name)}
            continue
        for place, call in enumerate(message.get("tool_calls") or ()):
            places[call.get("id")] = f"#{place}"
        yield message


def renamed(ours: Sequence[Message], theirs: Sequence[Message], new: Iterable[Message]) -> list[Message]:
    """Return new messages of a caller whose history ``theirs`` is ``ours``, with its names of calls as ours."""
    names: dict[str, str] = {}
    new = list(new)
    if all(message["role"] != "tool" for message in new):
        return new
    for own, their in zip(ours, theirs, strict=False):
        for call, same in zip(own.get("tool_calls") or (), their.get("tool_calls") or (), strict=False):
            names[same["id"]] = call["id"]
    return [
        message | {"tool_call_id": names[message["tool_call_id"]]} if message.get("tool_call_id") in names else message
        for message in new
    ]


# -- what changes from call to call ---------------------------------------------------------------------------------

_CLOCK = r"\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?: ?[AaPp][Mm])?(?: ?(?:Z|UTC|GMT|[+-]\d{2}:?\d{2})\b)?"
_DAY = r"(?:(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?,? +)?"
_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
# A value that names a moment, or one call among many.
_VALUE = re.compile(
    "|".join(
        (
            rf"{_DAY}\d{{4}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}(?:[T ]{_CLOCK})?",  # 2026-11-26T01:00:48Z
            rf"{_DAY}\d{{1,2}}[-/.]\d{{1,2}}[-/.]\d{{4}}(?:,? {_CLOCK})?",  # 11/26/2026, 1:00:48 AM
            rf"{_DAY}{_MONTH} \d{{1,2}}(?:st|nd|rd|th)?,?(?: {_CLOCK})? \d{{4}}",  # Thu Nov 26 01:00:48 2026
            rf"{_DAY}\d{{1,2}}\.? {_MONTH} \d{{4}}(?:,? {_CLOCK})?",  # Thursday, 26 November 2026
            rf"\b{_CLOCK}",
            r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b",  # a UUID
            r"\b(?=[a-z]*\d)[0-9a-f]{8,}(?:\.\d+)?\b",  # a checksum, or seconds since 1970
            r"\b(?:[a-z]+[_-])+(?=[a-z]*\d)[0-9a-z]{12,}\b",  # ses_5f1a...
        )
    ),
    re.IGNORECASE,
)
_LABEL = re.compile(
    r"date|\btime|\bnow\b|today|timestamp|session|request|trace|turn|conversation|thread|nonce|checksum|uuid|\bid\b",
    re.IGNORECASE,
)
# A billing header with its values; what follows in its line may be the next block of the system's text.
_BILLING = re.compile(r"\bx-[a-z-]*billing[a-z-]*:(?:\s*[\w.-]+=[^;\s]*;?)*", re.IGNORECASE)
_CHANGES = "\0"  # stands in the place of what changes


@lru_cache(maxsize=256)  # of long texts it takes milliseconds, and the visits of one agent have the same
def _unchanging(text: str, patterns: tuple[re.Pattern[str], ...]) -> str:
    """Return a text without what changes, by these patterns and by what is known to."""
    for pattern in patterns:
        text = pattern.sub(_CHANGES, text)
    lines = text.split("\n")
    for place, line in enumerate(lines):
        line = _BILLING.sub(_CHANGES, line)
        lines[place] = _VALUE.sub(_CHANGES, line) if _LABEL.search(line) else line
    return "\n".join(lines)


class Pins:
    """Takes text that differs from earlier text in nothing but what changes with each call as that was.

    So much is known to change: what stands in a billing header, and in lines that speak of a date, a time, a session, a
    request or the like, the moments and ids; further, what ``patterns`` match. One line that reads otherwise in
    anything else is another text.
    """

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        self._patterns = tuple(map(re.compile, patterns))
        self._first: dict[str, str] = {}  # by what does not change, the text that was the first with it
        self._orders: dict[frozenset[str], tuple[str, ...]] = {}  # the first order of each set of tools

    def text(self, text: str) -> str:
        """Return what a text is taken as."""
        return self._first.setdefault(_unchanging(text, self._patterns), text)

    def settled(self, messages: Iterable[Message]) -> list[Message]:
        """Return a history with its system messages as they first were; one that stands there again is left out."""
        said: list[Message] = []
        seen: set[str] = set()
        for message in messages:
            if message["role"] == "system" and not media_of(message):
                text = self.text(given := text_of(message))
                if text in seen:
                    continue
                seen.add(text)
                message = message if text == given else message | {"content": text}
            said.append(message)
        return said

    def tools(self, tools: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
        """Return OpenAI schemas by what stands for each: descriptions as they first were, and in the first order."""
        settled: dict[str, Mapping[str, Any]] = {}
        for tool in tools:
            function = tool["function"]
            if isinstance(about := function.get("description"), str) and (text := self.text(about)) != about:
                tool = {**tool, "function": {**function, "description": text}}
            settled[_encode(tool)] = tool
        order = self._orders.setdefault(frozenset(settled), tuple(settled))
        return {name: settled[name] for name in order}


class ShownTools:
    """The tools of calls: for the same ones the same object each time, which ``schemas`` keeps."""

    def __init__(self, schemas: Schemas, pins: Pins) -> None:
        self._schemas, self._pins = schemas, pins
        self._latest: tuple[list[dict[str, Any]], Tools] = [], ()  # the tools of the latest call, as they came

    def __call__(self, tools: list[dict[str, Any]]) -> Tools:
        """Return the schemas of a call."""
        if tools == self._latest[0]:  # quicker than to say what stands for them
            return self._latest[1]
        settled = self._pins.tools(tools)
        key = tuple(settled)
        if key not in self._schemas:
            if len(self._schemas) >= 256:
                self._schemas.clear()
            self._schemas[key] = tuple(map(dict, settled.values()))
        self._latest = tools, self._schemas[key]
        return self._schemas[key]
