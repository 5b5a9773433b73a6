"""What a trajectory says, twice: as the token streams of its contexts, and as the turns of its conversation.

Invariants: only :meth:`fsm_rollout.trajectory.trajectory.Trajectory.apply` changes them. The content of a message is a
text, nothing, or a list of parts in OpenAI's form; whoever wants the text of a message or what else it shows asks
:func:`text_of`, :func:`only_text_of` and :func:`media_of`, so that a new kind of part is met in one place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import msgspec

from fsm_rollout.errors import StreamError
from fsm_rollout.trajectory import events
from fsm_rollout.trajectory.enums import FinishReason, ForkReason
from fsm_rollout.trajectory.events import MalformedCall, Message, ToolCall
from fsm_rollout.trajectory.pictures import StoredPicture
from fsm_rollout.trajectory.tokens import NO_VERSION, Ids, MediaSpan, MessagePart, Taught, TokenStream, Usage


class SampledWith(NamedTuple):
    """The sampling that the logprobs of a turn's tokens belong to, from ``start`` on; ``top_k`` 0 keeps every token."""

    turn: int
    start: int
    temperature: float
    top_p: float
    top_k: int


class Stream(msgspec.Struct):
    """One token stream of a context, with the chat history it stands for.

    ``messages[:glued]`` are in ``tokens``; the rest is pending until the next generation, because the glue between two
    turns depends on all messages between them.
    """

    context: str
    """The context that it belongs to."""
    number: int
    """How many streams of the context were opened before it."""
    engine: str
    """The engine that samples it: ``policy``, or another of the run's."""
    messages: list[Message]
    """The chat history: what it was opened with, and every message since."""
    glued: int
    """How many of ``messages`` are in ``tokens``."""
    opening: int
    """How many of ``messages`` the stream was opened with; assistant messages among them were not sampled in it."""
    tokens: TokenStream
    """Its tokens, each with its origin; mask, logprobs and weight versions are read off them."""
    turn_at: int
    """Where the tokens of the latest assistant turn begin."""
    guarded_at: list[int]
    """Positions of tokens that spell a control token as plain text (``injection: guard``)."""
    parts: list[MessagePart]
    """Which tokens are whose text, what was sampled included; what no part holds is the chat template's own."""
    media: list[MediaSpan]
    """Which tokens are pictures, in order."""
    sampled_with: list[SampledWith]
    """The sampling of each generation, by its index."""
    shares: tuple[int, int] | None = None
    """Of a fork: the trajectory's stream, by its number, that it begins as, and with how many of its tokens."""
    why: str = ""
    """Why it is a stream of its own where that is known (:class:`~fsm_rollout.trajectory.enums.ForkReason`)."""
    replies: list[int] = []
    """Which of ``messages`` an interaction said."""
    reply: str | list[events.PlainData] | None = None
    """What an interaction has said that is in no message yet."""
    pending_state: str | None = None
    """The state that wrote the first pending message."""
    awaiting: bool = True
    """Whether the tokens end in an assistant's header, so that the next thing is to sample."""
    turn: int | None = None
    """Index of the latest generation in this stream."""
    finish_reason: FinishReason | None = None
    """Why that generation ended."""
    open: bool = True
    """Whether it is its context's current stream; a ``reset`` closes it and opens the next."""
    taught: dict[str, Taught] = {}
    """What teachers make of the response, by their names."""
    counted: int | None = None
    """Of an engine that gives text alone: how many tokens the stream has as that counts them, after its latest turn;
    ``None``: the ids are the engine's own, and say it themselves."""

    @property
    def length(self) -> int:
        """How many tokens it has, as its engine counts them."""
        return self.tokens.length if self.counted is None else self.counted

    @property
    def num_turns(self) -> int:
        """How many messages it has, system messages apart."""
        return len([message for message in self.messages if message["role"] != "system"])

    @property
    def pending(self) -> list[Message]:
        """Messages written since the last generation, not yet in the tokens."""
        return self.messages[self.glued :]

    @property
    def sampled(self) -> bool:
        """Whether anything was sampled in it. It was not if messages came before its first turn: they open another."""
        return self.turn is not None

    @classmethod
    def begun(cls, event: events.ContextOpened, turn: int, before: Stream | None) -> Stream:
        """Return the stream that an event opened before the generation ``turn``, in the place of ``before``: closed."""
        if before is not None:
            before.open = False
        not_glued = event.instead_of_glue and before is not None and before.sampled
        return cls(
            context=event.context,
            number=0 if before is None else before.number + 1,
            engine=event.engine,
            messages=list(event.messages),
            glued=len(event.messages),
            opening=len(event.messages),
            tokens=TokenStream(event.ids, state=event.state, turn=turn, trained=event.trained),
            turn_at=len(event.ids),
            guarded_at=list(event.guarded_at),
            parts=list(event.parts),
            media=list(event.media),
            sampled_with=[],
            shares=event.shares,
            why=ForkReason.NOT_GLUED if not_glued else event.why,
            replies=list(before.replies) if before is not None and event.instead_of_glue else [],
            counted=0 if event.text_only else None,
        )

    def append(self, event: events.MessagesAppended) -> None:
        """Take in messages of the environment; they are pending until the next glue."""
        if self.reply is not None:
            for place, message in enumerate(event.messages, len(self.messages)):
                if message["role"] == "user" and message.get("content") == self.reply:
                    self.replies.append(place)
                    self.reply = None
                    break
        self.pending_state = self.pending_state or event.state
        self.messages.extend(event.messages)

    def extend(self, event: events.PromptExtended, turn: int) -> int:
        """Take in the glue before the generation ``turn``; return of how many tokens that is known by now."""
        length = self.tokens.length
        self.guarded_at.extend([length + at for at in event.guarded_at])
        self.parts.extend([part.moved(length, self.glued) for part in event.parts])
        self.media.extend([span.moved(length) for span in event.media])
        self.tokens.append(event.ids, state=event.state, turn=turn)
        self.awaiting = True
        self.glued = len(self.messages)
        self.pending_state = None
        return len(event.ids) if self.counted is None else 0

    def sample(self, event: events.Generated, turn: int) -> Message:
        """Take in what a generation, the ``turn``-th unless it is one that goes on, has sampled; return its message.

        Raises:
            StreamError: its logprobs, versions or notes do not fit its ids, or messages never entered the tokens.
        """
        # 1. Whether it fits.
        length, versioned = self.tokens.length, sum(map(itemgetter(0), event.versions))
        end = length + len(event.ids)
        if len(event.ids) != len(event.logprobs) or versioned != len(event.ids):
            raise StreamError(
                f"a generation of {len(event.ids)} tokens came with {len(event.logprobs)} logprobs and versions "
                f"for {versioned} tokens; there must be one of each for every token"
            )
        if (noted := max(map(attrgetter("end"), event.notes), default=0)) > end:
            raise StreamError(f"a generation came with notes on {noted} tokens; there are {end}")
        if self.glued < len(self.messages):
            raise StreamError(f"context '{event.context}' has messages that never entered its stream")
        # 2. Its message.
        if event.continued:
            del self.messages[-1], self.parts[-1:]
        else:
            self.turn_at = length
        self.messages.append(message := event.said() if event.attempts else event.message)
        self.glued = len(self.messages)
        self.parts.append(MessagePart(self.glued - 1, self.turn_at, end - self.turn_at))
        # 3. Its tokens.
        if event.resumed and self.turn is not None:
            turn = self.turn
        sampled_with = SampledWith(turn, length, event.temperature, event.top_p, event.top_k)
        latest = self.sampled_with[-1] if self.sampled_with else None
        if latest is None or latest.turn != turn or latest[2:] != sampled_with[2:]:
            self.sampled_with.append(sampled_with)
        self.tokens.notes.extend(event.notes)
        start = 0
        for count, version in event.versions:
            ids, logprobs, after = event.ids, event.logprobs, start + count
            if count < len(ids):
                ids, logprobs = ids[start:after], logprobs[start:after]
            sampled = None if version == NO_VERSION else logprobs  # without a version: what closed its thinking
            self.tokens.append(ids, sampled, state=event.state, turn=turn, version=version)
            start = after
        self.awaiting = False
        self.finish_reason = event.finish_reason
        self.turn = turn
        return message

    @staticmethod
    def take_scores(streams: Sequence[Stream], event: events.TeacherScored) -> None:
        """Take in what a teacher makes of tokens; StreamError if these are not the next ones that it is to be shown."""
        whose = f"teacher '{event.teacher}' scored"
        if event.stream >= len(streams):
            raise StreamError(f"{whose} stream {event.stream}, and there are {len(streams)}")
        stream = streams[event.stream]
        taught, tokens = stream.taught.get(event.teacher) or Taught(), stream.tokens
        start, count = tokens.prompt_length + taught.length, len(event.scores.logprobs)
        event.scores.check(count)
        if event.start != start or start + count > tokens.length:
            raise StreamError(
                f"{whose} the tokens {event.start} to {event.start + count} of a stream of {tokens.length}; the next "
                f"ones are those from {start} on"
            )
        taught.scores.append(event.scores)
        taught.versions.append((count, event.version))
        taught.failure = taught.failure or event.failure
        stream.taught[event.teacher] = taught

    def count(self, usage: Usage) -> int:
        """Take in what its engine counted in a turn; return how much it has grown, beyond what it opened with."""
        before, self.counted = self.counted, usage.input + usage.output - usage.hidden
        return usage.output + (max(0, usage.input - before) if before else 0)

    @property
    def turn_ids(self) -> Ids:
        """The latest assistant turn's (of several generations when it was cut and went on)."""
        return self.tokens.tail(self.turn_at)


class AssistantTurn(msgspec.Struct, gc=False):
    """One message of the model's, with its tool calls, their results and its score."""

    context: str
    """The context that it was said in."""
    state: str
    """The state that the trajectory was in."""
    message: Message
    """The whole assistant message, in OpenAI's form."""
    calls: list[ToolCall | MalformedCall]
    """The calls that it tried to make, in order; a :class:`MalformedCall` could not be read."""
    finish_reason: FinishReason
    """Why it ended: ``stop``, or ``length`` when it was cut."""
    results: list[events.Called] = []
    """The calls' ends, in the order in which they ended: result, failure, whose fault, seconds, reward."""
    score: float | None = None
    """Its own score (an interaction's, or a handler's ``score_turn``); ``None``: it has none."""
    generations: list[int] = []
    """The indexes of the generations that it came from; several when it was cut and went on."""
    tokens: int = 0
    """How many tokens it has: those sampled for it, and what closed its thinking."""

    @property
    def text(self) -> str:
        """Its text, without tool calls."""
        return text_of(self.message)


def update_turn(turn_of: list[AssistantTurn], event: events.Generated, message: Message, count: int) -> None:
    """Begin or continue the turn of a generation that has just ended.

    ``turn_of`` has the turn of each generation, by its index; ``count`` is how many there are with this one.
    """
    # 1. A new message, or more of the context's latest.
    turn = None
    if event.continued or event.resumed:
        turn = next((turn for turn in reversed(turn_of) if turn.context == event.context), None)
    if turn is None:
        turn = AssistantTurn(event.context, event.state, message, event.attempts, event.finish_reason)
    # 2. What the generation made of it.
    turn.message, turn.calls, turn.finish_reason = message, event.attempts, event.finish_reason
    turn.tokens += len(event.ids) if event.usage is None else event.usage.output
    if len(turn_of) < count:  # else the generation is resumed, and is there already
        turn.generations.append(len(turn_of))
        turn_of.append(turn)


def whole_conversation(streams: Iterable[Stream]) -> list[Message]:
    """Return all messages of a context's streams, in order, those before a ``reset`` too.

    What a stream opens with and was said before comes once, but for the last of it, where that was answered: it is
    asked again, unless the stream is a branch.
    """
    messages: list[Message] = []
    for stream in streams:
        opening = stream.messages[: stream.opening]
        if opening[: len(messages)] == messages:  # it goes on from there
            messages = list(stream.messages)
            continue
        again = opening[-1:] if opening[-1:] != messages[-1:] and BRANCH not in stream.context else []
        new = [message for message in opening[: len(opening) - len(again)] if message not in messages]
        messages += [*new, *again, *stream.messages[stream.opening :]]
    return messages


def turns_of(streams: Sequence[Stream]) -> int:
    """Return how many messages a trajectory has in all contexts, system messages apart; what branches share, once."""
    roots = dict.fromkeys(root_of(stream.context) for stream in streams)
    said = (whole_conversation(stream for stream in streams if root_of(stream.context) == root) for root in roots)
    return sum(message["role"] != "system" for messages in said for message in messages)


def pictures_of(streams: Iterable[Stream]) -> list[StoredPicture]:
    """Return the pictures that streams have shown, each once, in the order in which they came."""
    parts = (part for stream in streams for message in stream.messages for part in media_of(message))
    shown = (part.get("image") for part in parts if isinstance(part, Mapping))
    return list(dict.fromkeys(picture for picture in shown if isinstance(picture, StoredPicture)))


# A foreign agent may have several histories at a time; the further ones are contexts with a number behind the name:
# `main~2` rewrites an earlier history, `main+2` shares nothing with any.
BRANCH, FURTHER = "~", "+"


def root_of(context: str) -> str:
    """Return the agent's context that a context of a trajectory is, or is a branch of."""
    return context.partition(BRANCH)[0].partition(FURTHER)[0]


# -- the content of a message ----------------------------------------------------------------------------------------


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message: its content, or that of its text parts; empty where there is none.

    Raises:
        TypeError: the content is neither text nor a list of parts.
    """
    content = message.get("content")
    if type(content) is str:
        return content
    if content is None:
        return ""
    if isinstance(content, str):
        return str.__str__(content)  # of an enum too, whose own `str` is its name
    return "".join([part["text"] for part in _parts(content) if _is_text(part)])


def only_text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message that says nothing else; TypeError for others, and as for :func:`text_of`."""
    content = message.get("content")
    if type(content) is str:
        return content
    if media_of(message):
        raise TypeError("the message holds parts that are not text")
    return text_of(message)


def media_of(message: Mapping[str, Any]) -> tuple[object, ...]:
    """Return the parts of a message that are not text, as they came; TypeError as for :func:`text_of`."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return ()
    return tuple([part for part in _parts(content) if not _is_text(part)])


def _parts(content: object) -> list[Any] | tuple[Any, ...]:
    if not isinstance(content, list | tuple):
        raise TypeError(f"content must be a string, got {type(content).__name__}")
    return content


def _is_text(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
