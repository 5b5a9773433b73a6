"""Runs as a server shows them: what is found, what is read on, who is answered; the pages by real HTTP."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from fsm_rollout.errors import ConfigError
from fsm_rollout.jobs.run_folder import SUMMARY
from fsm_rollout.jobs.samples import RunReader
from fsm_rollout.report.pages import page_path
from fsm_rollout.states.external.responding import listening_at
from fsm_rollout.trajectory.events import AnyEvent
from fsm_rollout.trajectory.journal import Journal, Search
from fsm_rollout.view.runs import Runs
from fsm_rollout.view.server import HOST, ViewServer
from tests.cases import cases
from tests.unit.report.recorded_runs import NASTY, Elements, history, write_run

CALM = "The answer is 3."
LONG = "g" * 200 + "/0"  # its page's name is a digest


def histories() -> dict[str, list[AnyEvent]]:
    return {
        "0/0": history("0/0", text=f"{CALM} Zürich", score=1.0),
        "0/1": history("0/1", text=NASTY, told="Division by ZERO", score=0.0, failure="bad_arguments"),
        "1/0": history("1/0", group_id="1", stop_reason="limit:tool_calls", score=None),
        "1/1": history("1/1", group_id="1", score=0.5)[:4],  # it goes on, in GENERATING
        LONG: history(LONG, group_id="g" * 200, score=0.5)[:-2],
    }


@asynccontextmanager
async def viewed(folder: Path) -> AsyncIterator[tuple[aiohttp.ClientSession, ViewServer]]:
    server = ViewServer(Runs(folder))
    async with listening_at(server.app(), HOST, 0, 1.0) as url, aiohttp.ClientSession(f"{url}/") as session:
        yield session, server


async def text_of(session: aiohttp.ClientSession, path: str, status: int = 200) -> str:
    async with session.get(path) as answer:
        assert answer.status == status, await answer.text()
        return await answer.text()


def listed(page: str) -> list[str]:
    return re.findall(r'<tr data-key="([^"]*)"', page)


async def until_read(session: aiohttp.ClientSession, server: ViewServer, path: str) -> str:
    """Return a run's page once all of the run is read."""
    while True:
        page = await text_of(session, path)
        if '"soon":false' in page:
            return page


@cases(
    "view",
    ("", ["0/0", "0/1", "1/0", "1/1", LONG]),
    ("ended=unfinished", ["1/1", LONG]),
    ("state=INTERACTING", ["0/0", "0/1", "1/0", LONG]),
    ("least=much&page=-3&sort=nothing", ["0/0", "0/1", "1/0", "1/1", LONG]),
    ("page=7", ["0/0", "0/1", "1/0", "1/1", LONG]),
    ("sort=-score", ["0/0", "0/1", "1/0", "1/1", LONG]),
    ("sort=score", ["0/1", "0/0", "1/0", "1/1", LONG]),
    ("sort=-trajectory", [LONG, "1/1", "1/0", "0/1", "0/0"]),
)
async def test_an_address_finds_trajectories(query: str, found: list[str], tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "one", histories())
    async with viewed(tmp_path / "runs") as (session, server):
        page = await until_read(session, server, f"runs/one/?{query}")
        assert listed(page) == found
        assert f'<small id="count">{len(found)} of 5</small>' in page


def test_what_comes_is_read_on_and_another_run_in_its_place_anew(tmp_path: Path) -> None:
    events = history("0/0")
    with Journal(tmp_path / "journal.sqlite") as journal:
        reader = RunReader(tmp_path, pytest.fail)
        assert not reader.read()
        for event in events[:4]:
            journal.append("0/0", event)
        journal.flush()
        assert reader.read()
        assert [(each.trajectory_id, each.ended, each.state) for each in reader.trajectories.values()] == [
            ("0/0", False, "GENERATING")
        ]
        search = Search(tmp_path, ["calculate", "3"])
        assert search.found() == {"0/0"}
        assert not reader.read(), "there is no more"
        for event in events[4:]:
            journal.append("0/0", event)
        for event in history("0/1"):
            journal.append("0/1", event)
        journal.flush()
        assert reader.read(1)
        assert reader.unread == 1
        assert reader.read()
        assert [(each.trajectory_id, each.ending, each.score) for each in reader.trajectories.values()] == [
            ("0/0", "answered", 1.0),
            ("0/1", "answered", 1.0),
        ]
        assert search.found() == {"0/0", "0/1"}
    (tmp_path / "journal.sqlite").unlink()
    write_run(tmp_path, {"5/0": history("5/0", group_id="5")[:3]})
    assert reader.read()
    assert list(reader.trajectories) == ["5/0"]
    assert list(reader.samples().prompts) == ["5"]


async def test_conversations_with_a_server_that_has_ended_are_counted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs" / "served", {"0/0": history("0/0")})
    (folder / SUMMARY).write_text('{"served_seconds": 2.5}\n', "utf-8")
    async with viewed(tmp_path / "runs") as (session, _):
        assert '<td class="num">1</td>' in await text_of(session, "")


async def test_pages_are_those_of_files_and_each_trajectory_has_one(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs" / "a b" / "one", histories())
    write_run(tmp_path / "runs" / "two", {})
    before = sorted(path.name for path in folder.iterdir())
    async with viewed(tmp_path / "runs") as (session, server):
        assert sorted(listed(await text_of(session, ""))) == ["runs/a b/one", "runs/two"]
        assert "no trajectories yet" in await text_of(session, "runs/two/")
        page = await until_read(session, server, "runs/a b/one/")
        links = [attributes["href"] for tag, attributes in Elements(page).tags if tag == "a"]
        names = [page_path(Path(), trajectory_id).as_posix() for trajectory_id in histories()]
        assert [link for link in links if link and link.startswith("trajectories/")] == names
        for name, trajectory_id in zip(names, histories(), strict=True):
            one = await text_of(session, f"runs/a b/one/{name}")
            assert f"<bdi>{trajectory_id}</bdi> <span" in one
            assert "document.title='owned'</script>" not in one
        report = await text_of(session, "runs/a b/one/report.html")
        assert [f'"{name}"' in report for name in names] == [True] * 5
        for path in ("runs", "runs/three/", "runs/two/trajectories/9~2F9.html", "runs/two/journal.sqlite", "x"):
            assert "no " in await text_of(session, path, 404)
    assert sorted(path.name for path in folder.iterdir()) == before, "it only reads"


async def test_a_page_is_sent_again_only_once_there_is_more(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    events = history("0/0")
    with Journal(folder / "journal.sqlite") as journal:
        for event in events[:4]:
            journal.append("0/0", event)
        journal.flush()
        async with viewed(folder) as (session, _):
            path, known = "runs/trajectories/0~2F0.html", ""
            for said in ("It has not ended", "", "interaction_done", ""):
                if said == "interaction_done":
                    for event in events[4:]:
                        journal.append("0/0", event)
                    journal.flush()
                async with session.get(path, headers={"If-None-Match": known}) as answer:
                    assert (answer.status, said in await answer.text()) == (200 if said else 304, True)
                    known = answer.headers["ETag"]


@cases("view")
async def test_what_cannot_be_put_beside_each_other_is_said(query: str, says: str, tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "one", histories())
    write_run(tmp_path / "runs" / "two", {})
    async with viewed(tmp_path / "runs") as (session, _):
        assert says in await text_of(session, query, 404)


@cases("view")
async def test_only_this_machine_is_answered_and_only_by_reading(
    method: str, headers: dict[str, str], status: int, says: str, tmp_path: Path
) -> None:
    async with viewed(tmp_path) as (session, _), session.request(method, "", headers=headers) as answer:
        assert answer.status == status
        assert says in await answer.text()
        assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder; give that in which runs have their folders"):
        Runs(tmp_path / "nowhere")
