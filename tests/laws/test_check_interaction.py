"""The interaction check passes all interactions there are, and names the fault of broken ones."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from typing import Any, ClassVar

import pytest

from fsm_rollout import load_agent
from fsm_rollout.environment.users import Conversation, Reply
from fsm_rollout.testing import ConformanceError, check_interaction
from fsm_rollout.testing.simulation import blocked_loop
from tests.kit import ROOT

SCRIPTED, MODEL = "fsm_rollout.interactions:ScriptedUser", "fsm_rollout.interactions:ModelUser"


@pytest.mark.parametrize(
    ("interaction", "given"),
    [
        (SCRIPTED, {"kwargs": {}}),
        (SCRIPTED, {"kwargs": {"turns": ["And 3 + 3?", "Thanks."]}}),
        (SCRIPTED, {"interaction_kwargs": {"turns": ["a"], "answers": ["5"]}, "extra": {"answer": "4"}}),
        (MODEL, {"kwargs": {"max_turns": 3, "system": "You are Kim."}}),
        (load_agent(ROOT / "configs/agents/tool_user.yaml").interaction, {}),
    ],
)
def test_the_shipped_interactions_conform(interaction: Any, given: dict[str, Any]) -> None:
    checked = check_interaction(interaction, **given, examples=12)
    assert {"resumed", "cancellation"} <= set(checked.promises)
    assert checked.examples > 30


class CountsForItself:
    """Keeps in itself how often it will still reply."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.remaining = 2
        self.seconds = seconds

    async def reply(self, conversation: Conversation) -> Reply:
        await asyncio.sleep(self.seconds)
        self.remaining -= 1
        return Reply(None, score=0.25, done=True) if self.remaining < 0 else Reply("Go on.", score=0.5)


def test_one_that_counts_for_itself_conforms_but_for_resuming() -> None:
    checked = check_interaction(CountsForItself, kwargs={"seconds": 1.0}, resumable=False, examples=12)
    assert "resumed" not in checked.promises
    with pytest.raises(ConformanceError, match="built anew before reply 2") as found:
        check_interaction(CountsForItself)
    assert found.value.invariant == 6


class InAThread:
    """Rolls its dice by the rng it is given, in a thread."""

    def reply(self, conversation: Conversation) -> Reply:
        done = conversation.replies >= 2
        return Reply(None if done else f"Take {conversation.rng.randint(1, 6)}.", done=done)


def test_a_sync_interaction_conforms() -> None:
    assert "cancellation" not in check_interaction(InAThread, examples=12).promises


class Base:
    """What the broken ones below have in common: two replies."""

    async def reply(self, conversation: Conversation) -> Any:
        return Reply("Go on.") if conversation.replies < 2 else Reply(None, done=True)


class NeedsMore(Base):
    def __init__(self, goal: str) -> None:
        self.goal = goal


class SaysText(Base):
    async def reply(self, conversation: Conversation) -> Any:
        return "Go on."


class SaysNumbers(Base):
    async def reply(self, conversation: Conversation) -> Any:
        return Reply(5)  # type: ignore[arg-type]


class Stumbles(Base):
    async def reply(self, conversation: Conversation) -> Any:
        return Reply(f"You said {conversation.text.split()[0]}", done=True)


class NeverDone(Base):
    async def reply(self, conversation: Conversation) -> Any:
        return Reply("And then?")


class NeverComes(Base):
    async def reply(self, conversation: Conversation) -> Any:
        await asyncio.Event().wait()


class Edits(Base):
    async def reply(self, conversation: Conversation) -> Any:
        conversation.messages[-1]["content"] = "something else"
        return await super().reply(conversation)


class Marks(Base):
    async def reply(self, conversation: Conversation) -> Any:
        conversation.trajectory.spent["patience"] = 1
        return await super().reply(conversation)


class ReadsTheClock(Base):
    async def reply(self, conversation: Conversation) -> Any:
        now = asyncio.get_running_loop().time()
        return Reply(f"It is {now:g} o'clock.", done=conversation.replies > 1)


class AsksNonsense(Base):
    async def reply(self, conversation: Conversation) -> Any:
        await conversation.ask("judge", [{"role": "user", "content": 42}])
        return await super().reply(conversation)


class Moody(Base):
    async def reply(self, conversation: Conversation) -> Any:
        return Reply(random.choice(["Yes.", "No."]), done=conversation.replies > 1)


class Crowded(Base):
    present = 0

    async def reply(self, conversation: Conversation) -> Any:
        Crowded.present += 1
        await asyncio.sleep(1.0)
        greeting = f"We are {Crowded.present}."
        await asyncio.sleep(1.0)
        Crowded.present -= 1
        return Reply(greeting, done=conversation.replies > 0)


class Recognises(Base):
    """Knows whom it has met, for all time."""

    met: ClassVar[set[str]] = set()

    async def reply(self, conversation: Conversation) -> Any:
        known = conversation.text in self.met
        self.met.add(conversation.text)
        return Reply("You again." if known else "Hello.", done=conversation.replies > 0)


class Remembers(Base):
    def __init__(self) -> None:
        self.told: list[str] = []

    async def reply(self, conversation: Conversation) -> Any:
        self.told.append(conversation.text)
        return Reply(f"That is {len(self.told)}.", done=len(self.told) > 2)


class Swallows(Base):
    async def reply(self, conversation: Conversation) -> Any:
        try:
            return Reply(await conversation.ask("user", [], None), done=True)
        except asyncio.CancelledError:
            return Reply(None, done=True)


class Sleeps(Base):
    async def reply(self, conversation: Conversation) -> Any:
        time.sleep(1)  # noqa: ASYNC251
        return await super().reply(conversation)


class LeavesATask(Base):
    async def reply(self, conversation: Conversation) -> Any:
        self.typing = asyncio.create_task(asyncio.sleep(1e6), name="typing")
        return await super().reply(conversation)


class CannotClose(Base):
    async def close(self) -> None:
        raise ConnectionError("already gone")


class ClosesOnlyWhatBegan(Base):
    async def reply(self, conversation: Conversation) -> Any:
        self.opened = True
        return await super().reply(conversation)

    def close(self) -> None:
        del self.opened


@pytest.mark.parametrize(
    ("interaction", "invariant", "message"),
    [
        (NeedsMore, 1, "missing a required argument: 'goal'"),
        ("tests.law_tools:CALLS", 1, "not a class with a method `reply`"),
        (SaysText, 2, "must return a Reply, got str"),
        (SaysNumbers, 2, "raised|no text"),
        (Stumbles, 2, "to '' .*raised IndexError"),
        (NeverDone, 3, "not done after 64 replies"),
        (NeverComes, 3, "did not come within 60 s"),
        (Edits, 4, "changed the conversation's messages"),
        (Marks, 4, "changed the conversation's trajectory"),
        (Moody, 5, "take randomness from conversation.rng"),
        (Crowded, 5, "and beside another"),
        (Recognises, 5, r"Hello\..* and the second time with .*You again"),
        (ReadsTheClock, 5, "It is 0 o'clock.* and the second time with .*It is 1024 o'clock"),
        (AsksNonsense, 2, "raised ChatTemplateError: .*content must be a string, got int"),
        (Remembers, 6, "built anew before reply 2"),
        (Swallows, 7, "cancelled at its await number 1, swallowed it"),
        (Sleeps, 8, r"blocks the event loop with time.sleep\(1\)"),
        (LeavesATask, 8, "typing"),
        (CannotClose, 9, "close raised ConnectionError"),
        (ClosesOnlyWhatBegan, 9, "close raised AttributeError"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_broken_interaction_is_found(interaction: Any, invariant: int, message: str) -> None:
    Crowded.present = 0
    Recognises.met.clear()
    with pytest.raises(ConformanceError, match=message) as found:
        check_interaction(interaction, examples=20)
    assert found.value.invariant == invariant


class TakesItsTime(Base):
    """Good: longer than a cancelled reply may take, but nobody cancels it."""

    async def reply(self, conversation: Conversation) -> Any:
        await asyncio.sleep(20.0)
        return await super().reply(conversation)


def test_a_slow_interaction_conforms() -> None:
    assert "cancellation" in check_interaction(TakesItsTime, examples=8).promises


class WaitsForItself(Base):
    async def reply(self, conversation: Conversation) -> Any:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()


def test_one_that_hangs_the_loop_is_ended_and_its_line_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked_loop, "BLOCKING_SECONDS", 0.5)
    with pytest.raises(ConformanceError, match=r"at .*_interaction\.py:\d+, in (\w+\.)?reply; await") as found:
        check_interaction(WaitsForItself, examples=5)
    assert found.value.invariant == 8
