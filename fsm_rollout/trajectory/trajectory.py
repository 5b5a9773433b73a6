"""One attempt of an agent at one prompt: the fold of its events.

Invariant: :meth:`Trajectory.apply` is the only thing that changes a trajectory, so a trajectory is a function of its
events: ``Trajectory.fold(events)`` of what was journalled equals the live object. Which state comes next is never
decided here; a :class:`~fsm_rollout.trajectory.events.Transitioned` event says it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import get_args

import msgspec

from fsm_rollout.errors import StreamError
from fsm_rollout.trajectory import events
from fsm_rollout.trajectory.enums import FinishReason, LimitName, StopReason, Trigger
from fsm_rollout.trajectory.events import AnyEvent, MalformedCall, Message, ToolCall
from fsm_rollout.trajectory.tokens import Ids, TokenStream


class Outcome(msgspec.Struct, frozen=True):
    """What a visit of a state came to: the trigger to raise, and facts about it that rows may ask for.

    A handler returns one of its declared triggers. The scheduler itself raises ``failed`` (with the error's class
    name in ``error``), ``timed_out``, ``limit_reached`` (with the limit's name in ``limit``) and ``cancelled``.
    """

    trigger: str
    limit: str | None = None
    error: str | None = None
    detail: str | None = None

    @property
    def stop_reason(self) -> str:
        """The stop reason of a trajectory that this outcome ends, when the row names none."""
        match self.trigger:
            case Trigger.LIMIT_REACHED:
                return StopReason.of_limit(self.limit)
            case Trigger.FAILED if self.error == "PromptTooLong":
                return StopReason.PROMPT_TOO_LONG
            case Trigger.FAILED:
                return StopReason.of_failure(self.error)
            case Trigger.TRUNCATED | Trigger.TIMED_OUT | Trigger.CANCELLED | Trigger.INTERACTION_DONE:
                return StopReason(self.trigger)
            case _:
                return StopReason.ANSWERED


class Stream(msgspec.Struct):
    """One token stream of a context, with the chat history it stands for.

    ``messages[:glued]`` are in ``tokens``; the rest is pending until the next generation, because the glue between two
    turns depends on all messages between them.
    """

    context: str
    engine: str
    messages: list[Message]
    glued: int
    opening: int
    """How many of the messages the stream was opened with; no assistant message among them is this stream's."""
    tokens: TokenStream
    turn_at: int
    """Where the tokens of the latest assistant turn begin."""
    guarded_at: list[int]
    """Positions of the tokens that spell a control marker which was kept from becoming one."""
    pending_state: str | None = None
    """The state that wrote the first pending message."""
    awaiting: bool = True
    """Whether the tokens end in an assistant's header, so that the next thing is to sample."""
    turn: int | None = None
    """Index of the latest generation in this stream."""
    finish_reason: FinishReason | None = None
    open: bool = True

    @property
    def pending(self) -> list[Message]:
        """Messages written since the last generation, not yet in the tokens."""
        return self.messages[self.glued :]

    @property
    def turn_ids(self) -> Ids:
        """What was sampled for the latest assistant turn (several generations when it was cut and went on)."""
        return self.tokens.tail(self.turn_at)


class Trajectory(msgspec.Struct):
    """One attempt of an agent at one prompt. Read it freely; only events change it."""

    # What it was given
    trajectory_id: str
    group_id: str
    sample: int
    agent: str
    parent_id: str | None
    messages: Sequence[Message]
    """The prompt's messages, as they came (no system prompt of the agent's)."""
    extra: Mapping[str, object]
    """The prompt's other fields: the answer and whatever the user put there."""
    limits: Mapping[str, float | None]
    seed: int
    date: str
    """When it started, as ISO 8601: what the chat template's clock shows, for good."""
    validate: bool
    sampling: Mapping[str, object]

    # Where it is
    state: str
    visits: dict[str, int]
    spent: dict[str, int]
    started_at: float
    latest_at: float
    routed: frozenset[str] = frozenset()
    """Limits that a ``limit_reached`` row has routed; each may be routed once."""
    transitions: int = 0
    exit: events.Transitioned | None = None
    """The row that led to a final state."""
    stop_reason: str | None = None
    detail: str | None = None
    suspended: str | None = None
    ended_at: float | None = None
    away: float = 0.0
    """Seconds between its suspensions and its resumptions."""
    resumptions: int = 0

    # The present visit
    here: list[AnyEvent] = []
    """What the present visit has done so far; when it is begun again, this is not done again."""
    interrupted: bool = False
    """Whether the present visit was broken off once and begun again."""
    time_up: events.TimedOut | None = None
    """Set when the time of the present visit is up and only its end is left to be done."""

    # What the model and the environment have done
    streams: list[Stream] = []
    open_streams: dict[str, Stream] = {}
    """The open stream of each context that has been used."""
    turn: int = 0
    """Number of generations so far; the index of the next one."""
    context_turns: dict[str, int] = {}
    """The same, by context."""
    last: events.Generated | None = None
    """The latest generation, of any context."""
    asked: dict[str, int] = {}
    """How often the environment has asked each engine."""
    called: list[events.Called] = []
    """The tool calls since the latest generation."""
    calls_seen: int = 0
    calls_failed: int = 0
    guarded: int = 0
    queue_seconds: float = 0.0
    generate_seconds: float = 0.0
    tool_seconds: float = 0.0
    interact_seconds: float = 0.0

    # How good it is
    score: float | None = None
    turn_scores: list[tuple[int, float]] = []
    tool_rewards: list[float] = []
    rewarded: bool = False
    """Whether the run's reward has scored it."""

    @classmethod
    def fold(cls, history: Iterable[AnyEvent]) -> Trajectory:
        """Return the trajectory of these events, the first of which is ``Prompted``; more may follow by :meth:`apply`.

        Raises:
            StreamError: the first event is not ``Prompted``, or an event does not fit those before it.
        """
        iterator = iter(history)
        first = next(iterator, None)
        if not isinstance(first, events.Prompted):
            raise StreamError(f"a trajectory's events begin with 'prompted', got {type(first).__name__}")
        own = {name: getattr(first, name) for name in first.__struct_fields__ if name in cls.__struct_fields__}
        own["spent"] = dict(first.spent)
        trajectory = cls(**own, state=first.initial, visits={first.initial: 1}, started_at=first.at, latest_at=first.at)
        for event in iterator:
            trajectory.apply(event)
        return trajectory

    @property
    def ended(self) -> bool:
        """Whether the trajectory has its stop reason."""
        return self.stop_reason is not None

    @property
    def wall_seconds(self) -> float | None:
        """Seconds from its start to its end, suspensions left out; ``None`` while it has not ended."""
        return None if self.ended_at is None else self.elapsed(self.ended_at)

    def elapsed(self, at: float) -> float:
        """Return the seconds from its start to ``at``, without those for which it was set aside."""
        return at - self.started_at - self.away

    def stream(self, context: str) -> Stream | None:
        """Return the open stream of ``context``, or ``None`` when the context has not been used yet."""
        return self.open_streams.get(context)

    @property
    def attempts(self) -> Sequence[ToolCall | MalformedCall]:
        """The calls and broken calls of the latest generation, in order."""
        return self.last.attempts if self.last else ()

    @property
    def text(self) -> str:
        """The content of the latest assistant turn (without its tool calls), of any context."""
        return str(self.last.message.get("content") or "") if self.last else ""

    def last_turn(self, context: str) -> int | None:
        """Return the index of the latest generation in a context's open stream, if there has been one."""
        stream = self.open_streams.get(context)
        return stream.turn if stream is not None else None

    def assistant_texts(self, context: str = "main") -> Iterator[str]:
        """Yield the content of every assistant turn of a context, in order, across its streams."""
        for stream in self.streams:
            if stream.context == context:
                for message in stream.messages:
                    if message["role"] == "assistant":
                        yield str(message.get("content") or "")

    @property
    def response_tokens(self) -> int:
        """Tokens after the opening prompts, over all streams."""
        return sum(stream.tokens.response_length for stream in self.streams)

    @property
    def trained_tokens(self) -> int:
        """Tokens with mask 1, over all streams."""
        return sum(stream.tokens.trained_length for stream in self.streams)

    def apply(self, event: AnyEvent) -> None:
        """Take one event in.

        Raises:
            StreamError: the event does not fit: it names a context with no open stream, its logprobs or versions are
                not as many as its ids, or the trajectory has ended (or is prompted again). One that has ended takes
                scores, and a failure that was found later.
        """
        found_later = isinstance(event, events.Ended) and StopReason.is_failure(event.stop_reason)
        if self.ended and not (found_later or isinstance(event, events.Scored)):
            raise StreamError(f"trajectory {self.trajectory_id} has ended; it cannot take {type(event).__name__}")
        _APPLY[type(event)](self, event)
        self.latest_at = event.at
        if type(event) in DONE_IN_A_VISIT and not self.ended:
            self.here.append(event)

    def _open_stream(self, context: str) -> Stream:
        try:
            return self.open_streams[context]
        except KeyError:
            raise StreamError(f"context '{context}' of trajectory {self.trajectory_id} has no open stream") from None

    def _prompted(self, event: events.Prompted) -> None:
        raise StreamError(f"trajectory {self.trajectory_id} has begun; it cannot take a second 'prompted'")

    def _context_opened(self, event: events.ContextOpened) -> None:
        before = self.open_streams.get(event.context)
        if before is not None:
            before.open = False
        stream = Stream(
            context=event.context,
            engine=event.engine,
            messages=list(event.messages),
            glued=len(event.messages),
            opening=len(event.messages),
            tokens=TokenStream(event.ids, state=event.state, turn=self.turn, trained=event.trained),
            turn_at=len(event.ids),
            guarded_at=list(event.guarded_at),
        )
        self.streams.append(stream)
        self.open_streams[event.context] = stream
        self.guarded += event.guarded

    def _wrote(self, event: events.MessagesAppended) -> None:
        stream = self._open_stream(event.context)
        if stream.pending_state is None:
            stream.pending_state = event.state
        stream.messages.extend(event.messages)

    def _extended(self, event: events.PromptExtended) -> None:
        stream = self._open_stream(event.context)
        stream.guarded_at.extend(len(stream.tokens) + at for at in event.guarded_at)
        stream.tokens.write(event.ids, state=event.state, turn=self.turn)
        stream.awaiting = True
        stream.glued = len(stream.messages)
        stream.pending_state = None
        self.guarded += event.guarded

    def _generated(self, event: events.Generated) -> None:
        stream = self._open_stream(event.context)
        if len(event.ids) != len(event.logprobs) or sum(count for count, _ in event.versions) != len(event.ids):
            raise StreamError(
                f"a generation of {len(event.ids)} tokens came with {len(event.logprobs)} logprobs and versions "
                f"for {sum(count for count, _ in event.versions)} tokens; they must be as many"
            )
        if stream.pending:
            raise StreamError(f"context '{event.context}' has messages that never entered its stream")
        if event.continued:
            stream.messages[-1] = event.message
        else:
            stream.turn_at = len(stream.tokens)
            stream.messages.append(event.message)
        turn = stream.turn if event.resumed and stream.turn is not None else self.turn
        start = 0
        for count, version in event.versions:
            piece = slice(start, start + count)
            stream.tokens.sample(event.ids[piece], event.logprobs[piece], state=event.state, turn=turn, version=version)
            start += count
        stream.glued = len(stream.messages)
        stream.awaiting = False
        stream.finish_reason = event.finish_reason
        stream.turn = turn
        if not event.resumed:
            self.turn += 1
            self.context_turns[event.context] = self.context_turns.get(event.context, 0) + 1
        self.last = event
        self.called = []
        self.queue_seconds += event.queue_seconds
        self.generate_seconds += event.seconds

    def _call_begun(self, event: events.CallBegun) -> None:
        """Nothing changes but what the present visit has done."""

    def _called(self, event: events.Called) -> None:
        self.called.append(event)
        self.calls_seen += 1
        self.calls_failed += event.failure is not None
        self.tool_seconds += event.seconds
        if event.bad:
            self.spent[LimitName.BAD_CALLS] = self.spent.get(LimitName.BAD_CALLS, 0) + 1
        if event.reward is not None:
            self.tool_rewards.append(event.reward)

    def _asked(self, event: events.ModelQueried) -> None:
        self.asked[event.engine] = max(self.asked.get(event.engine, 0), event.index + 1)

    def _interacted(self, event: events.UserReplied) -> None:
        self.interact_seconds += event.seconds

    def _charged(self, event: events.LimitCharged) -> None:
        self.spent[event.limit] = self.spent.get(event.limit, 0) + event.amount

    def _timed_out(self, event: events.TimedOut) -> None:
        self.time_up = event
        self.here = []

    def _transitioned(self, event: events.Transitioned) -> None:
        if event.source != self.state:
            raise StreamError(f"a row from '{event.source}' fired in state '{self.state}' of {self.trajectory_id}")
        if event.trigger == Trigger.LIMIT_REACHED:
            self.routed |= {routing_key(str(event.limit), event.source)}
        self.transitions += 1
        self.here = []
        self.interrupted = False
        self.time_up = None
        self.state = event.dest
        if event.stop_reason is not None:
            self.exit = event
        self.visits[event.dest] = self.visits.get(event.dest, 0) + 1
        for limit, amount in event.spent.items():
            self.spent[limit] = self.spent.get(limit, 0) + amount

    def _scored(self, event: events.Scored) -> None:
        if event.turn is None:
            self.score = event.value
            self.rewarded |= event.source == events.REWARD
        else:
            self.turn_scores.append((event.turn, event.value))

    def _suspended(self, event: events.Suspended) -> None:
        self.suspended = event.reason

    def _resumed(self, event: events.Resumed) -> None:
        self.suspended = None
        self.interrupted = True
        self.away += event.away
        self.resumptions += 1

    def _ended(self, event: events.Ended) -> None:
        self.stop_reason = event.stop_reason
        self.detail = event.detail
        self.suspended = None
        self.ended_at = event.at if self.ended_at is None else self.ended_at

    def __repr__(self) -> str:
        """Say which, where and how far."""
        where = self.stop_reason or (f"suspended: {self.suspended}" if self.suspended else self.state)
        return f"<Trajectory {self.trajectory_id} of {self.agent}: {where}, {self.turn} generations>"


def routing_key(limit: str, state: str) -> str:
    """Return under which name a limit is remembered as routed: ``max_visits`` is one limit per state."""
    return f"{limit}@{state}" if limit == LimitName.MAX_VISITS else limit


_APPLY: Mapping[type[events.Event], Callable[[Trajectory, AnyEvent], None]] = {
    event: getattr(Trajectory, f"_{event.__struct_config__.tag}") for event in get_args(AnyEvent)
}
"""How a trajectory takes in each event: its method of the event's own name."""

DONE_IN_A_VISIT = frozenset({
    events.ContextOpened, events.MessagesAppended, events.Generated, events.CallBegun, events.Called,
    events.ModelQueried, events.UserReplied, events.LimitCharged, events.Scored,
})  # fmt: skip
"""What a handler does through its visit (the glue before a generation is part of that generation)."""
