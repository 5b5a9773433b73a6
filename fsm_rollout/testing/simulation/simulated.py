"""Tools and users whose deeds are drawn: what a call or a reply comes to is in the plan.

Invariant: a simulated tool keeps the real one's schema and the real check of a model's arguments, and calls none of its
code. Which fate a call meets depends on the call's own randomness alone (trajectory, call, try), never on any order.
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter

from fsm_rollout.agent.graph import AgentGraph, Interaction
from fsm_rollout.environment.users import Conversation, Reply
from fsm_rollout.testing.simulation.plan import ReplyFate, ToolFate
from fsm_rollout.tools.base import ToolResult
from fsm_rollout.tools.toolbox import AgentTool, BoundTool, MakeContext, ToolSession


class SimulatedTool(BoundTool):
    """Stands in for a tool that runs code."""

    def __init__(self, real: BoundTool, fates: Sequence[ToolFate]) -> None:
        super().__init__(real.name, real.spec)
        self.schema = real.schema
        self.real = real
        self.fates = tuple(fates)

    def read(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Check a model's arguments as the real tool does."""
        return self.real.read(arguments)

    def check(self, tools_kwargs: Mapping[str, Any]) -> None:
        """Take what a prompt gives, and want nothing: no code needs it."""

    async def call(self, session: ToolSession, arguments: dict[str, Any], context: MakeContext) -> object:
        """Do what the plan says."""
        chosen = 0 if len(self.fates) == 1 else context("fate").rng.randrange(len(self.fates))
        fate = self.fates[chosen]
        await _meet(fate.seconds, fate.error, fate.hang)
        return ToolResult(fate.text, fate.reward)


async def _meet(seconds: float, error: str | None, hang: bool) -> None:
    if seconds:
        await asyncio.sleep(seconds)
    if hang:
        await asyncio.Event().wait()
    if error is not None:
        kind = getattr(builtins, error, RuntimeError)
        raise (kind if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError)("drawn by the plan")


def simulated_tool(tool: BoundTool, fates: Sequence[ToolFate]) -> BoundTool:
    """Return what stands in for a tool; an agent used as a tool is run as it is."""
    return tool if isinstance(tool, AgentTool) else SimulatedTool(tool, fates)


_reply_fates = TypeAdapter(tuple[ReplyFate, ...])


@lru_cache(maxsize=64)
def _fates(replies: str) -> tuple[ReplyFate, ...]:
    return _reply_fates.validate_json(replies)


class SimulatedUser:
    """An interaction whose replies are drawn; after the last one the conversation is over."""

    def __init__(self, replies: str = "[]") -> None:
        self._fates = _fates(replies)

    async def reply(self, conversation: Conversation) -> Reply:
        """Say what the plan says."""
        if conversation.replies >= len(self._fates):
            return Reply(None, done=True)
        fate = self._fates[conversation.replies]
        await _meet(fate.seconds, fate.error, fate.hang)
        return Reply(fate.text, fate.score, done=fate.done or fate.text is None)


def with_simulated_users(graph: AgentGraph, replies: Sequence[ReplyFate]) -> AgentGraph:
    """Return the agent with every interaction replaced, those of its sub-agents too."""
    user = Interaction(
        use="fsm_rollout.testing.simulation.simulated:SimulatedUser",
        kwargs={"replies": _reply_fates.dump_json(tuple(replies)).decode()},  # as one text: every trajectory copies it
    )
    states = {
        name: state.model_copy(update={"interaction": user}) if state.interaction is not None else state
        for name, state in graph.states.items()
    }
    tools = {
        name: tool if tool.agent is None else tool.model_copy(
            update={"agent": with_simulated_users(tool.agent, replies)}
        )
        for name, tool in graph.tools.items()
    }  # fmt: skip
    interaction = user if graph.interaction is not None else None
    return graph.model_copy(update={"interaction": interaction, "states": states, "tools": tools})
