"""Pictures of prompts: whatever a data set holds them as, a prompt shows the same ones at the same places."""

import base64
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fsm_rollout.errors import ConfigError
from fsm_rollout.trajectory.pictures import picture_of, with_images
from fsm_rollout.trajectory.prompt import Prompt, as_prompt, as_prompts, read_prompts


def png(red: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 2), (red, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


ONE, TWO = png(1), png(2)
URI = f"data:image/png;base64,{base64.b64encode(ONE).decode()}"
Row = dict[str, Any]


def image(source: object) -> Row:
    return {"type": "image", "image": source}


def text(words: str) -> Row:
    return {"type": "text", "text": words}


def user(*parts: Row) -> list[Row]:
    return [{"role": "user", "content": list(parts)}]


SAID = [{"role": "user", "content": "Is this <image>red?"}]
SHOWN = user(text("Is this "), image(picture_of(ONE)), text("red?"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shots").mkdir()
    (tmp_path / "shots/1.png").write_bytes(ONE)
    (tmp_path / "shots/2.png").write_bytes(TWO)
    return tmp_path


def parquet(rows: list[Row], folder: Path) -> list[Prompt]:
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    return read_prompts(folder / "train.parquet")


def jsonl(rows: list[Row], folder: Path) -> list[Prompt]:
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return read_prompts(folder / "train.jsonl")


def whole(rows: list[Row], folder: Path) -> list[Prompt]:
    (folder / "train.json").write_text(json.dumps(rows))
    return read_prompts(folder / "train.json")


def python(rows: list[Row], folder: Path) -> list[Prompt]:
    return as_prompts(rows)


FILES, ALL = (parquet, jsonl, whole), (parquet, jsonl, whole, python)


@pytest.mark.parametrize(
    ("row", "ways"),
    [
        # a part of the message
        ({"messages": user(text("Is this "), image("shots/1.png"), text("red?"))}, FILES),
        ({"messages": user(text("Is this "), image(URI), text("red?"))}, ALL),
        ({"messages": user(text("Is this "), image(ONE), text("red?"))}, (parquet, python)),
        ({"messages": user(text("Is this "), image({"bytes": ONE, "path": None}), text("red?"))}, (parquet, python)),
        ({"messages": user(text("Is this "), image(np.array(Image.open(io.BytesIO(ONE)))), text("red?"))}, (python,)),
        (
            {"messages": user(text("Is this "), {"type": "image_url", "image_url": {"url": URI}}, text("red?"))},
            (jsonl, python),
        ),
        # a column beside it: verl's, TRL's, one of another name
        ({"prompt": SAID, "images": [{"bytes": ONE, "path": None}]}, (parquet, python)),
        ({"prompt": SAID, "images": ["shots/1.png"]}, FILES),
        ({"prompt": SAID, "images": [{"path": "shots/1.png"}]}, FILES),
        ({"prompt": SAID, "images": [Image.open(io.BytesIO(ONE))]}, (python,)),
        ({"prompt": user(text("Is this "), {"type": "image"}, text("red?")), "images": [URI]}, ALL),
        ({"prompt": SAID, "image": {"bytes": ONE, "path": None}}, (parquet, python)),
        ({"messages": SAID, "image": "shots/1.png"}, FILES),
    ],
)
def test_a_prompt_shows_the_same_picture_wherever_it_was_kept(
    row: Row, ways: tuple[Callable[[list[Row], Path], list[Prompt]], ...], folder: Path
) -> None:
    for way in ways:
        (prompt,) = way([row | {"answer": "yes"}], folder)
        assert list(prompt.messages) == SHOWN, way
        assert prompt.messages[0]["content"][1]["image"] is SHOWN[0]["content"][1]["image"]
        assert prompt.extra == {"answer": "yes"}
        assert as_prompts([prompt])[0].messages == prompt.messages


def test_columns_are_named_and_pictures_without_a_place_come_first(folder: Path) -> None:
    rows = [{"question": "Which is red?", "shots": ["shots/1.png", "shots/2.png"]}, {"question": "None?", "shots": []}]
    (folder / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    shown, bare = read_prompts(folder / "p.jsonl", columns={"messages": "question", "images": "shots"})
    assert list(shown.messages) == user(image(picture_of(ONE)), image(picture_of(TWO)), text("Which is red?"))
    assert list(bare.messages) == [{"role": "user", "content": "None?"}]
    assert shown.extra == {"question": "Which is red?"}


PLACED = st.lists(st.text(st.characters(exclude_characters="<"), max_size=5), min_size=1, max_size=4)


@given(PLACED, st.booleans())
def test_pictures_stand_in_their_order_and_no_text_is_lost(pieces: list[str], in_parts: bool) -> None:
    said = "<image>".join(pieces)
    messages = [{"role": "system", "content": "Look."}, {"role": "user", "content": [text(said)] if in_parts else said}]
    images = list(range(len(pieces) - 1))
    system, shown = with_images(messages, images)
    assert system is messages[0]
    parts = shown["content"] if isinstance(shown["content"], list) else [text(shown["content"])]
    assert [part["image"] for part in parts if part["type"] == "image"] == images
    assert "".join(part.get("text", "<image>") for part in parts) == said


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"messages": [*SAID, *user(text("x"), image("shots/3.png"))]},
            "messages: message 1, part 1: 'shots/3.png' cannot be read: No such file or directory",
        ),
        (
            {"messages": user(image("../1.png"), image("https://example.org/1.png"))},
            "messages: message 0, part 0: '../1.png' leads out of",
        ),
        ({"messages": user(image("https://example.org/1.png"))}, "part 0: 'https://example.org/1.png' is an address"),
        ({"messages": user(image("notes.txt"))}, "part 0: is no picture (PNG, JPEG, WEBP, GIF, BMP are read)"),
        ({"messages": user({"type": "audio", "audio": "x"})}, "message 0 holds a part of type 'audio'; only text and"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "message 0 holds a part of type 'str'"),
        ({"messages": SAID, "images": []}, "there are 0 images, and the messages have 1 places for them"),
        ({"messages": SAID, "images": [URI, URI]}, "there are 2 images, and the messages have 1 places"),
        ({"messages": user(image(URI)), "images": [URI]}, "there are 1 images, and the messages have 0 places"),
        ({"messages": SAID, "videos": ["film.mp4"]}, "videos are not decoded; give their frames"),
        ({"messages": user(image(URI)), "limits": 3}, "limits must be a mapping"),
    ],
)
def test_what_is_wrong_with_a_picture_has_its_place(row: Row, message: str, folder: Path) -> None:
    (folder / "notes.txt").write_text("no picture")
    good = {"messages": user(image(URI))}
    with pytest.raises(ConfigError) as error:
        jsonl([good, row], folder)
    (problem,) = error.value.problems
    assert (problem.file, problem.line) == (str(folder / "train.jsonl"), 2)
    assert message in problem.message


def test_what_comes_from_a_client_reads_no_file(folder: Path) -> None:
    row: Mapping[str, object] = {"messages": user(image("shots/1.png"))}
    assert as_prompt(row, 0, folder).messages[0]["content"] == [image(picture_of(ONE))]
    with pytest.raises(ConfigError, match="no file is read for it here"):
        as_prompt(row, 0)
    with pytest.raises(ConfigError, match=r"prompts\[0\]: messages: message 0, part 0: .* leads out of"):
        as_prompts([{"messages": user(image(str(folder / "shots/1.png")))}])
    (prompt,) = as_prompts([{"messages": user(image(folder / "shots/1.png"))}])
    assert prompt.messages[0]["content"] == [image(picture_of(ONE))]


def test_a_prompt_of_python_stores_its_pictures() -> None:
    assert list(Prompt(messages=user(text("Is this "), image(ONE), text("red?"))).messages) == SHOWN
