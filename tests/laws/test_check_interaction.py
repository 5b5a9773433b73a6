"""The interaction check passes all interactions there are, and names the fault of broken ones."""

import asyncio
import random
import threading
import time
from collections.abc import Callable
from typing import Any

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
    """What the interactions below have in common: two replies."""

    async def reply(self, conversation: Conversation) -> Any:
        return Reply("Go on.") if conversation.replies < 2 else Reply(None, done=True)


class NeedsMore(Base):
    def __init__(self, goal: str) -> None:
        self.goal = goal


class Remembers(Base):
    def __init__(self) -> None:
        self.told: list[str] = []

    async def reply(self, conversation: Conversation) -> Any:
        self.told.append(conversation.text)
        return Reply(f"That is {len(self.told)}.", done=len(self.told) > 2)


class CannotClose(Base):
    async def close(self) -> None:
        raise ConnectionError("already gone")


class ClosesOnlyWhatBegan(Base):
    async def reply(self, conversation: Conversation) -> Any:
        self.opened = True
        return await super().reply(conversation)

    def close(self) -> None:
        del self.opened


BROKEN: list[tuple[Any, int, str]] = [
    (NeedsMore, 1, "missing a required argument: 'goal'"),
    ("tests.law_tools:CALLS", 1, "not a class with a method `reply`"),
    (Remembers, 6, "built anew before reply 2"),
    (CannotClose, 9, "close raised ConnectionError"),
    (ClosesOnlyWhatBegan, 9, "close raised AttributeError"),
]


def interaction(promise: int | None = None, message: str = "") -> Callable[[Any], type]:
    """Make an interaction of how it replies, as the others do unless the function says something else.

    With a promise, it is a case of one that breaks it.
    """

    def make(says: Any) -> type:
        async def reply(self: Any, conversation: Conversation) -> Any:
            said = await says(self, conversation)
            return await Base.reply(self, conversation) if said is None else said

        made = type(says.__name__, (Base,), {"reply": reply, "__module__": __name__})
        if promise is not None:
            BROKEN.append((made, promise, message))
        return made

    return make


PRESENT: list[object] = []
MET: set[str] = set()


@interaction(2, "must return a Reply, got str")
async def says_text(self, conversation):
    return "Go on."


@interaction(2, "raised|no text")
async def says_numbers(self, conversation):
    return Reply(5)


@interaction(2, "to '' .*raised IndexError")
async def stumbles(self, conversation):
    return Reply(f"You said {conversation.text.split()[0]}", done=True)


@interaction(2, "raised ChatTemplateError: .*content must be a string, got int")
async def asks_nonsense(self, conversation):
    await conversation.ask("judge", [{"role": "user", "content": 42}])


@interaction(3, "not done after 64 replies")
async def never_done(self, conversation):
    return Reply("And then?")


@interaction(3, "did not come within 60 s")
async def never_comes(self, conversation):
    await asyncio.Event().wait()


@interaction(4, "changed the conversation's messages")
async def edits(self, conversation):
    conversation.messages[-1]["content"] = "something else"


@interaction(4, "changed the conversation's trajectory")
async def marks(self, conversation):
    conversation.trajectory.spent["patience"] = 1


@interaction(5, "take randomness from conversation.rng")
async def moody(self, conversation):
    return Reply(random.choice(["Yes.", "No."]), done=conversation.replies > 1)


@interaction(5, "It is 0 o'clock.* and the second time with .*It is 1024 o'clock")
async def reads_the_clock(self, conversation):
    return Reply(f"It is {asyncio.get_running_loop().time():g} o'clock.", done=conversation.replies > 1)


@interaction(5, "and beside another")
async def crowded(self, conversation):
    PRESENT.append(self)
    await asyncio.sleep(1.0)
    greeting = f"We are {len(PRESENT)}."
    await asyncio.sleep(1.0)
    PRESENT.remove(self)
    return Reply(greeting, done=conversation.replies > 0)


@interaction(5, r"Hello\..* and the second time with .*You again")
async def recognises(self, conversation):
    """Know whom it has met, for all time."""
    known = conversation.text in MET
    MET.add(conversation.text)
    return Reply("You again." if known else "Hello.", done=conversation.replies > 0)


@interaction(7, "cancelled at its await number 1, swallowed it")
async def swallows(self, conversation):
    try:
        return Reply(await conversation.ask("user", [], None), done=True)
    except asyncio.CancelledError:
        return Reply(None, done=True)


@interaction(8, r"blocks the event loop with time.sleep\(1\)")
async def sleeps(self, conversation):
    time.sleep(1)  # noqa: ASYNC251


@interaction(8, "typing")
async def leaves_a_task(self, conversation):
    self.typing = asyncio.create_task(asyncio.sleep(1e6), name="typing")


@interaction(8, r"at .*_interaction\.py:\d+, in waits_for_itself; await")
async def waits_for_itself(self, conversation):
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


@pytest.mark.parametrize(("broken", "promise", "message"), BROKEN, ids=lambda value: getattr(value, "__name__", None))
def test_a_broken_interaction_is_found(
    broken: Any, promise: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    PRESENT.clear()
    MET.clear()
    monkeypatch.setattr(blocked_loop, "BLOCKING_SECONDS", 0.5)
    with pytest.raises(ConformanceError, match=message) as found:
        check_interaction(broken, examples=20)
    assert found.value.invariant == promise


@interaction()
async def takes_its_time(self, conversation):
    """Take longer than a cancelled reply may, but nobody cancels it."""
    await asyncio.sleep(20.0)


def test_a_slow_interaction_conforms() -> None:
    assert "cancellation" in check_interaction(takes_its_time, examples=8).promises
