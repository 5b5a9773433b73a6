"""A trajectory as a sequence of cards: who put which tokens where, and what it led to.

Invariant: the cards' token ranges cover every stream once, in order, without gap or overlap; what was written and never
entered any tokens has a card of its own that says so.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from fsm_rollout.report.pages import duration
from fsm_rollout.report.recorded import Recorded
from fsm_rollout.trajectory.events import (
    Called,
    ContextOpened,
    Generated,
    MalformedCall,
    Message,
    MessagesAppended,
    ModelQueried,
    Prompted,
    PromptExtended,
    Resumed,
    Scored,
    Suspended,
    ToolCall,
    Transitioned,
    UserReplied,
)
from fsm_rollout.trajectory.reasons import FinishReason
from fsm_rollout.trajectory.tokens import Owner


@dataclass(slots=True)
class CallCard:
    """One attempted tool call and what became of it (``called`` is ``None`` when it was never carried out)."""

    name: str
    arguments: Any
    broken: str | None
    called: Called | None = None


@dataclass(slots=True)
class Card:
    """A run of tokens with its messages, or what happened between two of them: a step or a pause."""

    kind: str
    """``prompt``, ``environment``, ``model``, ``pending`` (messages that entered no tokens), ``step`` or ``pause``."""
    state: str
    stream: int = -1
    start: int = 0
    end: int = 0
    turn: int | None = None
    messages: list[Message] = field(default_factory=list)
    guarded: int = 0
    unplaced: bool = False
    """Whether its guarded markers are counted, and where they stand is not known (journals from before that was)."""
    generated: Generated | None = None
    calls: list[CallCard] = field(default_factory=list)
    scores: list[tuple[float, str]] = field(default_factory=list)
    interacted: float | None = None
    step: Transitioned | None = None
    pause: str | None = None
    """That it was set aside, or went on."""
    asked: list[ModelQueried] = field(default_factory=list)
    """What the environment asked other models after it."""

    @property
    def roles(self) -> list[str]:
        """The roles of its messages, in order, repeats once."""
        return list(dict.fromkeys(str(message.get("role", "?")) for message in self.messages))

    @property
    def cut(self) -> str | None:
        """What cut its generation short, if anything did."""
        if self.generated is None or self.generated.finish_reason == FinishReason.STOP:
            return None
        if self.generated.finish_reason == FinishReason.LENGTH:
            return f"cut at {self.generated.cut_by or 'max_tokens'}"
        return "aborted"


def cards(recorded: Recorded) -> list[Card]:
    """Return the cards of a trajectory; without its events those that its token streams alone tell."""
    return _Dealer(recorded).found if recorded.events else _from_spans(recorded)


class _Dealer:
    """Follows the events, keeping only how long each stream is and what is pending in it."""

    def __init__(self, recorded: Recorded) -> None:
        self.found: list[Card] = []
        self.open: dict[str, int] = {}
        self.lengths: list[int] = []
        self.pending: defaultdict[str, list[Message]] = defaultdict(list)
        self.writers: dict[str, str] = {}
        self.turns: dict[str, Card] = {}
        self.by_turn: dict[int, Card] = {}
        self.turn = 0
        self.state = "?"
        self.latest: Card | None = None
        for event in recorded.events:
            self._take(event)
        for context, messages in self.pending.items():
            if messages:
                self._pending_card(context, messages)

    def _take(self, event: object) -> None:
        match event:
            case ContextOpened():
                # A first turn's prompt that had grown is rendered afresh: its pending messages are in the new prompt.
                self.pending.pop(event.context, None)
                self.turns.pop(event.context, None)
                self.open[event.context] = len(self.lengths)
                self.lengths.append(0)
                self._card("prompt", event, event.messages)
            case MessagesAppended():
                self.writers.setdefault(event.context, event.state)
                self.pending[event.context] += event.messages
            case PromptExtended():
                messages = self.pending.pop(event.context, [])
                self.writers.pop(event.context, None)
                self._card("environment", event, messages)
            case Generated():
                self._generated(event)
            case Called():
                self._called(event)
            case UserReplied() if self.latest is not None:
                self.latest.interacted = (self.latest.interacted or 0.0) + event.seconds
            case Scored() if event.turn is not None and event.turn in self.by_turn:
                self.by_turn[event.turn].scores.append((event.value, event.source))
            case ModelQueried() if self.latest is not None:
                self.latest.asked.append(event)
            case Suspended():
                self.found.append(Card("pause", self.state, pause=f"set aside: {event.reason}"))
            case Resumed():
                away = f" after {duration(event.away)}" if event.away > 0 else ""
                said = f"went on{away}, on weights {event.weight_version}"
                self.found.append(Card("pause", self.state, pause=said))
            case Prompted():
                self.state = event.initial
            case Transitioned():
                self.state = event.dest
                self.found.append(Card("step", event.source, step=event))
            case _:
                pass

    def _card(self, kind: str, event: ContextOpened | PromptExtended | Generated, messages: list[Message]) -> Card:
        number = self.open[event.context]
        start = self.lengths[number]
        self.lengths[number] = end = start + len(event.ids)
        card = Card(kind, event.state, number, start, end, self.turn, messages)
        if not isinstance(event, Generated):
            card.guarded, card.unplaced = event.guarded, event.guarded > 0 and not event.guarded_at
        self.found.append(card)
        return card

    def _generated(self, event: Generated) -> None:
        before = self.turns.get(event.context)
        card = self._card("model", event, [event.message])
        card.turn = before.turn if event.resumed and before is not None else self.turn
        card.generated = event
        card.calls = [
            CallCard(call.name, call.arguments, None) if isinstance(call, ToolCall) else _broken(call)
            for call in event.attempts
        ]
        self.turn += not event.resumed
        self.turns[event.context] = self.latest = card
        self.by_turn[card.turn if card.turn is not None else self.turn] = card

    def _called(self, event: Called) -> None:
        if self.latest is None or self.latest.generated is None:
            return
        ids = [attempt.id for attempt in self.latest.generated.attempts]
        # Cards of calls that nobody announced come after those of the attempts.
        slots = [call for id_, call in zip(ids, self.latest.calls, strict=False) if id_ == event.id]
        free = next((call for call in slots if call.called is None), None)
        if free is None:
            free = CallCard(event.name or "broken call", event.arguments, None)
            self.latest.calls.append(free)
        free.called = event

    def _pending_card(self, context: str, messages: list[Message]) -> None:
        card = Card("pending", self.writers.get(context, "?"), self.open.get(context, -1), messages=messages)
        self.found.append(card)


def _broken(attempt: MalformedCall) -> CallCard:
    return CallCard("broken call", attempt.message, attempt.kind)


def _from_spans(recorded: Recorded) -> list[Card]:
    found = []
    for number, stream in enumerate(recorded.trajectory.streams):
        said = iter([message for message in stream.messages[stream.opening :] if message.get("role") == "assistant"])
        latest: Card | None = None
        for span in stream.tokens.spans:
            kind = {Owner.PROMPT: "prompt", Owner.ENVIRONMENT: "environment", Owner.MODEL: "model"}[span.owner]
            if latest is not None and latest.kind == kind == "model" and latest.turn == span.turn:
                latest.end = span.end  # the weights changed within the turn
                continue
            messages = stream.messages[: stream.opening] if kind == "prompt" else []
            if kind == "model":
                message = next(said, None)
                messages = [message] if message is not None else []
            latest = Card(kind, span.state, number, span.start, span.end, span.turn, messages)
            found.append(latest)
        if stream.pending:
            found.append(Card("pending", stream.pending_state or "?", number, messages=stream.pending))
    return found
