"""The pages of ``fsm-rollout view``: those that are files without a server, and two lists that lead to them.

Invariant: an address within a run is the path that its page has as a file in the run's folder, so links of one lead to
pages of the other. A page is a function of what was read and of its address.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlencode

from fsm_rollout.errors import RolloutError
from fsm_rollout.jobs.compare import comparison_of, comparison_page
from fsm_rollout.report.pages import PAGES, REPORT, Links, page_path, render_page
from fsm_rollout.report.recording import RunFolder
from fsm_rollout.report.report import report_page, setting_of
from fsm_rollout.report.trajectory import page_of_run
from fsm_rollout.view.beside import beside_page
from fsm_rollout.view.runs import Runs, ViewedRun
from fsm_rollout.view.table import COLUMNS, PER_PAGE, WORDED, Wanted

KINDS = {"running": "open", "ended": "fine", "open": "cut"}
WORDS = {"running": "running", "ended": "ended", "open": "not ended"}
INDEX = "index.html"


class _Everything:
    """The pages of a server: each that is asked for is made."""

    def __contains__(self, path: object) -> bool:
        return True


def links_of(run: ViewedRun, page: Path, version: str) -> Links:
    """Return the links of a page that is at ``page`` in a run's folder."""
    return Links(run.run.folder, page, planned=_Everything(), version=version)


def path_of_run(name: str) -> str:
    """Return the address of a run's list, from the top."""
    return f"{name}/"


def runs_page(runs: Runs, version: str) -> str:
    """Return the list of all runs; those that have not ended are read."""
    rows = [_run_row(run) for run in runs.all()]
    return render_page(
        "runs.html.jinja", title=f"runs in {runs.folder.name}", states=[],
        data={"kind": "runs", "soon": any(row.get("unread") for row in rows)}, version=version,
        folder=runs.folder, runs=rows, notes=[],
    )  # fmt: skip


def _run_row(run: ViewedRun) -> dict[str, Any]:
    row: dict[str, Any] = {"name": run.name, "link": quote(path_of_run(run.name)), "problem": None}
    try:
        opened, status = run.run, run.status
        engine = opened.config.get("engine")
        kind = f"{engine.get('kind', '')} {engine.get('model') or ''}" if isinstance(engine, Mapping) else ""
        row |= {
            "status": WORDS[status], "kind": KINDS[status], "agents": ", ".join(sorted(opened.agents)),
            "engine": kind.strip(),
            "written": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.written_at)), "error": None, "unread": 0,
            "read": True,
        }  # fmt: skip
        summary = run.summary
        if "trajectories" in summary:  # a server's says nothing of them
            reasons = summary.get("stop_reasons", {})
            still = sum(reasons.get(name, 0) for name in ("suspended", "unfinished"))
            samples = summary["trajectories"]
            score, error = summary.get("score_mean"), summary.get("score_error")
            row |= {"samples": samples, "ended": samples - still, "score": score, "error": error}
        else:
            reader, all_ = run.watch(), run.overview
            row |= {"samples": all_.samples, "ended": all_.ended, "score": all_.score, "unread": reader.unread}
    except RolloutError as error:
        row["problem"] = str(error)
    return row


def run_page(run: ViewedRun, query: Mapping[str, str], version: str) -> str:
    """Return the list of a run's trajectories that the query asks for, and what the run has come to."""
    reader, opened = run.watch(), run.run
    everything = list(reader.trajectories.values())
    all_, wanted = run.overview, Wanted.of(query)
    found = wanted.chosen(everything, run.holding)
    first = min(wanted.page, max(0, len(found) - 1) // PER_PAGE) * PER_PAGE
    links = links_of(run, opened.folder / INDEX, version)
    asked = {name: value for name, value in query.items() if value}

    def turned(page: int) -> str | None:
        return urlencode(asked | {"page": str(page)}) if 0 <= page * PER_PAGE < len(found) else None

    names = [name for name in COLUMNS if name != "agent" or len(all_.agents) > 1]
    return render_page(
        "run.html.jinja",
        title=f"run {opened.folder.name}",
        states=list(dict.fromkeys([*(state for graph in opened.agents.values() for state in graph.states),
                                   *all_.visited, *all_.now])),
        data={"kind": "run", "soon": reader.unread > 0},
        version=version,
        run=opened,
        status=WORDS[run.status],
        kind=KINDS[run.status],
        setting=setting_of(opened, list(all_.agents)),
        notes=opened.notes,
        name=run.name,
        up="../" * (run.name.count("/") + 1),
        all=all_,
        total=len(everything),
        unread=reader.unread,
        wanted=wanted,
        least=query.get("least", ""),
        most=query.get("most", ""),
        columns=[_column(name, wanted.sort, asked) for name in names],
        found=len(found),
        rows=[(each, links.to(each.trajectory_id)) for each in found[first : first + PER_PAGE]],
        first=first + 1 if found else 0,
        last=min(first + PER_PAGE, len(found)),
        previous=turned(first // PER_PAGE - 1),
        next=turned(first // PER_PAGE + 1),
    )  # fmt: skip


def _column(name: str, sort: str, asked: Mapping[str, str]) -> dict[str, Any]:
    numbers = name not in WORDED
    here, down = sort.removeprefix("-") == name, sort.startswith("-")
    again = f"-{name}" if (not down if here else numbers) else name
    rest = {key: value for key, value in asked.items() if key not in ("sort", "page")}
    order = "none" if not here else "descending" if down else "ascending"
    return {"name": name, "number": numbers, "order": order, "link": urlencode(rest | {"sort": again})}


def file_page(run: ViewedRun, path: str, version: str) -> str | None:
    """Return the page that belongs at a path in a run's folder; ``None``: no page does."""
    opened = run.run
    if path == REPORT:
        return report_page(opened, links_of(run, opened.folder / REPORT, version))
    trajectory_id = trajectory_at(run, path)
    if trajectory_id is None:
        return None
    return page_of_run(opened, trajectory_id, links_of(run, page_path(opened.folder, trajectory_id), version))


def compare_page(runs: Sequence[ViewedRun], version: str) -> str:
    """Return the comparison of two runs, the second with the first; both are read to their ends."""
    first, second = runs[0].run, runs[1].run
    comparison = comparison_of(runs[0].samples(), runs[1].samples())
    paths = {run.folder: quote(path_of_run(run.name)) for run in runs}

    def link(run: RunFolder, trajectory_id: str) -> str:
        page = page_path(run.folder, trajectory_id).relative_to(run.folder).as_posix()
        return f"{paths[run.folder]}{quote(page)}"

    def both(trajectory_ids: Sequence[str]) -> str:
        named = [("run", run.name) for run in runs] + [("id", trajectory_id) for trajectory_id in trajectory_ids]
        return f"beside.html?{urlencode(named)}"

    return comparison_page(
        comparison, (first, second), link, both, [paths[first.folder], paths[second.folder]], version
    )


def two_page(runs: Sequence[ViewedRun], trajectory_ids: Sequence[str], page: Path, version: str) -> str:
    """Return the page of two trajectories; ``page``: where it would be as a file."""
    return beside_page([run.run for run in runs], trajectory_ids, [links_of(run, page, version) for run in runs])


def trajectory_at(run: ViewedRun, path: str) -> str | None:
    """Return the id of the trajectory whose page belongs at a path in a run's folder."""
    folder, _, name = path.rpartition("/")
    if folder != PAGES or not name.endswith(".html"):
        return None
    wanted = run.run.folder / PAGES / name
    trajectory_id = unquote(name.removesuffix(".html").replace("~", "%"))
    if page_path(run.run.folder, trajectory_id) == wanted:
        return trajectory_id
    return next((id_ for id_ in run.run.trajectory_ids() if page_path(run.run.folder, id_) == wanted), None)
