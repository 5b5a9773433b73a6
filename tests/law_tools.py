"""Tools and interactions of the law tests: each keeps a log of its own, which the oracles read."""

import asyncio

from fsm_rollout.environment.users import Conversation, Reply
from fsm_rollout.errors import BadArguments
from fsm_rollout.tools import ToolContext, ToolResult

CALLS: list[tuple[str, str]] = []
"""(trajectory id, what the tool returned), in the order in which calls ended."""


async def echo(text: str, context: ToolContext) -> ToolResult:
    """Say it again, after a while.

    Args:
        text: What to say.
    """
    await asyncio.sleep(len(text) % 5 / 10)
    CALLS.append((context.trajectory_id, text))
    return ToolResult(text, reward=len(text) / 10)


async def fail(text: str) -> str:
    """Always fail.

    Args:
        text: Why.
    """
    raise ValueError(text)


async def lots(count: int) -> str:
    """Say a lot.

    Args:
        count: How often.
    """
    return "word " * count


async def refuse(text: str) -> str:
    """Find every argument wrong.

    Args:
        text: What is wrong.
    """
    raise BadArguments(f"'{text}' is no number")


async def hang(text: str) -> str:
    """Never return.

    Args:
        text: Ignored.
    """
    await asyncio.Event().wait()
    return text


class Chatty:
    """An interaction that replies a few times, scoring each turn, then is done.

    It counts by the conversation, not by itself: a trajectory that goes on elsewhere makes a new interaction.
    """

    resumable = True

    def __init__(self, replies: int = 2, texts: tuple[str, ...] = ("Go on.",), seconds: float = 0.0) -> None:
        self.replies = replies
        self.texts = texts
        self.seconds = seconds

    async def reply(self, conversation: Conversation) -> Reply:
        await asyncio.sleep(self.seconds)
        remaining = self.replies - conversation.replies
        if remaining <= 0:
            return Reply(None, score=0.25, done=True)
        return Reply(self.texts[(remaining - 1) % len(self.texts)], score=0.5)
