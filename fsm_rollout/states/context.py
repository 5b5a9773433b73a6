"""What a handler may do during a visit of its state, and what each of it costs.

Invariant: all that happens in a visit happens through here, so it is recorded as events and charged against the limits
before it is done; and whatever the engine has sampled for the trajectory is recorded, also when the visit is cut off.
A visit that was interrupted begins again, and nothing is done twice (:mod:`fsm_rollout.states.effect_log`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from fsm_rollout.agent.graph import MAIN
from fsm_rollout.chat.reference import Opening
from fsm_rollout.concurrency.cancellation import being_cancelled
from fsm_rollout.concurrency.seeds import derive_seed
from fsm_rollout.engines.engine_ids import ABORT_GRACE
from fsm_rollout.environment.users import Conversation, Reply
from fsm_rollout.errors import PromptTooLong, ReplayDiverged, StreamError, ToolError
from fsm_rollout.states.active_trajectory import ActiveTrajectory, LiveUser
from fsm_rollout.states.bound_agent import BoundContext
from fsm_rollout.states.effect_log import NO_EFFECTS
from fsm_rollout.states.generation import Generation, OnTokens, ended, submit, text_of_turn
from fsm_rollout.states.visit import Visit
from fsm_rollout.tools import tool_messages
from fsm_rollout.tools.bounded_call import ToolDied
from fsm_rollout.tools.toolbox import LEAST_TOKENS
from fsm_rollout.trajectory import events
from fsm_rollout.trajectory.enums import FailureClass, FinishReason, LimitName
from fsm_rollout.trajectory.events import Called, Generated, MalformedCall, Message, ModelQueried, ToolCall
from fsm_rollout.trajectory.settings import Sampling

E = TypeVar("E", Called, ModelQueried, events.UserReplied)
WAITS = "waits for its user"  # the `reason` of `Suspended` while a `LiveUser` has not answered yet


class HandlerContext(Visit):
    """What a state handler works with. Methods that act raise ``LimitReached`` instead of exceeding a limit."""

    def __init__(self, active: ActiveTrajectory) -> None:
        super().__init__(active)
        # How many generations of the visit are charged already: 1, if entering the state charged for the first.
        self._prepaid = int(self.agent.machine.spends[self.state] == LimitName.ASSISTANT_TURNS)
        # The index of the next query, by engine; a visit that begins again counts from where it began first.
        self._queries = dict(self.trajectory.queries_before)
        self._generations: dict[str, Generation] = {}  # those under way, by context

    async def close(self) -> None:
        """End the visit. A generation that the handler left running is aborted and recorded.

        Raises:
            StreamError: a generation was left running.
        """
        if not self._generations:
            self._end()
            return
        running = [g.task for g in self._generations.values() if g.task is not None and not g.task.done()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=2 * ABORT_GRACE)
        self._end()
        if running and not being_cancelled():
            raise StreamError(f"the handler of '{self.state}' returned while a generation of its own was running")

    # -- generation ---------------------------------------------------------------------------------------------

    async def generate(self, context: str, sampling: Sampling | None = None) -> Generated:
        """Sample one assistant turn in a context (or go on with one that was cut) and return the event.

        Costs one of ``assistant_turns`` unless entering the state has paid for it. ``finish_reason`` is ``length`` only
        when the turn's own ``max_tokens`` cut it. Generations side by side, each in a context of its own, are recorded
        in the order in which they were asked for, so that nothing depends on which of them is quicker.

        Raises:
            LimitReached: no turn, or no token, is left; or a token limit cut the turn (which is recorded).
            PromptTooLong: a first turn's prompt leaves no room.
            EngineError: the engine failed for good (what it had sampled is recorded).
            StreamError: there is no such context, or another generation of it is under way.
        """
        bound = self.context(context)
        self._charge_turn()
        while self._effects and (recorded := self._effects.take(Generated, context)) is not None:
            if recorded.finish_reason == FinishReason.ABORT:
                continue  # the sampling below goes on from its tokens
            if recorded.cut_by is not None:
                raise self.limit_reached(recorded.cut_by, context)
            return recorded
        return await self._sample(bound, sampling, self._generations.values())

    def _charge_turn(self) -> None:
        """Charge for a generation, unless entering the state has paid for it."""
        if self._prepaid:
            self._prepaid -= 1
        else:
            self.charge(LimitName.ASSISTANT_TURNS)

    async def _sample(
        self,
        bound: BoundContext,
        sampling: Sampling | None,
        earlier: Iterable[Generation],
        on_tokens: OnTokens | None = None,
    ) -> Generated:
        """Sample a turn that is paid for; ``earlier``: the generations that are recorded before it."""
        if bound.name in self._generations:
            raise StreamError(f"two generations at once in context '{bound.name}'; give each a context of its own")
        generation = self._generations[bound.name] = Generation(self, bound, earlier)
        try:
            return await generation.sample(sampling, on_tokens)
        finally:
            if generation.recorded is not None:
                generation.recorded.set()
            del self._generations[bound.name]

    def forget_recorded(self) -> None:
        """Let a visit that begins again repeat its operations; its handler sees in the streams what it had done.

        What was charged and not generated before the interruption is not charged again.
        """
        self._effects = NO_EFFECTS
        for event in self.trajectory.visit_events:
            if isinstance(event, events.LimitCharged):
                self._prepaid += event.limit == LimitName.ASSISTANT_TURNS
            elif isinstance(event, Generated):
                self._prepaid -= not event.resumed
        self._prepaid = max(0, self._prepaid)

    async def generate_beside(
        self, context: str, sampling: Sampling | None, on_tokens: OnTokens | None, *, paid: bool
    ) -> Generated:
        """Sample as :meth:`generate` does, and record it at once, whatever other generations are under way.

        For foreign agents, whose calls have no other order than time. ``paid``: it continues a turn that was charged.
        """
        if not paid:
            self._charge_turn()
        return await self._sample(self.context(context), sampling, (), on_tokens)

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

    def _recorded(self, kind: type[E], key: object) -> E | None:
        """Return what was recorded for ``key``: by the visit before it was interrupted, or by the run that is replayed.

        The replayed run's is recorded anew, with the present time; sub-agents are replayed as trajectories.

        Raises:
            ReplayDiverged: a run is replayed, and has recorded nothing.
        """
        if self._effects and (event := self._effects.take(kind, key)) is not None:
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
        tool = self.agent.toolbox.spec_of(name)
        if tool is not None and not tool.may_repeat:
            begun = any(
                isinstance(event, events.CallBegun) and event.id == attempt.id for event in self.trajectory.visit_events
            )
            if self.resumed and begun:  # it may have been made before the visit was interrupted
                text = tool_messages.interrupted(name)
                return self.record_here(Called.of(attempt, text, "interrupted"))
            self.take_in(events.CallBegun(at=self.clock(), state=self.state, id=attempt.id))
        last = self.trajectory.last
        bound = self.context(last.context if last is not None else MAIN)
        tokenizer = bound.client.facts.tokenizer
        room = partial(self._room_for_result, bound)
        return self.record_here(
            await self.active.tools.call(attempt, context=bound.name, tokenizer=tokenizer, room=room)
        )

    def _room_for_result(self, bound: BoundContext) -> int:
        """Return how many tokens one of a turn's results may have, so that all leave half of what there is."""
        stream = self.trajectory.stream(bound.name)
        left = self.room_in_context(bound, 0 if stream is None else len(stream.tokens))
        left = min(left, self.remaining(LimitName.RESPONSE_TOKENS))
        return max(LEAST_TOKENS, int(left / 2 / max(1, len(self.trajectory.attempts))))

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
            messages=list(stream.messages),
            trajectory=self.trajectory,
            extra=self.trajectory.extra,
            rng=self.rng,
            ask=self.ask,
        )
        started, away_before = self.clock(), self.trajectory.suspended_seconds
        if self.active.live_user is None:
            reply = await self.active.interaction(self.state).reply(conversation)
        else:
            reply = await self._live_reply(self.active.live_user, conversation)
        self.take_in(
            events.UserReplied(
                at=self.clock(),
                state=self.state,
                context=context,
                seconds=self.clock() - started - (self.trajectory.suspended_seconds - away_before),
                content=reply.content,
                score=reply.score,
                done=reply.done,
            )
        )
        return reply

    async def _live_reply(self, user: LiveUser, conversation: Conversation) -> Reply:
        """Wait for a user who may take hours; the trajectory is suspended meanwhile, so that no time counts."""
        since = self.clock()
        self.active.emit(events.Suspended(at=since, reason=WAITS))
        try:
            with self.deadline.away():
                return await user.reply(conversation)
        finally:
            now, version = self.clock(), self.context(MAIN).client.weight_version
            self.active.emit(events.Resumed(at=now, away=now - since, weight_version=version, epoch=time.time()))

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
        # 2. The request: the messages in the engine's own template, with as much room as its window leaves.
        bound = self.agent.engine(engine)
        ids = (await bound.chat.encode(Opening(messages, None, self.active.date))).ids
        window = bound.client.facts.max_context
        room = window - len(ids)
        if room < 1:
            raise PromptTooLong(
                f"engine '{engine}': a prompt of {len(ids)} tokens leaves no room to answer in its window of "
                f"{window}; raise its max_context or shorten the prompt"
            )
        settings = sampling or Sampling()
        pending = submit(
            self, bound, ids, settings, name=f"ask:{engine}/{index}", session=engine, index=index,
            max_tokens=min(room, settings.max_tokens or room),
            seed=derive_seed(self.trajectory.seed, "ask", engine, index),
        )  # fmt: skip
        await ended(bound, pending)
        if pending.error is not None:
            raise pending.error
        # 3. The text, recorded so that it is not asked for again.
        text = text_of_turn(bound, pending.ids)
        now = self.clock()
        self.take_in(
            ModelQueried(
                at=now,
                engine=engine,
                index=index,
                state=self.state,
                text=text,
                tokens=len(pending.ids),
                seconds=now - pending.submitted_at,
            )
        )
        return text

    def score_turn(self, value: float, turn: int | None = None) -> None:
        """Give a score to the generation with the index ``turn`` (from 0, of all contexts), or to the latest one.

        Raises:
            StreamError: there is no such turn, or the score is not a finite number.
        """
        latest = self.trajectory.generations - 1
        turn = latest - self._effects.turns_ahead() if turn is None else turn
        if not isinstance(turn, int) or not 0 <= turn <= latest:
            existing = "none has been generated yet" if latest < 0 else f"the first is 0, the latest {latest}"
            raise StreamError(f"there is no turn {turn} to score; {existing}")
        if self._effects and self._effects.take(events.Scored, turn) is not None:
            return
        self.emit(events.Scored(at=self.clock(), value=float(value), turn=turn, source=self.state))
