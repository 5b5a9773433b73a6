"""Pictures in a real browser: thumbnails instead of pads, enlarged by a click, in the page alone."""

import base64
import html
from pathlib import Path
from typing import Any

import pytest

from fsm_rollout.report.notebook import trajectory_frame
from fsm_rollout.report.pages import Links, page_path, write_page
from fsm_rollout.report.recording import open_run
from fsm_rollout.report.report import write_report
from fsm_rollout.report.trajectory import page_of_run
from fsm_rollout.trajectory.journal import Journal
from fsm_rollout.trajectory.pictures import StoredPicture
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.cases import FILES
from tests.integration.chromium import NEEDED, chat_page, emulate, quiet, unfolded
from tests.integration.test_view_browser import append, go, texts, until, viewed
from tests.unit.report.recorded_runs import NASTY, PADS, showing, write_run
from tests.unit.report.test_pictures import picture
from tests.vision import gemma3, gemma3_with_tools

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (the extra `dev` has it)")
from selenium.webdriver.common.keys import Keys  # noqa: E402

pytestmark = NEEDED
SINGLE = FILES["single"]
SEEN = [picture(1), picture(2, 1200, 900), picture(3, 2000, 40)]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a trajectory that sees three pictures, then two of them again; beside the run's report."""
    histories = {"0/0": showing(SEEN, SEEN[:2], text=NASTY)}
    folder = write_run(tmp_path_factory.mktemp("run"), histories)
    path = page_path(folder, "0/0")
    write_page(path, page_of_run(open_run(folder), "0/0", Links(folder, path)))
    write_report(folder)
    return path


def shown(browser: Any, page: Path, width: int, *, dark: bool) -> None:
    emulate(browser, width, dark=dark)
    browser.get_log("browser")
    browser.get(page.as_uri())


def sizes(browser: Any, of: str) -> list[list[int]]:
    """The true width and height of each picture, once they are decoded."""
    found: list[list[int]] = browser.execute_async_script(
        """const [of, done] = arguments, all = [...document.querySelectorAll(of)];
           Promise.all(all.map((image) => image.decode())).then(
             () => done(all.map((image) => [image.naturalWidth, image.naturalHeight])), (error) => done(`${error}`))""",
        of,
    )
    return found


def enlarged(browser: Any) -> list[int] | None:
    """How large the picture over the page is."""
    box: list[int] | None = browser.execute_script(
        """const image = document.querySelector("dialog[open] img"), box = image?.getBoundingClientRect();
           return box && [Math.round(box.width), Math.round(box.height)]"""
    )
    return box


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, True)])
def test_a_thumbnail_stands_for_the_tokens_of_a_picture(browser: Any, page: Path, width: int, dark: bool) -> None:
    shown(browser, page, width, dark=dark)
    unfolded(browser)
    stream = Trajectory.fold(showing(SEEN, SEEN[:2], text=NASTY)).streams[0]
    wanted = [[each.width, each.height] for each in [*SEEN, *SEEN[:2]]]
    assert sizes(browser, ".ribbon .picture img") == wanted
    inside = {at for span in stream.media for at in range(span.start, span.end)}
    places = browser.execute_script(
        "return [...document.querySelectorAll('.ribbon [data-k]')].map((i) => +i.dataset.k)"
    )
    starts = {span.start for span in stream.media}
    assert places == [at for at in range(stream.tokens.length) if at not in inside or at in starts]
    words = browser.execute_script(
        "return [...document.querySelectorAll('.ribbon .picture')].map((i) => i.textContent)"
    )
    assert words[1] == f"1,200×900, {PADS} tokens"
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    # Every thumbnail is a small one, and within the page.
    browser.execute_script("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    boxes = browser.execute_script(
        """return [...document.querySelectorAll(".picture")].map((each) => {
             const box = each.getBoundingClientRect();
             return [box.right, box.height, each.querySelector("img").complete]})"""
    )
    assert all(right <= width and 40 < height < 120 and complete for right, height, complete in boxes), boxes
    quiet(browser)


@pytest.mark.parametrize("width", [1280, 400])
def test_a_click_enlarges_a_picture_and_another_ends_it(browser: Any, page: Path, width: int) -> None:
    shown(browser, page, width, dark=False)
    small, large, wide = browser.find_elements("css selector", ".gist .picture")[:3]
    assert enlarged(browser) is None
    small.click()
    box = enlarged(browser)
    assert box is not None
    assert box[0] == (384 if width > 400 else box[0])
    assert abs(box[0] * 48 / 64 - box[1]) < 2, "as wide as it is high, six times as large"
    caption = browser.find_element("css selector", "dialog[open] p").text
    assert caption == f"64×48, {PADS} tokens · sha256 {SEEN[0].sha256[:12]} · 6 times as large"
    webdriver.ActionChains(browser).send_keys(Keys.ESCAPE).perform()
    assert enlarged(browser) is None
    for thumbnail in (large, wide):
        thumbnail.send_keys(Keys.ENTER)
        box = enlarged(browser)
        assert box is not None
        assert max(box) > 300
        assert box[0] <= width
        assert box[1] <= 900
        browser.find_element("css selector", "dialog[open] img").click()
        assert enlarged(browser) is None
    quiet(browser)


def test_a_link_to_a_token_of_a_picture_leads_to_its_thumbnail(browser: Any, page: Path) -> None:
    span = Trajectory.fold(showing(SEEN, SEEN[:2], text=NASTY)).streams[0].media[3]
    emulate(browser, 1280, dark=False)
    browser.get("about:blank")
    browser.get(f"{page.as_uri()}#token-0-{span.start + PADS // 2}")
    hit = browser.find_element("css selector", ".hit")
    assert hit.get_attribute("data-picture") == span.picture.sha256
    webdriver.ActionChains(browser).move_to_element(hit).perform()
    tip = browser.execute_script("return document.getElementById('tip').textContent")
    assert f"positions {span.start} to {span.end - 1}\n" in tip
    assert "not trained" in tip
    quiet(browser)


def test_the_report_shows_what_was_seen(browser: Any, page: Path) -> None:
    shown(browser, page.parents[1] / "report.html", 400, dark=True)
    assert sizes(browser, "#pictures .picture img") == [[each.width, each.height] for each in SEEN]
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 400
    browser.find_element("css selector", "#pictures .picture").click()
    assert enlarged(browser)
    quiet(browser)


def test_a_picture_is_enlarged_within_a_notebook_s_frame(browser: Any, tmp_path: Path) -> None:
    frame = trajectory_frame(Trajectory.fold(showing(SEEN, [])))
    (tmp_path / "notebook.html").write_text(f"<meta charset=utf-8><title>{html.escape(NASTY)}</title>{frame}", "utf-8")
    shown(browser, tmp_path / "notebook.html", 900, dark=False)
    browser.switch_to.frame(browser.find_element("tag name", "iframe"))
    browser.find_element("css selector", ".gist .picture").click()
    assert enlarged(browser)
    assert sizes(browser, "dialog img") == [[64, 48]]
    browser.switch_to.default_content()
    quiet(browser)


def test_what_is_shown_while_somebody_looks_is_added_and_what_was_enlarged_stays(browser: Any, tmp_path: Path) -> None:
    events = showing(SEEN[:1], SEEN[:2])
    folder = write_run(tmp_path / "runs" / "one", {"0/0": events[:4]})
    with viewed(tmp_path / "runs") as url, Journal(folder / "journal.sqlite", append=True) as journal:
        go(browser, f"{url}runs/one/trajectories/0~2F0.html", width=400)
        unfolded(browser)
        assert sizes(browser, ".ribbon .picture img") == [[64, 48]]
        browser.find_element("css selector", ".gist .picture").click()
        first = browser.execute_script("return document.querySelector('.ribbon .picture img').src")
        append(journal, "0/0", events[4:])
        until(browser, lambda: texts(browser, "h1 .reason") == ["answered"])
        assert enlarged(browser)
        unfolded(browser)
        assert sizes(browser, ".ribbon .picture img") == [[64, 48], [64, 48], [1200, 900]]
        again = browser.execute_script(
            "return [...document.querySelectorAll('.ribbon .picture img')].map((i) => i.src)"
        )
        assert again[:2] == [first, first]
        browser.execute_script("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        assert [0, 0] not in sizes(browser, ".message .picture img")
        browser.get("about:blank")


# -- the chat page ----------------------------------------------------------------------------------------------------


def paste(browser: Any, shown: StoredPicture) -> None:
    """Put a picture on the clipboard, and press Ctrl+V where one writes."""
    grants = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    browser.execute_cdp_cmd("Browser.grantPermissions", grants)
    browser.execute_cdp_cmd("Emulation.setFocusEmulationEnabled", {"enabled": True})
    browser.find_element("id", "text").click()
    told = browser.execute_async_script(
        """const [text, done] = arguments, bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
           const item = new ClipboardItem({ "image/png": new Blob([bytes], { type: "image/png" }) });
           navigator.clipboard.write([item]).then(() => done(null), (error) => done(`${error}`))""",
        base64.b64encode(shown.data).decode(),
    )
    assert told is None
    browser.find_element("id", "text").send_keys(Keys.CONTROL, "v")


def test_pictures_are_uploaded_pasted_left_out_again_and_answered(browser: Any, tmp_path: Path) -> None:
    emulate(browser, 400, dark=True, height=700)
    files = []
    for number, shown in enumerate(SEEN[:2]):
        files.append(tmp_path / f"{number}.png")
        files[-1].write_bytes(shown.data)
    (tmp_path / "no.txt").write_text("This is none.")
    with chat_page(browser, ["Four."], agents=SINGLE, processor=gemma3()) as wait:
        assert browser.find_element("id", "pick").is_displayed()
        browser.find_element("id", "files").send_keys("\n".join(map(str, [*files, tmp_path / "no.txt"])))
        wait.until(lambda _: len(browser.find_elements("css selector", "#pictures .picture")) >= 2)
        paste(browser, SEEN[2])
        wait.until(lambda _: len(browser.find_elements("css selector", "#pictures .picture")) >= 3)
        assert sizes(browser, "#pictures img") == [[each.width, each.height] for each in SEEN]
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 400
        browser.find_elements("css selector", "#pictures .kept > button:last-child")[1].click()
        assert sizes(browser, "#pictures img") == [[each.width, each.height] for each in (SEEN[0], SEEN[2])]
        browser.find_element("css selector", "#pictures .picture").click()
        assert enlarged(browser)
        browser.find_element("id", "enlarged").click()
        assert enlarged(browser) is None
        browser.find_element("id", "text").send_keys("How many?", Keys.ENTER)
        wait.until(lambda _: texts(browser, "article.agent:not(.busy) .text") == ["Four."])
        assert sizes(browser, "article.user img") == [[each.width, each.height] for each in (SEEN[0], SEEN[2])]
        assert texts(browser, "article.user .picture") == ["64×48, 12 tokens", "2,000×40, 12 tokens"]
        assert not browser.find_elements("css selector", "#pictures .picture")
        quiet(browser)


def test_what_a_tool_shows_stands_below_its_call(browser: Any) -> None:
    emulate(browser, 400, dark=False, height=700)
    looking = FILES["chats"].replace("fsm_rollout.tools.calculator:calculate", "tests.unit.tools.test_pictures:look")
    call = '<tool_call>\n{"name": "calculate", "arguments": {}}\n</tool_call>'
    with chat_page(browser, [call, "Red."], agents=looking, processor=gemma3_with_tools()) as wait:
        browser.find_element("id", "text").send_keys("Look.", Keys.ENTER)
        wait.until(lambda _: texts(browser, "article.agent:not(.busy) .text") == ["Red."])
        assert sizes(browser, "article.agent details[open] .picture img") == [[30, 20], [30, 9]]
        quiet(browser)
