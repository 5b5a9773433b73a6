"""What a server refuses, in the protocols' words, and whom it lets in."""

import asyncio
from typing import Any
from unittest.mock import Mock

import aiohttp
import anthropic
import openai
import pytest

from fsm_rollout.engines.scripted.script import Turn
from tests.foreign import CALL
from tests.unit.serve.kit import Chat, refused, served, words


async def test_limits_are_told_in_the_protocol_s_own_errors() -> None:
    async with served(lambda request: CALL) as server:
        error = await refused(server)
        assert (error.status_code, error.code) == (400, "limit_reached")  # type: ignore[attr-defined]
        assert "'assistant_turns'" in str(error)
        with pytest.raises(openai.APIError, match="assistant_turns"):
            await server.stream([{"role": "user", "content": "?"}])
        error = await refused(server, messages="word " * 40_000)
        assert (error.status_code, error.code) == (400, "context_length_exceeded")  # type: ignore[attr-defined]
    async with served(lambda request: "word " * 60) as server:
        answer = await server.ask("?", max_tokens=20)
        assert answer.choices[0].finish_reason == "length"
        assert answer.choices[0].message.content.split() == ["word"] * len(answer.choices[0].message.content.split())


async def test_the_last_turn_that_a_limit_allows_is_an_answer() -> None:
    async with served(lambda request: f"answer {request.turn}") as server:
        chat: Chat = []
        for turn in range(4):  # user_turns: 3, and the prompt
            chat.append({"role": "user", "content": f"{turn}"})
            answer = await server.ask(chat)
            assert answer.choices[0].message.content == f"answer {turn}"
        (trajectory,) = server.trajectories.values()
        await server.until(lambda: trajectory.ended)
        assert trajectory.stop_reason == "limit:user_turns"


async def test_an_engine_that_fails_is_a_503_and_the_next_request_is_served() -> None:
    broken = Turn(error="Broken: no more", text="so far")
    turns = iter([broken, Turn(text="well")])

    async with served(lambda request: next(turns), rollout={"failures": {"engine": "end"}}) as server:
        error = await refused(server, messages="hi")
        assert (error.status_code, error.code) == (503, "failed_Broken")  # type: ignore[attr-defined]
        assert (await server.ask("hi")).choices[0].message.content == "well"


async def test_text_that_cannot_be_shown_as_it_comes_is_shown_at_its_turn_s_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*args: object) -> str:
        raise ValueError("half a character too many")

    monkeypatch.setattr("fsm_rollout.serve.served_conversation.TextStream.new", fails)
    async with served([Turn(text="So it goes.", chunks=3)]) as server:
        assert words(await server.stream([{"role": "user", "content": "?"}])) == ["So it goes."]
    assert "could not be shown as they came" in caplog.text


async def test_wrong_requests_say_what_is_wrong() -> None:
    async with served(lambda request: "well", body_bytes=10_000) as server:
        error = await refused(server, model="chating")
        assert error.status_code == 404
        assert "did you mean 'chatting'?" in str(error)
        for param, value, why in (
            ("seed", 0, "by its trajectory's id"),
            ("logprobs", True, "in the journal"), ("top_logprobs", 2, "sampled alone"), ("n", 2, "ask again"),
            ("stop", "x", "leave it out"), ("response_format", {"type": "json_object"}, "in words"),
        ):  # fmt: skip
            error = await refused(server, **{param: value})
            assert (error.status_code, error.code, error.param) == (400, "unsupported_parameter", param)  # type: ignore[attr-defined]
            assert why in str(error)
        assert "the last one is the assistant's own" in str(
            await refused(server, messages=[{"role": "assistant", "content": "x"}])
        )
        assert (await refused(server, messages="x" * 20_000)).status_code == 413
        async with aiohttp.ClientSession(server.url) as http:
            for path, status in (("/v1/files", 404), ("/../../etc/passwd", 404), ("/v1/chat/completions", 405)):
                async with http.get(path) as answer:
                    assert (answer.status, answer.headers.get("Allow")) == (status, "POST" if status == 405 else None)
                    told = (await answer.json())["error"]["message"]
                    assert "there is POST /v1/chat/completions, POST /v1/responses, " in told
            async with http.post("/v1/messages", data=b"{") as answer:
                assert (answer.status, (await answer.json())["type"]) == (400, "error")
            for wrong in (
                [{"role": "user", "content": [{"type": "text"}]}],
                [{"role": "user", "content": 7}],
                [{"role": "tool", "content": "x"}, "y"],
                [{"role": "assistant", "tool_calls": [{"id": "c"}]}, {"role": "user", "content": "?"}],
            ):
                async with http.post("/v1/chat/completions", json={"model": "chatting", "messages": wrong}) as answer:
                    assert answer.status == 400, (wrong, await answer.text())
        assert not server.trajectories


@pytest.mark.parametrize("error", [TimeoutError(), OSError(28, "No space left on device"), KeyError("x")])
async def test_what_fails_is_said_in_the_protocols_words(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(lambda request: "well") as server:
        monkeypatch.setattr(server.service, "ask", Mock(side_effect=error))
        asked: Any = {"model": "chatting", "max_tokens": 9, "messages": [{"role": "user", "content": "?"}]}
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
            with pytest.raises(anthropic.InternalServerError) as told:
                await client.messages.create(**asked)
        assert (told.value.status_code, told.value.type) == (500, "api_error")
        assert type(error).__name__ in told.value.message
        assert 'protocol="anthropic",status="500"} 1.0' in server.service.metrics.page().decode()


async def test_beyond_so_many_requests_one_is_told_to_come_again() -> None:
    script = {"hang": Turn(text="so", hang=True)}
    async with served(lambda request: script.get("hang", Turn(text="well")), calls=2) as server:
        chat: Chat = [{"role": "user", "content": "?"}]
        running = [asyncio.create_task(server.stream(chat)) for _ in range(2)]
        await server.until(lambda: len(server.trajectories) == 2)
        with pytest.raises(openai.RateLimitError) as caught:
            await server.ask("?")
        assert int(caught.value.response.headers["Retry-After"]) >= 1
        del script["hang"]
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        await server.until(lambda: all(t.ended for t in server.trajectories.values()))
        assert (await server.ask("?")).choices[0].message.content == "well"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_caller_that_goes_away_ends_its_trajectory(stream: bool) -> None:
    async with served(lambda request: Turn(text="so it goes", hang=True)) as server:
        chat: Chat = [{"role": "user", "content": "?"}]
        call = asyncio.create_task(server.stream(chat) if stream else server.ask(chat))
        await server.until(lambda: server.service.rollout.scheduler.clients["policy"].pool.requests)
        call.cancel()
        await asyncio.wait({call})
        (trajectory,) = server.trajectories.values()
        await server.until(lambda: trajectory.ended)
        assert trajectory.stop_reason == "cancelled"
        await server.until(lambda: not server.service.calls_under_way)


async def test_a_server_that_ends_tells_its_callers() -> None:
    async with served(lambda request: Turn(text="so", hang=True)) as server:
        whole = asyncio.create_task(server.ask("?"))
        await server.until(lambda: server.trajectories)
    error = (await asyncio.gather(whole, return_exceptions=True))[0]
    assert isinstance(error, openai.InternalServerError)
    assert error.code == "shutting_down"


async def test_without_a_key_nothing_is_answered_but_the_page_and_its_health() -> None:
    async with served(lambda request: "well", keys=("right",)) as server:
        with pytest.raises(openai.AuthenticationError):
            await server.ask("?", key="wrong")
        answer = await server.ask("?", key="right")
        assert server.trajectories[answer.trajectory].extra["caller"] != "right"
        async with aiohttp.ClientSession(server.url) as http:
            for path, status in (("/v1/models", 401), ("/metrics", 401), ("/health", 200), ("/", 200)):
                async with http.get(path) as response:
                    assert response.status == status, path
            for key, code in (("wrong", 401), ("right", 426)):
                with pytest.raises(aiohttp.WSServerHandshakeError) as error:
                    await http.ws_connect("/v1/responses", headers={"x-api-key": key})
                assert error.value.status == code
            async with http.get("/metrics", headers={"x-api-key": "right"}) as response:
                page = await response.text()
        assert 'fsm_rollout_answers_total{agent="chatting",protocol="openai",status="200"} 1.0' in page
        assert "fsm_rollout_conversations_waiting 1.0" in page


async def test_pages_from_elsewhere_are_not_served() -> None:
    async with served(lambda request: "well") as server:
        port = server.url.rpartition(":")[2]
        body = {"model": "chatting", "messages": [{"role": "user", "content": "?"}]}
        async with aiohttp.ClientSession(server.url) as http:
            for headers, status in (
                ({"Origin": "http://evil.example"}, 403),
                ({"Origin": "null"}, 403),
                ({"Origin": "http://["}, 403),
                ({"Host": "["}, 403),
                ({"Host": f"rebound.example:{port}"}, 403),
                ({"Origin": server.url}, 200),
                ({"Host": f"localhost:{port}", "Origin": f"http://localhost:{port}"}, 200),
            ):
                async with http.post("/v1/chat/completions", json=body, headers=headers) as answer:
                    assert answer.status == status, headers
