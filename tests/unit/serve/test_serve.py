"""Agents as an endpoint, by the clients of both protocols over real HTTP, on an engine that says what it is told."""

import asyncio
import gc
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import aiohttp
import anthropic
import numpy as np
import openai
import pytest

import fsm_rollout as fr
from fsm_rollout.agent.loader import loads
from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.engines.scripted.engine import ScriptedEngine
from fsm_rollout.engines.scripted.script import Turn
from fsm_rollout.jobs.run_config import ServeConfig
from fsm_rollout.serve.guarded import digest_of
from fsm_rollout.serve.server import listening
from fsm_rollout.serve.service import Service
from fsm_rollout.states.external import anthropic_dialect, responses_dialect
from fsm_rollout.states.external.responding import Answer
from fsm_rollout.testing.simulation.simulate import embedded_tokenizer
from fsm_rollout.trajectory.events import AnyEvent, Ended, Generated
from fsm_rollout.trajectory.journal import Journal, recordings
from fsm_rollout.trajectory.pictures import openai_part, picture_of
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.cases import FILES
from tests.foreign import CALL, check_exact
from tests.kit import CONFIGS
from tests.vision import gemma3_with_tools

CHATTING = FILES["chats"]
SINGLE = FILES["single"]
Chat = list[dict[str, Any]]


@dataclass
class Served:
    """A server with what it did."""

    url: str
    service: Service
    engine: ScriptedEngine
    trajectories: dict[str, Trajectory] = field(default_factory=dict)
    key: str = "none"

    async def until(self, holds: Callable[[], object]) -> None:
        """Wait for a condition."""
        async with asyncio.timeout(600):
            while not holds():  # noqa: ASYNC110  # what is waited for happens in other tasks' steps
                await asyncio.sleep(0.005)

    def openai(self, key: str = "none") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    async def ask(self, messages: Chat | str, *, key: str = "none", model: str = "chatting", **options: Any) -> Any:
        """Ask by OpenAI's client, and take the answer into the history."""
        history: Chat = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        async with self.openai(key) as client:
            answer = await client.chat.completions.create(model=model, messages=history, **options)  # type: ignore[call-overload]
        history.append({"role": "assistant", "content": answer.choices[0].message.content})
        return answer

    async def stream(self, messages: Chat, model: str = "chatting", **options: Any) -> list[Any]:
        async with self.openai() as client:
            chunks = await client.chat.completions.create(  # type: ignore[call-overload]
                model=model, messages=messages, stream=True, **options
            )
            return [chunk async for chunk in chunks]


@asynccontextmanager
async def served(
    turns: Any, *, agents: str = CHATTING, calls: int = 64, keys: tuple[str, ...] = (), journal: Path | None = None,
    rollout: dict[str, Any] | None = None, processor: Any = None, **serving: Any,
) -> AsyncIterator[Served]:  # fmt: skip
    """Serve an agent on a scripted engine; at the end its rows must be what the engine has sampled."""
    tokenizer = processor.tokenizer if processor is not None else embedded_tokenizer()
    engine = ScriptedEngine(turns, tokenizer=tokenizer, processor=processor, log=True)
    again = journal is not None and journal.exists()  # noqa: ASYNC240  # a test may
    earlier = list(recordings(journal, unfinished=True)) if journal is not None and again else []
    async with asyncio.timeout(600), fr.Rollout(loads(agents), engine, **(rollout or {})) as own:
        with nullcontext() if journal is None else Journal(journal, append=again) as writing:
            own.journal = writing
            service = Service(own, ServeConfig(port=0, **serving), calls)
            result = Served("", service, engine)
            listeners = own.scheduler.recorder.listeners

            def note(trajectory: Trajectory, event: AnyEvent) -> None:
                result.trajectories[trajectory.trajectory_id] = trajectory

            own.scheduler.recorder.listeners = (*listeners, note)
            async with listening(service, frozenset(keys), earlier) as (url, _):
                result.url = url
                yield result
    if not earlier:
        check_exact(list(result.trajectories.values()), engine)


def words(chunks: list[Any]) -> list[str]:
    return [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]


# -- answers ----------------------------------------------------------------------------------------------------------


async def test_a_request_is_a_trajectory_whose_tools_run_here() -> None:
    async with served([f"Let me see. {CALL}", "It is 42."]) as server:
        answer = await server.ask("What is 20 + 22?")
        (trajectory,) = server.trajectories.values()
        assert answer.choices[0].message.content == "Let me see.\n\nIt is 42."
        assert answer.choices[0].finish_reason == "stop"
        assert answer.trajectory == trajectory.trajectory_id
        assert [m["role"] for m in trajectory.messages] == ["user", "assistant", "tool", "assistant"]
        assert answer.usage.completion_tokens == trajectory.trained_tokens
        assert answer.usage.prompt_tokens == trajectory.streams[0].tokens.prompt_length
        async with server.openai() as client:
            (model,) = (await client.models.list()).data
            assert (model.id, model.architecture) == ("chatting", {"input_modalities": ["text"]})  # type: ignore[attr-defined]


@pytest.mark.parametrize("stream", [False, True])
async def test_of_an_answer_that_was_given_nothing_waits_for_the_collector(stream: bool) -> None:
    """A request to the engine holds all that was said: those of many calls would be most of the memory."""
    async with served([Turn(text="It is 42.", chunks=3)]) as server:
        gc.collect()
        gc.disable()
        try:
            if stream:
                await server.stream([{"role": "user", "content": "What is 20 + 22?"}])
            else:
                await server.ask("What is 20 + 22?")
            await server.until(lambda: server.service.waiting)
            assert not [each for each in gc.get_objects() if isinstance(each, PendingRequest)]
        finally:
            gc.enable()


PICTURES: dict[str, Callable[[Any], Any]] = {
    "openai": openai_part,
    "anthropic": anthropic_dialect.picture_part,
    "responses": responses_dialect.picture_part,
}
"""A part of a message that shows a picture, by protocol."""


@pytest.mark.parametrize("protocol", PICTURES)
async def test_callers_show_pictures_and_a_conversation_goes_on_with_them(protocol: str) -> None:
    form, text = PICTURES[protocol], "input_text" if protocol == "responses" else "text"
    first, second = (picture_of(np.full((40, 60, 3), grey, np.uint8)) for grey in (0, 200))
    async with (
        served(lambda request: "well", processor=gemma3_with_tools()) as server, server.openai() as client,
        anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as anthropics,
    ):  # fmt: skip

        async def ask(messages: Any) -> str | None:
            if protocol == "openai":
                reply = await client.chat.completions.create(model="chatting", messages=messages)
                return reply.choices[0].message.content
            if protocol == "responses":
                return (await client.responses.create(model="chatting", input=messages)).output_text
            said = await anthropics.messages.create(model="chatting", messages=messages, max_tokens=100)
            return said.content[0].text  # type: ignore[union-attr]

        (model,) = (await client.models.list()).data
        assert model.architecture == {"input_modalities": ["text", "image"]}  # type: ignore[attr-defined]
        messages: Chat = []
        for content in ([{"type": text, "text": "What is "}, form(first)], [form(second), form(first)], "And?"):
            messages.append({"role": "user", "content": content})
            messages.append({"role": "assistant", "content": await ask(messages)})
            assert messages[-1]["content"] == "well"
        (trajectory,) = server.trajectories.values()
        (stream,) = trajectory.streams
        assert [span.picture for span in stream.media] == [first, second, first]
        # Another picture in the same place is another conversation.
        messages[0]["content"][1] = form(second)
        await ask(messages[:1])
        assert len(server.trajectories) == 2


async def test_what_is_no_picture_and_what_reads_text_only_are_refused() -> None:
    black = openai_part(picture_of(np.zeros((4, 6, 3), np.uint8)))
    address = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}
    for processor, part, code, why in (
        (None, black, "unsupported_content", "agent 'chatting' reads text only"),
        (
            gemma3_with_tools(),
            address,
            "invalid_image",
            "messages[0]: part 0: 'http://127.0.0.1:1/a.png' is an address; nothing",
        ),
    ):
        async with served(lambda request: "well", processor=processor) as server:
            error = await refused(server, messages=[{"role": "user", "content": [part]}])
            assert (error.status_code, error.code) == (400, code)
            assert why in str(error)
            assert (await server.ask("well?")).choices[0].message.content == "well"
            assert len(server.trajectories) == 1


async def test_a_stream_has_the_text_as_it_comes_and_the_same_text() -> None:
    answer = "Four score and seven years ago our fathers brought forth on this continent a new nation."

    turns = [f"Let me see. {CALL}", Turn(text=answer, chunks=8, delay=0.01)]
    async with served(turns) as server:
        whole = await server.ask("Speak.")
        chunks = await server.stream([{"role": "user", "content": "Speak."}], stream_options={"include_usage": True})
        assert "".join(words(chunks)) == whole.choices[0].message.content == f"Let me see.\n\n{answer}"
        assert len(words(chunks)) >= 8
        assert chunks[-1].usage == whole.usage
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
        assert not any(getattr(chunk, "note", None) for chunk in chunks)


@pytest.mark.parametrize(
    ("headers", "train"), [({}, False), ({"x-session-id": "s"}, True), ({"x-session-id": "s"}, False)]
)
async def test_what_a_harness_asks_beside_its_work_is_not_trained_unless_asked(
    headers: dict[str, str], train: bool
) -> None:
    async with served(lambda request: "well", train_side_calls=train) as server:
        title = "Write a title for this conversation: hello"
        await server.ask(title, extra_headers=headers)
        await server.ask("Write something.", extra_headers=headers)
        beside, work = server.trajectories.values()
        assert work.trained_tokens > 0
        assert (beside.trained_tokens > 0) == (not headers or train)
        if headers and not train:
            assert beside.streams[0].why == "side_call"
            server.trajectories.pop(beside.trajectory_id)
            server.engine.log[:] = [e for e in server.engine.log if beside.trajectory_id not in e.what.request_id]  # type: ignore[union-attr]


async def test_states_and_tool_calls_come_with_the_text_where_they_are_asked_for() -> None:
    async with served([CALL, "It is 42."]) as server:
        chunks = await server.stream([{"role": "user", "content": "?"}], extra_body={"notes": True})
        notes = [chunk.note for chunk in chunks if getattr(chunk, "note", None)]
        states = ["PENDING", "GENERATING", "PROCESSING_TOOLS", "GENERATING", "INTERACTING"]
        assert [note["state"] for note in notes if note["kind"] == "state"] == states
        (call,), (result,) = ([n for n in notes if n["kind"] == kind] for kind in ("call", "result"))
        assert (call["name"], call["arguments"]["left"], result["text"]) == ("calculate", 20, "42")
        assert result["id"] == call["id"]
        assert notes[-1]["kind"] == "waits"


async def test_anthropic_s_client_is_answered_too_and_streamed_to() -> None:
    async with served([CALL, Turn(text="It is forty-two, I think.", chunks=4, delay=0.01)]) as server:
        client = anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0)
        question: Any = {"model": "chatting", "max_tokens": 200, "messages": [{"role": "user", "content": "?"}]}
        whole = await client.messages.create(**question)
        async with client.messages.stream(**question) as stream:
            texts = [text async for text in stream.text_stream]
            final = await stream.get_final_message()
        assert whole.content[0].text == "".join(texts) == final.content[0].text == "It is forty-two, I think."
        assert len(texts) > 1
        assert whole.stop_reason == final.stop_reason == "end_turn"
        assert whole.usage.output_tokens == final.usage.output_tokens > 0
        counted = await client.messages.count_tokens(model="chatting", messages=question["messages"])
        assert counted.input_tokens == whole.usage.input_tokens
        with pytest.raises(anthropic.NotFoundError, match="did you mean 'chatting'"):
            await client.messages.create(**question | {"model": "chating"})
        await client.close()


async def test_the_default_protocol_of_openai_s_client_is_answered_and_streamed_to() -> None:
    turns = [CALL, Turn(text="It is forty-two, I think.", chunks=4, delay=0.01)]
    async with served(turns) as server, server.openai() as client:
        question: Any = {"model": "chatting", "input": "?", "instructions": "Count."}
        whole = await client.responses.create(**question)
        async with client.responses.stream(**question) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        assert whole.output_text == final.output_text == "It is forty-two, I think."
        texts = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert ("".join(texts), len(texts) > 1) == (whole.output_text, True)
        assert whole.usage == final.usage
        assert events[0].type == "response.created"
        with pytest.raises(openai.NotFoundError, match="did you mean 'chatting'"):
            await client.responses.create(**question | {"model": "chating"})
        with pytest.raises(openai.BadRequestError, match="may be 'disabled'") as error:
            await client.responses.create(**question, truncation="auto")
        assert error.value.param == "truncation"


@pytest.mark.parametrize("agents", [CHATTING, SINGLE])
async def test_an_answer_s_id_names_its_history_for_who_had_it(agents: str) -> None:
    model = loads(agents).agent
    async with served(lambda request: f"answer {request.turn}", agents=agents, keys=("a", "b")) as server:
        async with server.openai("a") as client:
            first = await client.responses.create(model=model, input="one", instructions="Count.")
            more: Any = {"model": model, "instructions": "Count."}
            second = await client.responses.create(input="two", previous_response_id=first.id, **more)
            # The first answer can be gone on from again, and that is another trajectory.
            third = await client.responses.create(input="three", previous_response_id=first.id, **more)
            fourth = await client.responses.create(input="four", previous_response_id=second.id, **more)
            with pytest.raises(openai.BadRequestError, match="there is no answer"):
                await client.responses.create(input="x", previous_response_id="resp_chat-0-x", **more)
        async with server.openai("b") as other:
            with pytest.raises(openai.BadRequestError, match="there is no answer"):
                await other.responses.create(input="two", previous_response_id=second.id, **more)
        told = [[m["content"] for m in t.messages if m["role"] != "system"] for t in server.trajectories.values()]
        answers = [response.output_text for response in (first, second, third, fourth)]
        last = ["one", answers[0], "two", answers[1], "four", answers[3]]
        assert ["one", answers[0], "three", answers[2]] in told
        assert last in told
        assert len(told) == (2 if agents == CHATTING else 4)
        # Two at once, before the first has reached its trajectory.
        body = {"input": "five", "previous_response_id": fourth.id, **more}
        service, caller = server.service, digest_of("a")
        for exchange in [service.ask(responses_dialect.read(body), caller) for _ in range(2)]:
            parts = [part async for part in exchange.parts(partial(service.leave, exchange))]
            assert isinstance(parts[-1], Answer)


async def test_a_conversation_is_compacted_to_an_item_that_is_gone_on_from() -> None:
    async with served(lambda request: f"answer {request.turn}") as server, server.openai() as client:
        first = await client.responses.create(model="chatting", input="one")
        body = {"model": "chatting", "previous_response_id": first.id}
        kept: Any = await client.post("/responses/compact", body=body, cast_to=object)
        assert [item["type"] for item in kept["output"]] == ["compaction"]
        await client.responses.create(model="chatting", input=[*kept["output"], {"role": "user", "content": "two"}])
        before, after = server.trajectories.values()
        assert (before.generations, after.generations) == (2, 1)
        assert str(after.prompt_messages[0]["content"]).endswith("answer 1")
        # What is said again may be no valid Unicode, as it came.
        async with aiohttp.ClientSession(server.url) as http:
            for path, body in (("/compact", {"input": "\ud800"}), ("", {"input": "x", "instructions": "\ud800"})):
                async with http.post(f"/v1/responses{path}", json={"model": "chatting", **body}) as answer:
                    assert (answer.status, "\\ud800" in await answer.text()) == (200, True)


# -- conversations ----------------------------------------------------------------------------------------------------


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


# -- limits and errors -----------------------------------------------------------------------------------------------


async def refused(server: Served, **options: Any) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as caught:
        await server.ask(options.pop("messages", "What is 20 + 22?"), **options)
    return caught.value


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


# -- who may come in -------------------------------------------------------------------------------------------------


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


async def test_the_counts_are_those_of_the_trajectories() -> None:
    seen: list[AnyEvent] = []
    async with served(
        [CALL, "It is 42."], rollout={"on_event": [lambda _, event: seen.append(event)]}, waiting=1
    ) as server:
        for _ in range(2):
            await server.ask("?")
        await server.until(lambda: any(isinstance(event, Ended) for event in seen))
        page = server.service.metrics.page().decode()
        tokens = sum(len(event.ids) for event in seen if isinstance(event, Generated))
        assert f'fsm_rollout_sampled_tokens_total{{agent="chatting"}} {tokens:.1f}' in page
        assert 'tool_calls_total{agent="chatting",failed="false",tool="calculate"} 2.0' in page
        assert 'trajectories_ended_total{agent="chatting",stop_reason="interaction_done"} 1.0' in page
        assert 'trajectories_active{agent="chatting"} 0.0' in page, "the other waits for its caller"
        # Seconds to the first text are those of streams: others see none before the whole.
        assert 'first_text_seconds_count{agent="chatting"} 0.0' in page
        await server.stream([{"role": "user", "content": "?"}])
        assert b'first_text_seconds_count{agent="chatting"} 1.0' in server.service.metrics.page()
    # What the dashboard asks for is there, or will be with the first value.
    board = json.loads((CONFIGS / "dashboards/grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    there = set(re.findall(r"^# TYPE (\w+)", page, re.M)) | set(re.findall(r"(\w+)=", page))
    there |= {f"{name}_{part}" for name in there for part in ("bucket", "sum", "count")}
    for query in queries:
        named = set(re.findall(r"(?:fsm_rollout|gen_ai)_\w+", query))
        assert named, query
        assert named <= there, query
