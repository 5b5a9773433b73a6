"""Agents as an endpoint, by the clients of both protocols over real HTTP, on an engine that says what it is told."""

import asyncio
import gc
import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import aiohttp
import anthropic
import numpy as np
import openai
import pytest

from fsm_rollout.agent.loader import loads
from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.engines.scripted.memory import Memory
from fsm_rollout.engines.scripted.script import Turn
from fsm_rollout.serve.guarded import digest_of
from fsm_rollout.states.external import anthropic_dialect, responses_dialect
from fsm_rollout.states.external.responding import Answer
from fsm_rollout.trajectory.events import AnyEvent, Ended, Generated
from fsm_rollout.trajectory.pictures import openai_part, picture_of
from tests.foreign import CALL
from tests.kit import CONFIGS
from tests.unit.serve.kit import CHATTING, SINGLE, Chat, refused, served, words
from tests.vision import gemma3_with_tools

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


# -- who may come in -------------------------------------------------------------------------------------------------


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


async def test_conversations_have_their_places_in_the_engines_memory_as_trajectories_of_a_run_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six, with memory for about two: whose caller is silent gives way to those who wait, and all are answered."""
    monkeypatch.setattr("fsm_rollout.engines.placing.MARK_LEAST", 0.005)
    memory = Memory(tokens=450, fill=0, step=1e-4)
    async with served(lambda request: f"{request.turn} of {request.trajectory_id}", memory=memory) as server:
        chats: list[Chat] = [[{"role": "user", "content": f"{number} " + "word " * 40}] for number in range(6)]
        for turn in range(2):
            await asyncio.gather(*map(server.ask, chats))
            assert {chat[-1]["content"].split()[0] for chat in chats} == {str(turn)}
            for chat in chats:
                chat.append({"role": "user", "content": "And then?"})
        residency, trajectories = server.service.rollout.engines["policy"].placing.residency, server.trajectories
        assert residency is not None
        assert residency.paused > 0
        assert sum(trajectory.streams[0].tokens.length for trajectory in trajectories.values()) > 2 * memory.tokens
        assert {trajectory.stop_reason for trajectory in trajectories.values()} == {None}, "nothing is cancelled"
