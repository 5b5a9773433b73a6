"""Pictures in tools' results: what counts as one, what the model is shown, what is left out where there is no room."""

import asyncio
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import fsm_rollout as fr
from fsm_rollout.engines.protocol import Request
from fsm_rollout.engines.scripted.engine import ScriptedEngine
from fsm_rollout.errors import ConfigError
from fsm_rollout.tools.tool_messages import Unshowable, content, fit
from fsm_rollout.trajectory.events import Called
from fsm_rollout.trajectory.pictures import StoredPicture, picture_of
from fsm_rollout.trajectory.stream import text_of
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.cases import cases
from tests.embedded import tokenizer
from tests.runs import asking, with_tool
from tests.vision import gemma3_with_tools

HERE = "tests.unit.tools.test_pictures"
RED = np.full((20, 30, 3), (255, 0, 0), np.uint8)
STORED = picture_of(RED)
URI = STORED.data_uri()


@cases(
    "tools",
    (STORED, [STORED]),
    (RED, [STORED]),
    (Image.fromarray(RED), [STORED]),
    ({"type": "image_url", "image_url": {"url": URI}}, [STORED]),
    ({"type": "image", "image": RED}, [STORED]),
    (["left", STORED, 3, {"a": 1}], ["left", STORED, "3", '{"a": 1}']),
    (("one", {"type": "text", "text": "two"}, RED), ["one", "two", STORED]),
    ({"type": "image", "mimeType": "image/png", "data": URI.partition(",")[2]}, [STORED]),
    ({"type": "video", "video": [RED, RED[:9]]}, [STORED, picture_of(RED[:9])]),
    ({"type": "video", "video": "film.mp4"}, None),
    (RED[:, :, 0], None),
)
def test_what_shows_a_picture(value: Any, shown: list[Any] | None) -> None:
    text, parts = content(value)
    assert parts == [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
        for part in shown or []
    ]
    if shown is not None:
        assert text == "".join(part for part in shown if isinstance(part, str))


@pytest.mark.parametrize(
    "value",
    [
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
        [RED, {"type": "image", "data": "AAAA"}],
    ],
)
def test_what_is_no_picture_cannot_be_shown(value: Any) -> None:
    with pytest.raises(Unshowable, match=r"an address; nothing is fetched|is no picture"):
        content(value)


sized = st.lists(st.text(st.sampled_from("ab 12\n你…[]"), min_size=1, max_size=40) | st.integers(1, 90), max_size=6)


@cache
def small(number: int) -> StoredPicture:
    return picture_of(np.full((4, 4, 3), number, np.uint8))


@settings(deadline=None)
@given(
    sized.filter(lambda said: any(isinstance(part, int) for part in said)),
    st.integers(1, 200),
    st.sampled_from(["left", "middle", "right"]),
)
def test_a_result_has_whole_pictures_and_at_most_its_limit(said: list[str | int], limit: int, side: Any) -> None:
    parts = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": small(at)}
        for at, part in enumerate(said)
    ]
    sizes = {small(at): part for at, part in enumerate(said) if isinstance(part, int)}

    def count(message: list[Any]) -> int:
        text = len(tokenizer().encode(text_of({"content": message}), add_special_tokens=False))
        return text + sum(sizes[part["image"]] for part in message if "image" in part)

    shown, dropped = fit(parts, list(sizes.values()), tokenizer(), limit, side)
    assert count(shown) <= limit
    kept = [part["image"] for part in shown if "image" in part]
    assert kept == list(sizes)[: len(kept)], "the first ones stay"
    if dropped == 0:
        assert shown == parts
    else:
        assert (
            len(tokenizer().encode(text_of({"content": parts}), add_special_tokens=False)) + sum(sizes.values()) > limit
        )
    if len(kept) < len(sizes) and limit > 30:
        assert f"[{len(sizes) - len(kept)} of {len(sizes)} pictures left out]" in text_of({"content": shown})


def look() -> Any:
    """Look."""
    return ["It shows", Image.fromarray(RED), " and ", picture_of(RED[:9])]


def many() -> Any:
    """Look at much."""
    return ["Forty.", *(picture_of(np.full((8, 8, 3), number, np.uint8)) for number in range(40))]


def rewarded() -> fr.ToolResult:
    """Look, for a reward."""
    return fr.ToolResult([STORED], reward=0.5)


def damaged() -> Any:
    """Look at nothing."""
    return {"type": "image", "data": "AAAA"}


def run(name: str, eyes: Any, **spec: Any) -> tuple[Trajectory, Called, ScriptedEngine]:
    """Have a model call a tool of this module once."""
    turns = ['<tool_call>\n{"name": "tool", "arguments": {}}\n</tool_call>', "Red."]
    sees = hasattr(eyes, "tokenizer")
    engine = ScriptedEngine(
        turns, tokenizer=eyes.tokenizer if sees else eyes, processor=eyes if sees else None, log=True
    )

    found: list[Called] = []

    def hear(_: Trajectory, event: object) -> None:
        found.extend([event] if isinstance(event, Called) else [])

    async def main() -> Trajectory:
        async with fr.Rollout(with_tool(f"{HERE}:{name}", **spec), engine, on_event=[hear]) as rollout:
            (trajectory,) = [t async for group in rollout.stream(["Look."], 1) for t in group.trajectories]
            return trajectory

    trajectory = asyncio.run(main())
    (called,) = found
    return trajectory, called, engine


def test_a_tool_shows_pictures() -> None:
    trajectory, called, engine = run("look", gemma3_with_tools())
    assert (trajectory.stop_reason, trajectory.detail) == ("answered", None)
    (stream,) = trajectory.streams
    shown = [STORED, picture_of(RED[:9])]
    assert [span.picture for span in stream.media] == shown
    assert (called.result, called.failure, called.truncated_tokens) == ("It shows and ", None, 0)
    (told,) = [message for message in stream.messages if message["role"] == "tool"]
    assert [part["image"] for part in told["content"] if "image" in part] == shown
    assert text_of(told) == "It shows and "
    last = [line.what for line in engine.log if isinstance(line.what, Request)][-1]
    assert list(last.media) == stream.media


def test_a_tool_rewards_what_it_shows() -> None:
    trajectory, called, _ = run("rewarded", gemma3_with_tools())
    assert (called.reward, len(trajectory.streams[0].media)) == (0.5, 1)


def test_a_result_that_is_too_long_leaves_whole_pictures_out_and_says_so() -> None:
    trajectory, called, _ = run("many", gemma3_with_tools(), response_tokens=100)
    kept = len(trajectory.streams[0].media)
    assert 5 < kept < 40
    assert f"[{40 - kept} of 40 pictures left out]" in called.result
    (each,) = {span.length for span in trajectory.streams[0].media}
    assert called.truncated_tokens == (40 - kept) * each


def drops_them() -> Any:
    """Return a processor whose template shows pictures, but none in a tool's result."""
    processor = gemma3_with_tools()
    before, tool, behind = processor.chat_template.partition('message.role == "tool"')
    processor.chat_template = before + tool + behind.replace("<start_of_image>", "")
    return processor


@pytest.mark.parametrize(
    ("eyes", "name", "says"),
    [
        (drops_them, "look", "the template drops pictures in tools' results"),
        (gemma3_with_tools, "damaged", "is no picture"),
        (tokenizer, "look", "this model reads text only"),
    ],
)
def test_what_cannot_be_shown_is_the_tools_failure(eyes: Any, name: str, says: str, caplog: Any) -> None:
    trajectory, called, _ = run(name, eyes())
    assert (called.failure, called.bad, called.shown) == ("Unshowable", False, [])
    assert "gave no result that can be shown" in called.result
    assert says in caplog.text
    assert trajectory.stop_reason == "answered"


def test_a_sub_agents_pictures_are_refused_before_the_run_where_the_template_drops_them() -> None:
    graph = asking(with_tool(f"{HERE}:look"))
    ask = graph.tools["ask"].model_copy(update={"pictures": 1})
    eyes = drops_them()
    engine = ScriptedEngine(["Red."], tokenizer=eyes.tokenizer, processor=eyes)
    with pytest.raises(ConfigError, match="drops pictures in tools' results; give one that writes them"):
        fr.Rollout(graph.model_copy(update={"tools": {"ask": ask}}), engine)
