"""What a trajectory says, twice: as the token streams of its contexts, and as the turns of its conversation.

Invariant: only :meth:`fsm_rollout.trajectory.trajectory.Trajectory.apply` changes them.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from fsm_rollout.trajectory import events
from fsm_rollout.trajectory.content import text_of
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.events import MalformedCall, Message, ToolCall
from fsm_rollout.trajectory.tokens import Ids, MessagePart, TokenStream


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
    sampled_with: list[SampledWith]
    """The sampling of each generation, by its index."""
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

    @property
    def pending(self) -> list[Message]:
        """Messages written since the last generation, not yet in the tokens."""
        return self.messages[self.glued :]

    @property
    def sampled(self) -> bool:
        """Whether anything was sampled in it. It was not if messages came before its first turn: they open another."""
        return self.turn is not None

    @property
    def turn_ids(self) -> Ids:
        """What was sampled for the latest assistant turn (several generations when it was cut and went on)."""
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
    """How many tokens were sampled for it."""

    @property
    def text(self) -> str:
        """Its text, without tool calls."""
        return text_of(self.message)


# A foreign agent may have several histories at a time; the further ones are contexts with a number behind the name:
# `main~2` rewrites an earlier history, `main+2` shares nothing with any.
BRANCH, FURTHER = "~", "+"


def root_of(context: str) -> str:
    """Return the agent's context that a context of a trajectory is, or is a branch of."""
    return context.partition(BRANCH)[0].partition(FURTHER)[0]
