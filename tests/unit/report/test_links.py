"""Pages of a run lead to one another: from a call to the sub-agent that it ran, back, and to the report."""

import re
import shutil
from pathlib import Path
from urllib.parse import unquote

import pytest
from msgspec.structs import replace

from fsm_rollout.agent.loader import load_agent
from fsm_rollout.report.pages import Links, page_path
from fsm_rollout.report.recording import open_run
from fsm_rollout.report.report import write_report
from fsm_rollout.report.show import show
from fsm_rollout.trajectory.events import AnyEvent, Called, Prompted
from tests.unit.report.recorded_runs import CONFIGS, history, write_run

CHILD = "0/0/solve 1 & <more>"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A trajectory whose only call ran another one, which called nobody; and many that are nothing special."""
    parent = [replace(e, child_id=CHILD) if isinstance(e, Called) else e for e in history("0/0", stop_reason="odd")]
    child = [replace(e, parent_id="0/0") if isinstance(e, Prompted) else e for e in history(CHILD, score=None)]
    histories: dict[str, list[AnyEvent]] = {"0/0": parent, CHILD: child}
    histories |= {f"{n}/0": history(f"{n}/0", group_id=f"{n}", score=n / 10) for n in range(1, 20)}
    return write_run(tmp_path / "run", histories)


def hrefs(page: Path) -> list[Path]:
    """What a page links to, as files."""
    return [
        (page.parent / unquote(link)).resolve() for link in re.findall(r'<a href="([^"]*)"', page.read_text("utf-8"))
    ]


def test_a_call_and_its_sub_agent_lead_to_each_other_and_to_the_report(run: Path, tmp_path: Path) -> None:
    write_report(run, pages=True)
    parent, child, report = page_path(run, "0/0"), page_path(run, CHILD), run / "report.html"
    assert hrefs(parent)[0] == report
    assert child in hrefs(parent)
    assert hrefs(child) == [report, parent]
    assert len(list((run / "trajectories").iterdir())) < 20, "only those worth a look have a page"
    shutil.move(run, tmp_path / "moved")
    for page in (tmp_path / "moved/trajectories").iterdir():
        assert all(link.is_file() for link in hrefs(page)), "a run's folder can be moved, and served from anywhere"


def test_links_lead_only_to_pages_that_are_there(run: Path, tmp_path: Path) -> None:
    show(run, "0/0", tmp_path / "t.html")
    assert hrefs(tmp_path / "t.html") == []
    assert f"--trajectory &#39;{CHILD}" in (tmp_path / "t.html").read_text("utf-8").replace("&lt;", "<").replace(
        "&gt;", ">"
    ).replace("&amp;", "&")
    write_report(run)
    show(run, CHILD, page_path(run, CHILD))
    show(run, "0/0", tmp_path / "t.html")
    assert hrefs(tmp_path / "t.html") == [run / "report.html", page_path(run, CHILD)]


def test_the_report_says_who_called_whom(run: Path) -> None:
    write_report(run, pages=True)
    report = (run / "report.html").read_text("utf-8")
    assert '"called by"' in report
    assert page_path(run, CHILD) in hrefs(run / "report.html")


def test_a_command_can_be_pasted_whatever_the_names(tmp_path: Path) -> None:
    command = Links(Path("a run's"), tmp_path / "x.html").command("it's; rm -r ~")
    assert command == "fsm-rollout show 'a run'\"'\"'s' --trajectory 'it'\"'\"'s; rm -r ~' -o F.html"


def test_the_best_and_the_worst_have_a_page(run: Path) -> None:
    write_report(run, pages=True)
    written = set((run / "trajectories").iterdir())
    assert {page_path(run, f"{n}/0") for n in (1, 2, 3, 17, 18, 19)} <= written


def test_groups_with_the_widest_spread_come_first(tmp_path: Path) -> None:
    spreads = {"even": (0.5, 0.5), "wide": (0.0, 1.0), "narrow": (0.4, 0.6)}
    histories = {
        f"{group}/{sample}": history(f"{group}/{sample}", group_id=group, score=score)
        for group, scores in spreads.items()
        for sample, score in enumerate(scores)
    }
    write_report(write_run(tmp_path, histories))
    page = (tmp_path / "report.html").read_text("utf-8")
    assert re.findall(r'<div class="group"><bdi>(\w+)<', page) == ["wide", "narrow"]
    assert "1 of 3 have no spread" in page
    assert "without spread: 1 all 0.5" in page
    assert "dropped" not in page.partition('id="groups"')[2].partition("</section>")[0]
    (tmp_path / "summary.json").write_text('{"groups_dropped": 1}', "utf-8")
    write_report(tmp_path)
    assert "1 dropped by the filter" in (tmp_path / "report.html").read_text("utf-8")


def test_the_agents_of_a_run_are_those_of_its_sub_agents_too(tmp_path: Path) -> None:
    graph = load_agent(CONFIGS / "agents/delegate.yaml")
    assert list(open_run(write_run(tmp_path, {}, graph)).agents) == ["tool_agent", "delegate"]
