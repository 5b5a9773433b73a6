"""Foreign agents show pictures, in both protocols: each in its place, once, and what is none is refused."""

import asyncio
import base64
from functools import cache
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest

import fsm_rollout as fr
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.protocol import Request
from fsm_rollout.engines.scripted.engine import ScriptedEngine, Turn
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.states.external.anthropic_dialect import picture_part
from fsm_rollout.states.external.handler import ForeignVisit
from fsm_rollout.trajectory.journal import Journal, read
from fsm_rollout.trajectory.pictures import StoredPicture, openai_part, picture_of
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.foreign import agent, chat, check_exact, client
from tests.vision import PLACEHOLDERS, gemma3_with_tools

HERE = "tests.unit.states.test_external_pictures"
FAMILY = "gemma3_with_tools"
SEEN: list[Any] = []
TOOL = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


@cache
def picture(seed: int) -> StoredPicture:
    return picture_of(np.random.default_rng(seed).integers(0, 256, (40 + seed, 60, 3), dtype=np.uint8))


def said(*content: str | int) -> list[dict[str, Any]]:
    """A message's content in OpenAI's form: texts, and pictures by their seeds."""
    return [{"type": "text", "text": part} if isinstance(part, str) else openai_part(picture(part)) for part in content]


def run(use: str, turns: Any, folder: Path, dialect: str = "openai") -> Trajectory:
    """Run an agent of this module, and hold its streams to the processor, the engine's log and the journal."""
    processor = gemma3_with_tools()
    engine = ScriptedEngine(turns, tokenizer=processor.tokenizer, processor=processor, log=True)
    content = [{"type": "text", "text": "What is in "}, {"type": "image", "image": picture(0)}]
    prompt = fr.Prompt(prompt_id="p", messages=[{"role": "user", "content": content}])
    graph = agent(f"use: '{HERE}:{use}', dialect: {dialect}")

    async def go() -> Trajectory:
        with Journal(folder / "journal.sqlite") as journal:
            scheduler = Scheduler({"a": graph}, {"policy": EngineClient(engine)}, journal=journal)
            async with asyncio.timeout(600):
                (group,) = [group async for group in scheduler.run([prompt], 1)]
        return group.trajectories[0]

    SEEN.clear()
    trajectory = asyncio.run(go())
    if trajectory.failure is None:  # else there is an id that was sampled and taken back
        check_exact([trajectory], engine)
    asked = [entry.what for entry in engine.log if isinstance(entry.what, Request)]
    for stream in trajectory.streams:
        ids = stream.tokens.ids
        for span in stream.media:
            alone = processor(text=[PLACEHOLDERS[FAMILY]], images=[span.picture.image()], add_special_tokens=False)
            assert ids[span.start : span.end].tolist() == list(alone["input_ids"][0])
        for request in asked:
            if request.context == stream.context:
                assert list(request.media) == [span for span in stream.media if span.end <= len(request.ids)]
        count = sum(map(ids.count, [processor.image_token_id]))
        assert count == sum(ids[span.start : span.end].count(processor.image_token_id) for span in stream.media)
    assert list(read(folder)) == [trajectory]
    return trajectory


def shown(trajectory: Trajectory) -> list[list[StoredPicture]]:
    return [[span.picture for span in stream.media] for stream in trajectory.streams]


async def looker(visit: ForeignVisit) -> None:
    """Its history only grows: the prompt's picture, a tool's result with two, a user's message with the first again."""
    async with client(visit) as api:
        (model,) = (await api.models.list()).data
        SEEN.append(model.architecture)  # type: ignore[attr-defined]
        messages = [dict(message) for message in visit.messages]
        tools = [{"type": "function", "function": TOOL}]
        call = (await chat(api, messages, tools=tools)).tool_calls[0]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": said("Two: ", 1, 2)})
        await chat(api, messages, tools=tools)
        messages.append({"role": "user", "content": said(0, "once more")})
        await chat(api, messages, tools=tools)


async def claude(visit: ForeignVisit) -> None:
    """The same in Anthropic's protocol."""
    async with anthropic.AsyncAnthropic(base_url=visit.base_url, api_key=visit.api_key, max_retries=0) as api:
        messages: list[Any] = list(visit.messages)
        tool = {"name": "look", "description": "Look.", "input_schema": TOOL["parameters"]}
        options: dict[str, Any] = {"model": "m", "max_tokens": 100, "tools": [tool]}
        two = [{"type": "text", "text": "Two: "}, picture_part(picture(1)), picture_part(picture(2))]
        for content in (two, [picture_part(picture(0)), {"type": "text", "text": "once more"}], None):
            reply = await api.messages.create(messages=messages, **options)
            blocks = [block.model_dump(exclude_none=True) for block in reply.content]
            messages.append({"role": "assistant", "content": blocks})
            if use := next((block["id"] for block in blocks if block["type"] == "tool_use"), None):
                content = [{"type": "tool_result", "tool_use_id": use, "content": content}]
            messages.append({"role": "user", "content": content})


@pytest.mark.parametrize(("use", "dialect"), [("looker", "openai"), ("claude", "anthropic")])
def test_a_foreign_agent_shows_pictures_in_prompts_results_and_messages(use: str, dialect: str, tmp_path: Path) -> None:
    trajectory = run(use, [CALL, "Two more.", "The first."], tmp_path, dialect)
    assert (trajectory.stop_reason, trajectory.detail) == ("answered", None)
    assert shown(trajectory) == [[picture(0), picture(1), picture(2), picture(0)]]
    if dialect == "openai":
        assert SEEN == [{"input_modalities": ["text", "image"]}]


async def brancher(visit: ForeignVisit) -> None:
    async with client(visit) as api:
        first = [dict(message) for message in visit.messages]
        await chat(api, first)
        await chat(api, [*first, {"role": "user", "content": said(1, "?")}])  # it only grows
        await chat(api, [*first, {"role": "user", "content": said(2, "?")}])  # it parts at a picture
        await chat(api, [{"role": "user", "content": said("What is in ", 3)}])  # another picture: another conversation
        await chat(api, [{"role": "user", "content": said(0, "What is in ")}])  # another place: another conversation


def test_histories_are_told_apart_by_their_pictures(tmp_path: Path) -> None:
    trajectory = run("brancher", lambda request: "It is so.", tmp_path)
    assert [stream.context for stream in trajectory.streams] == ["main", "main~2", "main+2", "main+3"]
    assert shown(trajectory) == [
        [picture(0), picture(1)], [picture(0), picture(2)], [picture(3)], [picture(0)],
    ]  # fmt: skip


async def sees_none(visit: ForeignVisit) -> None:
    async with client(visit) as api:
        for _ in range(2):
            with pytest.raises(openai.BadRequestError, match="which stands for a picture"):
                await chat(api, [dict(message) for message in visit.messages])


def test_a_sampled_placeholder_is_the_policys_failure_whatever_the_agent_does_then(tmp_path: Path) -> None:
    pad = gemma3_with_tools().image_token_id
    trajectory = run("sees_none", lambda request: Turn(ids=[pad]), tmp_path)
    assert (trajectory.stop_reason, trajectory.failure) == ("failed:PictureSampled", "policy")
    assert trajectory.generations == 0


PNG = base64.b64encode(picture(0).data).decode()
NONE: list[tuple[dict[str, Any], str]] = [
    ({"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}, "nothing is fetched for a picture"),
    ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "no file is read for it here"),
    ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "no file is read for it here"),
    ({"type": "image", "path": "/etc/passwd"}, "no file is read for it here"),
    ({"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}, "nothing is fetched"),
    ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "holds no picture"),
    ({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG[:400]}"}}, "is damaged"),
    ({"type": "image_url", "image_url": {"url": "data:image/svg+xml,<svg/>"}}, "an SVG is a drawing"),
    ({"type": "image_url"}, "holds no picture"),
    ({"type": "input_audio", "input_audio": {}}, "a part of type 'input_audio' is not supported"),
]


async def shows_none(visit: ForeignVisit) -> None:
    async with client(visit) as api:
        for part, why in NONE:
            with pytest.raises(openai.BadRequestError, match=why) as error:
                await chat(api, [{"role": "user", "content": [{"type": "text", "text": "?"}, part]}])
            assert "messages[0]: " in str(error.value)
        await chat(api, [dict(message) for message in visit.messages])


def test_what_is_no_picture_is_refused_and_asks_no_address(tmp_path: Path) -> None:
    trajectory = run("shows_none", ["A cat."], tmp_path)
    assert (trajectory.stop_reason, trajectory.detail) == ("answered", None)
    assert shown(trajectory) == [[picture(0)]]
