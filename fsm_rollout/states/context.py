"""What a handler may do during a visit of its state, and what each of it costs.

Invariant: all that happens in a visit happens through here, so it is recorded as events and charged against the limits
before it is done; and whatever the engine has sampled for the trajectory is recorded, also when the visit is cut off.
A visit that was interrupted begins again, and nothing is done twice (:mod:`fsm_rollout.states.effect_log`).
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from fsm_rollout.agent.graph import MAIN, Context
from fsm_rollout.agent.limits import LimitReached, remaining, spent
from fsm_rollout.chat.messages import check_written
from fsm_rollout.concurrency.cancellation import being_cancelled
from fsm_rollout.concurrency.deadline import Deadline
from fsm_rollout.concurrency.seeds import derive_seed
from fsm_rollout.engines.client import ABORT_GRACE
from fsm_rollout.engines.protocol import Request
from fsm_rollout.environment.users import Conversation, Reply
from fsm_rollout.errors import ConfigError, PromptTooLong, StreamError, ToolError, did_you_mean
from fsm_rollout.states.effect_log import EffectLog
from fsm_rollout.states.generation import OngoingGeneration, generate, sampling_params
from fsm_rollout.states.program import BoundContext, Program, shared_chat
from fsm_rollout.states.resources import TrajectoryResources
from fsm_rollout.tools import CallResult, tool_messages
from fsm_rollout.trajectory.events import (
    AnyEvent,
    CallBegun,
    Called,
    ContextOpened,
    Generated,
    LimitCharged,
    MalformedCall,
    Message,
    MessagesAppended,
    ModelQueried,
    PromptExtended,
    Scored,
    ToolCall,
    UserReplied,
)
from fsm_rollout.trajectory.reasons import FinishReason, LimitName
from fsm_rollout.trajectory.settings import Sampling
from fsm_rollout.trajectory.tokens import as_ids
from fsm_rollout.trajectory.trajectory import DONE_IN_A_VISIT, Stream, Trajectory


class HandlerContext:
    """What a state handler works with. Methods that act raise ``LimitReached`` instead of exceeding a limit."""

    def __init__(self, resources: TrajectoryResources, deadline: Deadline) -> None:
        self.resources = resources
        self.deadline = deadline
        self.trajectory: Trajectory = resources.trajectory
        self.program: Program = resources.program
        self.state = self.trajectory.state
        self._prepaid = 1 if self.program.machine.spends[self.state] == "assistant_turns" else 0
        self._visit = self.trajectory.visits[self.state]
        recorded = self.trajectory.here  # by this visit, before it was interrupted
        self._entry = next(iter(recorded), None)  # entering comes first: if anything was done, that was
        self._effects = EffectLog(recorded)
        self._queries = dict(self.trajectory.asked)
        """How often the environment has asked each engine, up to where the visit stands."""
        for event in recorded:
            if isinstance(event, ModelQueried):
                self._queries[event.engine] = min(self._queries[event.engine], event.index)
        self._generations: dict[str, OngoingGeneration] = {}
        """Those under way, by context."""
        self._over = False
        self._rng: random.Random | None = None

    # -- time, facts and limits ---------------------------------------------------------------------------------

    def clock(self) -> float:
        """Return the scheduler's time in seconds (virtual in simulation)."""
        return asyncio.get_running_loop().time()

    @property
    def resumed(self) -> bool:
        """Whether this visit was interrupted and has begun again; what it had recorded is not done twice."""
        return self.trajectory.interrupted

    @property
    def rng(self) -> random.Random:
        """Random numbers that depend on the trajectory and the visit only (made when asked for: they are large)."""
        if self._rng is None:
            self._rng = random.Random(derive_seed(self.trajectory.seed, self.state, self._visit))
        return self._rng

    def emit(self, event: AnyEvent) -> None:
        """Apply an event to the trajectory and tell the journal and the listeners.

        Raises:
            StreamError: the visit is over (whoever calls was left behind by its handler), or the event is not for a
                handler to emit: it would begin, move or end the trajectory; or a score is not a finite number.
        """
        if type(event) not in DONE_IN_A_VISIT and not isinstance(event, PromptExtended):
            raise StreamError(f"a handler cannot emit {type(event).__name__}; return an Outcome, rows do the rest")
        if self._over:
            raise StreamError(f"the visit of '{self.state}' is over; a handler must wait for the tasks it starts")
        if isinstance(event, Scored) and not math.isfinite(event.value):
            raise StreamError(f"a score must be a finite number, got {event.value}")
        self.resources.emit(event)

    async def close(self) -> None:
        """End the visit. A generation that the handler left running is aborted and recorded; leaving it is a mistake.

        Raises:
            StreamError: a generation was left running.
        """
        running = [generation.task for generation in self._generations.values() if not generation.task.done()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=2 * ABORT_GRACE)
        self._over = True
        if running and not being_cancelled():
            raise StreamError(f"the handler of '{self.state}' returned while a generation of its own was running")

    def remaining(self, limit: str) -> float:
        """Return how much of a limit is left; infinity where it does not hold."""
        trajectory = self.trajectory
        return remaining(self.program.graph, trajectory, limit, spent(trajectory, limit, self.clock()))

    def check(self, limit: str) -> None:
        """Raise ``LimitReached`` when more than the limit allows has been spent."""
        if self.remaining(limit) < 0:
            raise LimitReached(limit)

    def charge(self, limit: str) -> None:
        """Spend one of a counted limit, or raise ``LimitReached``."""
        if self._effects.take(LimitCharged, limit) is None:
            self.emit(LimitCharged(at=self.clock(), limit=limit))
        self.check(limit)

    def facts(self) -> dict[str, Any]:
        """Return what a state's prompt template may use: :data:`fsm_rollout.agent.handlers.TEMPLATE_FACTS`."""
        trajectory = self.trajectory
        return {
            "agent": trajectory.agent,
            "state": self.state,
            "messages": trajectory.messages,
            "task": str(trajectory.messages[-1].get("content") or ""),
            "text": trajectory.text,
            "texts": {name: list(trajectory.assistant_texts(name)) for name in self.program.contexts},
            "history": {name: s.messages for name in self.program.contexts if (s := trajectory.stream(name))},
            "extra": trajectory.extra,
            "visits": trajectory.visits,
            "spent": trajectory.spent,
            "turn": trajectory.turn,
            "score": trajectory.score,
            "turn_scores": trajectory.turn_scores,
        }

    # -- contexts and messages ----------------------------------------------------------------------------------

    def enter(self) -> None:
        """Do what every working state does on entry: reset its context, write its prompt."""
        spec = self.program.graph.states[self.state]
        if spec.prompt is None and not spec.reset:
            return
        if self._entry is not None:
            self._effects.take(type(self._entry), spec.context)
            return
        text = self.program.prompts[self.state].render(self.facts()) if spec.prompt is not None else None
        prompt: list[Message] | None = None if text is None else [{"role": "user", "content": text}]
        if spec.reset:
            self._open(spec.context, prompt)
        elif prompt is not None:
            if self.trajectory.stream(spec.context) is None:
                self._open(spec.context, prompt)
            else:
                self.write(prompt, context=spec.context)

    def context(self, name: str) -> BoundContext:
        """Return a context of the agent.

        Raises:
            StreamError: it has none of that name.
        """
        if name not in self.program.contexts:
            raise StreamError(f"there is no context '{name}'{did_you_mean(name, self.program.contexts)}")
        return self.program.contexts[name]

    def open_context(self, context: str) -> Stream:
        """Return the open stream of ``context``; a first use opens it with the trajectory's prompt.

        Raises:
            PromptTooLong: the prompt leaves no room for a single token.
        """
        return self.trajectory.stream(context) or self._open(context, None)

    def _open(self, context: str, messages: Sequence[Message] | None) -> Stream:
        bound = self.context(context)
        opening = list(self.trajectory.messages if messages is None else messages)
        if bound.spec.system is not None and opening[0]["role"] != "system":
            opening.insert(0, {"role": "system", "content": bound.spec.system})
        return self.open_with(bound, opening)

    def open_with(self, bound: BoundContext, messages: list[Message], *, instead_of_glue: bool = False) -> Stream:
        """Open a context's next stream with exactly these messages (``instead_of_glue``: as a part of a generation).

        Raises:
            PromptTooLong: they leave no room for a single token.
        """
        if not instead_of_glue and self._effects.take(ContextOpened, bound.name) is not None:
            return self.open_context(bound.name)
        encoded = bound.chat.prompt_detailed(messages, bound.tools, now=self.date)
        room = min(self.room_in_context(len(encoded.ids)), bound.client.engine.max_context - len(encoded.ids))
        if room < 1:
            raise PromptTooLong(
                f"context '{bound.name}': a prompt of {len(encoded.ids)} tokens leaves no room to answer; "
                f"the engine's window is {bound.client.engine.max_context}, "
                f"context_tokens is {self.trajectory.limits.get(LimitName.CONTEXT_TOKENS)}"
            )
        self.emit(
            ContextOpened(
                at=self.clock(),
                context=bound.name,
                state=self.state,
                messages=messages,
                ids=as_ids(encoded.ids),
                trained=bound.spec.trained,
                engine=bound.spec.engine,
                guarded=encoded.guarded,
                guarded_at=list(encoded.guarded_at),
                instead_of_glue=instead_of_glue,
            )
        )
        return self.trajectory.streams[-1]

    def write(self, messages: Sequence[Message], *, context: str) -> None:
        """Append the environment's messages to a context; they enter its tokens with the next generation.

        Raises:
            ChatTemplateError: they are not OpenAI-style messages with text.
        """
        check_written(messages)
        if messages and self._effects.take(MessagesAppended, context) is None:
            self.open_context(context)
            self.emit(MessagesAppended(at=self.clock(), context=context, state=self.state, messages=list(messages)))

    @property
    def date(self) -> datetime:
        """What the chat template's clock shows: when the trajectory started."""
        return datetime.fromisoformat(self.trajectory.date)

    def room_in_context(self, length: int) -> float:
        """Return how many tokens ``context_tokens`` leaves a stream of that length."""
        return remaining(self.program.graph, self.trajectory, LimitName.CONTEXT_TOKENS, length)

    # -- generation ---------------------------------------------------------------------------------------------

    async def generate(self, context: str, sampling: Sampling | None = None) -> Generated:
        """Sample one assistant turn in a context (or go on with one that was cut) and return the event.

        Costs one of ``assistant_turns`` unless entering the state has paid for it. ``finish_reason`` is "length" only
        when the turn's own ``max_tokens`` cut it. Generations side by side, each in a context of its own, are recorded
        in the order in which they were asked for, so that nothing depends on which of them is quicker.

        Raises:
            LimitReached: no turn, or no token, is left; or a token limit cut the turn (which is recorded).
            PromptTooLong: a first turn's prompt leaves no room.
            EngineError: the engine failed for good (what it had sampled is recorded).
            StreamError: there is no such context, or another generation of it is under way.
        """
        self.context(context)
        if self._prepaid:
            self._prepaid -= 1
        else:
            self.charge(LimitName.ASSISTANT_TURNS)
        recorded = self._effects.take(Generated, context)
        while (
            recorded is not None and recorded.finish_reason == FinishReason.ABORT
        ):  # the sampling below goes on from there
            recorded = self._effects.take(Generated, context)
        if recorded is not None:
            if recorded.cut_by is not None:
                raise LimitReached(recorded.cut_by)
            return recorded
        if context in self._generations:
            raise StreamError(f"two generations at once in context '{context}'; give each a context of its own")
        task = asyncio.current_task()
        assert task is not None
        generation = OngoingGeneration(task, earlier=list(self._generations.values()))
        self._generations[context] = generation
        try:
            return await generate(self, context, sampling, generation)
        finally:
            generation.recorded.set()
            del self._generations[context]

    # -- tools, interactions, scores ----------------------------------------------------------------------------

    async def call_tool(self, attempt: ToolCall | MalformedCall, *, prepaid: bool = False) -> Called:
        """Carry out one attempted call and return its event; failures are results that the model is told.

        Costs one of ``tool_calls`` unless entering the state has paid for it (``prepaid``).

        Raises:
            ToolError: the tool itself failed, in a run that ends trajectories then (``failures: {tool: end}``).
        """
        if not prepaid:
            self.charge(LimitName.TOOL_CALLS)
        called = self._effects.take(Called, attempt.id)
        if called is None:
            called = self._interrupted_call(attempt) or await self._make_call(attempt)
        if called.failure is not None and called.tries and self.program.end_on_tool_failure:
            raise ToolError(f"tool '{called.name}' failed for good: {called.failure}")
        return called

    async def _make_call(self, attempt: ToolCall | MalformedCall) -> Called:
        last = self.trajectory.last
        bound = self.program.contexts[last.context if last is not None else MAIN]
        tool = self.program.graph.tools.get(attempt.name) if isinstance(attempt, ToolCall) else None
        if tool is not None and not tool.repeatable:  # so that it is known to have had its chance
            self.emit(CallBegun(at=self.clock(), state=self.state, id=attempt.id))
        tokenizer = bound.client.engine.tokenizer
        result = await self.resources.tools.call(attempt, context=bound.name, tokenizer=tokenizer)
        return self._record_call(attempt, result)

    def _interrupted_call(self, attempt: ToolCall | MalformedCall) -> Called | None:
        """Answer a call that may have been made before the visit was interrupted, if it must not be made twice."""
        if not self.resumed or not isinstance(attempt, ToolCall):
            return None
        tool = self.program.graph.tools.get(attempt.name)
        begun = any(isinstance(event, CallBegun) and event.id == attempt.id for event in self.trajectory.here)
        if tool is None or tool.repeatable or not begun:
            return None
        return self.record_unfinished_call(attempt, "interrupted", tool_messages.interrupted(attempt.name))

    def record_unfinished_call(self, attempt: ToolCall | MalformedCall, failure: str, text: str) -> Called:
        """Record a call that was cut off, with what the model is told about it, and return the event."""
        return self._record_call(attempt, CallResult(text, failure=failure))

    def _record_call(self, attempt: ToolCall | MalformedCall, result: CallResult) -> Called:
        readable = isinstance(attempt, ToolCall)
        called = Called(
            at=self.clock(),
            state=self.state,
            id=attempt.id,
            name=attempt.name if readable else "",
            arguments=attempt.arguments if readable else {},
            result=result.text,
            failure=result.failure,
            bad=result.bad,
            reward=result.reward,
            seconds=result.seconds,
            tries=result.tries,
            truncated_tokens=result.truncated_tokens,
            child_id=result.child_id,
        )
        self.emit(called)
        return called

    async def interact(self, context: str) -> Reply:
        """Let the state's interaction answer a context, and return its reply."""
        stream = self.open_context(context)
        recorded = self._effects.take(UserReplied, context)
        if recorded is not None:
            return Reply(recorded.content, recorded.score, recorded.done)
        conversation = Conversation(
            messages=list(stream.messages),
            trajectory=self.trajectory,
            extra=self.trajectory.extra,
            rng=self.rng,
            ask=self.ask,
        )
        started = self.clock()
        reply = await self.resources.interaction(self.state).reply(conversation)
        self.emit(
            UserReplied(
                at=self.clock(),
                state=self.state,
                context=context,
                seconds=self.clock() - started,
                content=reply.content,
                score=reply.score,
                done=reply.done,
            )
        )
        return reply

    async def ask(self, engine: str, messages: Sequence[Message], sampling: Sampling | None = None) -> str:
        """Ask a model on a named engine, in its own tokenizer and template, and return its text.

        Nothing of this enters a stream or is charged: it is the environment's own business. What was said is recorded.
        """
        # 1. Is it recorded already, from before an interruption?
        index = self._queries.get(engine, 0)
        self._queries[engine] = index + 1
        recorded = self._effects.take(ModelQueried, (engine, index))
        if recorded is not None:
            return recorded.text
        # 2. The request: the messages in the engine's own template, with as much room as its window leaves.
        clients = self.program.clients
        if engine not in clients:
            raise ConfigError(f"engine '{engine}' is not one of the run's{did_you_mean(engine, clients)}")
        client = clients[engine]
        chat = shared_chat(client, Context(engine=engine))
        ids = as_ids(chat.prompt(messages, None, now=self.date))
        room = client.engine.max_context - len(ids)
        if room < 1:
            raise PromptTooLong(f"engine '{engine}': a prompt of {len(ids)} tokens leaves no room to answer")
        wanted = sampling or Sampling()
        stop_ids = chat.stop_ids | client.engine.eos_ids
        request = Request(
            request_id=f"{self.trajectory.trajectory_id}/ask:{engine}/{index}",
            ids=ids,
            sampling=sampling_params(
                wanted,
                max_tokens=min(room, wanted.max_tokens or room),
                stop_ids=stop_ids,
                seed=derive_seed(self.trajectory.seed, "ask", engine, index),
            ),
            trajectory_id=self.trajectory.trajectory_id,
            group_id=self.trajectory.group_id,
            agent=engine,
            context=engine,
            turn=index,
        )
        pending = client.submit(request, self.deadline)
        try:
            await pending.done.wait()
        finally:
            await client.abort(pending)
        if pending.error is not None:
            raise pending.error
        # 3. The text, recorded so that it is not asked for again.
        text = chat.decode(pending.ids[:-1] if len(pending.ids) and pending.ids[-1] in stop_ids else pending.ids)
        now = self.clock()
        self.emit(
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
        """Give a score to the trajectory's latest turn, or to ``turn``: its index, from 0 (``turn`` counts them).

        Raises:
            StreamError: there is no such turn, or the score is not a finite number.
        """
        latest = self.trajectory.turn - 1
        turn = latest - self._effects.turns_ahead() if turn is None else turn
        if not isinstance(turn, int) or not 0 <= turn <= latest:
            known = "none has been generated yet" if latest < 0 else f"the first is 0, the latest {latest}"
            raise StreamError(f"there is no turn {turn} to score; {known}")
        if self._effects.take(Scored, turn) is not None:
            return
        self.emit(Scored(at=self.clock(), value=float(value), turn=turn, source=self.state))
