"""A trajectory as a sequence of cards: who put which tokens where, and what it led to.

Invariant: the cards' token ranges cover every stream once, in order, without gap or overlap. Messages that never became
tokens have a card of their own, which says so.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from fsm_rollout.report.recording import Recording
from fsm_rollout.report.spans import Turns
from fsm_rollout.report.texts import duration
from fsm_rollout.trajectory import events
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.events import Message
from fsm_rollout.trajectory.tokens import Owner


@dataclass(slots=True)
class CallCard:
    """One attempted tool call and what became of it (``called`` is ``None`` when it was never carried out)."""

    name: str
    arguments: object
    broken: str | None = None
    called: events.Called | None = None


@dataclass(slots=True)
class Card:
    """A run of tokens with its messages, or what happened between two of them: a step or a pause."""

    kind: str  # `prompt`, `environment`, `model`, `pending` (messages that entered no tokens), `step` or `pause`
    state: str
    stream: int = -1
    start: int = 0
    end: int = 0
    turn: int | None = None
    messages: list[Message] = field(default_factory=list)
    guarded: int = 0
    generated: events.Generated | None = None
    calls: list[CallCard] = field(default_factory=list)
    scores: list[tuple[float, str]] = field(default_factory=list)
    interacted: float | None = None
    step: events.Transitioned | None = None
    pause: str | None = None  # why it was suspended, or when it was resumed
    # Whether it is a prompt from which nothing was sampled: more was said first, and the next stream has it all.
    abandoned: bool = False
    queries: list[events.ModelQueried] = field(default_factory=list)  # what the environment asked other models after it

    @property
    def who(self) -> str:
        """Who its tokens are from, in a word or two."""
        roles = dict.fromkeys(str(message.get("role", "?")) for message in self.messages)
        return "assistant" if self.kind == "model" else " + ".join(roles) or self.kind

    @property
    def cut(self) -> str | None:
        """What cut its generation short, if anything did."""
        if self.generated is None or self.generated.finish_reason == FinishReason.STOP:
            return None
        if self.generated.finish_reason == FinishReason.LENGTH:
            return f"cut at {self.generated.cut_by or 'max_tokens'}"
        return "aborted"


def cards(recording: Recording) -> list[Card]:
    """Return the cards of a trajectory; without its events those that its token streams alone tell."""
    dealt = _Dealer(recording).cards if recording.events else _from_spans(recording)
    streams = recording.trajectory.streams
    for card in dealt:
        card.abandoned = card.kind == "prompt" and not streams[card.stream].open and not streams[card.stream].sampled
    return dealt


class _Dealer:
    """Follows the events, keeping only how long each stream is and what is pending in it."""

    def __init__(self, recording: Recording) -> None:
        self.cards: list[Card] = []
        self.stream_of: dict[str, int] = {}
        self.lengths: list[int] = []
        self.pending: defaultdict[str, list[Message]] = defaultdict(list)
        self.writers: dict[str, str] = {}  # the state that wrote the first of a context's pending messages
        self.generations: dict[int, Card] = {}
        self.turns = Turns()
        self.state = "?"
        self.latest: Card | None = None  # the latest generation of any context
        for event in recording.events:
            self._take(event)
        for context, messages in self.pending.items():
            if messages:
                state, stream = self.writers.get(context, "?"), self.stream_of.get(context, -1)
                self.cards.append(Card("pending", state, stream, messages=messages))

    def _take(self, event: object) -> None:
        match event:
            case events.ContextOpened():
                # A first turn's prompt that had grown is rendered afresh: its pending messages are in the new prompt.
                self.pending.pop(event.context, None)
                self.turns.opened(event.context)
                self.stream_of[event.context] = len(self.lengths)
                self.lengths.append(0)
                self._card("prompt", event, event.messages)
            case events.MessagesAppended():
                self.writers.setdefault(event.context, event.state)
                self.pending[event.context] += event.messages
            case events.PromptExtended():
                self.writers.pop(event.context, None)
                self._card("environment", event, self.pending.pop(event.context, []))
            case events.Generated():
                self._generated(event)
            case events.Called():
                self._called(event)
            case events.UserReplied() if self.latest is not None:
                self.latest.interacted = (self.latest.interacted or 0.0) + event.seconds
            case events.Scored() if event.turn is not None and event.turn in self.generations:
                self.generations[event.turn].scores.append((event.value, event.source))
            case events.ModelQueried() if self.latest is not None:
                self.latest.queries.append(event)
            case events.Suspended():
                self.cards.append(Card("pause", self.state, pause=f"suspended: {event.reason}"))
            case events.Resumed():
                away = f" after {duration(event.away)}" if event.away > 0 else ""
                pause = f"resumed{away}, with weights {event.weight_version}"
                self.cards.append(Card("pause", self.state, pause=pause))
            case events.Restored():
                told = ", ".join(f"{name} by {way}" for name, way in event.ways.items())
                self.cards.append(Card("pause", self.state, pause=f"restored: {told}"))
            case events.Prompted():
                self.state = event.initial
            case events.Transitioned():
                self.state = event.dest
                self.cards.append(Card("step", event.source, step=event))
            case _:
                pass

    def _card(
        self, kind: str, event: events.ContextOpened | events.PromptExtended | events.Generated, messages: list[Message]
    ) -> Card:
        stream = self.stream_of[event.context]
        start = self.lengths[stream]
        self.lengths[stream] = end = start + len(event.ids)
        self.cards.append(card := Card(kind, event.state, stream, start, end, messages=messages))
        if not isinstance(event, events.Generated):
            card.guarded = event.guarded
        return card

    def _generated(self, event: events.Generated) -> None:
        card, turn = self._card("model", event, [event.message]), self.turns.number(event)
        card.turn, card.generated = turn, event
        card.calls = [
            CallCard(attempt.name, attempt.arguments)
            if isinstance(attempt, events.ToolCall)
            else CallCard("broken call", attempt.message, attempt.kind)
            for attempt in event.attempts
        ]
        self.generations[turn] = self.latest = card

    def _called(self, event: events.Called) -> None:
        """Give a call to its attempt; a call that nobody announced gets a card after those of the attempts."""
        if self.latest is None or self.latest.generated is None:
            return
        for attempt, card in zip(self.latest.generated.attempts, self.latest.calls, strict=False):
            if attempt.id == event.id and card.called is None:
                card.called = event
                return
        self.latest.calls.append(CallCard(event.name or "broken call", event.arguments, called=event))


def _from_spans(recording: Recording) -> list[Card]:
    cards: list[Card] = []
    for number, stream in enumerate(recording.trajectory.streams):
        answers = iter([m for m in stream.messages[stream.opening :] if m.get("role") == "assistant"])
        latest: Card | None = None
        for span in stream.tokens.spans:
            if latest is not None and latest.kind == "model" and latest.turn == span.turn:
                latest.end = span.end  # the weights changed within the turn, or its thinking was closed
                continue
            messages: list[Message] = []
            if span.owner is Owner.PROMPT:
                messages = stream.messages[: stream.opening]
            elif span.owner is Owner.MODEL and (answer := next(answers, None)) is not None:
                messages = [answer]
            latest = Card(span.owner.value, span.state, number, span.start, span.end, span.turn, messages)
            cards.append(latest)
        if stream.pending:
            cards.append(Card("pending", stream.pending_state or "?", number, messages=stream.pending))
    return cards
