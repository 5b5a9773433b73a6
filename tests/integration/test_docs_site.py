"""The documentation as a site, built strictly; and the blocks of its pages that need Ray, SGLang or programs."""

import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cases import PROGRAMS
from tests.doc_blocks import blocks, pages, run_page
from tests.kit import ROOT
from tests.programs import program

NEEDS = {page: frozenset().union(*(block.needs for block in blocks(page))) - {"gpu"} for page in pages()}


def pages_that_need(what: str) -> list[str]:
    return [page for page in pages() if what in NEEDS[page]]


@pytest.mark.process
@pytest.mark.parametrize("page", pages_that_need("process"))
@pytest.mark.real
def test_programs_print_what_the_page_says(page: str, tmp_path: Path) -> None:
    run_page(page, tmp_path, frozenset({"process"}))


@pytest.mark.ray("shared")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("page", pages_that_need("ray"))
@pytest.mark.real
def test_blocks_run_on_ray(page: str, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    run_page(page, tmp_path, frozenset({"ray"}))


@pytest.mark.sglang
@pytest.mark.parametrize("page", pages_that_need("sglang"))
@pytest.mark.real
def test_blocks_run_on_sglang_and_a_server_that_is_not_closed_keeps_no_program_from_ending(
    page: str, tmp_path: Path
) -> None:
    """One start of SGLang shows both: the page runs in a program that does not close what the page closes."""
    pytest.importorskip("sglang")
    done = program(PROGRAMS["runs a page and closes no rollout"], page, tmp_path, finalized=True)
    progress = ("still starting", "still closing")  # of a slow machine
    errors = [line for line in done.stderr.splitlines() if not line.startswith(progress)]
    assert (done.returncode, errors) == (0, [])
    children = [line.split() for line in done.stdout.splitlines()]
    assert children
    assert not [child for child in children if running(*child)]


def running(pid: str, since: str) -> bool:
    try:
        return psutil.Process(int(pid)).create_time() == float(since)
    except psutil.NoSuchProcess:
        return False


CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MKDOCS = "from mkdocs.__main__ import cli; cli()"


@pytest.mark.process
@pytest.mark.real
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    env = {"NO_MKDOCS_2_WARNING": "1"}
    build = program(MKDOCS, "build", "--strict", "--site-dir", tmp_path / "site", env=env, searched=(str(ROOT),))
    assert build.returncode == 0, build.stdout + build.stderr
    # What the code says has reached the pages.
    batch = (tmp_path / "site/reference/batch/index.html").read_text("utf-8")
    assert "rollout_log_probs" in batch
    assert "[B, P+R]" in batch
    python = (tmp_path / "site/reference/python/index.html").read_text("utf-8")
    assert "max_staleness" in python
    assert ":class:" not in python
    assert (tmp_path / "site/diagrams/tool_user.svg").is_file()
    # Its tables fit a window of 1,300 pixels.
    if CHROMIUM is not None and DRIVER is not None:
        assert too_wide(tmp_path / "site", tmp_path / "profile") == []


def too_wide(site: Path, profile: Path) -> list[tuple[str, str]]:
    """Return the pages and beginnings of tables that have to be scrolled sideways in a real Chromium."""
    webdriver: Any = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    for flag in ("headless", "no-sandbox", "disable-gpu", f"user-data-dir={profile}", "window-size=1300,1000"):
        options.add_argument(f"--{flag}")
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    wide = """return [...document.querySelectorAll('.md-typeset__scrollwrap')]
        .filter(table => table.scrollWidth > table.clientWidth + 1).map(table => table.innerText.slice(0, 60))"""
    try:
        found = []
        for page in sorted(site.rglob("index.html")):
            driver.get(page.as_uri())
            found += [(str(page.relative_to(site)), table) for table in driver.execute_script(wide)]
        return found
    finally:
        driver.quit()
