"""Whose call it is: of which thread of the agent, or beside its work; and why a history is a stream of its own.

Invariant: of what is said here only :func:`is_side_call` decides where a call's tokens go; reasons are for people.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from fsm_rollout.states.external.sameness import key_of
from fsm_rollout.trajectory.enums import ForkReason
from fsm_rollout.trajectory.events import Message
from fsm_rollout.trajectory.stream import Stream, text_of

# What a caller that wants its history compacted has the model asked, as the user's message; what its summary becomes.
COMPACT: Message = {
    "role": "user",
    "content": "The conversation so far will be replaced by a summary. Write it now, and nothing else: what is to be "
    "done, what was done and found out, with names, paths and numbers, and what comes next.",
}
SUMMED_UP = "The conversation so far was replaced by this summary:\n\n"


class Origin(NamedTuple):
    """Where a call comes from, as its headers say."""

    thread: str = ""  # of several that the agent has side by side; empty: nothing is said of any
    window: int = 0  # how often the thread was compacted before


NOWHERE = Origin()

# Headers that name a thread, the narrowest first: Codex's and opencode's.
_THREADS = ("thread-id", "x-session-id", "x-session-affinity", "session-id")


def origin_of(headers: Mapping[str, str]) -> Origin:
    """Return where a call with such headers comes from."""
    thread = next((headers[name] for name in _THREADS if name in headers), "")
    window = headers.get("x-codex-window-id", "").rpartition(":")[2]
    return Origin(thread, int(window) if window.isdecimal() and len(window) < 10 else 0)


_TALK = r"(?:conversation|chat|thread|session|dialog(?:ue)?)"
_SIDE = re.compile(
    rf"\btitle generator\b|\b{_TALK} (?:title|headline)s?\b"
    rf"|\b(?:title|headline)s?\b[^.\n]{{0,60}}\b(?:this|the|a|our|their|new)\b[^.\n]{{0,30}}\b{_TALK}\b"
    rf"|\bsummari[sz]e\b[^.\n]{{0,30}}\b{_TALK}\b|\bnew (?:{_TALK} )?topic\b",
    re.IGNORECASE,
)
_SUMS_UP = re.compile(r"\bsummar|\bcompact|\bcontinuing our\b", re.IGNORECASE)
_LEAST = 16  # characters of a summary that is found again
_READ = 4000  # characters in which a call's purpose is looked for


Shown = tuple[Sequence[Message], Sequence[object]]  # messages, and the tools that come with them


def is_side_call(call: Shown, work: Shown | None, task: str, thread: str) -> bool:
    """Whether a call is beside its agent's ``work``: it reads so (:func:`reads_as_side_call`), and the work does not.

    Where there is no work yet, only a harness that names its threads is known to ask for a title first.
    """
    return reads_as_side_call(*call, task) and (not reads_as_side_call(*work, task) if work else bool(thread))


def reads_as_side_call(messages: Sequence[Message], tools: Sequence[object], task: str) -> bool:
    """Whether a call asks for a title of the conversation or the like, as calls do that are no part of the work.

    It shows no tools and no answer, and asks for that in its words, those of the ``task`` left out.
    """
    if tools or any(message["role"] in ("assistant", "tool") for message in messages):
        return False
    texts = [(text_of(message).replace(task, "") if task else text_of(message))[:_READ] for message in messages]
    return any(_SIDE.search(text) for text in texts)


def why_opened(
    messages: Sequence[Message], tools: object, streams: Iterable[tuple[Stream, object]], closing: str, *, shares: bool
) -> ForkReason:
    """Return why a history is rendered afresh.

    ``streams`` are the earlier ones with their tools, ``closing`` ends what the model thinks in them (empty: it does
    not); ``shares``: whether it begins with the same messages as one of them, up to a user's.
    """
    # 1. Begins it like an earlier one, but for the system's messages?
    streams = list(streams)
    own = [key_of(message) for message in messages if message["role"] != "system"]
    alike = [
        (stream, shown)
        for stream, shown in streams
        if own[:1] == [key_of(m) for m in stream.messages if m["role"] != "system"][:1]
    ]
    asks_for_summary = bool(_SUMS_UP.search(text_of(messages[-1])[:_READ]))
    # 2. A summary that was asked for stands in it.
    given = [text_of(message) for message in messages if message["role"] in ("system", "user")]
    summaries = [SUMMED_UP, *(summary for stream, _ in streams for summary in _summaries(stream, closing))]
    if any(summary in text for summary in summaries for text in given):
        return ForkReason.COMPACTION
    if alike and len(own) > 1 and asks_for_summary:
        return ForkReason.SUMMARY
    # 3. What differs first.
    if any(shown is not tools for _, shown in alike) and not any(shown is tools for _, shown in alike):
        return ForkReason.TOOLS_CHANGED
    if shares:
        return ForkReason.REWRITTEN
    return ForkReason.SYSTEM_CHANGED if alike else ForkReason.CONVERSATION


def _summaries(stream: Stream, closing: str) -> list[str]:
    """Return the answers in a stream that a summary was asked for with."""
    said = stream.messages
    answers = [
        text_of(message)
        for before, message in pairwise(said)
        if message["role"] == "assistant" and _SUMS_UP.search(text_of(before)[:_READ])
    ]
    texts = [(text.rpartition(closing)[2] if closing else text).strip() for text in answers]
    return [text for text in texts if len(text) >= _LEAST]
