"""Answers to a foreign agent that are streamed, and Anthropic's protocol, by the official clients."""

import json
from typing import Any, NoReturn

import anthropic
import openai
import pytest

from fsm_rollout.engines.protocol import Request
from fsm_rollout.engines.scripted.script import Turn
from fsm_rollout.states.external.agent_histories import AgentHistories
from fsm_rollout.states.external.handler import ForeignVisit
from tests.foreign import CALCULATOR, CALL, SEEN, Visitor, client, run, visited_by


async def streams(visit: ForeignVisit) -> None:
    async with client(visit) as api:
        messages: list[Any] = [{"role": "user", "content": "x"}]
        options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}, "tools": [CALCULATOR]}
        chunks = [c async for c in await api.chat.completions.create(model="m", messages=messages, **options)]
        pieces = [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content]
        calls = [call for c in chunks if c.choices for call in c.choices[0].delta.tool_calls or ()]
        SEEN.append((pieces, [(call.function.name, json.loads(call.function.arguments)) for call in calls]))
        assert chunks[-1].usage.completion_tokens > 5
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == ("tool_calls" if calls else "stop")


@pytest.mark.parametrize(
    ("text", "shown", "called"),
    [
        (f"Let me see: é漢. {CALL}", "Let me see: é漢.", [("calculate", {"left": 20, "operator": "+", "right": 22})]),
        ("This begins as a <tool", "This begins as a <tool", []),  # held back until it is known to be no call
    ],
)
def test_text_is_streamed_as_it_comes_and_calls_when_they_are_whole(text: str, shown: str, called: list[Any]) -> None:
    run(streams, [Turn(text=text, chunks=12, delay=0.001)])
    ((pieces, calls),) = SEEN
    assert "".join(pieces) == shown
    assert len(pieces) > 2
    assert calls == called


async def claude(visit: ForeignVisit) -> None:
    tool = CALCULATOR["function"]
    tools: Any = [{"name": tool["name"], "description": "Add.", "input_schema": tool["parameters"]}]
    async with anthropic.AsyncAnthropic(base_url=visit.base_url, api_key=visit.api_key, max_retries=0) as api:
        messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": visit.task}]}]
        shown: dict[str, Any] = {"model": "m", "tools": tools, "system": "Count."}
        options: dict[str, Any] = shown | {"max_tokens": 100}

        async def counted() -> int:
            return (await api.messages.count_tokens(messages=messages, **shown)).input_tokens

        opening = await counted()
        async with api.messages.stream(messages=messages, **options) as stream:
            reply = await stream.get_final_message()
        assert reply.stop_reason == "tool_use"
        assert [block.type for block in reply.content] == ["text", "tool_use"]
        messages.append({"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in reply.content]})
        (use,) = [block for block in reply.content if block.type == "tool_use"]
        assert use.input == {"left": 20, "operator": "+", "right": 22}
        messages.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "42"}]})
        grown = await counted()
        async with api.messages.stream(messages=messages, **options) as stream:
            SEEN.append([text async for text in stream.text_stream])
            final = await stream.get_final_message()
        assert final.stop_reason == "end_turn"
        messages += [{"role": "assistant", "content": final.content[0].text}, {"role": "user", "content": "Sure?"}]
        for _ in range(2):
            told = await counted()
            cut = await api.messages.create(messages=messages, stop_sequences=["é", "sur"], **options)
            assert (cut.stop_reason, cut.stop_sequence, cut.content[0].text) == ("stop_sequence", "sur", "I am ")
            assert cut.usage.input_tokens == told
            messages += [{"role": "assistant", "content": cut.content[0].text}, {"role": "user", "content": "Really?"}]
        SEEN.append((opening, grown))


def test_anthropic_s_protocol_gives_the_same_rows() -> None:
    last = Turn(text="The answer is 42.", chunks=6, delay=0.001)
    turns = [f"So: {CALL}", last, *["I am sure of it."] * 2]
    (trajectory,), engine = run(visited_by(claude, "dialect: anthropic"), turns, check=False)
    assert trajectory.stop_reason == "answered", trajectory.detail
    assert [stream.context for stream in trajectory.streams] == ["main"]
    pieces, counted = SEEN
    assert "".join(pieces) == "The answer is 42."
    roles = [message["role"] for message in trajectory.streams[0].messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant", *["user", "assistant"] * 2]
    asked = [len(entry.what.ids) for entry in engine.log if isinstance(entry.what, Request)]
    assert list(counted) == asked[:2]


async def wants_logprobs(visit: ForeignVisit) -> None:
    options: dict[str, Any] = {
        "model": "m",
        "logprobs": True,
        "stop": "two",
        "messages": [{"role": "user", "content": "x"}],
    }
    async with client(visit) as api:
        whole = (await api.chat.completions.create(**options)).choices[0]
        chunks = [chunk.choices[0] async for chunk in await api.chat.completions.create(stream=True, **options)]
    assert (whole.message.content, whole.finish_reason) == ("one ", "stop")
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "one "
    SEEN.extend([(t.token, t.logprob) for t in said.logprobs.content] for said in (whole, chunks[-1]))


def test_a_call_s_own_stop_is_not_shown_and_its_log_probs_are() -> None:
    turn = Turn(text="one two three", chunks=9, delay=0.001)
    (trajectory,), engine = run(wants_logprobs, lambda request: turn, check=False)  # the engine says more
    assert trajectory.failure is None, trajectory.detail
    for stream, seen in zip(trajectory.streams, SEEN, strict=True):  # the second time it asks for another answer
        ids, values = stream.tokens.tail(stream.tokens.prompt_length), stream.tokens.response_logprobs()
        texts = [engine.tokenizer.decode([id_]) for id_ in ids]
        assert "".join(texts) == "one two"
        assert seen == [(text, pytest.approx(value)) for text, value in zip(texts, values, strict=True)]


async def hears_that_it_broke(visit: ForeignVisit) -> None:
    options: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    async with client(visit) as api:
        chunks = await api.chat.completions.create(stream=True, **options)
        with pytest.raises(openai.APIError, match="it broke") as error:
            SEEN.extend([chunk async for chunk in chunks])
        raise error.value


async def claude_hears_that_it_broke(visit: ForeignVisit) -> None:
    async with anthropic.AsyncAnthropic(base_url=visit.base_url, api_key=visit.api_key, max_retries=0) as api:
        messages: list[Any] = [{"role": "user", "content": "x"}]
        with pytest.raises(anthropic.APIStatusError, match="it broke") as error:
            async with api.messages.stream(model="m", max_tokens=100, messages=messages) as stream:
                SEEN.extend([text async for text in stream.text_stream])
        raise error.value


@pytest.mark.parametrize(
    ("visitor", "dialect"), [(hears_that_it_broke, "openai"), (claude_hears_that_it_broke, "anthropic")]
)
def test_an_answer_that_breaks_off_says_so_in_the_protocol_s_own_event(visitor: Visitor, dialect: str) -> None:
    broken = Turn(text="Let me see.", chunks=6, delay=0.001, error="ValueError: it broke")
    (trajectory,), _ = run(visited_by(visitor, f"dialect: {dialect}"), lambda request: broken)
    assert trajectory.failure is not None
    assert "it broke" in trajectory.detail


async def hears_of_a_fault(visit: ForeignVisit) -> None:
    options: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    async with client(visit) as api:
        chunks = await api.chat.completions.create(stream=True, **options)
        with pytest.raises(openai.APIError, match="could not be answered: KeyError"):
            SEEN.extend([chunk async for chunk in chunks])


def test_a_fault_of_ours_amid_a_stream_is_said_in_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = AgentHistories.answer

    async def answer(self: AgentHistories, *arguments: Any) -> NoReturn:
        await whole(self, *arguments)
        raise KeyError("a mistake")

    monkeypatch.setattr(AgentHistories, "answer", answer)
    (trajectory,), _ = run(hears_of_a_fault, lambda request: Turn(text="Let me see.", chunks=6, delay=0.001))
    assert trajectory.failure is None, trajectory.detail
