"""Pages of a running server in a real browser: they grow with the run, find, and show two beside each other."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fsm_rollout.trajectory.events import AnyEvent, Generated
from fsm_rollout.trajectory.journal import Journal
from fsm_rollout.view.runs import Runs
from fsm_rollout.view.server import serve_view
from tests.integration.chromium import NEEDED, emulate, quiet, ready, unfolded
from tests.unit.report.recorded_runs import NASTY, history, write_run

pytest.importorskip("selenium.webdriver", reason="selenium is not installed (the extra `dev` has it)")
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

pytestmark = NEEDED


@contextmanager
def viewed(folder: Path) -> Iterator[str]:
    """Serve the runs of a folder, and yield the address."""
    address: list[str] = []
    ready, loop = threading.Event(), asyncio.new_event_loop()
    task: list[asyncio.Task[None]] = []

    async def main() -> None:
        task.append(asyncio.ensure_future(serve_view(Runs(folder), 0, lambda url: (address.append(url), ready.set()))))
        await asyncio.wait(task)

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    try:
        assert ready.wait(600)
        yield address[0]
    finally:
        loop.call_soon_threadsafe(task[0].cancel)
        thread.join()
        loop.close()


def go(browser: Any, url: str, *, width: int = 1280, dark: bool = False) -> None:
    emulate(browser, width, dark=dark)
    browser.get("about:blank")  # a page of an earlier test asks a server that has ended
    browser.get_log("browser")
    browser.get(url)
    ready(browser)


def until(browser: Any, holds: Callable[[], object]) -> None:
    WebDriverWait(browser, 600, poll_frequency=0.05).until(lambda _: holds())


def texts(browser: Any, css: str) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0])].map((found) => found.textContent)"
    found: list[str] = browser.execute_script(script, css)
    return found


def listed(browser: Any) -> list[str]:
    return texts(browser, "#rows tbody tr[data-key] a")


def append(journal: Journal, trajectory_id: str, events: list[AnyEvent]) -> None:
    for event in events:
        journal.append(trajectory_id, event)
    journal.flush()


def test_pages_grow_with_the_run_and_keep_what_a_reader_did(browser: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs" / "one", {"0/0": history("0/0")[:4]})
    rest = history("0/0")[4:]
    with viewed(tmp_path / "runs") as url, Journal(folder / "journal.sqlite", append=True) as journal:
        # 1. A trajectory's page: what is new is added, what stands there stays, and so does what was unfolded in it.
        go(browser, f"{url}runs/one/trajectories/0~2F0.html")
        unfolded(browser)
        assert len(texts(browser, "article.card")) == 2
        browser.execute_script(
            """const first = document.querySelector("article.card");
               first.mine = true;
               first.querySelector("details").open = true;"""
        )
        append(journal, "0/0", rest)
        until(browser, lambda: texts(browser, "h1 .reason") == ["answered"])
        unfolded(browser)
        assert len(texts(browser, "article.card")) == 4
        assert browser.execute_script(
            """const first = document.querySelector("article.card");
               return first.mine && first.querySelector("details").open"""
        )
        tokens = browser.execute_script(
            """return [...document.querySelectorAll(".ribbon[data-stream] i")].map((token) => [
                 +token.dataset.k, getComputedStyle(token).textDecorationLine === "underline"])"""
        )
        mask = [isinstance(event, Generated) for event in history("0/0") if hasattr(event, "ids") for _ in event.ids]
        assert tokens == [[at, trained] for at, trained in enumerate(mask)]
        quiet(browser)
        # 2. The run's list.
        go(browser, f"{url}runs/one/")
        assert listed(browser) == ["0/0"]
        append(journal, "0/1", history("0/1", text=NASTY, score=0.0, failure="bad_arguments"))
        append(journal, "0/2", history("0/2")[:4])
        until(browser, lambda: listed(browser) == ["0/0", "0/1", "0/2"])
        assert "GENERATING" in texts(browser, "#now a")
        quiet(browser)


def test_a_list_is_filtered_ordered_and_leads_to_two_side_by_side(browser: Any, tmp_path: Path) -> None:
    write_run(
        tmp_path / "runs" / "one",
        {
            "0/0": history("0/0", score=0.5),
            "0/1": history("0/1", text=NASTY, score=0.0, failure="bad_arguments"),
            "0/2": history("0/2", told="4", score=1.0),
        },
    )
    with viewed(tmp_path / "runs") as url:
        go(browser, url)
        browser.find_element("css selector", "tbody a").click()
        browser.find_element("name", "text").send_keys("owned")
        until(browser, lambda: listed(browser) == ["0/1"])
        assert "text=owned" in browser.current_url, "the address says what is listed"
        browser.find_element("name", "text").send_keys(Keys.BACKSPACE * len("owned"))
        until(browser, lambda: len(listed(browser)) == 3)
        browser.find_element("link text", "score").click()
        until(browser, lambda: listed(browser) == ["0/2", "0/0", "0/1"])
        for box in browser.find_elements("css selector", "#rows input")[:2]:
            box.click()
        browser.find_element("css selector", ".pages button").click()
        until(browser, lambda: "side-1" in browser.page_source)
        ready(browser)
        # What both did stands once, and a click leads to the token at which they part.
        assert texts(browser, "h1") == ["0/2 and 0/0"]
        assert len(texts(browser, "#same article")) == 1
        assert [len(texts(browser, f"#side-{side} article")) for side in (0, 1)] == [3, 3]
        parts = browser.find_elements("css selector", "td code")
        for side, part in enumerate(parts):
            part.click()
            until(browser, lambda side=side: texts(browser, f"#side-{side} i.hit") == ["43"[side]])
        quiet(browser)


def test_two_runs_are_compared_and_lead_to_what_differs(browser: Any, tmp_path: Path) -> None:
    for name, scores, told in (("early", (0.0, 1.0), "4"), ("final", (1.0, 1.0), "3")):
        ids = ("0/0", "1/0")
        runs = {
            id_: history(id_, group_id=id_[0], score=score, told=told) for id_, score in zip(ids, scores, strict=True)
        }
        write_run(tmp_path / "runs" / name, runs)
    with viewed(tmp_path / "runs") as url:
        go(browser, url)
        for box in browser.find_elements("css selector", "tbody input"):
            box.click()
        browser.find_element("css selector", "form button").click()
        until(browser, lambda: texts(browser, "#flips bdi"))
        ready(browser)
        assert "early → final" in texts(browser, ".crumbs")[0]
        browser.find_element("link text", "side by side").click()
        until(browser, lambda: texts(browser, "#sides i"))
        ready(browser)
        assert texts(browser, ".crumbs a") == ["early", "final"]
        assert len(texts(browser, "td code")) == 2
        quiet(browser)


@pytest.mark.parametrize(("width", "dark"), [(400, True), (1280, False)])
def test_nothing_is_wider_than_the_window(browser: Any, tmp_path: Path, width: int, dark: bool) -> None:
    long = "a_long_name_of_a_run_" * 6
    ids = ("0/0", "0/1")
    for name in (long, "two"):
        write_run(tmp_path / "runs" / name, {id_: history(id_, text=f"{NASTY} {id_}") for id_ in ids})
    with viewed(tmp_path / "runs") as url:
        for path in (
            "", f"runs/{long}/", f"runs/{long}/report.html", "runs/two/trajectories/0~2F1.html",
            "runs/two/beside.html?id=0/0&id=0/1", f"compare.html?run=runs/two&run=runs/{long}",
        ):  # fmt: skip
            go(browser, f"{url}{path}", width=width, dark=dark)
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width, path
            quiet(browser)
