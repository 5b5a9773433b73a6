"""Tools that callers bring to a served agent: they are handed its calls, and it goes on with the results."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import pytest
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from hypothesis import given, settings
from hypothesis import strategies as st

from fsm_rollout.engines.protocol import Chunk, Request
from fsm_rollout.states.bound_agent import CALLERS_TOOLS
from fsm_rollout.testing.simulation.simulate import embedded_tokenizer
from fsm_rollout.tools import tool_schema
from fsm_rollout.trajectory.journal import read
from tests.foreign import CALL
from tests.unit.serve.kit import CHATTING, SINGLE, Served, refused, served


def look_up(word: str) -> str:
    """Look a word up."""
    return f"{word}: forty-two"


TOOL: Any = tool_schema(look_up)
LOOK_UP = '<tool_call>\n{"name": "look_up", "arguments": {"word": "WORD"}}\n</tool_call>'
TURNS = [
    f"Let me see. {CALL}\n{LOOK_UP.replace('WORD', 'six')}\n{LOOK_UP.replace('WORD', 'seven')}",
    f"And more. {CALL}",
    LOOK_UP.replace("WORD", "eight"),
    "It is 42.",
    "You are welcome.",
]


class Turn(NamedTuple):
    """An answer as a caller sees it."""

    text: str
    calls: dict[str, Any]  # by their ids
    ended: str  # why, in the protocol's words


class Caller:
    """Somebody who speaks one protocol, and sends the whole history each time unless the protocol keeps it."""

    def __init__(
        self, server: Served, way: str, model: str = "chatting", key: str = "none",
        options: Mapping[str, Any] | None = None, client: Any = None,
    ) -> None:  # fmt: skip
        self.protocol, _, self.how = way.partition(" ")
        self.history: list[Any] = []
        self.previous: str | None = None
        anthropics = partial(anthropic.AsyncAnthropic, base_url=server.url, api_key=key, max_retries=0)
        self.client = client or (anthropics() if self.protocol == "anthropic" else server.openai(key))
        self.asked: dict[str, Any] = {"model": model, **(options or {})}

    async def say(self, text: str) -> Turn:
        return await self._send([{"role": "user", "content": text}])

    async def answer(self, results: Sequence[tuple[str, str]], said: Sequence[str] = ()) -> Turn:
        """Send the results of calls, and what is said beside them."""
        more = [{"role": "user", "content": text} for text in said]
        if self.protocol == "chat":
            told = [{"role": "tool", "tool_call_id": id, "content": text} for id, text in results]
        elif self.protocol == "responses":
            told = [{"type": "function_call_output", "call_id": id, "output": text} for id, text in results]
        else:
            blocks = [{"type": "tool_result", "tool_use_id": id, "content": text} for id, text in results]
            texts = [{"type": "text", "text": text} for text in said]
            return await self._send([{"role": "user", "content": [*blocks, *texts]}])
        return await self._send([*told, *more])

    async def _send(self, new: list[Any]) -> Turn:
        self.history += new
        return await getattr(self, f"_{self.protocol}")(new)  # type: ignore[no-any-return]

    async def _chat(self, new: list[Any]) -> Turn:
        tool = TOOL | {"cache_control": None, "function": TOOL["function"] | {"strict": None}}  # as some send it
        asked: Any = self.asked | {"messages": self.history, "tools": [tool]}
        if self.how == "streamed":
            message: dict[str, Any] = {"role": "assistant", "content": ""}
            async for chunk in await self.client.chat.completions.create(**asked, stream=True):
                (choice,) = chunk.choices
                message["content"] += choice.delta.content or ""
                for call in choice.delta.tool_calls or ():
                    message.setdefault("tool_calls", []).append(call.model_dump(exclude={"index"}))
        else:
            (choice,) = (await self.client.chat.completions.create(**asked)).choices
            message = choice.message.model_dump(exclude_none=True)
        self.history.append(message)
        calls = {call["id"]: json.loads(call["function"]["arguments"]) for call in message.get("tool_calls", ())}
        return Turn(message.get("content", ""), calls, choice.finish_reason)

    async def _responses(self, new: list[Any]) -> Turn:
        tool = {"type": "function", "strict": False, **TOOL["function"]}
        asked: Any = self.asked | {"input": self.history, "tools": [tool]}
        if self.how == "by id" and self.previous:
            asked |= {"input": new, "previous_response_id": self.previous}
        if self.how == "streamed":
            async with self.client.responses.stream(**asked) as stream:
                response: Any = await stream.get_final_response()
        else:
            response = await self.client.responses.create(**asked)
        self.previous = response.id
        self.history += [item.model_dump(exclude_none=True) for item in response.output]
        for item in self.history:
            item.pop("parsed_arguments", None)
        calls = {item.call_id: json.loads(item.arguments) for item in response.output if item.type == "function_call"}
        return Turn(response.output_text, calls, response.status)

    async def _anthropic(self, new: list[Any]) -> Turn:
        function = TOOL["function"]
        tool = {k: function[k] for k in ("name", "description")} | {"input_schema": function["parameters"]}
        asked: Any = self.asked | {"max_tokens": 200, "messages": self.history, "tools": [tool]}
        if self.how == "streamed":
            async with self.client.messages.stream(**asked) as stream:
                message: Any = await stream.get_final_message()
        else:
            message = await self.client.messages.create(**asked)
        self.history.append({"role": "assistant", "content": [block.model_dump() for block in message.content]})
        text = "".join(block.text for block in message.content if block.type == "text")
        calls = {block.id: block.input for block in message.content if block.type == "tool_use"}
        return Turn(text, calls, message.stop_reason)


@asynccontextmanager
async def calling(
    server: Served, way: str, model: str = "chatting", key: str = "none", **options: Any
) -> AsyncIterator[Caller]:
    caller = Caller(server, way, model, key, options)
    async with caller.client:
        yield caller


ENDS = {"chat": ("tool_calls", "stop"), "responses": ("completed",) * 2, "anthropic": ("tool_use", "end_turn")}
WAYS = [
    "chat whole", "chat streamed", "responses whole", "responses streamed", "responses by id", "anthropic whole",
    "anthropic streamed",
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
async def test_calls_of_a_caller_s_tools_are_handed_to_it_and_the_trajectory_goes_on_with_the_results(way: str) -> None:
    async with served(TURNS) as server, calling(server, way) as caller:
        calling_, ending = ENDS[caller.protocol]
        # 1. Of three calls in a turn one is the agent's own, and done by then.
        first = await caller.say("What is it?")
        assert (first.text, first.ended) == ("Let me see.", calling_)
        assert list(first.calls.values()) == [{"word": "six"}, {"word": "seven"}]
        (trajectory,) = server.trajectories.values()
        assert [called.result for called in trajectory.called] == ["42"]
        assert trajectory.suspended == "waits for its user"
        # 2. Then a turn with its own alone, of which the caller sees the text, and one with the caller's alone.
        second = await caller.answer([(id, look_up(**arguments)) for id, arguments in reversed(first.calls.items())])
        assert (second.text, list(second.calls.values()), second.ended) == ("And more.", [{"word": "eight"}], calling_)
        third = await caller.answer([(id, look_up(**arguments)) for id, arguments in second.calls.items()])
        assert third == ("It is 42.", {}, ending)
        assert await caller.say("Thanks.") == ("You are welcome.", {}, ending)
        # 3. All that is one trajectory and one stream, of which the engine's own turns are trained.
        assert list(server.trajectories.values()) == [trajectory]
        (stream,) = trajectory.streams
        assert [(m["role"], m["content"]) for m in stream.messages if m["role"] != "assistant"] == [
            ("user", "What is it?"), ("tool", "42"), ("tool", "six: forty-two"), ("tool", "seven: forty-two"),
            ("tool", "42"), ("tool", "eight: forty-two"), ("user", "Thanks."),
        ]  # fmt: skip
        assert trajectory.spent["tool_calls"] == 5
        assert "null" not in json.dumps(trajectory.extra[CALLERS_TOOLS])


SESSIONS, RULES = 256, "Be brief, and work on. " * 1_800  # 40 kB


@pytest.mark.real
async def test_256_sessions_at_once_with_bodies_of_40_kb_are_all_answered() -> None:
    """All their requests are with the engine before it answers any, twice; nobody hears what was said to another."""
    tokenizer = embedded_tokenizer()

    def named(request: Request) -> str:
        (*_, name) = re.findall(r"I am (\w+)", tokenizer.decode(request.ids[-200:]))
        return f"Hello, {name}: {request.turn}."

    async with served(named, calls=SESSIONS, waiting=SESSIONS) as server, server.openai() as openais:
        openais.timeout = 600.0  # the callers have the core of the server, and take more of it
        anthropics = anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0, timeout=600)
        generate, asked, everybody = server.engine.generate, set[str](), [asyncio.Event(), asyncio.Event()]

        async def together(requests: Sequence[Request]) -> AsyncIterator[Chunk]:
            asked.update(request.request_id for request in requests)
            for turn, all_there in enumerate(everybody, 1):
                if len(asked) == turn * SESSIONS:
                    all_there.set()
            await everybody[requests[0].turn].wait()
            async for chunk in generate(requests):
                yield chunk

        server.engine.generate = together  # type: ignore[method-assign]

        async def talk(name: str, way: str) -> None:
            client = anthropics if "anthropic" in way else openais
            options = {"system": RULES} if "anthropic" in way else {"instructions": RULES} if "responses" in way else {}
            caller = Caller(server, way, options=options, client=client)
            if "chat" in way:
                caller.history.append({"role": "system", "content": RULES})
            assert (await caller.say(f"I am {name}.")).text == f"Hello, {name}: 0."
            assert (await caller.say("And now?")).text == f"Hello, {name}: 1."

        async with anthropics, asyncio.TaskGroup() as group:
            for number in range(SESSIONS):
                group.create_task(talk(f"n{number}", WAYS[number % len(WAYS)]))
        assert len(server.trajectories) == SESSIONS
        assert {len(trajectory.streams) for trajectory in server.trajectories.values()} == {1}


SAID = st.sampled_from(["yes", "what is 2 + 2?", "é漢字", "<|im_end|>", " a b  c ", CALL])
BROKEN = '<tool_call>\n{"name": "look_up", "argum\n</tool_call>'
CALLS = st.lists(
    st.sampled_from([LOOK_UP, LOOK_UP, CALL, BROKEN, LOOK_UP.replace("look_up", "look_down")]), min_size=1, max_size=3
)
ANSWERS = st.lists(st.tuples(st.sampled_from(["", "Well.", "é漢 ", "<think>hm</think> So."]), CALLS), max_size=3)


@settings(max_examples=min(12, settings().max_examples))  # each is a server
@given(st.lists(st.tuples(SAID, ANSWERS), min_size=1, max_size=3), st.sampled_from(WAYS), st.data())
def test_whatever_is_called_and_answered_is_one_stream_with_what_the_engine_sampled(
    asked: list[tuple[str, list[tuple[str, list[str]]]]], way: str, data: st.DataObject
) -> None:
    """Of each question: turns with calls, and one without. That the ids are the engine's own is checked at the end."""
    turns = [text for _, answers in asked for text in [*("\n".join([t, *calls]) for t, calls in answers), "Done."]]
    agents = CHATTING.replace("_turns: 6", "_turns: 20").replace("_calls: 8", "_calls: 40").replace(" 900", " 9000")
    told: list[str] = []

    async def main() -> None:
        async with served(turns, agents=agents) as server, calling(server, way) as caller:
            for question, _ in asked:
                turn = await caller.say(question)
                while turn.calls:
                    results = [(id, data.draw(SAID)) for id in turn.calls]
                    told.extend(text for _, text in results)
                    turn = await caller.answer(data.draw(st.permutations(results)))
                assert turn.text.endswith("Done.")
            (trajectory,) = server.trajectories.values()
            (stream,) = trajectory.streams
            theirs = [c.id for t in trajectory.assistant_turns for c in t.calls if getattr(c, "name", "") == "look_up"]
            results_of = {m["tool_call_id"]: m["content"] for m in stream.messages if m["role"] == "tool"}
            assert [results_of[id] for id in theirs] == told
            assert [m["content"] for m in stream.messages if m["role"] == "user"] == [text for text, _ in asked]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("model", "streamed"),
    [(OpenAIResponsesModel, False), (OpenAIResponsesModel, True), (OpenAIChatCompletionsModel, False)],
)
async def test_an_agent_of_the_agents_sdk_carries_out_its_own_tools_and_goes_on(model: Any, streamed: bool) -> None:
    set_tracing_disabled(True)
    async with served(TURNS) as server, server.openai() as client:
        ours: Any = Agent("ours", "Be brief.", model=model("chatting", client), tools=[function_tool(look_up)])
        if streamed:
            result: Any = Runner.run_streamed(ours, "What is it?")
            events = [event.type async for event in result.stream_events()]
            assert "raw_response_event" in events
        else:
            result = await Runner.run(ours, "What is it?")
        assert result.final_output == "It is 42."
        thanks: Any = {"role": "user", "content": "Thanks."}
        assert (await Runner.run(ours, [*result.to_input_list(), thanks])).final_output == "You are welcome."
        (trajectory,) = server.trajectories.values()
        assert trajectory.generations == 5
        assert len(trajectory.streams) == 1


async def test_a_caller_that_answers_otherwise_begins_a_new_trajectory() -> None:
    async with served(lambda request: TURNS[0] if not request.turn else "well") as server:
        for wrong in ("one result", "a question", "another name", "twice"):
            before = len(server.trajectories)
            async with calling(server, "chat whole") as caller:
                first, second = (await caller.say("What is it?")).calls
                match wrong:
                    case "one result":
                        await caller.answer([(first, "x")])
                    case "a question":
                        await caller.say("Well?")
                    case "another name":
                        await caller.answer([(first, "x"), ("c9", "x")])
                    case "twice":
                        await caller.answer([(first, "x"), (second, "x"), (first, "x")])
                assert len(server.trajectories) == before + 2, wrong


@pytest.mark.parametrize("way", ["chat whole", "responses by id", "anthropic whole"])
async def test_what_a_caller_says_beside_the_results_follows_them(way: str) -> None:
    async with served(TURNS) as server, calling(server, way) as caller:
        said = ["Go on.", "Quickly."]
        turn = await caller.say("What is it?")
        turn = await caller.answer([(id, "x") for id in turn.calls], said)
        assert (await caller.answer([(id, "x") for id in turn.calls])).text == "It is 42."
        (trajectory,) = server.trajectories.values()
        assert len(trajectory.streams) == 1
        told = [m["content"] for m in trajectory.messages if m["role"] == "user"]
        assert told == ["What is it?", *(["".join(said)] if caller.protocol == "anthropic" else said)]


async def test_the_names_of_calls_and_their_order_are_the_caller_s() -> None:
    async with served(TURNS) as server, calling(server, "chat whole") as caller:
        await caller.say("What is it?")
        for call, name in zip(caller.history[-1]["tool_calls"], ("b", "a"), strict=True):
            call["id"] = name
        await caller.answer([("a", "seven: x"), ("b", "six: x")])
        (trajectory,) = server.trajectories.values()
        assert [m["content"] for m in trajectory.messages if m["role"] == "tool"][1:3] == ["six: x", "seven: x"]


def test_a_server_that_is_started_again_waits_for_results_and_for_what_is_said_next(tmp_path: Path) -> None:
    """Of the same caller, who asks for the same sampling."""
    journal = tmp_path / "journal.sqlite"
    kept: list[Any] = []

    async def goes_on(step: Callable[[Caller], Awaitable[object]]) -> None:
        async with (
            served(TURNS, journal=journal, keys=("k",)) as server,
            calling(server, "chat whole", key="k", temperature=0.5) as caller,
        ):
            await server.until(lambda: server.service.waiting or not kept)
            caller.history = kept[:]
            await step(caller)
            kept[:] = caller.history

    async def asks(caller: Caller) -> None:
        calls = (await caller.say("What is it?")).calls
        await caller.answer([(id, look_up(**arguments)) for id, arguments in reversed(calls.items())])

    async def answers(caller: Caller) -> None:
        assert (await caller.answer([(kept[-1]["tool_calls"][0]["id"], "x")])).text == "It is 42."

    async def says(caller: Caller) -> None:
        assert (await caller.say("Thanks.")).text == "You are welcome."

    for step in (asks, answers, says):
        asyncio.run(goes_on(step))
    (trajectory,) = read(journal)
    assert len(trajectory.streams) == 1
    assert [len(turn.calls) for turn in trajectory.assistant_turns] == [3, 1, 1, 0, 0]


async def test_calls_that_nobody_carries_out_end_their_trajectory() -> None:
    async with served(TURNS, wait_seconds=0.01) as server, calling(server, "chat whole") as caller:
        await caller.say("What is it?")
        (trajectory,) = server.trajectories.values()
        await server.until(lambda: trajectory.ended)
        assert trajectory.stop_reason == "cancelled"


async def test_calls_that_are_wrong_are_answered_here() -> None:
    """Of a tool that nobody has, and one that cannot be read: their caller sees the others alone."""
    nobody = LOOK_UP.replace("look_up", "look_down")
    async with served([f"{BROKEN}\n{nobody}\n{LOOK_UP}", "well"]) as server, calling(server, "chat whole") as caller:
        ((id, arguments),) = (await caller.say("?")).calls.items()
        assert arguments == {"word": "WORD"}
        assert (await caller.answer([(id, "x")])).text == "well"
        (trajectory,) = server.trajectories.values()
        (_, unknown, own) = [m["content"] for m in trajectory.messages if m["role"] == "tool"]
        assert own == "x"
        assert "calculate, look_up" in unknown


async def test_tools_that_cannot_be_handed_over_are_refused_with_the_reason() -> None:
    own = {"type": "function", "function": {"name": "calculate", "parameters": {"type": "object"}}}
    async with served(lambda request: "well") as server:
        for tools, why in (([own, TOOL], "calculate, which the agent has"), ([TOOL, TOOL], "look_up twice")):
            error = await refused(server, tools=tools)
            assert (error.status_code, error.param) == (400, "tools")  # type: ignore[attr-defined]
            assert why in str(error)
        error = await refused(server, tools=[TOOL], tool_choice="required")
        assert error.param == "tool_choice"  # type: ignore[attr-defined]
        answer = await server.ask("?", tools=[own, TOOL], tool_choice="none", parallel_tool_calls=False)
        assert answer.choices[0].message.content == "well"
    async with served(lambda request: "well", agents=SINGLE) as server:
        error = await refused(server, model="single", tools=[TOOL])
        assert "PROCESSING_TOOLS" in str(error)


async def test_what_a_count_counts_is_the_prompt_with_all_tools() -> None:
    async with served(TURNS) as server, calling(server, "anthropic whole") as caller:
        await caller.say("What is it?")
        function = TOOL["function"]
        tool: Any = {"name": "look_up", "description": function["description"], "input_schema": function["parameters"]}
        messages: Any = caller.history[:1]
        counted = await caller.client.messages.count_tokens(model="chatting", messages=messages, tools=[tool])
        (trajectory,) = server.trajectories.values()
        assert counted.input_tokens == trajectory.streams[0].tokens.prompt_length
