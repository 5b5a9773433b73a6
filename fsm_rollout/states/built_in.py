"""The built-in handlers: prompt, generate, call_tools, interact and write."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fsm_rollout.states.base import State
from fsm_rollout.tools import tool_messages
from fsm_rollout.trajectory.enums import FinishReason, LimitName, Trigger
from fsm_rollout.trajectory.events import Called, MalformedCall, Message, ToolCall
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.trajectory import Trajectory

if TYPE_CHECKING:
    from fsm_rollout.states.context import HandlerContext


class OpenPrompt(State):
    """PENDING: opens the state's context with the prompt's messages (or the state's own template)."""

    triggers = (Trigger.PROMPTED,)
    keys = ()

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        """Open the stream, unless entering the state has done so."""
        await ctx.opened(self.spec.context)
        return Outcome(Trigger.PROMPTED)


class Generate(State):
    """GENERATING: samples one turn of the state's context. One cut at its own ``max_tokens`` raises ``truncated``."""

    triggers = (Trigger.GENERATED, Trigger.TRUNCATED)
    spends = LimitName.ASSISTANT_TURNS
    keys = ("sampling",)

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        """Ask the engine and wait for the turn's end."""
        generated = await ctx.generate(self.spec.context)
        return Outcome(Trigger.TRUNCATED if generated.finish_reason == FinishReason.LENGTH else Trigger.GENERATED)


class CallTools(State):
    """PROCESSING_TOOLS: runs the attempted calls, at most ``parallel`` at once, and writes one message for each.

    The messages stand in the calls' order. Broken calls are answered too, so nothing that looks like a call is ever
    passed over. Calls that an earlier visit has finished are not made again. Those of tools that a user has brought are
    handed over to it when all others are done.
    """

    triggers = (Trigger.TOOLS_DONE,)
    spends = LimitName.TOOL_CALLS
    keys = ("parallel",)

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        """Call, wait for all, write."""
        slots = asyncio.Semaphore(self.spec.parallel or 1 << 31)

        async def call(attempt: ToolCall | MalformedCall) -> None:
            async with slots:
                await ctx.call_tool(attempt, prepaid=True)

        open_calls = trajectory.attempts
        if trajectory.called:
            # Those that this visit finished before an interruption are asked for again, and answered from its record.
            finished_here = {event.id for event in trajectory.visit_events if isinstance(event, Called)}
            finished_before = {called.id for called in trajectory.called} - finished_here
            open_calls = [attempt for attempt in open_calls if attempt.id not in finished_before]
        of_user: list[ToolCall] = []
        if names := ctx.active.users_tools:
            of_user = [call for call in open_calls if isinstance(call, ToolCall) and call.name in names]
            open_calls = [call for call in open_calls if call not in of_user]
        if len(open_calls) == 1:  # the usual case; a task for it would cost as much as all else here
            await ctx.call_tool(open_calls[0], prepaid=True)
        else:
            async with asyncio.TaskGroup() as calls:
                for attempt in open_calls:
                    calls.create_task(call(attempt))
        self._write_results(trajectory, ctx, await ctx.hand_over(of_user) if of_user else ())
        ctx.check(LimitName.BAD_CALLS)
        return Outcome(Trigger.TOOLS_DONE)

    def timed_out(self, trajectory: Trajectory, ctx: HandlerContext) -> None:
        """Answer the calls still open, so that the history stays one that any template can render."""
        finished = {called.id for called in trajectory.called}
        for attempt in trajectory.attempts:
            if attempt.id not in finished:
                name = attempt.name if isinstance(attempt, ToolCall) else "call"
                text = tool_messages.timed_out(name, self.spec.timeout)
                ctx.record_here(Called.of(attempt, text, "timed_out"))
        self._write_results(trajectory, ctx)

    def _write_results(self, trajectory: Trajectory, ctx: HandlerContext, replies: Sequence[Message] = ()) -> None:
        """Write the results, and what a user has replied beside them."""
        results = {called.id: called for called in trajectory.called}
        messages: list[Message] = []
        for attempt in trajectory.attempts:
            called = results[attempt.id]
            message = {"role": "tool", "content": called.content, "tool_call_id": called.id}
            messages.append(message | {"name": called.name} if called.name else message)
        ctx.append([*messages, *replies], context=trajectory.last.context if trajectory.last else self.spec.context)


class Interact(State):
    """INTERACTING: a user (simulated, scripted, or a model) answers the latest turn, may score it, may end it."""

    triggers = (Trigger.REPLIED, Trigger.INTERACTION_DONE)
    spends = LimitName.USER_TURNS
    keys = ("interaction",)

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        """Ask, score the turn that was judged, write the reply."""
        stream = trajectory.stream(self.spec.context)
        judged = stream.turn if stream is not None else None
        reply = await ctx.interact(self.spec.context)
        if reply.score is not None and judged is not None:
            ctx.score_turn(reply.score, judged)
        if reply.content is not None:
            ctx.write([{"role": "user", "content": reply.content}], context=self.spec.context)
        return Outcome(Trigger.INTERACTION_DONE if reply.done else Trigger.REPLIED)


class Write(State):
    """Only writes: the state's ``prompt`` was appended on entry, as in any working state."""

    triggers = (Trigger.WRITTEN,)
    keys = ()

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        """Nothing is left to do."""
        return Outcome(Trigger.WRITTEN)
