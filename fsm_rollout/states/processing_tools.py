"""PROCESSING_TOOLS: every call that the latest turn attempted is carried out, and the model is told the results."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fsm_rollout.states.base import State
from fsm_rollout.tools import tool_messages
from fsm_rollout.trajectory.events import Called, MalformedCall, Message, ToolCall
from fsm_rollout.trajectory.reasons import LimitName, Trigger
from fsm_rollout.trajectory.trajectory import Outcome, Trajectory

if TYPE_CHECKING:
    from fsm_rollout.states.context import HandlerContext


class CallTools(State):
    """Runs the attempted calls, at most ``parallel`` at once, and writes one tool message each, in the calls' order.

    Broken calls are answered too, so nothing that looks like a call is ever passed over. Calls that an earlier visit
    has finished are not made again.
    """

    triggers = (Trigger.TOOLS_DONE,)
    spends = LimitName.TOOL_CALLS
    keys = ("parallel",)

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        """Call, wait for all, write."""
        slots = asyncio.Semaphore(self.spec.parallel or 2**31)

        async def call(attempt: ToolCall | MalformedCall) -> None:
            async with slots:
                await ctx.call_tool(attempt, prepaid=True)

        async with asyncio.TaskGroup() as calls:
            for attempt in self._due(trajectory):
                calls.create_task(call(attempt))
        self._tell(trajectory, ctx)
        ctx.check(LimitName.BAD_CALLS)
        return Outcome(Trigger.TOOLS_DONE)

    def timed_out(self, trajectory: Trajectory, ctx: HandlerContext) -> None:
        """Answer the calls still open, so that the history stays one that any template can render."""
        for attempt in self._open(trajectory):
            name = attempt.name if isinstance(attempt, ToolCall) else "call"
            ctx.record_unfinished_call(attempt, "timed_out", tool_messages.timed_out(name, self.spec.timeout))
        self._tell(trajectory, ctx)

    @staticmethod
    def _due(trajectory: Trajectory) -> list[ToolCall | MalformedCall]:
        """Return the calls of this visit, with those that it had finished before it was interrupted."""
        here = {event.id for event in trajectory.here if isinstance(event, Called)}
        before = {called.id for called in trajectory.called} - here
        return [attempt for attempt in trajectory.attempts if attempt.id not in before]

    @staticmethod
    def _open(trajectory: Trajectory) -> list[ToolCall | MalformedCall]:
        done = {called.id for called in trajectory.called}
        return [attempt for attempt in trajectory.attempts if attempt.id not in done]

    def _tell(self, trajectory: Trajectory, ctx: HandlerContext) -> None:
        results: dict[str, Called] = {called.id: called for called in trajectory.called}
        messages: list[Message] = []
        for attempt in trajectory.attempts:
            called = results[attempt.id]
            message = {"role": "tool", "content": called.result, "tool_call_id": called.id}
            messages.append(message | {"name": called.name} if called.name else message)
        ctx.write(messages, context=trajectory.last.context if trajectory.last else self.spec.context)
