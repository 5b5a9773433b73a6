"""A foreign agent as a state, over its real HTTP: exact rows, limits, keys, streams, ends."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import anthropic
import openai
import pytest
from aiohttp import web

from fsm_rollout.agent.loader import loads
from fsm_rollout.engines.protocol import Chunk, Request
from fsm_rollout.engines.scripted.engine import ScriptedEngine
from fsm_rollout.engines.scripted.script import Turn
from fsm_rollout.errors import ConfigError
from fsm_rollout.states.external.agent_histories import AgentHistories
from fsm_rollout.states.external.handler import ForeignVisit
from fsm_rollout.states.external.responding import listening_at
from fsm_rollout.testing.simulation.simulate import embedded_tokenizer
from tests.foreign import CALCULATOR, CALL, SEEN, YAML, Visitor, agent, chat, client, run, visited_by
from tests.laws.test_thinking import PREFILLED

FORKS = [f"{mark}{number}" for mark in "~+" for number in range(2, 9)]


# -- histories and streams ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 8])
def test_a_history_that_only_grows_is_one_row(n: int) -> None:
    graph = agent("use: 'tests.foreign:tool_user'")
    trajectories, engine = run(graph, [CALL, CALL, "It is 42."], n=n)
    for trajectory in trajectories:
        assert trajectory.stop_reason == "answered"
        assert [stream.context for stream in trajectory.streams] == ["main"]
        assert trajectory.forks == 0
        assert trajectory.generations == 3
        assert trajectory.spent["assistant_turns"] == 3
        (stream,) = trajectory.streams
        assert [m["role"] for m in stream.messages] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
        assert stream.messages[2]["name"] == "calculate"
        text = engine.tokenizer.decode(stream.tokens.tail(stream.tokens.prompt_length))
        assert text.count("<tool_call>\n{") == 2
        assert text.count("42") == 3


async def hears_how_it_ended(visit: ForeignVisit) -> None:
    async with client(visit) as api:
        reply = await api.chat.completions.create(model="any", messages=[{"role": "user", "content": "one"}])
        SEEN.append((reply.choices[0].message.content, reply.choices[0].finish_reason))


@pytest.mark.parametrize("end", ["stop", "length"])
def test_a_turn_that_a_stop_string_ends_was_not_cut(end: str) -> None:
    sampling = {"max_tokens": len(embedded_tokenizer().encode("one STOP"))} if end == "length" else {"stop": ["STOP"]}
    run(hears_how_it_ended, ["one STOP two"], check=False, sampling=sampling)
    assert [("one STOP", end)] == SEEN


async def rewriter(visit: ForeignVisit) -> None:
    async with client(visit) as api:
        messages = [{"role": "user", "content": "one"}]
        await chat(api, messages)
        messages.append({"role": "user", "content": "two"})
        await chat(api, messages)
        short = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "(summed up)"}]
        await chat(api, [*short, {"role": "user", "content": "three"}])


def test_a_rewrite_is_a_counted_stream_of_its_own() -> None:
    (trajectory,), _ = run(rewriter, {"main": ["a", "b"], "main~2": ["c"]})
    assert [stream.context for stream in trajectory.streams] == ["main", "main~2"]
    assert (trajectory.forks, trajectory.streams[1].why) == (1, "rewritten")
    assert trajectory.streams[0].tokens.trained_length == 4  # two turns of a token and a stop


async def brancher(visit: ForeignVisit) -> None:
    async with client(visit) as api:
        messages = [{"role": "user", "content": "one"}]
        await chat(api, messages)
        await asyncio.gather(*(chat(api, [*messages, {"role": "user", "content": f"{i}"}]) for i in range(3)))
        await chat(api, [{"role": "user", "content": "one"}])
        await chat(api, [{"role": "user", "content": "something else"}])


def test_a_branch_begins_with_the_very_tokens_that_it_shares() -> None:
    (trajectory,), _ = run(brancher, lambda request: f"{request.context} {request.turn}")
    names = [stream.context for stream in trajectory.streams]
    assert sorted(names) == ["main", "main+2", "main~2", "main~3", "main~4"]
    streams = {stream.context: stream.tokens for stream in trajectory.streams}
    first = next(stream for stream in trajectory.streams if stream.context == "main")
    end = [span.end for span in first.tokens.spans][1]
    for name in ("main~2", "main~3"):
        assert streams[name].ids[:end] == streams["main"].ids[:end]
        assert streams[name].prompt_length > end
    again = streams["main~4"]  # another answer to the first question
    assert again.ids[: again.prompt_length] == streams["main"].ids[: streams["main"].prompt_length]
    assert trajectory.forks == 3
    reasons = {stream.context: stream.why for stream in trajectory.streams}
    earlier = dict.fromkeys(("main~2", "main~3"), "earlier_point")
    assert reasons == {"main": "", **earlier, "main~4": "another_answer", "main+2": "conversation"}
    number = trajectory.streams.index(first)
    shared = {stream.context: stream.shares for stream in trajectory.streams}
    whole, opening = (number, end), (number, first.tokens.prompt_length)
    assert shared == {"main": None, "main+2": None, "main~2": whole, "main~3": whole, "main~4": opening}


async def two_conversations(visit: ForeignVisit) -> None:
    async with client(visit) as api:
        plans = [{"role": "system", "content": "Plan."}, {"role": "user", "content": "p"}]
        works = [{"role": "system", "content": "Work."}, {"role": "user", "content": "w"}]
        for number in range(3):
            await chat(api, plans)
            await chat(api, works)
            plans.append({"role": "user", "content": f"p{number}"})
            works.append({"role": "user", "content": f"w{number}"})


def test_histories_that_grow_side_by_side_are_a_stream_each() -> None:
    (trajectory,), _ = run(two_conversations, lambda request: f"turn {request.turn}")
    assert [stream.context for stream in trajectory.streams] == ["main", "main+2"]
    assert [stream.turn for stream in trajectory.streams] == [4, 5]
    assert trajectory.forks == 0


async def titler(visit: ForeignVisit) -> None:
    """Do nothing but what is beside the work of others."""
    async with client(visit) as api:
        for text in ("one", "two"):
            system = {"role": "system", "content": "You write conversation titles."}
            await chat(api, [system, {"role": "user", "content": text}])


def test_an_agent_s_own_work_is_trained_whatever_it_asks() -> None:
    (trajectory,), _ = run(titler, lambda request: f"Title {request.turn}")
    assert [(stream.context, stream.why) for stream in trajectory.streams] == [("main", ""), ("main+2", "conversation")]


async def opencode(visit: ForeignVisit) -> None:
    """Call as opencode does: a title, its work, a sub-agent, a summary, and what goes on from that."""

    def told(number: int, rest: str = "") -> list[dict[str, Any]]:
        return [{"role": "system", "content": f"Work.\nToday's date: 2026-11-{number}{rest}"}]

    tools = [CALCULATOR, {"type": "function", "function": {"name": "note", "parameters": {"type": "object"}}}]
    async with client(visit) as api:

        async def say(messages: list[Any], session: str = "a", **options: Any) -> Any:
            return await chat(api, messages, extra_headers={"x-session-id": session}, **options)

        title = {"role": "system", "content": "You are a title generator."}
        asked = {"role": "user", "content": visit.task}
        await say([title, {"role": "user", "content": "Generate a title for this conversation:"}, asked])
        work = [asked]
        called = await say(history := [*told(26), *work], tools=tools)
        work.append(history[-1] | {"content": called.content + "\n"})
        work[-1]["tool_calls"][0]["id"] = "renamed"
        work += [{"role": "tool", "tool_call_id": "renamed", "content": "42"}, *told(26)]
        await say(history := [*told(27), *work], tools=tools[::-1])
        await say([*told(28), asked], session="b", tools=tools)
        prompt = {"role": "user", "content": "Give a detailed summary of our conversation."}
        summary = await say([{"role": "system", "content": "You sum up."}, *work, history[-1], prompt])
        after = [asked, {"role": "user", "content": f"So far: {summary.content}"}]
        await say([*told(29), *after], tools=tools)
        await say([*told(29, "; be brief."), asked, {"role": "assistant", "content": "x"}, asked], tools=tools)


@pytest.mark.parametrize("train", [False, True])
def test_a_harness_s_histories_are_a_stream_each_and_each_says_why(train: bool) -> None:
    graph = visited_by(opencode, f"train_side_calls: {str(train).lower()}")
    turns = {"main": [f"I add. {CALL}", "It is 42."]}
    (trajectory,), _ = run(graph, turns | {f"main{mark}": ["as was said before"] for mark in FORKS}, check=train)
    assert trajectory.stop_reason == "answered", trajectory.detail
    side, work, *others = trajectory.streams
    assert (work.context, work.why, [m["role"] for m in work.messages]) == (
        "main", "", ["system", "user", "assistant", "tool", "assistant"],
    )  # fmt: skip
    assert work.messages[3]["tool_call_id"] == work.messages[2]["tool_calls"][0]["id"] != "renamed"
    assert (side.why, side.tokens.trained_length > 0) == ("side_call", train)
    assert [stream.why for stream in others] == ["sub_agent", "summary", "compaction", "system_changed"]
    assert all(stream.tokens.trained_length for stream in others)


def test_a_call_that_was_broken_off_goes_on_where_it_was() -> None:
    slow = Turn(text="a long answer", delay=0.25, chunks=4)
    engine = ScriptedEngine({"main": [slow, "b"]}, tokenizer=embedded_tokenizer(), log=True)

    async def gives_up(visit: ForeignVisit) -> None:
        """Break a call off, ask it again, then go on."""
        async with client(visit) as api:
            messages = [{"role": "user", "content": "one"}]
            first = asyncio.create_task(chat(api, messages))
            while not any(isinstance(entry.what, Chunk) and len(entry.what.ids) for entry in engine.log):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            reply = await chat(api, messages)
            assert reply.content == "a long answer"
            messages.append({"role": "user", "content": "two"})
            await chat(api, messages)

    (trajectory,), _ = run(gives_up, engine)
    assert trajectory.stop_reason == "answered", trajectory.detail
    assert [stream.context for stream in trajectory.streams] == ["main"]
    assert trajectory.generations == 2
    assert trajectory.spent["assistant_turns"] == 2


async def asks_in_each_visit(visit: ForeignVisit) -> None:
    SEEN.append({"role": "user", "content": "Go on."})
    async with client(visit) as api:
        await chat(api, SEEN)


def test_a_later_visit_goes_on_behind_a_turn_whose_thinking_was_closed_at_once() -> None:
    visited_by(asks_in_each_visit)
    key = "use: 'tests.foreign:visitor'"
    twice = YAML.replace("AGENT", key).replace("source: EXTERNAL", "source: AGAIN")
    again = f"  AGAIN: {{handler: external, {key}, timeout: 600}}\ntransitions:\n"
    graph = loads(twice.replace("transitions:\n", f"{again}  - {{trigger: returned, source: EXTERNAL, dest: AGAIN}}\n"))
    main = graph.context("main").model_copy(update={"chat_template": PREFILLED})
    graph = graph.model_copy(update={"contexts": {"main": main}})
    (trajectory,), _ = run(graph, lambda request: "Well.", sampling={"thinking_tokens": 0})
    assert trajectory.generations == 2, trajectory.detail
    assert [stream.context for stream in trajectory.streams] == ["main"]


# -- streaming, and Anthropic's protocol ----------------------------------------------------------------------------


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


def test_a_server_that_could_not_listen_is_begun_anew_by_the_next_visit(monkeypatch: pytest.MonkeyPatch) -> None:
    start, tried = web.TCPSite.start, list[web.TCPSite]()

    async def at_the_second_try(self: web.TCPSite) -> None:
        tried.append(self)
        if len(tried) == 1:
            raise OSError(24, "Too many open files")
        await start(self)

    monkeypatch.setattr(web.TCPSite, "start", at_the_second_try)
    trajectories, _ = run(hears_how_it_ended, ["one"] * 2, n=2, check=False)
    failed, answered = sorted(trajectories, key=lambda trajectory: trajectory.stop_reason == "answered")
    assert "cannot listen at 127.0.0.1:0: Too many open files (at" in str(failed.detail)
    assert answered.stop_reason == "answered", answered.detail


async def test_what_a_server_had_begun_is_ended_where_it_cannot_be_set_up() -> None:
    ended = []

    async def begun(_: web.Application) -> AsyncIterator[None]:
        yield
        ended.append("begun")

    async def failing(_: web.Application) -> None:
        raise ConfigError("no")

    app = web.Application()
    app.cleanup_ctx.append(begun)
    app.on_startup.append(failing)
    with pytest.raises(ConfigError, match="no"):
        async with listening_at(app, "127.0.0.1", 0, 1.0):
            pass
    assert ended == ["begun"]
