"""The report of a run: where the batch spends its time and earns its reward.

Invariant: the report is a function of the run's folder. It shows a run that is still going on, and an empty one, as
what they are, and it is one file: links lead only to pages that exist when it is written; where there is none, a click
shows the command that makes it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsm_rollout.report.figures import Figures, Line, Replica, histogram
from fsm_rollout.report.flow import Flow, traffic_picture
from fsm_rollout.report.links import REPORT, Links, page_path
from fsm_rollout.report.moments import BUSY
from fsm_rollout.report.pages import duration, number, render_page, write_page
from fsm_rollout.report.recorded import RecordedRun, open_run
from fsm_rollout.report.token_texts import visible
from fsm_rollout.report.trajectory import page_of_run

TAIL = 8
GROUPS_SHOWN = 30
SCORES_SHOWN = 64
FLATS_SHOWN = 6
"""Different scores of groups without spread that are named."""
WORTH_A_PAGE = 3
"""How many of the slowest, the best and the worst get a page of their own at the end of a run."""
NO_PAGE = "It has no page. A click says which command makes one."
SAID = 3
"""Different messages of one kind of failure that are shown."""


def write_report(folder: str | Path, out: str | Path | None = None, *, pages: bool = False) -> Path:
    """Write a run's report (``report.html`` in its folder, unless ``out`` says where) and return its path.

    ``pages`` also makes the pages of the trajectories that are most worth a look: the slowest, best and worst scored,
    the first of every stop reason and those whose failures are told, with those that they called and were called by.

    Raises:
        ConfigError: ``folder`` is not a run's.
        JournalError: the journal cannot be read.
        OSError: the file cannot be written.
    """
    run = open_run(folder)
    out = run.folder / REPORT if out is None else Path(out)
    figures, traffic = _read(run)
    chosen = {page_path(run.folder, one): one for one in worth_a_page(figures)} if pages else {}
    for path, trajectory_id in chosen.items():
        links = Links(run.folder, path, planned={*chosen, out})
        write_page(path, page_of_run(run, trajectory_id, links))
    write_page(out, _page(run, figures, traffic, Links(run.folder, out)))
    return out


def worth_a_page(figures: Figures) -> list[str]:
    """Return the ids of trajectories that a reader of the report will want to open."""
    by_time = sorted(figures.lines, key=lambda line: -line.wall)
    scored = sorted((line for line in figures.own if line.score is not None), key=lambda line: line.score or 0.0)
    endings: dict[str, Line] = {}
    for line in figures.lines:
        endings.setdefault(line.ending, line)
    said = [line for item in (*_reasons(figures.own), *_reasons(figures.called)) for line in item["said"]]
    chosen = [*by_time[:WORTH_A_PAGE], *scored[:WORTH_A_PAGE], *scored[-WORTH_A_PAGE:], *endings.values(), *said]
    by_id = {line.trajectory_id: line for line in figures.lines}
    called: defaultdict[str | None, list[str]] = defaultdict(list)
    for line in figures.lines:
        called[line.parent_id].append(line.trajectory_id)
    wanted = [line.trajectory_id for line in chosen]
    for trajectory_id in wanted:  # grows while it is read: callers of callers, sub-agents of sub-agents
        parent = by_id[trajectory_id].parent_id
        family = [*([parent] if parent in by_id else []), *called[trajectory_id]]
        wanted += [one for one in dict.fromkeys(family) if one is not None and one not in wanted]
    return list(dict.fromkeys(wanted))


def _read(run: RecordedRun) -> tuple[Figures, list[Flow]]:
    figures, traffic = Figures(), dict[str, Flow]()
    for recorded in run.histories():
        figures.add(recorded)
        agent = recorded.trajectory.agent
        if agent not in traffic:
            traffic[agent] = Flow(agent, run.agents.get(agent))
        traffic[agent].add(recorded)
    return figures, list(traffic.values())


def _page(run: RecordedRun, figures: Figures, traffic: Sequence[Flow], links: Links) -> str:
    lines, own = figures.lines, figures.own
    columns, rows = _table(lines, links)
    names = [column["name"] for column in columns]
    scores = [line.score for line in own if line.score is not None]
    seconds = figures.seconds
    sampled = sum(stretch.tokens for stretch in figures.generations)
    replicas = figures.replicas()
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
            "command": links.command("TRAJECTORY"),
            "no_page": NO_PAGE,
        },
        run=run,
        setting=_setting(run, [one.agent for one in traffic] or list(run.agents)),
        notes=run.notes,
        lines=lines,
        own=own,
        called=figures.called,
        columns=columns,
        seconds=seconds,
        still=figures.end - figures.begin - seconds,
        score_mean=sum(scores) / len(scores) if scores else None,
        groups=_groups(own),
        dropped=(run.summary or {}).get("groups_dropped", 0),
        group_count=len({line.group_id for line in own}),
        reasons=_reasons(own),
        called_reasons=_reasons(figures.called),
        endings=sorted({line.ending for line in lines}),
        agents=sorted({line.agent for line in lines}),
        tokens=sum(line.tokens for line in lines),
        trained=sum(line.trained for line in lines),
        rate=sampled / seconds if seconds else None,
        histograms=[
            ("messages per trajectory", histogram([line.turns for line in own]), number),
            ("tokens after the prompt", histogram([line.tokens for line in own]), number),
            ("score", histogram(scores), number),
            ("time", histogram([line.wall for line in own]), duration),
        ],
        courses=[
            ("sampled tokens/s", _course(figures.throughput())),
            ("trajectories under way", _course(figures.under_way())),
            ("generations under way", _course(figures.load())),
        ]
        if lines
        else [],
        replicas=_replicas(replicas, seconds) if len(replicas) > 1 else [],
        resumed=[line for line in own if line.resumed],
        crossed=sum(len(line.versions) > 1 for line in own),
        versions=sorted({version for line in lines for version in line.versions}),
        spent=_spent(own),
        tail=_tail(lines),
        tools=sorted(figures.tools.values(), key=lambda use: -sum(use.seconds)),
        graphs=[{"flow": one, "picture": traffic_picture(one)} for one in traffic],
        scale=(min(means), max(means)) if means and min(means) < max(means) else None,
        kinds=[kind for kind in BUSY if any(line.seconds[kind] > 0 for line in lines)],
        link=links.to,
        no_page=NO_PAGE,
        row_of={line.trajectory_id: place for place, line in enumerate(lines)},
    )


def _setting(run: RecordedRun, agents: Sequence[str]) -> list[str]:
    """Return what was run, in a few words: the agents, the engine, how much of it, and how it was sampled and scored.

    The configuration is that of a journal that any program may have written: what is not as expected is left out.
    """
    config, engine = run.config, run.config.get("engine")
    said = [", ".join(agents)]
    if isinstance(engine, Mapping):
        replicas = engine.get("replicas") or 1
        many = f", {replicas} replicas" if replicas != 1 else ""
        where = " on Ray" if engine.get("placement") == "ray" else ""
        said.append(f"{engine.get('kind', 'engine')} {engine.get('model') or ''}".strip() + many + where)
    if config.get("n") and config.get("n") != 1:
        said.append(f"{config['n']} per prompt")
    sampling = config.get("validation_sampling" if config.get("validate") else "sampling")
    if isinstance(sampling, Mapping):
        said += [f"{name} {value}" for name, value in sampling.items() if value is not None]
    if config.get("seed") is not None:
        said.append(f"seed {config['seed']}")
    if config.get("reward"):
        said.append(f"reward {str(config['reward']).rpartition(':')[2]}")
    return [one for one in said if one]


def weights_of(versions: Sequence[int]) -> str:
    """Return a range of weight versions in words."""
    return "–" if not versions else f"{versions[0]}" if len(versions) == 1 else f"{versions[0]} → {versions[-1]}"


def _reasons(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Return how many ended for which reason, and of failures the first with each of the first few messages."""
    by_reason: defaultdict[str, list[Line]] = defaultdict(list)
    for line in lines:
        by_reason[line.ending].append(line)
    found = []
    for reason, own in sorted(by_reason.items(), key=lambda item: -len(item[1])):
        scores = [line.score for line in own if line.score is not None]
        mean = sum(scores) / len(scores) if scores else None
        failures: dict[str, Line] = {}
        for line in own if own[0].kind == "cut" else ():
            if line.detail:
                failures.setdefault(line.detail, line)
        said = list(failures.values())[:SAID]
        share = len(own) / len(lines)
        found.append({"reason": reason, "count": len(own), "share": share, "score": mean, "said": said})
    return found


def _spent(lines: Sequence[Line]) -> dict[str, Any] | None:
    """Return what the time of all trajectories together went into; ``None`` where nothing took any."""
    parts: dict[str, float] = {kind: sum(line.seconds[kind] for line in lines) for kind in BUSY}
    parts["other"] = sum(line.other for line in lines)
    whole = sum(parts.values())
    if not whole:
        return None
    shares = [{"kind": kind, "seconds": part, "share": part / whole} for kind, part in parts.items() if part > 0]
    return {"parts": shares, "mean": sum(line.wall for line in lines) / len(lines)}


def _tail(lines: Sequence[Line]) -> list[dict[str, Any]]:
    slowest = sorted((line for line in lines if line.wall > 0), key=lambda line: -line.wall)[:TAIL]
    longest = max((line.wall for line in slowest), default=0.0)
    found = []
    for line in slowest:
        # Tools of one turn may run beside each other's waits: shares are of what the bar shows, never over its end.
        parts = [(kind, line.seconds[kind]) for kind in BUSY] + [("other", line.other)]
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
        if line.score is not None:
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
    spread = [item for item in found if item["deviation"] > 0]
    flat = Counter(item["mean"] for item in found if not item["deviation"] > 0).most_common()
    return {
        "shown": spread[:GROUPS_SHOWN],
        "count": len(found),
        "spread": len(spread),
        "flat": len(found) - len(spread),
        "flats": flat[:FLATS_SHOWN],
        "more_flats": len(flat) > FLATS_SHOWN,
        "low": low,
        "high": high,
    }


def _replicas(replicas: Sequence[Replica], seconds: float) -> list[dict[str, Any]]:
    """Return each replica's figures; their courses share one scale, so that they can be compared."""
    most = max((value for replica in replicas for value in replica.under_way), default=0.0)
    fastest = max((value for replica in replicas for value in replica.throughput), default=0.0)
    return [
        {
            "of": replica,
            "under_way": _course(replica.under_way, most),
            "throughput": _course(replica.throughput, fastest),
            "busy": replica.busy / seconds if seconds else 0.0,
        }
        for replica in replicas
    ]


def _course(values: Sequence[float], scale: float | None = None) -> dict[str, Any]:
    top = max(values, default=0.0)
    scale = scale if scale is not None else top
    points = [f"{place},{100 - (95 * value / scale if scale else 0):.2f}" for place, value in enumerate(values)]
    return {"points": " ".join(points), "width": len(values) - 1, "top": top, "mean": sum(values) / len(values)}


def _table(lines: Sequence[Line], links: Links) -> tuple[list[dict[str, Any]], list[list[Any]]]:
    """Return the columns and rows of the table; after the columns' values a row has its id and its link."""

    def column(name: str, digits: int | None = None) -> dict[str, Any]:
        return {"name": name, "number": digits is not None, "digits": digits or 0}

    crossing = len({version for line in lines for version in line.versions}) > 1
    resumed = any(line.resumed for line in lines)
    callers = [[visible(line.parent_id or "")] for line in lines] if any(line.parent_id for line in lines) else []
    columns = [
        column("trajectory"),
        *([column("called by")] if callers else []),
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
        *([column("resumed", 0), column("away", 2)] if resumed else []),
        *([column("weights")] if crossing else []),
    ]
    rows: list[list[Any]] = [
        [
            visible(line.trajectory_id),
            *(callers[place] if callers else []),
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
            *([line.resumed, line.seconds["away"]] if resumed else []),
            *([weights_of(line.versions)] if crossing else []),
            line.trajectory_id,
            links.to(line.trajectory_id),
        ]
        for place, line in enumerate(lines)
    ]
    return columns, rows
