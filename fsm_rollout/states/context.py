"""What a handler may do during a visit of its state, and what each of it costs.

Invariant: all that happens in a visit happens through here, so it is recorded as events and charged against the limits
before it is done; and whatever the engine has sampled for the trajectory is recorded, also when the visit is cut off.
A visit that was interrupted begins again, and nothing is done twice (:mod:`fsm_rollout.states.effect_log`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace as copy_with
from functools import cached_property, partial
from typing import TypeVar

from msgspec.structs import replace

from fsm_rollout.agent.graph import MAIN
from fsm_rollout.agent.limits import LimitReached, remaining, room_in_context, spent
from fsm_rollout.chat.markers import Encoded
from fsm_rollout.chat.messages import check_written
from fsm_rollout.chat.reference import Opening
from fsm_rollout.concurrency.cancellation import being_cancelled
from fsm_rollout.concurrency.deadline import Deadline
from fsm_rollout.concurrency.seeds import derive_seed
from fsm_rollout.engines.engine_ids import ABORT_GRACE
from fsm_rollout.environment.users import Conversation, Reply
from fsm_rollout.errors import PromptTooLong, ReplayDiverged, StreamError, ToolError, did_you_mean
from fsm_rollout.states.active_trajectory import ActiveTrajectory
from fsm_rollout.states.bound_agent import BoundContext
from fsm_rollout.states.effect_log import NO_EFFECTS, EffectLog
from fsm_rollout.states.generation import Generation, OnTokens, ask
from fsm_rollout.tools import tool_messages
from fsm_rollout.tools.bounded_call import ToolDied
from fsm_rollout.tools.toolbox import LEAST_TOKENS
from fsm_rollout.trajectory import events
from fsm_rollout.trajectory.enums import FailureClass, LimitName
from fsm_rollout.trajectory.events import AnyEvent, Called, Generated, MalformedCall, Message, ModelQueried, ToolCall
from fsm_rollout.trajectory.settings import Sampling
from fsm_rollout.trajectory.stream import Stream, root_of
from fsm_rollout.trajectory.trace_ids import reply_key, tries_before, within
from fsm_rollout.trajectory.trajectory import DONE_IN_A_VISIT, INTERACTION

E = TypeVar("E", Called, ModelQueried, events.UserReplied)
_FOR_HANDLERS = DONE_IN_A_VISIT | {events.PromptExtended}  # what a handler may emit


class HandlerContext:
    """What a state handler works with. Methods that act raise ``LimitReached`` instead of exceeding a limit."""

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
        self.effects = EffectLog(self.trajectory.visit_events) if self.trajectory.visit_events else NO_EFFECTS
        # How many generations of the visit are charged already: 1, if entering the state charged for the first.
        self.prepaid = int(self.agent.machine.spends[self.state] == LimitName.ASSISTANT_TURNS)
        # The index of the next query, by engine; a visit that begins again counts from where it began first.
        self._queries = dict(self.trajectory.queries_before)
        self.generations: dict[str, Generation] = {}  # those under way, by context

    async def close(self) -> None:
        """End the visit. A generation that the handler left running is aborted and recorded.

        Raises:
            StreamError: a generation was left running.
        """
        running: list[asyncio.Task[object]] = []
        for generation in self.generations.values():
            if generation.task is not None and not generation.task.done():
                generation.task.cancel()
                running.append(generation.task)
        if running:
            await asyncio.wait(running, timeout=2 * ABORT_GRACE)
        self.take_in = partial(_refuse, self.state)
        if running and not being_cancelled():
            raise StreamError(f"the handler of '{self.state}' returned while a generation of its own was running")

    # -- time, facts and limits ---------------------------------------------------------------------------------

    @property
    def resumed(self) -> bool:
        """Whether this visit was interrupted and has begun again; what it had recorded is not done twice."""
        return self.trajectory.interrupted

    @cached_property
    def rng(self) -> random.Random:
        """Random numbers that depend on the trajectory and the visit only (made when asked for: they are large)."""
        return random.Random(derive_seed(self.trajectory.seed, self.state, self.trajectory.entries[self.state]))

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
        if not self.effects or self.effects.take(events.LimitCharged, limit) is None:
            self.take_in(events.LimitCharged(at=self.clock(), limit=limit))
        self.check(limit)

    def facts(self) -> dict[str, object]:
        """Return what a state's prompt template may use: :data:`fsm_rollout.agent.handlers.TEMPLATE_FACTS`."""
        return self.agent.facts(self.trajectory)

    # -- contexts and messages ----------------------------------------------------------------------------------

    async def enter(self) -> None:
        """Enter a state that has a ``prompt`` or a ``reset``: reset its context, write its prompt."""
        spec = self.spec
        if self._entry is not None:
            # Recorded before an interruption; the handler must not get it as an effect of its own.
            self.effects.take(type(self._entry), spec.context)
            return
        messages: list[Message] | None = None
        if spec.prompt is not None:
            messages = [{"role": "user", "content": self.agent.prompt_of(self.state, self.facts())}]
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
        return copy_with(contexts[root], name=name)

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
        if self.effects and not instead_of_glue:
            recorded = self.effects.take(events.ContextOpened, bound.name)
        if before is not None and recorded is not None:
            return before
        encoded = await bound.chat.encode(Opening(messages, bound.tools, self.active.date))
        meanwhile = self.trajectory.open_streams.get(bound.name)
        if meanwhile is not None and meanwhile is not before:  # another task of the handler has opened it
            return meanwhile
        if instead_of_glue and before is not None and len(before.messages) > len(messages):  # ... has written to it
            return await self.open(bound, list(before.messages), instead_of_glue=True)
        return self.begin(bound, messages, encoded, instead_of_glue=instead_of_glue)

    def begin(
        self, bound: BoundContext, messages: list[Message], encoded: Encoded, *, instead_of_glue: bool = False,
        shares: tuple[int, int] | None = None,
    ) -> Stream:  # fmt: skip
        """Record a context's next stream, whose opening is encoded; PromptTooLong: it leaves no room for a token."""
        text_only = bound.client.facts.text_only  # then its engine says how many tokens there are
        window, length = bound.client.facts.max_context, 0 if text_only else len(encoded.ids)
        if room_in_context(self.agent.graph, self.trajectory, window, length) < 1:
            context_tokens = self.trajectory.limits.get(LimitName.CONTEXT_TOKENS)
            raise PromptTooLong(
                f"context '{bound.name}': a prompt of {len(encoded.ids)} tokens leaves no room to answer; the engine's "
                f"window is {window} (its max_context), limits.context_tokens is "
                f"{'not set' if context_tokens is None else context_tokens}; raise the lower one or shorten the prompt"
            )
        opened = events.ContextOpened(
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
            media=list(encoded.media),
            shares=shares,
            why=bound.why,
            instead_of_glue=instead_of_glue,
            text_only=text_only,
        )
        if (before := self.trajectory.open_streams.get(bound.name)) is not None:
            self.active.end_sessions(f"{bound.name}/{before.number + 1}")
        self.take_in(opened)
        return self.trajectory.streams[-1]

    def write(self, messages: Sequence[Message], *, context: str) -> None:
        """Append the environment's messages to a context; they enter its tokens with the next generation.

        Raises:
            ChatTemplateError: they are not messages with text, or with pictures for a model that sees them.
        """
        check_written(messages, sees=self.context(context).chat.sees)
        self.append(messages, context=context)

    def append(self, messages: Sequence[Message], *, context: str) -> None:
        """Do what :meth:`write` does with messages that need no look."""
        if not messages or (self.effects and self.effects.take(events.MessagesAppended, context) is not None):
            return
        if context not in self.trajectory.open_streams:  # nothing may wait here: what is written is there at once
            bound = self.context(context)
            opening = self._opening_messages(bound, None)
            self.begin(bound, opening, bound.chat.encode_here(Opening(opening, bound.tools, self.active.date)))
        self.take_in(
            events.MessagesAppended(at=self.clock(), context=context, state=self.state, messages=list(messages))
        )

    # -- generation ---------------------------------------------------------------------------------------------

    def generate(self, context: str, sampling: Sampling | None = None) -> Coroutine[object, object, Generated]:
        """Sample one assistant turn in a context (or go on with one that was cut) and return the event: await it.

        Costs one of ``assistant_turns`` unless entering the state has paid for it. ``finish_reason`` is ``length`` only
        when the turn's own ``max_tokens`` cut it. Generations side by side, each in a context of its own, are recorded
        in the order in which they were asked for, so that nothing depends on which of them is quicker.

        Raises:
            LimitReached: no turn, or no token, is left; or a token limit cut the turn (which is recorded).
            PromptTooLong: a first turn's prompt leaves no room.
            EngineError: the engine failed for good (what it had sampled is recorded).
            StreamError: there is no such context, or another generation of it is under way.
        """
        return Generation(self, self.context(context)).run(sampling)

    def generate_beside(
        self, context: str, sampling: Sampling | None, on_tokens: OnTokens | None, *, paid: bool
    ) -> Coroutine[object, object, Generated]:
        """Sample as :meth:`generate` does, and record it at once, whatever other generations are under way.

        For foreign agents, whose calls have no other order than time. ``paid``: it continues a turn that was charged.
        """
        return Generation(self, self.context(context), beside=True, on_tokens=on_tokens).run(sampling, paid=paid)

    # -- tools, interactions, scores ----------------------------------------------------------------------------

    async def call_tool(self, attempt: ToolCall | MalformedCall, *, prepaid: bool = False) -> Called:
        """Carry out one attempted call and return its event; a failure is a result too, which the model reads.

        Costs one of ``tool_calls`` unless entering the state has paid for it (``prepaid``).

        Raises:
            ToolError: the tool itself failed, in a run that ends trajectories then (``failures: {tool: end}``).
        """
        if not prepaid:
            self.charge(LimitName.TOOL_CALLS)
        called = self._recorded(Called, attempt.id) or await self._make_call(attempt)
        if called.bad and self.agent.end_on_bad_call:
            error = ToolError(f"the model's call is wrong: {called.failure}")
            error.failure = FailureClass.POLICY
            raise error
        ran = called.tries > 0
        if called.failure is not None and ran and not called.bad and self.agent.end_on_tool_failure:
            error = ToolError(f"tool '{called.name}' failed for good: {called.failure}")
            died = called.failure == ToolDied.__name__
            error.failure = FailureClass.INFRASTRUCTURE if died else FailureClass.TOOL
            raise error
        return called

    async def hand_over(self, calls: Sequence[ToolCall]) -> list[Message]:
        """Have the user carry out calls of tools that it has brought, which are paid for; return what else it says."""
        calls, said = [call for call in calls if self._recorded(Called, call.id) is None], list[Message]()
        if calls and (user := self.active.live_user) is not None:
            results, said = await self.active.by_user(user.carry_out(self.trajectory, calls), self.deadline)
            for called in results:
                self.record_here(called)
        return said

    def _recorded(self, kind: type[E], key: object) -> E | None:
        """Return what was recorded for ``key``: by the visit before it was interrupted, or by the run that is replayed.

        The replayed run's is recorded anew, with the present time; sub-agents are replayed as trajectories.

        Raises:
            ReplayDiverged: a run is replayed, and has recorded nothing.
        """
        if self.effects and (event := self.effects.take(kind, key)) is not None:
            return event
        replayed = self.active.replayed
        if replayed is None or (kind is Called and key in replayed.by_agents):
            return None
        event = replayed.effects.take(kind, key)
        if event is None:
            raise ReplayDiverged(f"the run that is replayed has no '{kind.__struct_config__.tag}' of {key!r} here")
        return self.record_here(event)

    async def _make_call(self, attempt: ToolCall | MalformedCall) -> Called:
        name = attempt.name if isinstance(attempt, ToolCall) else ""
        tool = self.agent.toolbox.tool(name)
        if tool is not None and (not tool.may_repeat or (self.active.services.careful and tool.runs_here)):
            begun = any(
                isinstance(event, events.CallBegun) and event.id == attempt.id for event in self.trajectory.visit_events
            )
            if self.resumed and begun and not tool.may_repeat:  # it may have had its effect already
                text = tool_messages.interrupted(name)
                return self.record_here(Called.of(attempt, text, "interrupted"))
            self.take_in(events.CallBegun(at=self.clock(), state=self.state, id=attempt.id))
        last = self.trajectory.last
        bound = self.context(last.context if last is not None else MAIN)
        tokenizer = bound.client.facts.tokenizer
        tools, room = self.active.tools, partial(self._room_for_result, bound)
        span = None
        if (trace := self.active.trace) is not None:
            span = partial(trace.of_try, attempt.id, tries_before(self.trajectory.called, attempt.id))
        called = self.record_here(
            await tools.call(attempt, context=bound.name, tokenizer=tokenizer, room=room, span=span, eye=bound.chat)
        )
        if tools.snapshots and (state := tools.snapshots.pop(name, None)) is not None:
            self.active.keep(name, state)
        return called

    def _room_for_result(self, bound: BoundContext) -> int:
        """Return how many tokens one of a turn's tool results may have, so that all leave half of what there is."""
        trajectory, graph = self.trajectory, self.agent.graph
        stream, window = trajectory.stream(bound.name), bound.client.facts.max_context
        left = min(
            room_in_context(graph, trajectory, window, 0 if stream is None else stream.length),
            remaining(graph, trajectory, LimitName.RESPONSE_TOKENS, trajectory.response_tokens),
        )
        return max(LEAST_TOKENS, int(left / 2 / max(1, len(trajectory.attempts))))

    def record_here(self, event: E) -> E:
        """Record an event with the present time and state, and return it."""
        event = replace(event, at=self.clock(), state=self.state)
        self.take_in(event)
        return event

    async def interact(self, context: str) -> Reply:
        """Let the state's interaction answer a context, and return its reply."""
        stream = await self.opened(context)
        recorded = self._recorded(events.UserReplied, context)
        if recorded is not None:
            return Reply(recorded.content, recorded.score, recorded.done)
        conversation = Conversation(
            list(stream.messages), self.trajectory, self.trajectory.extra, self.rng, self.ask,
            replies=self.active.replies_before(self.state),
        )  # fmt: skip
        started, away_before = self.clock(), self.trajectory.suspended_seconds
        user, _ = self.active.user_of(self.state)
        if self.active.live_user is None:
            work = self.active.interaction(self.state).reply(conversation)
            if (trace := self.active.trace) is not None:
                before = sum(isinstance(event, events.UserReplied) for event in self.trajectory.visit_events)
                work = within(trace.parent(reply_key(self.trajectory.transitions, before)), work)
            reply = await work
            state = await self.active.state_of_user(self.state)
        else:
            reply, state = await self.active.by_user(self.active.live_user.reply(conversation), self.deadline), None
        self.take_in(
            events.UserReplied(
                at=self.clock(), state=self.state, context=context,
                seconds=self.clock() - started - (self.trajectory.suspended_seconds - away_before),
                content=reply.content, score=reply.score, done=reply.done, own=user != INTERACTION,
            )
        )  # fmt: skip
        if state is not None:
            self.active.keep(user, state)
        return reply

    async def ask(self, engine: str, messages: Sequence[Message], sampling: Sampling | None = None) -> str:
        """Ask a model on a named engine, in its own tokenizer and template, and return its text.

        Nothing of this enters a stream or is charged: it is the environment's own business. What was said is recorded.
        """
        # 1. The answer, if it was recorded before an interruption.
        index = self._queries.get(engine, 0)
        self._queries[engine] = index + 1
        recorded = self._recorded(ModelQueried, (engine, index))
        if recorded is not None:
            return recorded.text
        # 2. The answer of the model, recorded so that it is not asked for again.
        answer = await ask(self, self.agent.engine(engine), messages, sampling or Sampling(), engine, index)
        self.take_in(answer)
        return answer.text

    def score_turn(self, value: float, turn: int | None = None) -> None:
        """Give a score to the generation with the index ``turn`` (from 0, of all contexts), or to the latest one.

        Raises:
            StreamError: there is no such turn, or the score is not a finite number.
        """
        latest = self.trajectory.generations - 1
        turn = latest - self.effects.turns_ahead() if turn is None else turn
        if not isinstance(turn, int) or not 0 <= turn <= latest:
            existing = "none has been generated yet" if latest < 0 else f"the first is 0, the latest {latest}"
            raise StreamError(f"there is no turn {turn} to score; {existing}")
        if self.effects and self.effects.take(events.Scored, turn) is not None:
            return
        self.emit(events.Scored(at=self.clock(), value=float(value), turn=turn, source=self.state))


def _refuse(state: str, event: AnyEvent) -> None:
    raise StreamError(f"the visit of '{state}' is over; a handler must wait for the tasks it starts")
