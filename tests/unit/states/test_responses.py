"""OpenAI's responses as a foreign agent speaks them, by the official client and by bytes: exact rows, one stream."""

import asyncio
import json
from copy import deepcopy
from typing import Any

import aiohttp
import openai
import pytest
from agents import Agent, FunctionTool, OpenAIResponsesModel, RunContextWrapper, Runner, set_tracing_disabled

from fsm_rollout.engines.scripted.script import Turn
from fsm_rollout.states.external.handler import ForeignVisit
from fsm_rollout.states.external.response_items import Items
from fsm_rollout.states.external.responses_dialect import read
from fsm_rollout.testing.simulation.simulate import embedded_tokenizer
from fsm_rollout.tools.calculator import calculate
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.cases import cases
from tests.foreign import CALCULATOR, CALL, Visitor, client, run, visited_by
from tests.laws.test_thinking import PREFILLED
from tests.unit.report.test_pictures import picture
from tests.vision import gemma3

FUNCTION = CALCULATOR["function"]
TOOL = {"type": "function", "strict": False, **FUNCTION}
CUSTOM = {"type": "custom", "name": "note", "description": "Writes down.", "format": {"type": "text"}}
SPACE = {"type": "namespace", "name": "maths", "description": "Numbers.", "tools": [TOOL]}
NOTE = '<tool_call>\n{"name": "note", "arguments": {"input": "é\\n漢"}}\n</tool_call>'
IN_SPACE = CALL.replace("calculate", "maths__calculate")
THOUGHT = "<think>\nTwenty, and\nmore.\n</think>\n\n"


def visits(visitor: Visitor, turns: Any, *, processor: Any = None, tokenizer: Any = None, **limits: int) -> Trajectory:
    """Run a foreign agent, which is a function, once; its rows are held to the engine's log."""
    graph = visited_by(visitor, "dialect: responses", **limits)
    (trajectory,), _ = run(graph, turns, processor=processor, tokenizer=tokenizer)
    assert trajectory.failure is None, trajectory.detail
    return trajectory


def names(trajectory: Trajectory) -> list[str]:
    return [stream.context for stream in trajectory.streams]


def test_a_history_of_items_is_one_row_whatever_the_tools_are_and_whatever_was_dropped() -> None:
    async def visitor(visit: ForeignVisit) -> None:
        async with client(visit) as api:
            items: Any = [{"role": "developer", "content": "Count."}, {"role": "user", "content": visit.task}]
            tools: Any = [TOOL, CUSTOM, SPACE, {"type": "web_search"}]
            first = await api.responses.create(model="m", input=items, tools=tools, instructions="Be brief.")
            kinds = ["reasoning", "message", "function_call", "custom_tool_call", "function_call"]
            assert [item.type for item in first.output] == kinds
            reasoning, message, plain, custom, spaced = (item.model_dump() for item in first.output)
            assert reasoning["content"] == [{"text": "Twenty, and\nmore.", "type": "reasoning_text"}]
            assert first.output_text == "Let me see."
            assert custom["input"] == "é\n漢"
            assert (spaced["namespace"], spaced["name"]) == ("maths", "calculate")
            assert (first.status, first.usage.input_tokens > 20) == ("completed", True)  # type: ignore[union-attr]
            out = [
                {"type": f"{kind}_output", "call_id": call["call_id"], "output": "42"}
                for kind, call in (("function_call", plain), ("custom_tool_call", custom), ("function_call", spaced))
            ]
            # As one sends it that puts each result behind its call, drops the thought, and has no ids but two.
            bare = [{key: value for key, value in item.items() if key != "id"} for item in (message, plain)]
            items += [*bare, custom | {"id": None}, spaced, out[0], out[1], out[2]]
            again = await api.responses.create(model="m", input=items, tools=tools, instructions="Be brief.")
            assert again.output_text == "It is 42."
            items += [item.model_dump() for item in again.output] + [{"role": "user", "content": "Sure?"}]
            last = await api.responses.create(model="m", input=items, tools=tools, instructions="Be brief.")
            items += [item.model_dump() for item in last.output]
            mixed = [items[0], items[1], reasoning, message, plain, out[0], custom, out[1], spaced, out[2]]
            other: Any = [*mixed, *items[9:], {"role": "user", "content": "And?"}]
            with pytest.raises(openai.BadRequestError, match="the limit 'assistant_turns'"):
                await api.responses.create(model="m", input=other, tools=tools, instructions="Be brief.")

    calls = f"{CALL}\n{NOTE}\n{IN_SPACE}"
    graph = visited_by(visitor, "dialect: responses", assistant_turns=3)
    (trajectory,), _ = run(graph, [f"{THOUGHT}Let me see.\n{calls}", "It is 42.", "Yes."])
    assert trajectory.stop_reason == "limit:assistant_turns", trajectory.detail
    (stream,) = trajectory.streams
    roles = ["system", "system", "user", "assistant", "tool", "tool", "tool", "assistant", "user", "assistant"]
    assert [message["role"] for message in stream.messages[:10]] == roles
    assert [message.get("name") for message in stream.messages[4:7]] == ["calculate", "note", "maths__calculate"]


async def events_of(visit: ForeignVisit, **body: Any) -> list[dict[str, Any]]:
    """Return the events that a call is answered with, as they come over the wire."""
    own = {"Authorization": f"Bearer {visit.api_key}"}
    asked = {"model": "m", "stream": True, **body}
    async with (
        aiohttp.ClientSession(headers=own) as http,
        http.post(f"{visit.base_url}/responses", json=asked) as answer,
    ):
        assert answer.status == 200, await answer.text()
        lines = (await answer.text()).split("\n\n")
    events = [json.loads(line.partition("\ndata: ")[2]) for line in lines if line]
    assert [line.partition("\n")[0].removeprefix("event: ") for line in lines if line] == [e["type"] for e in events]
    return events


@pytest.mark.parametrize(
    ("text", "options", "last"),
    [
        (f"{THOUGHT}Let me see.\n{CALL}\n{NOTE}", {}, "completed"),
        ("It is forty-two, I think.", {}, "completed"),
        (CALL, {}, "completed"),
        ("", {}, "completed"),
        ("It is forty-two, I think.", {"max_output_tokens": 3}, "incomplete"),
        (f"{THOUGHT}Let me see.", {"max_output_tokens": 5}, "incomplete"),
    ],
)
def test_events_come_in_the_order_that_clients_demand_and_say_what_the_whole_says(
    text: str, options: dict[str, Any], last: str
) -> None:
    seen: list[Any] = []

    async def visitor(visit: ForeignVisit) -> None:
        asked = {"input": "x", "tools": [TOOL, CUSTOM], **options}
        seen.extend([await events_of(visit, **asked)])
        # The same question asks for another answer.
        async with client(visit) as api, api.responses.stream(model="m", **asked) as stream:
            seen.append([event async for event in stream])

    visits(visitor, lambda request: Turn(text=text, chunks=9, delay=0.001))
    events, by_client = seen
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert [*kinds[:2], kinds[-1]] == ["created", "in_progress", last]
    response = events[-1]["response"]
    assert {event["response"]["id"] for event in events if "response" in event} == {response["id"]}
    # Each item is added, told piece by piece, and done, before the next one is.
    items, place = response["output"], 2
    for index, item in enumerate(items):
        end = kinds.index("output_item.done", place)
        assert kinds[place] == "output_item.added"
        assert events[end]["item"] == item
        assert {event["output_index"] for event in events[place : end + 1]} == {index}
        pieces = [event["delta"] for event in events[place:end] if "delta" in event]
        match item["type"]:
            case "reasoning":
                told = item["content"][0]["text"]
            case "message":
                told = item["content"][0]["text"]
            case "custom_tool_call":
                told = item["input"]
            case _:
                told = item["arguments"]
        assert "".join(pieces) == told
        place = end + 1
    assert place == len(events) - 1
    assert [len(event["response"]["tools"]) for event in events if "response" in event] == [0, 0, 2]
    assert [event.type for event in by_client] == [event["type"] for event in events]
    assert (response["incomplete_details"] is None) == (last == "completed")


def test_thoughts_are_carried_by_their_callers() -> None:
    async def visitor(visit: ForeignVisit) -> None:
        async with client(visit) as api:
            sealed: Any = ["reasoning.encrypted_content"]
            first = await api.responses.create(model="m", input="one", tools=[TOOL], include=sealed)  # type: ignore[list-item]
            thought, text = (item.model_dump() for item in first.output)
            assert Items().take({"type": "reasoning", "encrypted_content": "gAAA"}, "input[0]") is None
            read = Items()
            read.take({key: thought[key] for key in ("type", "encrypted_content")}, "input[0]")
            assert read.messages[0]["reasoning_content"] == thought["content"][0]["text"] == "Twenty, and\nmore."
            # Its items are a history like any other.
            items: Any = [{"role": "user", "content": "one"}, thought, text, {"role": "user", "content": "two"}]
            await api.responses.create(model="m", input=items, tools=[TOOL])  # type: ignore[list-item]

    assert names(visits(visitor, [f"{THOUGHT}Yes.", "No."])) == ["main"]


def test_an_answer_is_its_own_visit_s_alone() -> None:
    answers: list[str] = []

    async def visitor(visit: ForeignVisit) -> None:
        async with client(visit) as api:
            own = (await api.responses.create(model="m", input="one")).id
            answers.append(own)
            while len(answers) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0)
            (other,) = set(answers) - {own}
            with pytest.raises(openai.BadRequestError, match="no answer"):
                await api.responses.create(model="m", input="two", previous_response_id=other)

    trajectories, _ = run(visited_by(visitor, "dialect: responses"), lambda request: "yes", n=2)
    assert [t.failure for t in trajectories] == [None, None], [t.detail for t in trajectories]


def test_what_was_answered_is_named_by_its_id() -> None:
    async def visitor(visit: ForeignVisit) -> None:
        async with client(visit) as api:
            ask: Any = api.responses.create
            first = await ask(model="m", input="one", tools=[TOOL], instructions="Count.")
            (call,) = [item for item in first.output if item.type == "function_call"]
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
            after = {"previous_response_id": first.id, "tools": [TOOL]}
            second = await ask(model="m", input=[result], instructions="Count.", **after)
            (text,) = [item.id for item in second.output if item.type == "message"]
            # Its items by reference, as clients do that have the server store them.
            thought, call_of_it = first.output
            by_name = [thought.model_dump(), {"type": "item_reference", "id": call_of_it.id}]
            items = [{"role": "user", "content": "one"}, *by_name, result, {"type": "item_reference", "id": text}]
            third = await ask(
                model="m", input=[*items, {"role": "user", "content": "two"}], tools=[TOOL], instructions="Count."
            )
            assert third.output_text == "main 2"
            # Instructions are not inherited: without them it is another history.
            fourth = await ask(model="m", input="three", previous_response_id=third.id, tools=[TOOL])
            assert fourth.output_text == "main+2 0"
            for wrong in ({"previous_response_id": "resp_none"}, {"previous_response_id": f"resp_{'0' * 24}"}):
                with pytest.raises(openai.BadRequestError) as error:
                    await ask(model="m", input="x", **wrong)
                assert (error.value.code, error.value.param) == (
                    "previous_response_not_found", "previous_response_id",
                )  # fmt: skip

    def turns(request: Any) -> str:
        return (
            f"{THOUGHT}{CALL}"
            if (request.context, request.turn) == ("main", 0)
            else f"{request.context} {request.turn}"
        )

    trajectory = visits(visitor, turns)
    assert names(trajectory) == ["main", "main+2"]
    assert [m["content"] for m in trajectory.streams[1].messages[:1]] == ["one"]


def test_an_answer_whose_thought_the_header_opens_is_found_by_its_id_in_forks_too() -> None:
    tokenizer = deepcopy(embedded_tokenizer())
    tokenizer.chat_template = PREFILLED

    async def visitor(visit: ForeignVisit) -> None:
        async with client(visit) as api:
            one = await api.responses.create(model="m", input="one")
            assert [item.type for item in one.output] == ["reasoning", "message"]
            two = await api.responses.create(model="m", input="two", previous_response_id=one.id)
            await api.responses.create(model="m", input="three", previous_response_id=two.id)
            fork = await api.responses.create(model="m", input="other", previous_response_id=two.id)
            last = await api.responses.create(model="m", input="more", previous_response_id=fork.id)
            assert last.output_text == "main~2 1"

    trajectory = visits(
        visitor, lambda request: f"hm\n</think>\n\n{request.context} {request.turn}", tokenizer=tokenizer
    )
    assert names(trajectory) == ["main", "main~2"]


def test_answers_behind_one_another_are_messages_of_their_own() -> None:
    items, (a, b) = Items(), ("a" * 24, "b" * 24)
    said: Any = {"type": "message", "role": "assistant", "content": "A", "id": f"msg_{a}"}
    call = {"type": "function_call", "id": f"fc_{b}_0", "name": "f", "call_id": "1"}
    for item in (said, {"type": "reasoning", "id": f"rs_{b}"}, said | {"content": "B", "id": f"msg_{b}"}, call):
        items.take(item, "input[0]")
    assert [(message["content"], "tool_calls" in message) for message in items.messages] == [("A", False), ("B", True)]


@pytest.mark.parametrize("how", ["endpoint", "trigger"])
def test_a_compaction_is_an_answer_and_what_goes_on_from_it_a_branch(how: str) -> None:
    async def visitor(visit: ForeignVisit) -> None:
        async with client(visit) as api:
            items: Any = [{"role": "user", "content": "one"}]
            first = await api.responses.create(model="m", input=items, tools=[TOOL])  # type: ignore[list-item]
            items += [item.model_dump(exclude_none=True) for item in first.output]
            if how == "endpoint":
                compacted = await api.post("/responses/compact", body={"model": "m", "input": items}, cast_to=object)
                assert compacted["object"] == "response.compaction"  # type: ignore[index]
                kept = compacted["output"]  # type: ignore[index]
            else:
                events = await events_of(visit, input=[*items, {"type": "compaction_trigger"}], tools=[TOOL])
                assert [event["type"] for event in events[2:4]] == [
                    "response.output_item.added", "response.output_item.done",
                ]  # fmt: skip
                kept = [items[0], *events[-1]["response"]["output"]]
            assert [item.get("type", item.get("role")) for item in kept] == ["user", "compaction"]
            again: Any = [*kept, {"role": "user", "content": "two"}]
            answer = await api.responses.create(model="m", input=again, tools=[TOOL])  # type: ignore[list-item]
            assert answer.output_text == "main~2 0"

    trajectory = visits(visitor, lambda request: f"{request.context} {request.turn}")
    before, after = trajectory.streams
    assert [m["content"] for m in before.messages if m["role"] == "assistant"] == ["main 0", "main 1"]
    assert after.messages[1]["content"].endswith("summary:\n\nmain 1")
    assert before.tokens.trained_length > 0 < after.tokens.trained_length


def test_the_oldest_is_left_out_where_there_is_no_room_if_the_caller_wants_that() -> None:
    async def visitor(visit: ForeignVisit) -> None:
        async with client(visit) as api:
            items: Any = [{"role": "system", "content": "Count."}]
            for number in range(3):
                items += [{"role": "user", "content": f"{number} " + "word " * 20}]
                items += [{"role": "assistant", "content": "yes"}]
            items += [{"role": "user", "content": "now"}]
            with pytest.raises(openai.BadRequestError) as error:
                await api.responses.create(model="m", input=items)
            assert error.value.code == "context_length_exceeded"
            assert (await api.responses.create(model="m", input=items, truncation="auto")).output_text == "yes"

    trajectory = visits(visitor, lambda request: "yes", context_tokens=150)
    (stream,) = trajectory.streams
    contents = [str(message["content"])[:2].strip() for message in stream.messages]
    assert contents == ["Co", "2", "ye", "no", "ye"]


async def asks(visit: ForeignVisit, data: bytes, **headers: str) -> tuple[int, Any]:
    own = {"Authorization": f"Bearer {visit.api_key}", **headers}
    async with (
        aiohttp.ClientSession(headers=own) as http,
        http.post(f"{visit.base_url}/responses", data=data) as answer,
    ):
        return answer.status, await answer.json(content_type=None)


@cases("states")
def test_what_cannot_be_done_is_refused_with_what_is_at_fault(
    body: dict[str, Any], param: str | None, message: str
) -> None:
    async def visitor(visit: ForeignVisit) -> None:
        status, told = await asks(visit, json.dumps({"input": "x", **body}).encode())
        assert (status, told["error"]["param"]) == (400, param), told
        assert message in told["error"]["message"]

    visits(visitor, [])


def test_bodies_may_be_packed_and_who_wants_a_socket_is_told_to_post() -> None:
    zstd = pytest.importorskip("backports.zstd", reason="is in the extra `external`")

    async def visitor(visit: ForeignVisit) -> None:
        packed = zstd.compress(b'{"input": "x"}')
        status, told = await asks(visit, packed, **{"Content-Encoding": "zstd"})
        assert (status, told["output"][0]["content"][0]["text"]) == (200, "yes")
        own = {"Authorization": f"Bearer {visit.api_key}"}
        async with aiohttp.ClientSession(headers=own) as http:
            with pytest.raises(aiohttp.WSServerHandshakeError) as error:
                await http.ws_connect(f"{visit.base_url}/responses")
        assert error.value.status == 426  # Upgrade Required: Codex goes on by HTTP at once

    visits(visitor, ["yes"])


def test_pictures_are_shown_as_prompts_show_them() -> None:
    shown: list[Any] = []

    async def visitor(visit: ForeignVisit) -> None:
        async with client(visit) as api:
            for number in (1, 1, 2):
                content = [
                    {"type": "input_image", "image_url": picture(number, 40, 30).data_uri(), "detail": "auto"},
                    {"type": "input_text", "text": "What is it?"},
                ]
                question: Any = [{"role": "user", "content": content}]
                answer = await api.responses.create(model="m", input=question)
                shown.append(answer.output_text)

    trajectory = visits(visitor, lambda request: request.context, processor=gemma3())
    # The same picture again asks for another answer; another picture is another conversation.
    assert shown == ["main", "main~2", "main+2"]
    assert [len(stream.media) for stream in trajectory.streams] == [1, 1, 1]


@pytest.mark.parametrize(("choice", "single"), [("auto", False), ("none", False), ("required", True)])
def test_an_answer_says_whether_it_was_held_to_one_call(choice: str, single: bool) -> None:
    """Where none is demanded the agents SDK asks for one unasked, so that is not refused."""
    request = read(
        {"input": "x", "tools": [{"type": "function", **FUNCTION}], "tool_choice": choice, "parallel_tool_calls": False}
    )
    assert request.echo["parallel_tool_calls"] is not single
    assert (request.form is not None and request.form.single) is single


@pytest.mark.parametrize("streamed", [False, True])
def test_the_agents_sdk_works_by_its_default_protocol(streamed: bool) -> None:
    async def calls(context: RunContextWrapper[Any], arguments: str) -> str:
        return str(calculate(**json.loads(arguments)))

    async def visitor(visit: ForeignVisit) -> None:
        set_tracing_disabled(True)
        tool = FunctionTool("calculate", FUNCTION["description"], FUNCTION["parameters"], calls)
        async with client(visit) as api:
            solver = Agent("solver", "Count.", tools=[tool], model=OpenAIResponsesModel("m", api))
            if streamed:
                result: Any = Runner.run_streamed(solver, visit.task)
                async for _ in result.stream_events():
                    pass
            else:
                result = await Runner.run(solver, visit.task)
            assert result.final_output == "It is 42."

    trajectory = visits(visitor, [f"{THOUGHT}I call. {CALL}{CALL}", f"{THOUGHT}{CALL}", "It is 42."])
    assert names(trajectory) == ["main"]
    assert trajectory.generations == 3
