"""What people look at first: whose figures they are, what failed and why, and that nothing long is in the way."""

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace
from typer.testing import CliRunner

from fsm_rollout import AgentGraph, State
from fsm_rollout.cli import app
from fsm_rollout.diagrams.draw import to_dot
from fsm_rollout.diagrams.picture import picture
from fsm_rollout.report.figures import histogram
from fsm_rollout.report.pages import duration
from fsm_rollout.report.recording import kind_of_end
from fsm_rollout.report.report import write_report
from fsm_rollout.report.show import show
from fsm_rollout.report.texts import folded, shortened
from fsm_rollout.trajectory.enums import IMPLICIT_TRIGGERS
from fsm_rollout.trajectory.events import AnyEvent, Ended, Generated, Prompted
from fsm_rollout.trajectory.outcome import Outcome
from tests.cases import FILES, table
from tests.kit import ROOT, on_screen
from tests.unit.report.recorded_runs import history, write_run

LONG = "so much was wrong " * 170
"""3,060 characters."""


def ended(trajectory_id: str, reason: str, detail: str | None = None, parent: str | None = None, **facts: Any) -> Any:
    """The usual history with another end, and maybe a caller."""
    changed: dict[type, dict[str, Any]] = {Ended: {"detail": detail}, Prompted: {"parent_id": parent}}
    group = trajectory_id.partition("/")[0]
    events: list[AnyEvent] = history(trajectory_id, stop_reason=reason, group_id=group, **facts)
    return [replace(event, **changed.get(type(event), {})) for event in events]


def text_of(page: Path) -> str:
    """What a reader of a page sees, on one line."""
    body = page.read_text("utf-8").partition("<body>")[2].partition("<script")[0]
    return " ".join(html.unescape(re.sub("<.*?>", " ", body)).split())


def test_a_sub_agent_is_in_no_headline(tmp_path: Path) -> None:
    family = {"0/0": ended("0/0", "done", score=1.0), "0/1": ended("0/1", "done", score=0.0)}
    child = ended("0/0/solve.1", "limit:tool_calls", parent="0/0", score=1.0)
    write_report(write_run(tmp_path, family | {"0/0/solve.1": child}))
    page, screen = text_of(tmp_path / "report.html"), on_screen(show(tmp_path))
    assert "trajectories 2 in 1 group + 1 of sub-agents mean score 0.5" in page
    assert "Why they ended done 2, score 0.5 of sub-agents 1 trajectory limit:tool_calls 1, score 1" in page
    assert "of sub-agents, 10.0 s" in " ".join(screen.split())
    assert "2 trajectories in 1 group + 1 of sub-agents" in " ".join(screen.split())
    assert "\nended: done 2\nof sub-agents: limit:tool_calls 1\n" in screen
    assert "PENDING 2 " in screen
    assert "↳ 0/0/solve.1" in screen


def test_an_attempt_that_was_given_up_is_in_no_headline(tmp_path: Path) -> None:
    child = ended("0/0/solve.1", "done", parent="0/0")
    again = {"0/0": ended("0/0", "failed:E"), "0/0/solve.1": child, "0/0~1": ended("0/0~1", "done", score=1.0)}
    write_report(write_run(tmp_path, again))
    page, screen = text_of(tmp_path / "report.html"), " ".join(on_screen(show(tmp_path)).split())
    assert "trajectories 1 in 1 group mean score 1" in page
    assert "1 trajectory in 1 group, 10.0 s, 10 trained tokens; 2 given up, in whose place others began" in screen
    assert "ended: done 1 " in screen
    assert "failed:E" in screen, "it can be looked at all the same"


def test_an_author_s_own_end_is_no_failure() -> None:
    assert {kind_of_end(Outcome(trigger, limit="x", error="E").stop_reason) for trigger in IMPLICIT_TRIGGERS} == {"cut"}
    assert kind_of_end("prompt_too_long") == "cut"
    for reason in ("answered", "interaction_done", "no_plan", "failing_is_fine", "done:twice"):
        assert kind_of_end(reason) == "fine"
    assert kind_of_end("suspended") == kind_of_end("unfinished") == "open"


def test_ends_are_coloured_by_their_kind(tmp_path: Path) -> None:
    run = {"0/0": ended("0/0", "no_plan"), "1/0": ended("1/0", "timed_out"), "2/0": history("2/0")[:5]}
    write_report(write_run(tmp_path, run), pages=True)
    page = (tmp_path / "report.html").read_text("utf-8")
    assert dict(re.findall(r'class="reason (\w+)"><bdi>(\w+)<', page)) == {
        "fine": "no_plan",
        "cut": "timed_out",
        "open": "unfinished",
    }
    assert re.findall(r'class="hbar (\w+)"><button data-filter="(\w+)"', page) == [
        ("fine", "no_plan"),
        ("cut", "timed_out"),
        ("open", "unfinished"),
    ]
    own = (tmp_path / "trajectories/0~2F0.html").read_text("utf-8")
    assert '<span class="reason fine"><bdi>no_plan' in own


def test_the_report_says_who_has_to_answer_for_failures(tmp_path: Path) -> None:
    run = {f"{n}/0": ended(f"{n}/0", "failed:KeyError") for n in range(3)} | {"3/0": ended("3/0", "limit:tool_calls")}
    classes = {"0/0": "tool", "1/0": "engine", "2/0": "tool", "3/0": "policy"}
    for name, history_ in run.items():
        run[name] = [replace(event, failure=classes[name]) if isinstance(event, Ended) else event for event in history_]
    write_report(write_run(tmp_path / "failed", run))
    page = text_of(tmp_path / "failed/report.html")
    assert "Failures by class: tool 2, engine 1, policy 1. Only the policy’s have a score." in page
    write_report(write_run(tmp_path / "fine", {"0/0": ended("0/0", "done")}))
    assert "Failures by class" not in text_of(tmp_path / "fine/report.html")


def test_the_report_says_what_failed_and_leads_there(tmp_path: Path) -> None:
    messages = ["no 'a'", "no 'b'", "no 'a'", "no 'c'", "no 'd'"]
    run = {f"{n}/0": ended(f"{n}/0", "failed:KeyError", detail) for n, detail in enumerate(messages)}
    run |= {f"{n}/0": ended(f"{n}/0", "done", "not to be told", score=n / 40) for n in range(5, 40)}
    write_report(write_run(tmp_path, run), pages=True)
    page = (tmp_path / "report.html").read_text("utf-8")
    links = re.findall(r'<div class="said"><a href="([^"]*)"><bdi>(.*?)</bdi></a>: <bdi>(.*?)</bdi>', page)
    assert [(id_, html.unescape(text)) for _, id_, text in links] == [
        ("0/0", messages[0]),
        ("1/0", messages[1]),
        ("3/0", messages[3]),
    ]
    assert "not to be told" not in page


def test_a_long_message_is_folded_everywhere(tmp_path: Path) -> None:
    run = write_run(tmp_path, {"0/0": ended("0/0", "failed:ValueError", LONG)})
    write_report(run, pages=True)
    begins, rest = folded(LONG)
    assert (begins + rest, len(begins)) == (LONG, 200)
    assert folded("x" * 240) == ("x" * 240, "")
    assert shortened(LONG).endswith(" … 2,860 more characters")
    for page in (run / "report.html", run / "trajectories/0~2F0.html"):
        inside = re.findall(
            r'<details class="rest"><summary>… ([\d,]+) more characters</summary>', page.read_text("utf-8")
        )
        assert len(inside) == 1
        assert 2_800 < int(inside[0].replace(",", "")) < 3_000
    screen = " ".join(on_screen(show(run, "0/0")).split())
    assert "more characters" in screen
    assert screen.count("so much was wrong") < 20


REASONS = ("interaction_done", "limit:tool_calls", "failed:QuiteALongNameOfAnError", "x" * 70)


def test_at_80_columns_nothing_is_cut(tmp_path: Path) -> None:
    run = {f"a-prompt-with-a-name-{n}/0": ended(f"a-prompt-with-a-name-{n}/0", r) for n, r in enumerate(REASONS)}
    write_run(tmp_path, run)
    narrow, wide = (on_screen(show(tmp_path), width) for width in (80, 200))
    table = narrow.partition("slowest")[2]
    assert "…" not in table
    for n, reason in enumerate(REASONS[:2]):
        assert re.search(rf"^a-prompt-\S+ +{reason} ", table, re.MULTILINE), reason
        assert f"a-prompt-with-a-name-{n}/0: 45 % generating: 2 generations, " in table
    assert max(map(len, narrow.split("\n")[:-1])) <= 80
    assert "what it went into:" not in wide
    assert wide.count("45 % generating") == len(REASONS)


@pytest.mark.parametrize(("facts", "says"), table("report")["a turn that was cut says at what"])
def test_a_turn_that_was_cut_says_at_what(tmp_path: Path, facts: dict[str, Any], says: str | None) -> None:
    events = [replace(event, **facts) if isinstance(event, Generated) else event for event in history()]
    run = write_run(tmp_path, {"0/0": events})
    show(run, "0/0", tmp_path / "t.html")
    messages = (tmp_path / "t.html").read_text("utf-8").partition('id="messages"')[2].partition("<script")[0]
    for shown in (on_screen(show(run, "0/0")), messages):
        assert ("cut at" in shown, "aborted" in shown) == ("cut" in (says or ""), says == "aborted")
        assert (says or "") in shown


def test_short_times_are_said_without_exponents(tmp_path: Path) -> None:
    quick = [replace(event, at=event.at / 1e5) for event in history()]
    slow = [replace(event, at=event.at / 5e3) for event in history("0/1")]
    write_report(write_run(tmp_path, {"0/0": quick, "0/1": slow}))
    page = text_of(tmp_path / "report.html")
    assert not re.search(r"\de-\d", page)
    assert "100 µs 2.0 ms" in page
    chart = histogram([0.0001, 0.00094])
    assert chart is not None
    assert chart.bar(0, duration) == "100 µs to 135 µs"
    assert chart.bar(0) == "0.0001 to 0.00014"


class Grades(State):
    """Calls nothing and samples nothing, as far as anybody knows."""

    triggers = ("graded",)

    async def run(self, trajectory: Any, visit: Any) -> Outcome:
        raise NotImplementedError


class Executes(Grades):
    triggers = ("executed",)
    spends = "assistant_turns"


def test_a_box_says_what_is_known_of_its_handler() -> None:
    graph = AgentGraph.model_validate(yaml.safe_load(FILES["handlers of ones own"].replace("HERE", __name__)))
    boxes = {box.name: box for box in picture(graph).boxes}
    assert boxes["EXECUTING"].trained is True
    assert boxes["EXECUTING"].lines[0] == boxes["PROCESSING_TOOLS"].lines[0] == "note, solve (agent helper)"
    assert boxes["GRADING"].trained is None
    assert boxes["GRADING"].lines == ("max_visits ≤ 1",)
    assert to_dot(graph).count(">trained<") == 1


def test_a_run_says_what_its_sub_agents_failed_of(tmp_path: Path) -> None:
    configs = ROOT / "configs"
    call = '<tool_call>\n{"name": "solve", "arguments": {"task": "x"}}\n</tool_call>'
    script = {"delegate": [call, "It failed."], "tool_agent": [{"text": "x", "error": f"Overload: {LONG}"}]}
    (tmp_path / "script.yaml").write_text(json.dumps(script), "utf-8")
    asked = ["limit=1", f"engine.script={tmp_path / 'script.yaml'}", "failures.engine.attempts=1", "n=2"]
    done = CliRunner().invoke(app, ["run", str(configs / "runs/delegate.yaml"), *asked, f"out={tmp_path / 'out'}"])
    assert done.exit_code == 0, done.output
    summary = json.loads((tmp_path / "out/summary.json").read_text("utf-8"))
    assert (summary["trajectories"], summary["stop_reasons"]) == (2, {"answered": 2})
    assert summary["sub_agents"]["stop_reasons"] == {"failed:Overload": 2}
    assert "failed:Overload (2 of 2 sub-agents): " in done.output
    assert "more characters\n" in done.output
    assert "every trajectory failed" not in done.output
