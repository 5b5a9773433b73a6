"""Why things end and why states change: the words used in journals, YAMLs and pages, each with its meaning.

Invariant: every member is its word (``FinishReason.STOP == "stop"``), so files hold plain text, and users may write the
word wherever a member is wanted.
"""

from __future__ import annotations

from enum import StrEnum


class Word(StrEnum):
    """A string enum whose members print as plain strings."""

    def __repr__(self) -> str:
        """Show as text, which is what users wrote and will read."""
        return repr(self.value)


class FinishReason(Word):
    """Why one generation ended."""

    STOP = "stop"
    """The model sampled a stop token; it is the last of the sampled ids."""
    LENGTH = "length"
    """``max_tokens``, a token limit or the engine's window cut it."""
    ABORT = "abort"
    """It was aborted, or its engine failed; what was sampled until then is kept, and the generation may go on."""


class LimitName(Word):
    """The limits of a trajectory; :data:`fsm_rollout.agent.limits.LIMITS` says what is charged for each, and when."""

    MAX_VISITS = "max_visits"
    """Of one state: how often it may be visited."""
    ASSISTANT_TURNS = "assistant_turns"
    """Generations."""
    TOOL_CALLS = "tool_calls"
    """Attempted tool calls."""
    USER_TURNS = "user_turns"
    """Replies of the simulated user."""
    WALL_SECONDS = "wall_seconds"
    """Seconds since the trajectory began, without those for which it was set aside."""
    RESPONSE_TOKENS = "response_tokens"
    """Tokens after the opening prompts, over all streams."""
    CONTEXT_TOKENS = "context_tokens"
    """Tokens of any one stream; the engine's window limits them too."""
    BAD_CALLS = "bad_calls"
    """Tool calls that failed through the model's fault: unreadable, of no tool, or with wrong arguments."""


class Trigger(Word):
    """What built-in handlers and the scheduler raise. A handler of the user's own may raise further names."""

    PROMPTED = "prompted"
    """The prompt stands in the history."""
    GENERATED = "generated"
    """The model has finished its turn."""
    TRUNCATED = "truncated"
    """The model's turn was cut at the length limit."""
    TOOLS_DONE = "tools_done"
    """Every call of the latest turn has its result."""
    REPLIED = "replied"
    """The simulated user has answered."""
    INTERACTION_DONE = "interaction_done"
    """The simulated user has nothing more to say."""
    WRITTEN = "written"
    """The state's text stands in the history."""
    RETURNED = "returned"
    """The foreign agent has come to its end."""
    FAILED = "failed"
    """The scheduler: the handler raised an error."""
    TIMED_OUT = "timed_out"
    """The scheduler: the visit took longer than the state's timeout."""
    LIMIT_REACHED = "limit_reached"
    """The scheduler: a limit was reached."""
    CANCELLED = "cancelled"
    """The scheduler: the trajectory was cancelled from outside. No transition can take it."""


IMPLICIT_TRIGGERS = (Trigger.TRUNCATED, Trigger.FAILED, Trigger.TIMED_OUT, Trigger.LIMIT_REACHED, Trigger.CANCELLED)
"""Triggers that need no transition: without one they end the trajectory; ``cancelled`` always does."""
SCHEDULERS_TRIGGERS = frozenset(IMPLICIT_TRIGGERS) - {Trigger.TRUNCATED}
"""Triggers that the scheduler alone raises."""


class DropReason(Word):
    """Why a group is in no batch and does not count towards a target."""

    FILTERED = "filtered"
    """The run's group filter turned it down."""
    STALE = "stale"
    """A sample of it fell too far behind the weights, once more than ``max_restarts``."""
    WRONG_TOKENS = "wrong_tokens"
    """Tokens of it are wrong (``failed:GlueMismatchError``)."""


def routing_key(limit: str, state: str) -> str:
    """Return under which name a limit is remembered as routed: ``max_visits`` is one limit per state."""
    return f"{limit}@{state}" if limit == LimitName.MAX_VISITS else limit


class ForkReason(Word):
    """Why a history is a stream of its own; all but the last are of foreign agents alone.

    Pages say what stands before a colon.
    """

    CONVERSATION = "conversation"
    """Another conversation of its agent: it shares no user's message with an earlier history."""
    SUB_AGENT = "sub_agent"
    """The first history of a sub-agent: of another thread, as the caller's headers name it."""
    SIDE_CALL = "side_call"
    """A call beside the work of its agent, say for a title: not trained unless that is asked for."""
    SUMMARY = "summary"
    """A summary that its agent asked for with other tools or instructions."""
    COMPACTION = "compaction"
    """Goes on from a summary of what was said: that stands in its place."""
    EARLIER_POINT = "earlier_point"
    """Goes on from an earlier point, or in another way."""
    ANOTHER_ANSWER = "another_answer"
    """Another answer to a question that was answered."""
    REWRITTEN = "rewritten"
    """A history that its agent rewrote."""
    TOOLS_CHANGED = "tools_changed"
    """Begins like an earlier one, with other tools."""
    SYSTEM_CHANGED = "system_changed"
    """Begins like an earlier one, with other instructions."""
    GRAMMAR = "grammar"
    """Under a grammar, whose tokens are not the policy's own; or goes on freely from there: what a form or a forced
    call has bound is not trained unless that is asked for, what is free is."""
    NOT_GLUED = "not_glued"
    """Its messages could not be glued to the stream before: the chat template cannot go on with the tokens that there
    are, or is not to (``history``: ``split``)."""


class StopReason(Word):
    """Why a trajectory ended: the fixed reasons.

    A transition may give a ``stop_reason`` of its own; a limit gives ``limit:<name>`` and an error ``failed:<class>``
    (:meth:`of_limit`, :meth:`of_failure`), so the stop reason of a trajectory is a ``str``.
    """

    ANSWERED = "answered"
    """A transition led to a final state and named no reason."""
    TRUNCATED = "truncated"
    """A turn was cut at the length limit, and no transition took it on."""
    TIMED_OUT = "timed_out"
    """A visit timed out, and no transition took that on."""
    INTERACTION_DONE = "interaction_done"
    """The simulated user had nothing more to say."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """The prompt does not fit into the engine's window."""
    CANCELLED = "cancelled"
    """It was cancelled from outside."""

    @staticmethod
    def of_limit(limit: str | None) -> str:
        """Return the stop reason of a trajectory that a limit has ended."""
        return f"limit:{limit}"

    @staticmethod
    def of_failure(error: str | None) -> str:
        """Return the stop reason of a trajectory that an error has ended; ``error`` is the name of its class."""
        return f"failed:{error}"

    @staticmethod
    def is_failure(stop_reason: str | None) -> bool:
        """Whether an error has ended the trajectory."""
        return stop_reason is not None and stop_reason.startswith("failed:")


class FailureClass(Word):
    """Whose fault it is that a trajectory failed.

    Only :attr:`POLICY` is something to learn from: what failed for any other reason has no score.
    """

    POLICY = "policy"
    """The model: it reached a limit, was cut at its length, ran out of time while it spoke, or made one bad call too
    many."""
    DATA = "data"
    """The prompt: it is too long, or its messages cannot be rendered."""
    TOOL = "tool"
    """A tool: it failed for good, or its state's time was up."""
    ENVIRONMENT = "environment"
    """The agent's own code: a handler, an interaction, a predicate, a missing transition."""
    ENGINE = "engine"
    """The engine: it answered with an error, with nothing, or with something invalid."""
    INFRASTRUCTURE = "infrastructure"
    """The machinery: a replica or a process was lost, memory ran out, or cached tokens were wrong."""


class Role(StrEnum):
    """Whose a token of a row is: what a trainer may give it a loss for. The column ``roles`` has their numbers."""

    SCAFFOLD = "scaffold"
    """The chat template's own: headers, separators, what closes a thinking budget, and a token that straddles two."""
    SAMPLED = "sampled"
    """The model's, as the row's engine sampled it: trained in every row, and nowhere else."""
    SYSTEM = "system"
    """A system or developer message."""
    USER = "user"
    """A user message of the prompt, or of a state that writes one."""
    ASSISTANT = "assistant"
    """The model's words that were not sampled in this row: examples in a prompt, or a history that another row has."""
    TOOL = "tool"
    """What a tool answered."""
    INTERACTION = "interaction"
    """What an interaction, the simulated user, replied."""
    NOTICE = "notice"
    """What this framework told the model in a tool's place: that a call failed, or how much of its result was cut."""
    MEDIA = "media"
    """What the model sees for a picture."""


ROLES = tuple(Role)  # by their numbers in a batch
