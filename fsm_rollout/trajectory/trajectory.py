"""One attempt of an agent at one prompt: the fold of its events.

Invariant: :meth:`Trajectory.apply` is the only thing that changes a trajectory, so a trajectory is a function of its
events: ``Trajectory.fold(events)`` of what was journalled equals the live object. Which state comes next is never
decided here; a :class:`~fsm_rollout.trajectory.events.Transitioned` event says it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import get_args

import msgspec

from fsm_rollout.errors import StreamError
from fsm_rollout.trajectory import events
from fsm_rollout.trajectory.enums import FailureClass, LimitName, StopReason, Trigger, routing_key
from fsm_rollout.trajectory.events import AnyEvent, MalformedCall, Message, ToolCall
from fsm_rollout.trajectory.stream import BRANCH, AssistantTurn, Stream, text_of, update_turn, whole_conversation
from fsm_rollout.trajectory.wall_time import TimeSpent

INTERACTION = "interaction:"  # how the name of a user's snapshot begins; behind it stands the state that has its own


class Trajectory(msgspec.Struct):
    """One attempt of an agent at one prompt. Read it freely; only events change it.

    What a reward, a judge, a predicate or an interaction reads first:

    - ``messages``: the whole conversation. ``prompt_messages`` is only the prompt's part of it.
    - ``text``: the latest turn's text, which most rewards judge.
    - ``assistant_turns``: the model's turns: each one's text, tool calls, their results and its score.
    - ``extra``: the prompt's other fields, such as ``answer``.
    - ``stop_reason``: why it ended.

    A trajectory that is being scored has ended, but has no score yet.
    """

    # What it was given
    trajectory_id: str
    """Its name in the run: ``group/sample``, ``group/sample~1`` once begun anew, ``caller/tool.1`` of a sub-agent."""
    group_id: str
    """The prompt's id; the trajectories of one prompt share it."""
    sample: int
    """Which of the group's trajectories it is, from 0."""
    agent: str
    """The name of the agent that ran."""
    parent_id: str | None
    """The trajectory whose tool it was; ``None`` unless it is a sub-agent's."""
    prompt_messages: Sequence[Message]
    """The prompt's messages, as they came (no system prompt of the agent's); ``messages`` is the whole conversation."""
    extra: Mapping[str, object]
    """The prompt's other fields: the answer and whatever the user put there."""
    limits: Mapping[str, float | None]
    """Its limits by name, the agent's and the prompt's together; ``None`` or missing: not limited."""
    seed: int
    """All of its randomness follows from this."""
    date: str
    """When it started, as ISO 8601: what the chat template's clock shows, for good."""
    validate: bool
    """Whether it belongs to a validation run, which uses ``validation_sampling``."""
    sampling: Mapping[str, object]
    """What the prompt itself says about sampling."""

    # Where it is
    state: str
    """The state that it is in; of one that has ended, the final one or the one that it failed in."""
    entries: dict[str, int]
    """How often each state was entered, the initial one included: what ``max_visits`` and ``visits_over`` count."""
    spent: dict[str, int]
    """How much was charged to each limit: ``assistant_turns``, ``tool_calls``, ``user_turns``, ``bad_calls``."""
    started_at: float
    """When it began, in seconds on the scheduler's clock."""
    latest_at: float
    """When its latest event happened, on the same clock."""
    refused: dict[str, int] = {}
    """How often each state was entered in vain: a limit had no room left, so its handler did not run."""
    routed_limits: frozenset[str] = frozenset()
    """Limits that a ``limit_reached`` transition has routed; each may be routed once."""
    transitions: int = 0
    """How many transitions it has made."""
    exit: events.Transitioned | None = None
    """The transition that led to a final state."""
    stop_reason: str | None = None
    """Why it ended (:class:`fsm_rollout.trajectory.enums.StopReason`); ``None`` while it has not."""
    detail: str | None = None
    """More about its end: the error's text, or what was cut."""
    failure: FailureClass | None = None
    """Whose fault its end is; ``None``: it has not failed (it ended as intended, was cancelled, or goes on)."""
    suspended: str | None = None
    """Why it was set aside unfinished; ``None`` when it was not."""
    ended_at: float | None = None
    """When it ended, on the scheduler's clock."""
    suspended_seconds: float = 0.0
    """Seconds between its suspensions and its resumptions."""
    resumptions: int = 0
    """How often it was resumed."""
    deaths: int = 0
    """How often the process that ran it has died."""
    begun_calls: set[str] = set()
    """The ids of calls that were recorded as begun and are under way."""

    # The present visit
    visit_events: list[AnyEvent] = []
    """The events of the present visit so far. If the visit is begun again, their effects are not repeated."""
    interrupted: bool = False
    """Whether the present visit was broken off once and begun again."""
    time_up: events.TimedOut | None = None
    """Set when the present visit has timed out and only its handler's ``timed_out`` is still to run."""

    # What the model and the environment have done
    streams: list[Stream] = []
    """Every token stream, in the order in which they were opened; those with trained tokens are rows of the batch."""
    open_streams: dict[str, Stream] = {}
    """The open stream of each context that has been used."""
    generations: int = 0
    """Number of generations so far; the index of the next one."""
    context_turns: dict[str, int] = {}
    """Number of generations so far, by context."""
    turn_of: list[AssistantTurn] = []
    """The turn that each generation belongs to, by the generation's index."""
    last: events.Generated | None = None
    """The latest generation, of any context."""
    attempts: Sequence[ToolCall | MalformedCall] = ()
    """The calls and broken calls of the latest generation, in order."""
    response_tokens: int = 0
    """Tokens after the opening prompts, over all streams."""
    cost: float | None = None
    """What its generations, and the models that its environment asked, cost; ``None``: those engines have no price."""
    queries: dict[str, int] = {}
    """How often the environment has asked each engine."""
    queries_before: dict[str, int] = {}
    """The same when the present visit began."""
    replied: dict[str, int] = {}
    """How often the interaction of each state has replied."""
    called: list[events.Called] = []
    """The tool calls since the latest generation."""
    calls_seen: int = 0
    """How many tool calls were attempted, broken ones included."""
    calls_failed: int = 0
    """How many of them failed, whoever is to blame; ``bad_calls`` says how many the model is to blame for."""
    snapshots: dict[str, str] = {}
    """Of each tool (or user) whose state after its latest call was kept: the name of the bytes in the journal."""
    guarded: int = 0
    """How many control markers in the environment's text were kept from becoming control tokens."""
    time_spent: TimeSpent = msgspec.field(default_factory=TimeSpent)
    """What it has spent time in."""

    # How good it is
    score: float | None = None
    """Its score; ``None``: it has none, which is not 0."""
    turn_scores: list[tuple[int, float]] = []
    """``(generation's index, score)`` of each turn that was scored, in the order in which that was done."""
    state_scores: list[tuple[str, float, int]] = []
    """``(state, score, generations by then)`` of each visit that its state's ``score`` had an opinion of."""
    tool_rewards: list[float] = []
    """The rewards that tools gave with their results, in order."""
    tool_reward_turns: list[int] = []
    """The index of the generation whose call each of them is for; 0 before any."""
    rewarded: bool = False
    """Whether the run's reward has scored it."""
    reward_parts: Mapping[str, events.Part] = {}
    """What the run's reward reported beside the score, by name."""
    unscored: str | None = None
    """Why the run's reward gave no score, if it was asked for one."""

    @property
    def visits(self) -> Counter[str]:
        """How often each state was visited, the initial one and a visit under way included, refused ones not."""
        return Counter(self.entries) - Counter(self.refused)

    @property
    def score_is_missing(self) -> bool:
        """Whether its score is missing: the run's reward gave none, or nothing has scored it or a turn of it."""
        return self.score is None and (self.unscored is not None or not self.turn_scores)

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
        own = dict(zip(_PROMPTED, attrgetter(*_PROMPTED)(first), strict=True))
        own |= {"prompt_messages": first.messages, "spent": dict(first.spent), "state": first.initial}
        trajectory = cls(**own, entries={first.initial: 1}, started_at=first.at, latest_at=first.at)
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
        return at - self.started_at - self.suspended_seconds

    def stream(self, context: str) -> Stream | None:
        """Return the open stream of ``context``, or ``None`` when the context has not been used yet."""
        return self.open_streams.get(context)

    @property
    def messages(self) -> list[Message]:
        """The conversation: the agent's system message, the prompt, and all that the model, tools and users said."""
        return self.conversation()

    def conversation(self, context: str = "main") -> list[Message]:
        """Return all messages of a context, in order, those before a ``reset`` too; ``main`` has the prompt's."""
        messages = whole_conversation(stream for stream in self.streams if stream.context == context)
        return messages if messages or context != "main" else list(self.prompt_messages)

    @property
    def assistant_turns(self) -> list[AssistantTurn]:
        """The model's turns, of all contexts, in the order in which they began: text, calls, results and score."""
        return [turn for index, turn in enumerate(self.turn_of) if turn.generations[0] == index]

    @property
    def bad_calls(self) -> int:
        """How many tool calls failed through the model's fault: unreadable, of no tool, or with wrong arguments."""
        return self.spent.get(LimitName.BAD_CALLS, 0)

    @property
    def queue_seconds(self) -> float:
        """Seconds in which it waited for an engine to begin a generation; what ran side by side counts once."""
        return self.time_spent.seconds("queue")

    @property
    def generate_seconds(self) -> float:
        """Seconds in which an engine sampled for it; what ran side by side counts once."""
        return self.time_spent.seconds("generate")

    @property
    def tool_seconds(self) -> float:
        """Seconds in which a tool ran, sub-agents included; what ran side by side counts once."""
        return self.time_spent.seconds("tool")

    @property
    def interact_seconds(self) -> float:
        """Seconds in which an interaction made its reply."""
        return self.time_spent.seconds("interact")

    @property
    def other_seconds(self) -> float:
        """Seconds until its end (or its latest event) in which none of these was under way."""
        end = self.latest_at if self.ended_at is None else self.ended_at
        return max(0.0, self.elapsed(end) - self.time_spent.seconds("any"))

    def _took(self, kind: str, start: float, end: float) -> None:
        if end > (start := max(start, self.started_at)):
            self.time_spent.intervals.append((kind, start, end))

    @property
    def text(self) -> str:
        """The content of the latest assistant turn (without its tool calls), of any context."""
        return text_of(self.last.message) if self.last else ""

    def assistant_texts(self, context: str = "main") -> Iterator[str]:
        """Yield the content of every assistant turn of a context, in order, across its streams."""
        streams = (stream.messages for stream in self.streams if stream.context == context)
        return (text_of(said) for messages in streams for said in messages if said["role"] == "assistant")

    @property
    def forks(self) -> int:
        """How often a foreign agent has rewritten a history, so that it is a stream of its own."""
        return sum(BRANCH in stream.context for stream in self.streams)

    @property
    def trained_tokens(self) -> int:
        """Tokens with mask 1, over all streams."""
        return sum(map(attrgetter("tokens.trained_length"), self.streams))

    def apply(self, event: AnyEvent) -> None:
        """Take one event in.

        Raises:
            StreamError: the event does not fit: it names a context with no open stream, its logprobs or versions are
                not as many as its ids, or the trajectory has ended (or is prompted again). One that has ended takes
                scores, teachers' too, and a failure that was found later.
        """
        kind = type(event)
        if self.stop_reason is not None:
            found_later = isinstance(event, events.Ended) and StopReason.is_failure(event.stop_reason)
            if not (found_later or isinstance(event, events.Scored | events.NotScored | events.TeacherScored)):
                raise StreamError(f"trajectory {self.trajectory_id} has ended; it cannot take {kind.__name__}")
        _APPLY[kind](self, event)
        self.latest_at = event.at
        if kind in DONE_IN_A_VISIT and self.stop_reason is None:
            self.visit_events.append(event)

    def _open_stream(self, context: str) -> Stream:
        if context not in self.open_streams:
            raise StreamError(f"context '{context}' of trajectory {self.trajectory_id} has no open stream")
        return self.open_streams[context]

    def _prompted(self, event: events.Prompted) -> None:
        raise StreamError(f"trajectory {self.trajectory_id} has begun; it cannot take a second 'prompted'")

    def _context_opened(self, event: events.ContextOpened) -> None:
        before = self.open_streams.get(event.context)
        self.open_streams[event.context] = stream = Stream.begun(event, self.generations, before)
        self.streams.append(stream)
        self.guarded += event.guarded

    def _wrote(self, event: events.MessagesAppended) -> None:
        self._open_stream(event.context).append(event)

    def _extended(self, event: events.PromptExtended) -> None:
        self.response_tokens += self._open_stream(event.context).extend(event, self.generations)
        self.guarded += event.guarded

    def _generated(self, event: events.Generated) -> None:
        stream = self._open_stream(event.context)
        message = stream.sample(event, self.generations)
        if not event.resumed:
            self.generations += 1
            self.context_turns[event.context] = self.context_turns.get(event.context, 0) + 1
        update_turn(self.turn_of, event, message, self.generations)
        self.last, self.attempts, self.called = event, event.attempts, []
        self.response_tokens += len(event.ids) if event.usage is None else stream.count(event.usage)
        self.cost = self.cost if event.cost is None else (self.cost or 0.0) + event.cost
        begun = event.at - event.seconds
        self._took("queue", begun - event.queue_seconds, begun)
        self._took("generate", begun, event.at)

    def _call_begun(self, event: events.CallBegun) -> None:
        self.begun_calls.add(event.id)

    def _restored(self, event: events.Restored) -> None:
        """Change nothing: whoever looks at the events sees it."""

    def _called(self, event: events.Called) -> None:
        self.called.append(event)
        turn = next((turn for turn in reversed(self.turn_of) if self.last and turn.context == self.last.context), None)
        if turn is not None:
            turn.results.append(event)
        self.calls_seen += 1
        self.calls_failed += event.failure is not None
        self._took("tool", event.at - event.seconds, event.at)
        if event.bad:
            self.spent[LimitName.BAD_CALLS] = self.spent.get(LimitName.BAD_CALLS, 0) + 1
        if event.reward is not None:
            self.tool_rewards.append(event.reward)
            self.tool_reward_turns.append(0 if turn is None else turn.generations[-1])
        self.begun_calls.discard(event.id)
        if self.snapshots and event.tries:
            self.snapshots.pop(event.name, None)  # from before this call

    def _asked(self, event: events.ModelQueried) -> None:
        self.queries[event.engine] = max(self.queries.get(event.engine, 0), event.index + 1)
        self.cost = self.cost if event.cost is None else (self.cost or 0.0) + event.cost

    def _interacted(self, event: events.UserReplied) -> None:
        self._took("interact", event.at - event.seconds, event.at)
        self.replied[event.state] = self.replied.get(event.state, 0) + 1
        if (stream := self.open_streams.get(event.context)) is not None:
            stream.reply = event.content
        if self.snapshots:
            self.snapshots.pop(f"{INTERACTION}{event.state}" if event.own else INTERACTION, None)

    def _charged(self, event: events.LimitCharged) -> None:
        self.spent[event.limit] = self.spent.get(event.limit, 0) + event.amount

    def _refused(self, event: events.Refused) -> None:
        self.refused[self.state] = self.refused.get(self.state, 0) + 1

    def _timed_out(self, event: events.TimedOut) -> None:
        self.time_up, self.visit_events = event, []

    def _transitioned(self, event: events.Transitioned) -> None:
        if event.source != self.state:
            raise StreamError(f"a transition from '{event.source}' in state '{self.state}' of {self.trajectory_id}")
        if event.trigger == Trigger.LIMIT_REACHED:
            self.routed_limits |= {routing_key(str(event.limit), event.source)}
        self.transitions += 1
        self.visit_events, self.interrupted, self.time_up = [], False, None
        self.queries_before = dict(self.queries) if self.queries else self.queries_before
        if event.score is not None:
            self.state_scores.append((event.source, event.score, self.generations))
        self.state = event.dest
        self.exit = self.exit if event.stop_reason is None else event
        self.entries[event.dest] = self.entries.get(event.dest, 0) + 1
        for limit, amount in event.spent.items():
            self.spent[limit] = self.spent.get(limit, 0) + amount

    def _scored(self, event: events.Scored) -> None:
        if event.turn is None:
            self.score, self.unscored = event.value, None
            if event.source == events.REWARD:
                self.rewarded, self.reward_parts = True, event.parts
        else:
            self.turn_scores.append((event.turn, event.value))
            if event.turn < len(self.turn_of):
                self.turn_of[event.turn].score = event.value

    def _not_scored(self, event: events.NotScored) -> None:
        self.unscored = event.detail

    def _taught(self, event: events.TeacherScored) -> None:
        Stream.take_scores(self.streams, event)

    def _suspended(self, event: events.Suspended) -> None:
        self.suspended = event.reason
        self.deaths += event.reason == events.DIED

    def _resumed(self, event: events.Resumed) -> None:
        self.deaths += self.suspended is None
        self.begun_calls.clear()
        self.time_spent.settle()
        self.suspended, self.interrupted = None, True
        self.suspended_seconds += event.away
        self.resumptions += 1

    def _snapshotted(self, event: events.Snapshotted) -> None:
        self.snapshots[event.tool] = event.blob

    def _ended(self, event: events.Ended) -> None:
        self.stop_reason, self.detail, self.failure = event.stop_reason, event.detail, event.failure
        self.suspended, self.ended_at = None, (event.at if self.ended_at is None else self.ended_at)

    def __repr__(self) -> str:
        where = self.stop_reason or (f"suspended: {self.suspended}" if self.suspended else self.state)
        count = f"{self.generations} generation{'s' * (self.generations != 1)}"
        return f"<Trajectory {self.trajectory_id} of {self.agent}: {where}, {count}>"


# How a trajectory takes in each event: the method named like the event's tag in the journal (`_` and the tag).
_APPLY: Mapping[type[events.Event], Callable[[Trajectory, AnyEvent], None]] = {
    event: getattr(Trajectory, f"_{event.__struct_config__.tag}") for event in get_args(AnyEvent)
}

# What a handler does through its visit (the glue before a generation is part of that generation).
DONE_IN_A_VISIT = frozenset({
    events.ContextOpened, events.MessagesAppended, events.Generated, events.CallBegun, events.Called,
    events.ModelQueried, events.UserReplied, events.LimitCharged, events.Scored, events.Refused,
})  # fmt: skip
# The fields that it has as `Prompted` has them.
_PROMPTED = tuple(name for name in events.Prompted.__struct_fields__ if name in Trajectory.__struct_fields__)
