"""What a foreign agent asks for in its state: limits, keys, forms, and what is refused, over its real HTTP."""

import asyncio
import gzip
import json
from typing import Any

import aiohttp
import openai
import pytest

import fsm_rollout as fr
from fsm_rollout.engines.protocol import Chunk, Request, basic_facts
from fsm_rollout.engines.scripted.engine import ScriptedEngine
from fsm_rollout.engines.scripted.script import Turn
from fsm_rollout.errors import ConfigError
from fsm_rollout.states.external import gateway
from fsm_rollout.states.external.handler import ForeignVisit
from tests.cases import cases
from tests.foreign import CALCULATOR, CALL, SEEN, agent, chat, client, run, visited_by


async def counts(visit: ForeignVisit) -> None:
    async with client(visit) as api:
        messages: list[Any] = [{"role": "user", "content": "one"}]
        for _ in range(3):
            reply = await api.chat.completions.create(model="m", messages=messages)
            messages += [reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "more"}]
            SEEN.append((reply.usage.prompt_tokens, reply.usage.completion_tokens))


def test_usage_counts_what_stood_before_the_turn_and_what_was_sampled() -> None:
    _, engine = run(counts, ["one two", "three", "four five six"])
    lengths: dict[str, list[int]] = {}
    for entry in [entry for entry in engine.log if isinstance(entry.what, Request | Chunk)]:
        lengths.setdefault(entry.what.request_id, []).append(len(entry.what.ids))
    assert [(asked, sum(sampled)) for asked, *sampled in lengths.values()] == SEEN
    assert len(set(SEEN)) == 3


async def goes_on_for_ever(visit: ForeignVisit) -> None:
    async with client(visit) as api:
        messages = [{"role": "user", "content": "go"}]
        try:
            while True:
                await chat(api, messages)
                messages.append({"role": "user", "content": "on"})
        except openai.BadRequestError as error:
            SEEN.append((error.code, error.message))


def test_a_limit_is_told_in_the_protocol_s_own_error_and_ends_the_state() -> None:
    (trajectory,), _ = run(visited_by(goes_on_for_ever, assistant_turns=3), lambda request: "more")
    assert trajectory.stop_reason == "limit:assistant_turns"
    assert trajectory.generations == 3
    ((code, message),) = SEEN
    assert code == "limit_reached"
    assert "the limit 'assistant_turns' of this agent is reached" in message


def test_a_turn_that_a_token_limit_cuts_is_an_answer_and_the_next_call_is_refused() -> None:
    (trajectory,), _ = run(visited_by(goes_on_for_ever, response_tokens=30), lambda request: "word " * 12)
    assert trajectory.stop_reason == "limit:response_tokens"
    assert SEEN[0][0] == "limit_reached"
    assert trajectory.response_tokens == 30


async def forgets(visit: ForeignVisit) -> None:
    async with client(visit) as api:
        messages = [{"role": "user", "content": "word " * 30}]
        await chat(api, messages)
        messages.append({"role": "user", "content": "word " * 100})
        with pytest.raises(openai.BadRequestError) as error:
            await chat(api, messages)
        assert error.value.code == "context_length_exceeded"
        await chat(api, [messages[0], {"role": "user", "content": "shorter"}])


def test_a_history_that_is_too_long_may_be_shortened() -> None:
    (trajectory,), _ = run(visited_by(forgets, context_tokens=200), lambda request: "yes")
    assert trajectory.stop_reason == "answered", trajectory.detail
    assert trajectory.generations == 2


@cases("states")
def test_what_cannot_be_done_is_refused_and_not_passed_over(body: dict[str, Any], message: str) -> None:
    good = {} if not body else {"messages": [{"role": "user", "content": "x"}]}

    async def asks(visit: ForeignVisit) -> None:
        own = {"Authorization": f"Bearer {visit.api_key}"}
        url = f"{visit.base_url}/chat/completions"
        async with aiohttp.ClientSession(headers=own) as http, http.post(url, json=good | body) as answer:
            SEEN.append((answer.status, (await answer.json())["error"]))

    run(asks, [])
    ((status, error),) = SEEN
    told = error["message"]
    assert status == 400
    assert error["param"] == (told.split("`")[1] if told.startswith("`") else None)
    with pytest.raises(ValueError, match=message):
        raise ValueError(told)


SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}


AS_JSON = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}


async def demands_forms(visit: ForeignVisit) -> None:
    """Force a call, go on freely, ask for JSON, go on freely."""
    messages: Any = [{"role": "user", "content": visit.task}]
    async with client(visit) as api:
        forced = await chat(api, messages, tools=[CALCULATOR], tool_choice="required", parallel_tool_calls=False)
        messages.append({"role": "tool", "tool_call_id": forced.tool_calls[0].id, "content": "42"})
        await chat(api, messages, tools=[CALCULATOR])
        messages.append({"role": "user", "content": "As JSON."})
        await chat(api, messages, tools=[CALCULATOR], response_format=AS_JSON)
        messages.append({"role": "user", "content": "Thanks."})
        await chat(api, messages, tools=[CALCULATOR])


@pytest.mark.parametrize("train", [False, True])
def test_what_is_sampled_under_a_grammar_is_a_stream_that_is_not_trained_unless_asked(train: bool) -> None:
    graph = visited_by(demands_forms, f"train_grammars: {str(train).lower()}")
    said = [CALL, "It is 42.", '{"sum": 42}', "You are welcome."]
    turns = {f"main{mark}": said[i:] for i, mark in enumerate(["", "~2", "~3", "~4"])}
    (trajectory,), engine = run(graph, turns, check=train)
    assert trajectory.stop_reason == "answered", trajectory.detail
    told = [(stream.context, stream.why, stream.tokens.trained_length > 0) for stream in trajectory.streams]
    if train:
        assert told == [("main", "", True)]
    else:
        assert told == [(f"main{mark}", "grammar", bool(i % 2)) for i, mark in enumerate(["", "~2", "~3", "~4"])]
        assert [len(stream.messages) for stream in trajectory.streams] == [2, 4, 6, 8]
    asked = [dict(entry.what.sampling.extra) for entry in engine.log if isinstance(entry.what, Request)]
    assert [list(extra) for extra in asked] == [["structural_tag"], [], ["structural_tag"], []]
    call, either = (json.loads(extra["structural_tag"])["format"] for extra in asked[::2])
    assert (call["stop_after_first"], [tag["begin"] for tag in call["tags"]]) == (True, [CALL[: CALL.index('{"left')]])
    assert [element["type"] for element in either["elements"]] == ["json_schema", "tags_with_separator"]


@pytest.mark.parametrize(
    ("tools", "param"),
    [([], {"response_format": {"type": "json_object"}}), ([CALCULATOR], {"tool_choice": "required"})],
    ids=["text", "call"],
)
def test_forms_that_an_engine_cannot_enforce_are_refused_with_what_demands_them(
    tools: Any, param: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def asks(visit: ForeignVisit) -> None:
        async with client(visit) as api:
            with pytest.raises(openai.BadRequestError, match="by this engine: it samples freely alone") as error:
                await chat(api, [{"role": "user", "content": "x"}], tools=tools, **param)
            SEEN.append(error.value.param)

    monkeypatch.setattr(ScriptedEngine, "facts", property(basic_facts))
    run(asks, [])
    assert list(param) == SEEN


PLAIN = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


async def shows_a_tool(visit: ForeignVisit) -> None:
    for system in ("Be brief.", "You may call calculate."):
        async with client(visit) as api:
            messages: Any = [{"role": "system", "content": system}, {"role": "user", "content": "x"}]
            tools: Any = [CALCULATOR]
            try:
                await api.chat.completions.create(model="m", messages=messages, tools=tools)
                SEEN.append("answered")
            except openai.BadRequestError as error:
                SEEN.append(error.message)


def test_tools_that_the_template_hides_are_refused_with_the_reason() -> None:
    plain = visited_by(shows_a_tool)
    main = plain.context("main").model_copy(update={"chat_template": PLAIN, "tool_format": "hermes"})
    run(plain.model_copy(update={"contexts": {"main": main}}), ["It is 42."])
    refusal, answer = SEEN
    assert "[tools-not-shown] the chat template writes nothing of calculate, so the model would not" in refusal
    assert answer == "answered", "their names stand in the system message"


KEYS: list[ForeignVisit] = []


async def tries_keys(visit: ForeignVisit) -> None:
    KEYS.append(visit)
    while len(KEYS) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    other = KEYS[1 - KEYS.index(visit)]
    url = visit.base_url + "/chat/completions"
    body = {"messages": [{"role": "user", "content": "x"}]}
    async with aiohttp.ClientSession() as http:
        for key in ("", "fsm-wrong", "Bearer"):
            async with http.post(url, json=body, headers={"Authorization": f"Bearer {key}"}) as answer:
                SEEN.append(answer.status)
        own = {"Authorization": f"Bearer {visit.api_key}"}
        async with http.post(url, json=body, headers=own) as answer:
            SEEN.append((await answer.json())["choices"][0]["message"]["content"])
        async with http.get(visit.base_url + "/../../etc/passwd", headers=own) as answer:
            SEEN.append(answer.status)
        long = b"{" + b" " * gateway.MOST_BYTES
        async with http.post(url, data=long, headers=own) as answer:
            SEEN.append(answer.status)
        packed = {"Content-Encoding": "gzip"}
        async with http.post(url, data=gzip.compress(long), headers=own | packed) as answer:
            SEEN.append(answer.status)
    assert other.api_key != visit.api_key


def test_a_key_opens_its_own_visit_alone_and_bodies_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    KEYS.clear()
    monkeypatch.setattr(gateway, "MOST_BYTES", 1000)
    trajectories, _ = run(tries_keys, lambda request: f"for {request.trajectory_id}", n=2)
    assert [t.stop_reason for t in trajectories] == ["answered"] * 2, [t.detail for t in trajectories]
    assert sorted(map(str, SEEN)) == sorted(["401"] * 6 + ["404"] * 2 + ["413"] * 4 + ["for 0/0", "for 0/1"])
    for trajectory in trajectories:
        assert trajectory.text == f"for {trajectory.trajectory_id}"

    with pytest.raises(aiohttp.ClientConnectorError):
        asyncio.run(opens(KEYS[0]))


async def opens(visit: ForeignVisit) -> int:
    headers = {"Authorization": f"Bearer {visit.api_key}"}
    async with aiohttp.ClientSession() as http, http.get(visit.base_url + "/models", headers=headers) as answer:
        return answer.status


async def outlives_another(visit: ForeignVisit) -> None:
    KEYS.append(visit)
    while len(KEYS) < 2 or (visit is KEYS[0] and not SEEN):  # noqa: ASYNC110
        await asyncio.sleep(0)
    async with asyncio.timeout(600):
        while visit is KEYS[1] and SEEN[-1:] != [401]:
            SEEN.append(await opens(KEYS[0]))


def test_a_key_is_worth_nothing_once_its_visit_has_ended_while_others_go_on() -> None:
    KEYS.clear()
    run(outlives_another, "yes", n=2)
    assert (SEEN[0], SEEN[-1]) == (200, 401)


async def raises(visit: ForeignVisit) -> None:
    raise KeyError("mine")


async def returns_score(visit: ForeignVisit) -> float:
    async with client(visit) as api:
        await chat(api, [{"role": "user", "content": visit.task}])
    return 0.75


def test_how_it_ends() -> None:
    (failed,), _ = run(raises, [])
    assert failed.stop_reason == "failed:KeyError"
    (scored,), _ = run(returns_score, ["x"])
    assert (scored.stop_reason, scored.score) == ("answered", 0.75)
    (broken,), _ = run(returns_score, [Turn(text="x", fails=100, error="Boom: no")])
    assert broken.stop_reason.startswith("failed:")


def test_the_yaml_is_checked() -> None:
    with pytest.raises(ConfigError, match="give either `command`"):
        agent("timeout: 5")
    with pytest.raises(ConfigError, match="unknown key 'comand'; did you mean 'command'"):
        agent("comand: [x]")
    with pytest.raises(ConfigError, match="may wait for ever"):
        fr.agent.loader.loads(
            fr.agent.loader.dump(agent("use: 'os:getcwd'")).replace("timeout: 600.0", "max_visits: 1")
        )
    assert "20 generations" in str(fr.prove(agent("use: 'os:getcwd'")))
