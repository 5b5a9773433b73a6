"""What can happen to a trajectory, as immutable records.

Invariant: a trajectory changes only by these. They are complete: folding a trajectory's events over an empty one gives
the trajectory again, bit for bit, so journal, report, replay, resume and re-scoring need nothing else.

Times (``at``) are seconds on the scheduler's clock; durations are seconds.
"""

from __future__ import annotations

import math
import reprlib
from typing import Any, SupportsFloat, cast

import msgspec

from fsm_rollout.trajectory.enums import FailureClass, FinishReason
from fsm_rollout.trajectory.tokens import Ids, Logprobs, MediaSpan, MessagePart, Note, TokenScores, Usage

# Text, numbers, lists and mappings, by key. (`object` would not do: msgspec asks the hook to decode it.)
PlainData = dict[str, Any]
Message = PlainData  # a chat message in OpenAI's form: role, content, and for tools tool_calls / tool_call_id / name


class Event(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="event", gc=False, omit_defaults=True,
    forbid_unknown_fields=True,
):  # fmt: skip
    """Base of all events. They hold plain data without cycles, so the garbage collector need not track them.

    A field that is not known is an error: what another version has written is refused, not read in part.
    """

    at: float


class Prompted(Event, frozen=True, kw_only=True, tag="prompted"):
    """A trajectory began: everything it was given."""

    trajectory_id: str
    group_id: str
    sample: int
    agent: str
    initial: str
    messages: list[Message]
    extra: PlainData
    limits: dict[str, float | None]
    seed: int
    date: str
    epoch: float = 0.0  # seconds since 1970: what `at` means in the world
    validate: bool = False
    parent_id: str | None = None
    called_by: str = ""  # of a sub-agent: the id of its parent's call, and how many times that was tried by then
    step: int | None = None  # the training step that the run belongs to
    sampling: PlainData = {}  # what the prompt itself says about sampling
    spent: dict[str, int] = {}  # what entering the initial state was charged


class ContextOpened(Event, frozen=True, kw_only=True, tag="context_opened"):
    """A context's next stream began with its opening prompt."""

    context: str
    state: str
    messages: list[Message]
    ids: Ids
    trained: bool
    engine: str
    guarded: int = 0
    # The places in `ids` of tokens that spell a control token as plain text (`injection: guard`).
    guarded_at: list[int] = []
    parts: list[MessagePart] = []  # which of the ids are whose text; the others are the chat template's own
    media: list[MediaSpan] = []  # which of the ids are pictures
    # The trajectory's stream, by its number, whose first tokens are so many of the first ids: it is a fork of that.
    shares: tuple[int, int] | None = None
    # Whether a generation opened it, because its messages could not be glued to the stream before.
    instead_of_glue: bool = False
    # Of a foreign agent's: why it is a stream of its own, of :class:`~fsm_rollout.trajectory.enums.ForkReason`.
    why: str = ""
    # Whether its engine gives text alone: the ids spell what was said, and are none that a model sampled.
    text_only: bool = False


class MessagesAppended(Event, frozen=True, kw_only=True, tag="wrote"):
    """The environment added messages to a context's history. Their tokens come with the next ``extended``."""

    context: str
    state: str
    messages: list[Message]


class PromptExtended(Event, frozen=True, kw_only=True, tag="extended"):
    """The glue of all pending messages entered the stream, right before a generation.

    ``state`` is the state that wrote the first of them; ``guarded`` counts control markers in environment text that
    were kept from becoming control tokens, and ``guarded_at`` are the places in ``ids`` of the tokens that spell them.
    ``parts`` and ``media`` are as in :class:`ContextOpened`, of the pending messages.
    """

    context: str
    state: str
    ids: Ids
    guarded: int = 0
    guarded_at: list[int] = []
    parts: list[MessagePart] = []
    media: list[MediaSpan] = []


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, tag="call", gc=False):
    """A well-formed call that the model made."""

    id: str
    """Ties the call to its result."""
    name: str
    """The tool's name; there may be no such tool."""
    arguments: PlainData
    """As the model wrote them; they may not fit the tool's parameters."""


class MalformedCall(msgspec.Struct, frozen=True, kw_only=True, tag="broken", gc=False):
    """A call the model tried to make and that cannot be read."""

    id: str
    """Ties the call to its answer."""
    kind: str
    """The tool format's slug for what is wrong."""
    message: str
    """The same in words; the model is told them."""


class Generated(Event, frozen=True, kw_only=True, tag="generated"):
    """One generation ended. ``versions`` are run lengths ``(tokens, weight version)`` over ``ids``.

    Tokens of the version -1 were not sampled: the environment wrote them, to close the thinking at its budget
    (``thinking_tokens``). They have no log-prob (0.0) and the mask 0, and are of the turn like all others.

    ``attempts`` holds calls and broken calls in the order of the text, ``message`` what the turn says beside them, all
    of it also where the generation goes on after ``length``. :meth:`said` is the message of the history.
    """

    context: str
    state: str
    ids: Ids
    logprobs: Logprobs
    versions: list[tuple[int, int]]
    finish_reason: FinishReason
    message: Message
    attempts: list[ToolCall | MalformedCall] = []
    continued: bool = False  # whether it continues the last message of the history, a turn that was cut
    # Whether it continues an aborted generation; then it is the same generation and not counted again.
    resumed: bool = False
    # With `top_p` and `top_k`: the distribution that the ids were sampled from and that `logprobs` are of.
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    # What else the engine said of `ids`, and of the tokens before them that it had said nothing of.
    notes: list[Note] = []
    # The limit that cut it, when `finish_reason` is "length" and it was not the turn's own `max_tokens`.
    cut_by: str | None = None
    queue_seconds: float = 0.0
    seconds: float = 0.0
    cached_tokens: int = 0
    replica: str = ""
    usage: Usage | None = None  # of an engine that gives text alone: the tokens as it counts them
    cost: float | None = None  # in money, where the engine has a price

    @property
    def tokens(self) -> int:
        """How many tokens it took, as its engine counts them, where it does."""
        return len(self.ids) if self.usage is None else self.usage.output

    def said(self) -> Message:
        """Return the whole assistant message in OpenAI's form: with the calls among the attempts that could be read."""
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.attempts
            if isinstance(call, ToolCall)
        ]
        return self.message | {"tool_calls": calls} if calls else self.message


class CallBegun(Event, frozen=True, kw_only=True, tag="call_begun"):
    """A call is about to be made that must not be made twice, or that may end this process, as one did before."""

    state: str
    id: str


class Called(Event, frozen=True, kw_only=True, tag="called"):
    """One attempted tool call came to its end.

    The model is to blame (``bad``) for a call that cannot be read, an unknown tool, and arguments that do not fit the
    tool's parameters or that the tool itself refuses by raising ``BadArguments``. Those are charged to
    ``bad_calls``. Whatever else a tool raises is a failure of the tool.
    """

    state: str
    """The state that made the call."""
    id: str
    """The id of the model's call."""
    name: str
    """The tool; empty where the call could not be read."""
    arguments: PlainData
    """As the model wrote them."""
    result: str
    """What the model was told."""
    shown: list[PlainData] = []
    """The result as the parts of a message, where it shows pictures; ``result`` is then their text."""
    failure: str | None = None
    """``None``: it succeeded. Else what failed: ``unknown_tool``, ``bad_arguments``, ``timed_out``, the tool format's
    slug, or the class of the error that the tool raised."""
    bad: bool = False
    """Whether the model is to blame for the failure; charged to ``bad_calls``."""
    reward: float | None = None
    """The reward that the tool gave with its result."""
    seconds: float = 0.0
    """How long it took, with all waiting, tries and the pauses between them."""
    tries: int = 1
    """How often the tool was run; 0 when the call never reached it."""
    failed_tries: list[tuple[float, str]] = []
    """Of each try but the last: how long it took, from the end of the one before, and what failed."""
    truncated_tokens: int = 0
    """How many tokens of the result were cut away: by ``response_tokens``, else because of what the limits had left."""
    child_id: str | None = None
    """The trajectory of the sub-agent that answered."""

    @property
    def content(self) -> str | list[PlainData]:
        """The content of the message that answers the call."""
        return self.shown or self.result

    @classmethod
    def of(
        cls, attempt: ToolCall | MalformedCall, result: str, failure: str | None = None, *, tries: int = 0, **facts: Any
    ) -> Called:
        """Return what an attempted call came to; when, and in which state, says who records it."""
        name, arguments = (attempt.name, attempt.arguments) if isinstance(attempt, ToolCall) else ("", {})
        told: dict[str, Any] = {"id": attempt.id, "name": name, "arguments": arguments, "result": result}
        return cls(at=0.0, state="", failure=failure, tries=tries, **told, **facts)


class ModelQueried(Event, frozen=True, kw_only=True, tag="asked"):
    """The environment asked a model on a named engine, and this is what it said; it enters no stream by itself."""

    engine: str
    index: int  # how many times the trajectory had asked that engine before
    state: str
    text: str
    tokens: int
    seconds: float
    cost: float | None = None  # in money, where the engine has a price


class UserReplied(Event, frozen=True, kw_only=True, tag="interacted"):
    """An interaction answered a context; ``content`` enters its history as ``wrote``."""

    context: str
    state: str
    seconds: float
    content: str | list[PlainData] | None = None
    score: float | None = None
    done: bool = False
    own: bool = False  # whether it is that of the state alone, and not the one that states share


class LimitCharged(Event, frozen=True, kw_only=True, tag="charged"):
    """A limit was charged outside of entering a state: a further generation or call within one visit."""

    limit: str
    amount: int = 1


class Transitioned(Event, frozen=True, kw_only=True, tag="transitioned"):
    """A transition fired. ``spent``: what entering ``dest`` was charged; ``stop_reason`` is set for final ones."""

    trigger: str
    source: str
    dest: str
    spent: dict[str, int]
    limit: str | None = None
    detail: str | None = None
    stop_reason: str | None = None
    # Which of the agent's transitions fired, by its place in `transitions`; `None` for an implicit one.
    row: int | None = None
    score: float | None = None  # what the `score` of the state that was left said of how things stood
    # Whose fault it is, if it is a failure: `failed`, or another trigger that no transition of the agent takes.
    failure: FailureClass | None = None


Part = float | str | None  # a part of a reward, or something that it measured
REWARD = "reward"  # the source of a score that the run's reward gave


class TimedOut(Event, frozen=True, kw_only=True, tag="timed_out"):
    """The present visit timed out, or (``walled``) ``wall_seconds`` were over; the handler's ``timed_out`` follows."""

    walled: bool = False


class Refused(Event, frozen=True, kw_only=True, tag="refused"):
    """A limit has no room for the visit that has just begun: its handler does not run, ``limit_reached`` follows."""


LARGEST_SCORE = 3.4028234663852886e38  # of float32, in which tensors hold scores


def as_score(value: object, whose: str) -> float | None:
    """Return a score as Python's float; ``whose`` it is begins the message.

    Raises:
        TypeError: it is neither a number nor ``None``.
        ValueError: no float32 holds it: it is not finite, or beyond 3.4e38.
    """
    if value is None:
        return None
    rule = f"{whose} must be a finite number or None"
    try:
        if isinstance(value, str):
            raise TypeError("a string")
        number = float(cast(SupportsFloat, value))
    except OverflowError:
        raise ValueError(f"{rule}, got a number of more than 300 digits") from None
    except Exception as error:  # whatever the conversion of a user's object raises
        raise TypeError(f"{rule}, got {reprlib.repr(value)} ({error})") from None
    if not abs(number) <= LARGEST_SCORE:
        beyond = f" (a float32 holds up to {LARGEST_SCORE:.2g})" if math.isfinite(number) else ""
        raise ValueError(f"{rule}, got {number:g}{beyond}")
    return number


class Scored(Event, frozen=True, kw_only=True, tag="scored"):
    """A score was given: to the trajectory (``turn`` is None) or to one turn (index of its generation)."""

    value: float
    turn: int | None = None
    source: str = ""
    parts: dict[str, Part] = {}  # what the run's reward reported beside the score, by name
    seconds: float = 0.0  # how long the run's reward took, for all that it judged at once


class NotScored(Event, frozen=True, kw_only=True, tag="not_scored"):
    """The run's reward gave the trajectory no score: it failed, or had none to give."""

    detail: str
    seconds: float = 0.0  # as of `Scored`


class TeacherScored(Event, frozen=True, kw_only=True, tag="taught"):
    """A teacher was shown tokens of a stream, and this is what it made of them, or why it made nothing of them."""

    teacher: str
    stream: int  # the number of the stream among the trajectory's
    start: int  # the position of the first token in it
    scores: TokenScores
    version: int = 0  # the teacher's weights; -1 where it has failed
    failure: str | None = None  # why there are no log-probs (they are NaN)
    seconds: float = 0.0


UNREAD = "nobody waits for its answer any more"  # the `detail` of a sub-agent's end whose caller ended without it
DIED = "the process died during a call"  # the `reason` of `Suspended` that is found out when the run is resumed


class Suspended(Event, frozen=True, kw_only=True, tag="suspended"):
    """The trajectory was set aside unfinished; it has no stop reason and may be resumed."""

    reason: str


class Resumed(Event, frozen=True, kw_only=True, tag="resumed"):
    """A trajectory that was set aside, or cut off by a crash, goes on; the visit under way is begun again.

    ``away`` is how long it was gone, in seconds; that time counts against no limit. It may be negative: the clock of
    another process may lie behind.
    """

    away: float
    weight_version: int = 0  # the weights that it goes on with
    epoch: float = 0.0  # seconds since 1970: what `at` means in the world, also where another process goes on
    step: int | None = None  # the training step in which it goes on


class Snapshotted(Event, frozen=True, kw_only=True, tag="snapshotted"):
    """A tool's state after its latest call, or a user's after the latest reply, was kept, from which it can go on.

    ``blob`` is the name of the bytes in the journal.
    """

    tool: str
    blob: str


class Restored(Event, frozen=True, kw_only=True, tag="restored"):
    """What a resumed trajectory's tools and users had in memory was got back; ``ways`` says how, by name."""

    ways: dict[str, str]


class Ended(Event, frozen=True, kw_only=True, tag="ended"):
    """The trajectory ended; the one and only stop reason."""

    stop_reason: str
    detail: str | None = None
    failure: FailureClass | None = None  # whose fault it is, if it is a failure


AnyEvent = (
    Prompted | ContextOpened | MessagesAppended | PromptExtended | Generated | CallBegun | Called | ModelQueried
    | UserReplied | LimitCharged | Refused | TimedOut | Transitioned | Scored | NotScored | Suspended | Resumed
    | Snapshotted | Restored | Ended | TeacherScored
)  # fmt: skip
