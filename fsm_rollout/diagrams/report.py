"""The report of a run: where the batch spends its time and earns its reward.

Invariant: the report is a function of the run's folder. It shows a run that is still going on, and an empty one, as
what they are, and it is one file: links lead only to pages that exist when it is written; where there is none, a click
shows the command that makes it.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fsm_rollout.diagrams.figures import Figures, Line, histogram
from fsm_rollout.diagrams.flow import Flow, traffic_picture
from fsm_rollout.diagrams.moments import KINDS
from fsm_rollout.diagrams.pages import render_page, write_page
from fsm_rollout.diagrams.recorded import RecordedRun, open_run
from fsm_rollout.diagrams.token_texts import visible
from fsm_rollout.diagrams.trajectory import page_of_run

PAGES = "trajectories"
"""The folder, in a run's folder, of trajectory pages that a report links to."""
TAIL = 8
GROUPS_SHOWN = 30
SCORES_SHOWN = 64
LONGEST_NAME = 150
"""Characters of a page's name; file systems take 255 in all."""
WORTH_A_PAGE = 3
"""How many of the slowest, the best and the worst get a page of their own at the end of a run."""


def write_report(folder: str | Path, out: str | Path | None = None, *, pages: bool = False) -> Path:
    """Write a run's report (``report.html`` in its folder, unless ``out`` says where) and return its path.

    ``pages`` also makes the pages of the trajectories that are most worth a look: the slowest, best and worst scored,
    and the first of every stop reason.

    Raises:
        ConfigError: ``folder`` is not a run's.
        JournalError: the journal cannot be read.
        OSError: the file cannot be written.
    """
    run = open_run(folder)
    out = run.folder / "report.html" if out is None else Path(out)
    figures, traffic = _read(run)
    if pages:
        for trajectory_id in worth_a_page(figures):
            write_page(page_path(run.folder, trajectory_id), page_of_run(run, trajectory_id))
    write_page(out, _page(run, figures, traffic, out))
    return out


def report_page(run: RecordedRun, out: Path) -> str:
    """Return the report as one HTML page that is to be at ``out`` (which relative links depend on)."""
    return _page(run, *_read(run), out)


def page_path(folder: Path, trajectory_id: str) -> Path:
    """Return where the page of a trajectory belongs; no two ids share a name, whatever characters they have."""
    name = quote(trajectory_id, safe="", errors="backslashreplace").replace("~", "%7E").replace("%", "~")
    if len(name) > LONGEST_NAME:
        name = f"{name[:LONGEST_NAME]}~~{hashlib.sha256(trajectory_id.encode(errors='backslashreplace')).hexdigest()}"
    return folder / PAGES / f"{name}.html"


def worth_a_page(figures: Figures) -> list[str]:
    """Return the ids of trajectories that a reader of the report will want to open."""
    by_time = sorted(figures.lines, key=lambda line: -line.wall)
    scored = sorted((line for line in figures.lines if line.score is not None), key=lambda line: line.score or 0.0)
    endings: dict[str, Line] = {}
    for line in figures.lines:
        endings.setdefault(line.ending, line)
    chosen = [*by_time[:WORTH_A_PAGE], *scored[:WORTH_A_PAGE], *scored[-WORTH_A_PAGE:], *endings.values()]
    return list(dict.fromkeys(line.trajectory_id for line in chosen))


def _read(run: RecordedRun) -> tuple[Figures, list[Flow]]:
    figures, traffic = Figures(), dict[str, Flow]()
    for recorded in run.histories():
        figures.add(recorded)
        agent = recorded.trajectory.agent
        if agent not in traffic:
            traffic[agent] = Flow(agent, run.agents.get(agent))
        traffic[agent].add(recorded)
    return figures, list(traffic.values())


def _page(run: RecordedRun, figures: Figures, traffic: Sequence[Flow], out: Path) -> str:
    lines = figures.lines
    columns, rows = _table(run, lines, out)
    names = [column["name"] for column in columns]
    scores = [line.score for line in lines if line.score is not None]
    seconds = figures.end - figures.begin
    sampled = sum(stretch.tokens for stretch in figures.generations)
    load = figures.load()
    means = [edge.score for one in traffic for edge in one.edges if edge.score is not None]
    return render_page(
        "report.html.jinja",
        title=f"run {run.folder.name}",
        states=list(dict.fromkeys(name for one in traffic for name in one.states)),
        data={
            "kind": "report",
            "columns": columns,
            "rows": rows,
            "reason": names.index("stop reason"),
            "agent": names.index("agent"),
            "command": f"fsm-rollout show {shlex.quote(str(run.folder))} --trajectory TRAJECTORY -o trajectory.html",
        },
        run=run,
        notes=run.notes,
        lines=lines,
        columns=columns,
        seconds=seconds,
        score_mean=sum(scores) / len(scores) if scores else None,
        groups=_groups(lines),
        group_count=len({line.group_id for line in lines}),
        reasons=_reasons(lines),
        endings=sorted({line.ending for line in lines}),
        agents=sorted({line.agent for line in lines}),
        tokens=sum(line.tokens for line in lines),
        trained=sum(line.trained for line in lines),
        rate=sampled / seconds if seconds else None,
        histograms=[
            ("messages per trajectory", histogram([line.turns for line in lines])),
            ("tokens after the prompt", histogram([line.tokens for line in lines])),
            ("score", histogram(scores)),
            ("seconds", histogram([line.wall for line in lines])),
        ],
        courses=[
            ("sampled tokens per second", _course(figures.throughput())),
            ("trajectories under way", _course(figures.under_way())),
            *(
                (f"generations under way{f' on replica {name}' if name else ''}", _course(values))
                for name, values in load.items()
            ),
        ]
        if lines
        else [],
        tail=_tail(lines),
        tools=sorted(figures.tools.values(), key=lambda use: -sum(use.seconds)),
        graphs=[{"flow": one, "picture": traffic_picture(one)} for one in traffic],
        scale=(min(means), max(means)) if means and min(means) < max(means) else None,
        kinds=KINDS,
        link=lambda trajectory_id: _link(run, trajectory_id, out),
        row_of={line.trajectory_id: place for place, line in enumerate(lines)}.__getitem__,
    )


def _reasons(lines: Sequence[Line]) -> list[dict[str, Any]]:
    by_reason: defaultdict[str, list[Line]] = defaultdict(list)
    for line in lines:
        by_reason[line.ending].append(line)
    found = []
    for reason, own in sorted(by_reason.items(), key=lambda item: -len(item[1])):
        scores = [line.score for line in own if line.score is not None]
        mean = sum(scores) / len(scores) if scores else None
        found.append({"reason": reason, "count": len(own), "share": len(own) / len(lines), "score": mean})
    return found


def _tail(lines: Sequence[Line]) -> list[dict[str, Any]]:
    slowest = sorted((line for line in lines if line.wall > 0), key=lambda line: -line.wall)[:TAIL]
    longest = max((line.wall for line in slowest), default=0.0)
    found = []
    for line in slowest:
        # Tools of one turn may run beside each other's waits: shares are of what the bar shows, never over its end.
        parts = [(kind, line.seconds[kind]) for kind in KINDS] + [("other", line.other)]
        whole = max(line.wall, sum(seconds for _, seconds in parts))
        shares = [
            {"kind": kind, "seconds": seconds, "share": seconds / whole * line.wall / longest}
            for kind, seconds in parts
            if seconds > 0
        ]
        found.append({"line": line, "parts": shares, "why": line.why()})
    return found


def _groups(lines: Sequence[Line]) -> dict[str, Any] | None:
    """Return the groups of several scored trajectories, the widest spread first; without spread nothing is learned."""
    by_group: defaultdict[str, list[float]] = defaultdict(list)
    for line in lines:
        if line.score is not None and line.parent_id is None:
            by_group[line.group_id].append(line.score)
    several = {group: scores for group, scores in by_group.items() if len(scores) > 1}
    if not several:
        return None
    low = min(score for scores in several.values() for score in scores)
    high = max(score for scores in several.values() for score in scores)
    span = (high - low) or 1.0
    found: list[dict[str, Any]] = []
    for group, scores in several.items():
        mean = sum(scores) / len(scores)
        deviation = (sum((score - mean) ** 2 for score in scores) / len(scores)) ** 0.5
        places = [(score - low) / span if high > low else 0.5 for score in sorted(scores)[:SCORES_SHOWN]]
        at = (mean - low) / span if high > low else 0.5
        found.append({"group": group, "mean": mean, "deviation": deviation, "places": places, "at": at})
    found.sort(key=lambda item: (-item["deviation"], item["mean"]))
    flat = sum(item["deviation"] == 0 for item in found)
    return {"shown": found[:GROUPS_SHOWN], "count": len(found), "flat": flat, "low": low, "high": high}


def _course(values: Sequence[float]) -> dict[str, Any]:
    top = max(values, default=0.0)
    points = [f"{place},{100 - (95 * value / top if top else 0):.2f}" for place, value in enumerate(values)]
    return {"points": " ".join(points), "width": len(values) - 1, "top": top, "mean": sum(values) / len(values)}


def _table(run: RecordedRun, lines: Sequence[Line], out: Path) -> tuple[list[dict[str, Any]], list[list[Any]]]:
    """Return the columns and rows of the table; after the columns' values a row has its id and its link."""

    def column(name: str, digits: int | None = None) -> dict[str, Any]:
        return {"name": name, "number": digits is not None, "digits": digits or 0}

    columns = [
        column("trajectory"),
        column("group"),
        column("agent"),
        column("stop reason"),
        column("score", 3),
        column("messages", 0),
        column("generations", 0),
        column("tokens", 0),
        column("trained", 0),
        column("calls", 0),
        column("failed", 0),
        column("seconds", 2),
    ]
    rows: list[list[Any]] = [
        [
            visible(line.trajectory_id),
            visible(line.group_id),
            visible(line.agent),
            visible(line.ending),
            line.score,
            line.turns,
            line.generations,
            line.tokens,
            line.trained,
            line.calls,
            line.failures,
            line.wall,
            line.trajectory_id,
            _link(run, line.trajectory_id, out),
        ]
        for line in lines
    ]
    return columns, rows


def _link(run: RecordedRun, trajectory_id: str, out: Path) -> str | None:
    page = page_path(run.folder, trajectory_id)
    if not page.is_file():
        return None
    return quote(os.path.relpath(page.absolute(), out.absolute().parent).replace(os.sep, "/"))
