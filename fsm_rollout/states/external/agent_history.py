"""One history of a foreign agent with its stream, and the assistant's turns in it.

Invariant: a branch's chains stand for its messages as its caller sees them; where its tokens are, its stream says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from fsm_rollout.chat.markers import Encoded
from fsm_rollout.chat.reference import FollowUp, Opening
from fsm_rollout.chat.thinking import ThinkingTags
from fsm_rollout.errors import ChatTemplateError
from fsm_rollout.states.bound_agent import BoundContext
from fsm_rollout.states.external.chat_request import THOUGHT
from fsm_rollout.states.external.sameness import Chain, chains_of
from fsm_rollout.states.external.text_stream import split_thought, until_stop
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.events import Message
from fsm_rollout.trajectory.stream import Stream, text_of


@dataclass(slots=True)
class HistoryTurn:
    """An assistant turn of a branch: where its tokens are, and whether its caller has received it."""

    before: int  # how many messages stand before it
    start: int
    end: int  # its tokens
    answered: bool = True  # whether it has come to its end; else the rest of it can be sampled
    delivered: bool = True
    stopped: bool = False  # whether it has ended, be it at a stop string, and was not cut
    stops: tuple[str, ...] = ()  # the strings that were to end it by its call, and that its caller does not see


@dataclass(slots=True, eq=False)
class AgentHistory:
    """One history with its stream."""

    name: str
    bound: BoundContext
    chains: list[Chain]  # the hash of each prefix of its messages, the empty one first
    tools_known: bool = True  # whether its tools are those of ``bound``; else a call will show which they were
    constrained: bool = False  # whether it is sampled under grammars, and so is not trained
    thread: str | None = None  # which of its agent's it is; ``None``: that is not known
    turns: list[HistoryTurn] = field(default_factory=list)
    asks: bool = True  # whether its last message waits for an answer
    left: AgentHistory | None = None  # the branch that it forks off,
    shares: int = 0  # and how many messages they share
    busy: bool = False

    def begins_with(self, chains: Sequence[Chain], count: int) -> bool:
        """Whether its first ``count`` messages are those of the history that has these hashes."""
        return count < min(len(chains), len(self.chains)) and self.chains[count] == chains[count]


class CallersView:
    """What callers see of a model's turns: what it thought, by ``tags``, apart from what it says."""

    def __init__(self, tags: ThinkingTags | None) -> None:
        self.tags = tags
        self.closing = "" if tags is None else tags.closing  # ends a thought

    def seen(self, stream: Stream, turn: HistoryTurn, message: Message) -> Message:
        """Return a turn's message as its caller sees it."""
        if self.tags is None and not turn.stops:
            return message
        reach = max(0, turn.start - 256)  # tokens that hold the header's end
        inside = self.tags is not None and self.tags.opened_by(stream.tokens.tail(reach)[: turn.start - reach])
        thought, text = split_thought(text_of(message), self.tags, inside)
        text, _ = until_stop(text, turn.stops)
        return message | {"content": text, THOUGHT: thought} if thought else message | {"content": text}

    def chains(self, messages: Iterable[Message]) -> list[Chain]:
        """Return what stands for the prefixes of a history that a caller sends; it may have put thoughts back."""
        if self.tags is not None:
            messages = [
                message | {"content": split_thought(text_of(message), self.tags)[1]}
                if message["role"] == "assistant"
                else message
                for message in messages
            ]
        return chains_of(None, messages)

    def of_stream(self, stream: Stream, turns: Iterable[HistoryTurn]) -> list[Chain]:
        """Return what stands for the prefixes of a stream's messages, as their caller sees them."""
        seen = {turn.before: self.seen(stream, turn, stream.messages[turn.before]) for turn in turns}
        return self.chains(seen.get(place, message) for place, message in enumerate(stream.messages))


def turns_of(stream: Stream, *, delivered: bool) -> list[HistoryTurn]:
    """Return the turns that were sampled in a stream, each with what closed its thinking and all that it went on by."""
    return [
        HistoryTurn(part.message, part.start, part.start + part.length, delivered=delivered)
        for part in stream.parts
        if part.message >= stream.opening and stream.messages[part.message]["role"] == "assistant"
    ]


def ends_of(histories: Sequence[AgentHistory], chains: Sequence[Chain]) -> list[tuple[int, AgentHistory, int]]:
    """Return the answers of ours that a history begins with: each one's end, whose it is, and its number there."""
    return [
        (turn.before + 1, history, number)
        for history in reversed(histories)
        for number, turn in enumerate(history.turns)
        if turn.answered and history.begins_with(chains, turn.before + 1)
    ]


async def was_shown(
    tools: tuple[dict[str, Any], ...], stream: Stream, streams: Sequence[Stream], bound: BoundContext, date: datetime
) -> bool:
    """Whether a stream of an earlier process, one of ``streams``, begins with what such tools are rendered as."""
    while stream.shares is not None:
        stream = streams[stream.shares[0]]
    try:
        encoded = await bound.chat.encode(Opening(stream.messages[: stream.opening], tools, date))
    except ChatTemplateError:
        return False
    return encoded.ids == stream.tokens.ids[: stream.tokens.prompt_length]


def logprobs_of(bound: BoundContext, stream: Stream, turn: HistoryTurn) -> list[tuple[str, float]]:
    """Return the tokens of a turn but that which ends it: their texts, and their log-probs."""
    ids = stream.tokens.tail(turn.start)[: turn.end - turn.start]
    values = stream.tokens.response_logprobs()[turn.start - stream.tokens.prompt_length :]
    last = len(ids) - (len(ids) > 0 and ids[-1] in bound.stop_ids)
    return [(bound.chat.decode([id_]), float(value)) for id_, value in zip(ids[:last], values, strict=False)]


async def continued(
    bound: BoundContext, stream: Stream, turn: HistoryTurn, end: int, shared: int, new: list[Message], date: datetime
) -> Encoded | None:  # fmt: skip
    """Return the first ``end`` tokens of a stream with messages behind its first ``shared``.

    ``turn`` is its last that stands there. None: the chat template cannot go on with these tokens.
    """
    ids = stream.tokens.ids[:end]
    guarded_at = [at for at in stream.guarded_at if at < end]
    parts = [part for part in stream.parts if part.start + part.length <= end]
    media = [span for span in stream.media if span.end <= end]
    encoded = Encoded(ids, len(guarded_at), tuple(guarded_at), tuple(parts), media=tuple(media))
    if not new:
        return encoded
    history = stream.messages[:shared]
    if bound.chat.must_split(history, new, bound.tools):
        return None
    stopped = len(ids) > turn.start and ids[-1] in bound.stop_ids
    finish_reason = FinishReason.STOP if stopped else FinishReason.LENGTH
    try:
        glue = await bound.chat.encode(FollowUp(history, new, bound.tools, ids[turn.start :], finish_reason, date))
    except ChatTemplateError:
        return None
    places = (*guarded_at, *(len(ids) + at for at in glue.guarded_at))
    parts += [part.moved(len(ids), shared) for part in glue.parts]
    media += [span.moved(len(ids)) for span in glue.media]
    guarded = encoded.guarded + glue.guarded
    return Encoded(ids + glue.ids, guarded, places, tuple(parts), glue.entry, media=tuple(media))
