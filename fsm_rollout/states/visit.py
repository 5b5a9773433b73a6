"""A visit of a state: its record, its limits, and the contexts that it writes to.

Invariant: all that happens in a visit is recorded as an event through :meth:`Visit.emit`. A visit that was interrupted
begins again, and nothing is done twice (:mod:`fsm_rollout.states.effect_log`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial

from fsm_rollout.agent.handlers import TEMPLATE_FACTS
from fsm_rollout.agent.limits import COUNTED_LIMITS, LimitReached, remaining, spent
from fsm_rollout.chat.markers import Encoded
from fsm_rollout.chat.messages import check_written
from fsm_rollout.chat.reference import Opening
from fsm_rollout.concurrency.deadline import Deadline
from fsm_rollout.concurrency.seeds import derive_seed
from fsm_rollout.errors import PromptTooLong, StreamError, did_you_mean
from fsm_rollout.states.active_trajectory import ActiveTrajectory
from fsm_rollout.states.bound_agent import BoundContext
from fsm_rollout.states.effect_log import NO_EFFECTS, EffectLog
from fsm_rollout.trajectory import events
from fsm_rollout.trajectory.enums import LimitName
from fsm_rollout.trajectory.events import AnyEvent, Message
from fsm_rollout.trajectory.stream import Stream, root_of, text_of
from fsm_rollout.trajectory.trajectory import DONE_IN_A_VISIT

_FOR_HANDLERS = DONE_IN_A_VISIT | {events.PromptExtended}  # what a handler may emit


class Visit:
    """One visit of a state: its record, its limits, and the contexts that it writes to."""

    deadline: Deadline
    """The handler's; set while it runs."""

    def __init__(self, active: ActiveTrajectory) -> None:
        self.active = active
        self.trajectory = active.trajectory
        self.agent = active.agent
        self.state = self.trajectory.state
        self.spec = self.agent.graph.states[self.state]
        self.clock: Callable[[], float] = asyncio.get_running_loop().time
        """Returns the scheduler's time in seconds (virtual in simulation)."""
        self.take_in: Callable[[AnyEvent], None] = active.emit
        """Takes in what the visit's own operations have done; StreamError once it is over."""
        # The first event that the interrupted visit had recorded; if `enter` records one, it is that one.
        self._entry = next(iter(self.trajectory.visit_events), None)
        # What the visit had done before it was interrupted; nothing, nearly always.
        self._effects = EffectLog(self.trajectory.visit_events) if self.trajectory.visit_events else NO_EFFECTS

    # -- time, facts and limits ---------------------------------------------------------------------------------

    @property
    def resumed(self) -> bool:
        """Whether this visit was interrupted and has begun again; what it had recorded is not done twice."""
        return self.trajectory.interrupted

    @cached_property
    def rng(self) -> random.Random:
        """Random numbers that depend on the trajectory and the visit only (made when asked for: they are large)."""
        return random.Random(derive_seed(self.trajectory.seed, self.state, self.trajectory.visits[self.state]))

    def emit(self, event: AnyEvent) -> None:
        """Apply an event to the trajectory, journal it and call the listeners.

        Raises:
            StreamError: the visit is over (its handler did not wait for a task), or the event is not one that a handler
                may emit (it would begin, move or end the trajectory).
            TypeError, ValueError: a score is no number that a float32 holds.
        """
        if type(event) not in _FOR_HANDLERS:
            raise StreamError(
                f"a handler cannot emit {type(event).__name__}; return an Outcome, transitions do the rest"
            )
        if isinstance(event, events.Scored):
            events.as_score(event.value, "a score")
        self.take_in(event)

    def _end(self) -> None:
        """Take nothing in any more."""
        self.take_in = partial(_refuse, self.state)

    def remaining(self, limit: str) -> float:
        """Return how much of a limit is left; infinity where it does not hold."""
        trajectory = self.trajectory
        if trajectory.limits.get(limit) is None:
            return float("inf")
        return remaining(self.agent.graph, trajectory, limit, spent(trajectory, limit, self.clock()))

    def check(self, limit: str) -> None:
        """Raise ``LimitReached`` when more than the limit allows has been spent."""
        if self.remaining(limit) < 0:
            raise LimitReached(limit)

    def charge(self, limit: str) -> None:
        """Spend one of a counted limit, or raise ``LimitReached``."""
        if not self._effects or self._effects.take(events.LimitCharged, limit) is None:
            self.take_in(events.LimitCharged(at=self.clock(), limit=limit))
        self.check(limit)

    def facts(self) -> dict[str, object]:
        """Return what a state's prompt template may use: :data:`fsm_rollout.agent.handlers.TEMPLATE_FACTS`."""
        trajectory, contexts = self.trajectory, self.agent.contexts
        return {fact: getattr(trajectory, fact, None) for fact in TEMPLATE_FACTS} | {
            "messages": trajectory.prompt_messages,
            "task": text_of(trajectory.prompt_messages[-1]),
            "texts": {name: list(trajectory.assistant_texts(name)) for name in contexts},
            "history": {name: stream.messages if (stream := trajectory.stream(name)) else [] for name in contexts},
            "visits": {state: trajectory.visits.get(state, 0) for state in self.agent.graph.states},
            "spent": {limit: trajectory.spent.get(limit, 0) for limit in (*COUNTED_LIMITS, LimitName.BAD_CALLS)},
        }

    # -- contexts and messages ----------------------------------------------------------------------------------

    async def enter(self) -> None:
        """Enter a state that has a ``prompt`` or a ``reset``: reset its context, write its prompt."""
        spec = self.spec
        if self._entry is not None:
            # Recorded before an interruption; the handler must not get it as an effect of its own.
            self._effects.take(type(self._entry), spec.context)
            return
        messages: list[Message] | None = None
        if spec.prompt is not None:
            messages = [{"role": "user", "content": self.agent.prompts[self.state].render(self.facts())}]
        if spec.reset or spec.context not in self.trajectory.open_streams:
            bound = self.context(spec.context)
            await self.open(bound, self._opening_messages(bound, messages))
        elif messages is not None:
            self.append(messages, context=spec.context)

    def context(self, name: str) -> BoundContext:
        """Return a context of the agent, or a branch of one; StreamError if it has none of that name."""
        branches, contexts = self.active.branches, self.agent.contexts
        bound = branches.get(name) or contexts.get(name)
        if bound is not None:
            return bound
        root = root_of(name)
        if root not in contexts:
            raise StreamError(f"there is no context '{name}'{did_you_mean(name, contexts)}")
        return replace(contexts[root], name=name)

    async def opened(self, context: str) -> Stream:
        """Return the open stream of ``context``; a first use opens it with the prompt, or raises PromptTooLong."""
        stream = self.trajectory.open_streams.get(context)
        if stream is None:
            bound = self.context(context)
            stream = await self.open(bound, self._opening_messages(bound, None))
        return stream

    def _opening_messages(self, bound: BoundContext, messages: Sequence[Message] | None) -> list[Message]:
        """Return what a context's next stream opens with: ``messages``, or the trajectory's prompt."""
        opening = list(self.trajectory.prompt_messages if messages is None else messages)
        if bound.spec.system is not None and opening[0]["role"] != "system":
            opening.insert(0, {"role": "system", "content": bound.spec.system})
        return opening

    async def open(self, bound: BoundContext, messages: list[Message], *, instead_of_glue: bool = False) -> Stream:
        """Open a context's next stream with exactly these messages.

        ``instead_of_glue``: a generation opens it, because its history cannot be continued in the present stream; it is
        then part of that generation, and no effect of its own.

        Raises:
            PromptTooLong: they leave no room for a single token.
        """
        before = self.trajectory.open_streams.get(bound.name)
        recorded = None
        if self._effects and not instead_of_glue:
            recorded = self._effects.take(events.ContextOpened, bound.name)
        if before is not None and recorded is not None:
            return before
        encoded = await bound.chat.encode(Opening(messages, bound.tools, self.active.date))
        meanwhile = self.trajectory.open_streams.get(bound.name)
        if meanwhile is not None and meanwhile is not before:  # another task of the handler has opened it
            return meanwhile
        if instead_of_glue and before is not None and len(before.messages) > len(messages):  # ... has written to it
            return await self.open(bound, list(before.messages), instead_of_glue=True)
        return self.begin_stream(bound, messages, encoded, instead_of_glue=instead_of_glue)

    def begin_stream(
        self, bound: BoundContext, messages: list[Message], encoded: Encoded, *, instead_of_glue: bool = False
    ) -> Stream:
        """Record a context's next stream, whose opening is encoded; PromptTooLong: it leaves no room for a token."""
        if self.room_in_context(bound, len(encoded.ids)) < 1:
            context_tokens = self.trajectory.limits.get(LimitName.CONTEXT_TOKENS)
            raise PromptTooLong(
                f"context '{bound.name}': a prompt of {len(encoded.ids)} tokens leaves no room to answer; the engine's "
                f"window is {bound.client.facts.max_context} (its max_context), limits.context_tokens is "
                f"{'not set' if context_tokens is None else context_tokens}; raise the lower one or shorten the prompt"
            )
        self.take_in(
            events.ContextOpened(
                at=self.clock(),
                context=bound.name,
                state=self.state,
                messages=messages,
                ids=encoded.ids,
                trained=bound.trained,
                engine=bound.spec.engine,
                guarded=encoded.guarded,
                guarded_at=list(encoded.guarded_at),
                parts=list(encoded.parts),
                instead_of_glue=instead_of_glue,
            )
        )
        return self.trajectory.streams[-1]

    def write(self, messages: Sequence[Message], *, context: str) -> None:
        """Append the environment's messages to a context; they enter its tokens with the next generation.

        Raises:
            ChatTemplateError: they are not messages with text.
        """
        check_written(messages)
        self.append(messages, context=context)

    def append(self, messages: Sequence[Message], *, context: str) -> None:
        """Do what :meth:`write` does with messages that need no look."""
        if not messages or (self._effects and self._effects.take(events.MessagesAppended, context) is not None):
            return
        if context not in self.trajectory.open_streams:  # nothing may wait here: what is written is there at once
            bound = self.context(context)
            opening = self._opening_messages(bound, None)
            self.begin_stream(bound, opening, bound.chat.encode_here(Opening(opening, bound.tools, self.active.date)))
        self.take_in(
            events.MessagesAppended(at=self.clock(), context=context, state=self.state, messages=list(messages))
        )

    def limit_reached(self, limit: str, context: str) -> LimitReached:
        """Return the error for a limit that stops a generation; it says so if the engine's window is the limit."""
        bound, context_tokens = self.context(context), self.trajectory.limits.get(LimitName.CONTEXT_TOKENS)
        window = bound.client.facts.max_context
        if limit != LimitName.CONTEXT_TOKENS or (context_tokens is not None and context_tokens <= window):
            return LimitReached(limit)
        setting = "not set" if context_tokens is None else f"{context_tokens:,}"
        detail = f"the window of engine '{bound.spec.engine}' is {window:,} tokens, and context_tokens is {setting}"
        return LimitReached(limit, detail)

    def room_in_context(self, bound: BoundContext, length: int) -> float:
        """Return how many tokens ``context_tokens`` and the engine's window leave a stream of that length."""
        window = bound.client.facts.max_context - length
        if self.trajectory.limits.get(LimitName.CONTEXT_TOKENS) is None:
            return window
        return min(window, remaining(self.agent.graph, self.trajectory, LimitName.CONTEXT_TOKENS, length))


def _refuse(state: str, event: AnyEvent) -> None:
    raise StreamError(f"the visit of '{state}' is over; a handler must wait for the tasks it starts")
