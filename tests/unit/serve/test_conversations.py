"""Conversations of served agents: which request goes on with which, how long one waits for its caller, and the end."""

import asyncio
from typing import Any

import pytest

from tests.unit.serve.kit import CHATTING, SINGLE, Chat, served


@pytest.mark.parametrize("change", ["an answer", "a question", "the sampling", "the key", "a further question"])
async def test_any_other_history_is_the_prompt_of_a_new_trajectory(change: str) -> None:
    async with served(lambda request: "well", keys=("a", "b")) as server:
        chat: Chat = [{"role": "user", "content": "one"}]
        first = await server.ask(chat, key="a")
        chat.append({"role": "user", "content": "two"})
        options: dict[str, Any] = {"key": "a"}
        match change:
            case "an answer":
                chat[1]["content"] = "we11"
            case "a question":
                chat[0]["content"] = "0ne"
            case "the sampling":
                options["temperature"] = 0.5
            case "the key":
                options["key"] = "b"
            case "a further question":
                chat.append({"role": "user", "content": "three"})
        asked = [dict(message) for message in chat]
        second = await server.ask(chat, **options)
        assert second.trajectory != first.trajectory
        trajectory = server.trajectories[second.trajectory]
        assert list(trajectory.prompt_messages) == asked
        assert trajectory.generations == 1
        assert server.trajectories[first.trajectory].suspended is not None


async def test_two_conversations_with_the_same_words_stay_two() -> None:
    async with served(lambda request: "well") as server:
        chats: list[Chat] = [[{"role": "user", "content": "hello"}] for _ in range(3)]
        first = [(await server.ask(chat)).trajectory for chat in chats]
        for chat in chats:
            chat.append({"role": "user", "content": "and?"})
        second = await asyncio.gather(*(server.ask(chat) for chat in chats))
        assert {answer.trajectory for answer in second} == set(first)
        assert len(set(first)) == 3


async def test_an_agent_that_asks_nobody_begins_anew_each_time() -> None:
    async with served(lambda request: f"{len(request.ids)}", agents=SINGLE) as server:
        chat: Chat = [{"role": "user", "content": "one"}]
        first = await server.ask(chat, model="single")
        chat.append({"role": "user", "content": "two"})
        second = await server.ask(chat, model="single")
        assert [t.stop_reason for t in server.trajectories.values()] == ["answered"] * 2
        assert first.stop_reason == second.stop_reason == "answered"
        assert [m["role"] for m in server.trajectories[second.trajectory].prompt_messages] == [
            "user", "assistant", "user",
        ]  # fmt: skip


async def test_conversations_that_wait_are_bounded_and_the_oldest_ends() -> None:
    async with served(lambda request: "well", waiting=2) as server:
        chats: list[Chat] = [[{"role": "user", "content": f"{n}"}] for n in range(3)]
        answers = [await server.ask(chat) for chat in chats]
        first = server.trajectories[answers[0].trajectory]
        await server.until(lambda: first.ended)
        assert first.stop_reason == "interaction_done"
        assert not any(server.trajectories[a.trajectory].ended for a in answers[1:])
        chats[0].append({"role": "user", "content": "still there?"})
        assert (await server.ask(chats[0])).trajectory != answers[0].trajectory


async def test_a_conversation_waits_so_long_and_no_longer() -> None:
    async with served(lambda request: "well", wait_seconds=0.01) as server:
        answer = await server.ask("hello")
        await server.until(lambda: server.trajectories[answer.trajectory].ended)
        assert server.trajectories[answer.trajectory].stop_reason == "interaction_done"


async def test_waiting_for_the_caller_counts_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the agent's timeouts are shorter than the wait, and hold for all that is not waiting."""

    loop = asyncio.get_running_loop()
    clock, away = loop.time, [0]
    monkeypatch.setattr(loop, "time", lambda: clock() + away[0])
    async with served(lambda request: "well", agents=CHATTING.replace("600", "250")) as server:
        chat: Chat = [{"role": "user", "content": "one"}]
        first = await server.ask(chat)
        trajectory = server.trajectories[first.trajectory]
        await server.until(lambda: server.service._waiting)
        away[0] = 300
        chat.append({"role": "user", "content": "two"})
        assert (await server.ask(chat)).trajectory == first.trajectory
        assert trajectory.suspended_seconds >= 300
        assert trajectory.interact_seconds < 250


async def test_conversations_that_are_not_kept_end_with_the_server() -> None:
    async with served(lambda request: "well", keep=False) as server:
        for _ in range(3):
            await server.ask("hello")
    assert [t.stop_reason for t in list(server.trajectories.values())] == ["interaction_done"] * 3
