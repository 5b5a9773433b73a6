"""Pictures on pages, in notebooks and in the terminal: the bytes of each once, and how many tokens it is."""

import base64
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from IPython.core.formatters import DisplayFormatter
from msgspec.structs import replace

from fsm_rollout.batch.batch import TrajectoryBatch
from fsm_rollout.jobs.compare import parting
from fsm_rollout.report import notebook, pictures
from fsm_rollout.report.notebook import batch_table, register
from fsm_rollout.report.pages import Links
from fsm_rollout.report.pictures import line_of
from fsm_rollout.report.recording import Recording, open_run
from fsm_rollout.report.report import write_report
from fsm_rollout.report.show import show
from fsm_rollout.report.trajectory import trajectory_page
from fsm_rollout.trajectory.events import Called
from fsm_rollout.trajectory.pictures import StoredPicture, picture_of
from fsm_rollout.trajectory.trajectory import Trajectory
from fsm_rollout.view.beside import beside_page
from tests.kit import on_screen
from tests.unit.report.recorded_runs import NASTY, PADS, Elements, showing, write_run


def picture(seed: int, width: int = 64, height: int = 48) -> StoredPicture:
    return picture_of(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


A, B = picture(1), picture(2, 30, 20)


def base64_of(shown: StoredPicture) -> str:
    return base64.b64encode(shown.data).decode()


def thumbnails(page: str) -> list[str]:
    """The hashes that a page's thumbnails name, in order."""
    return [attributes["data-picture"] or "" for _, attributes in Elements(page).tags if "data-picture" in attributes]


def data_of(page: str) -> Any:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found)


def test_a_page_holds_the_bytes_of_each_picture_once_however_often_it_is_shown() -> None:
    recording = Recording.of(showing([A, B], [A, A, A], text=NASTY))
    page = trajectory_page(recording)
    assert [page.count(base64_of(shown)) for shown in (A, B)] == [1, 1]
    data = data_of(page)
    assert data["pictures"] == {shown.sha256: {"mime": "image/png", "data": base64_of(shown)} for shown in (A, B)}, (
        "and there alone"
    )
    words = {A: f"64×48, {PADS} tokens", B: f"30×20, {PADS} tokens"}
    spans = recording.trajectory.streams[0].media
    assert data["streams"][0]["media"] == [
        [span.start, PADS, span.picture.sha256, words[span.picture]] for span in spans
    ]
    assert len(spans) == 5
    # At the top, in the message of its prompt, in that of the tool's answer, and in what it was given.
    assert thumbnails(page) == [shown.sha256 for shown in (A, B, A, B, A, A, A, A, B)]
    assert page.count(words[A]) == 6
    images = [attributes for tag, attributes in Elements(page).tags if tag == "img"]
    assert {image["alt"] for image in images} == {"picture"}
    assert not any("src" in image for image in images), "the text of a message made no element"
    assert "img-src blob:;" in page


def test_what_a_tool_has_shown_stands_beside_its_call() -> None:
    events = [
        replace(e, shown=[{"type": "image", "image": B}]) if isinstance(e, Called) else e for e in showing([A], [])
    ]
    assert thumbnails(trajectory_page(Recording.of(events))).count(B.sha256) == 1


def test_a_page_without_pictures_has_none() -> None:
    page = trajectory_page(Recording.of(showing([], [])))
    assert data_of(page)["pictures"] == {}
    assert thumbnails(page) == []


def test_a_page_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures.picture_data, "__defaults__", (len(A.data) + len(B.data),))
    recording = Recording.of(showing([A, picture(3)], [B]))
    assert list(data_of(trajectory_page(recording))["pictures"]) == [A.sha256]


def test_a_journal_cannot_say_that_a_picture_is_a_page() -> None:
    odd = StoredPicture(b"<svg onload='alert(1)'/>", "text/html", 1, 1)
    (found,) = pictures.picture_data([odd]).values()
    assert found["mime"] == "application/octet-stream"


def test_a_model_that_sees_less_of_it_is_said_too() -> None:
    assert pictures.words_of(A, [12, 9, 12]) == "64×48, 9 or 12 tokens"
    assert pictures.words_of(A, [1]) == "64×48, 1 token"
    assert pictures.words_of(A) == "64×48", "it never entered the tokens"


def test_two_trajectories_side_by_side_share_what_they_show(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {"0/0": showing([A], [B]), "0/1": showing([A], [], trajectory_id="0/1")})
    run = open_run(folder)
    links = Links(folder, folder / "beside.html", version="1")
    page = beside_page([run, run], ["0/0", "0/1"], [links, links])
    assert [page.count(base64_of(shown)) for shown in (A, B)] == [1, 1]


def test_two_trajectories_part_where_they_are_shown_different_pictures(tmp_path: Path) -> None:
    """Their ids say how large a picture is, and are the same."""
    folder = write_run(
        tmp_path / "run", {"0/0": showing([A], []), "0/1": showing([picture(3)], [], trajectory_id="0/1")}
    )
    run = open_run(folder)
    found = parting(run, run, ["0/0", "0/1"])
    assert found is not None
    assert found.position == 1
    assert [line_of(shown) in text for shown, text in zip((A, picture(3)), found.texts, strict=True)] == [True, True]
    assert [text.count("[picture") for text in found.texts] == [1, 1]
    assert parting(run, run, ["0/1", "0/1"]) is None


def test_the_report_shows_what_the_run_saw(tmp_path: Path) -> None:
    every = [picture(seed, 8, 8) for seed in range(30)]
    folder = write_run(
        tmp_path / "run", {"0/0": showing([A], [A, B]), "1/0": showing(every, [], trajectory_id="1/0", group_id="1")}
    )
    page = write_report(folder).read_text("utf-8")
    shown = [A, B, *every[:22]]
    assert thumbnails(page) == [each.sha256 for each in shown]
    assert list(data_of(page)["pictures"]) == thumbnails(page)
    assert f"32, shown 33 times: {33 * PADS:,} tokens; the first 24" in page
    assert "<small>2 × from" in page


def test_the_terminal_says_what_was_shown_in_a_line(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {"0/0": showing([A, B], [])})
    screen = " ".join(on_screen(show(folder, "0/0"), 400).split())
    lines = [f"[picture {size}, {PADS} tokens, {shown.sha256[:12]}]" for shown, size in ((A, "64×48"), (B, "30×20"))]
    assert [screen.count(line) for line in lines] == [1, 1]
    assert "more tokens" not in screen, "a picture counts as one of its tokens"
    pending = [event for event in showing([], [A]) if event.at < 106]
    folder = write_run(tmp_path / "pending", {"0/0": pending[:-2]})
    assert f"[picture 64×48, {A.sha256[:12]}] 3" in on_screen(show(folder, "0/0"), 400)


def test_a_notebook_shows_a_picture() -> None:
    formatter = DisplayFormatter()
    register(SimpleNamespace(display_formatter=formatter))
    data, _ = formatter.format(Trajectory.fold(showing([A], [])).streams[0].media[0].picture)
    ((tag, attributes),) = Elements(data["text/html"]).tags
    assert (tag, attributes["src"]) == ("img", A.data_uri())
    assert A.sha256[:12] in (attributes["alt"] or "")


def test_a_notebook_shows_a_batch_s_pictures_below_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [showing([A, B], [A]), showing([A], [], trajectory_id="0/1"), showing([], [], trajectory_id="0/2")]
    batch = TrajectoryBatch.from_trajectories(list(map(Trajectory.fold, made)), pad_id=0)
    table = batch_table(batch)
    images = [attributes for tag, attributes in Elements(table).tags if tag == "img"]
    assert [image["src"] for image in images] == [A.data_uri(), B.data_uri()]
    assert [image["alt"] for image in images] == ["picture 1", "picture 2"]
    cells = re.findall(r'main</td>\s*<td style="text-align:left">([^<]*)</td>', table)
    assert cells == ["1, 2, 1", "1", ""]
    monkeypatch.setattr(notebook, "SHOWN_PICTURES", 1)
    assert "and 1 more</small>" in batch_table(batch)
    assert "pictures" not in batch_table(TrajectoryBatch.from_trajectories([Trajectory.fold(made[2])], pad_id=0))
