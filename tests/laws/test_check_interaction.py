"""The interaction check passes all interactions there are, and names the fault of broken ones."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fsm_rollout import load_agent
from fsm_rollout.environment.users import Conversation, Reply
from fsm_rollout.testing import ConformanceError, check_interaction
from fsm_rollout.testing.simulation import blocked_loop
from tests.cases import mistakes, table, written
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


def interaction(says: Any) -> type:
    """Make an interaction of how it replies, as the others do unless the function says something else."""

    async def reply(self: Any, conversation: Conversation) -> Any:
        said = await says(self, conversation)
        return await Base.reply(self, conversation) if said is None else said

    return type(says.__name__, (Base,), {"reply": reply, "__module__": __name__})


@pytest.mark.parametrize(
    ("broken", "promise", "message"),
    [*mistakes("broken_interactions"), ("tests.law_tools:CALLS", 1, "not a class with a method `reply`")],
)
def test_a_broken_interaction_is_found(
    broken: Any, promise: int, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code = table("broken_interactions").get(broken, {}).get("code")
    if code is not None and code.startswith("class"):
        broken = written("broken_interactions", broken, tmp_path)
    elif code is not None:
        head = f"async def {broken}(self, conversation)"
        broken = interaction(written("broken_interactions", broken, tmp_path, head))
    monkeypatch.setattr(blocked_loop, "BLOCKING_SECONDS", 0.5)
    with pytest.raises(ConformanceError, match=message) as found:
        check_interaction(broken, examples=20)
    assert found.value.invariant == promise


@interaction
async def takes_its_time(self, conversation):
    """Take longer than a cancelled reply may, but nobody cancels it."""
    await asyncio.sleep(20.0)


def test_a_slow_interaction_conforms() -> None:
    assert "cancellation" in check_interaction(takes_its_time, examples=8).promises
