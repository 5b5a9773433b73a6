"""The report of a run: where the batch spends its time and earns its reward.

Invariant: the report is a function of the run's folder. It shows a run that is still going on, and an empty one, as
what they are, and it is one file: links lead only to pages that exist when it is written; where there is none, a click
shows the command that makes it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsm_rollout.report.figures import Figures, Line, histogram
from fsm_rollout.report.flow import Flow, traffic_picture
from fsm_rollout.report.pages import REPORT, Links, page_path, render_page, write_page
from fsm_rollout.report.pictures import picture_data, words_of
from fsm_rollout.report.recording import EndKind, RunFolder, open_run
from fsm_rollout.report.running import running_costs
from fsm_rollout.report.spans import PARTS
from fsm_rollout.report.texts import duration, number, visible
from fsm_rollout.report.trajectory import page_of_run

TAIL = 8
GROUPS_SHOWN = 30
SCORES_SHOWN = 64
MOST_SOLVED = 16  # scores of a group up to which every number of solved ones has a bar, also one that no group has
FLATS_SHOWN = 6  # different scores of groups without spread that are named
WORTH_A_PAGE = 3  # how many of the slowest, the best and the worst get a page of their own at the end of a run
NO_PAGE = "It has no page. A click says which command makes one."
FAILURES_SHOWN = 3  # different messages of one kind of failure that are shown


def write_report(folder: str | Path, out: str | Path | None = None, *, pages: bool = False) -> Path:
    """Write a run's report (``report.html`` in its folder, unless ``out`` says where) and return its path.

    ``pages`` also makes the pages of the trajectories that are most worth a look: the slowest, best and worst scored,
    the first of every stop reason and those whose failures the report quotes, with their callers and sub-agents.

    Raises:
        ConfigError: ``folder`` is not a run's, or a file cannot be written.
        JournalError: the journal cannot be read.
    """
    run = open_run(folder)
    out = run.folder / REPORT if out is None else Path(out)
    # 1. One pass over the journal, of which only figures are kept.
    figures, flows = _read(run)
    # 2. The pages that the report leads to.
    paths = {page_path(run.folder, trajectory_id): trajectory_id for trajectory_id in worth_a_page(figures)}
    for path, trajectory_id in paths.items() if pages else ():
        write_page(path, page_of_run(run, trajectory_id, Links(run.folder, path, planned={*paths, out})))
    # 3. The report.
    write_page(out, _page(run, figures, flows, Links(run.folder, out)))
    return out


def report_page(run: RunFolder, links: Links) -> str:
    """Return the report of a run as it stands, with what ``links`` leads to; JournalError as above."""
    return _page(run, *_read(run), links)


def _read(run: RunFolder) -> tuple[Figures, list[Flow]]:
    figures, flows = Figures(), dict[str, Flow]()
    for recording in run.recordings():
        figures.add(recording)
        agent = recording.trajectory.agent
        flows.setdefault(agent, Flow(agent, run.agents.get(agent))).add(recording)
    return figures, list(flows.values())


def worth_a_page(figures: Figures) -> list[str]:
    """Return the ids of trajectories that a reader of the report will want to open."""
    slowest = sorted(figures.lines, key=lambda line: -line.wall)[:WORTH_A_PAGE]
    scored = sorted((line for line in figures.own if line.score is not None), key=lambda line: line.score or 0.0)
    first_to_end: dict[str, Line] = {}
    for line in figures.lines:
        first_to_end.setdefault(line.ending, line)
    failures = [line for ends in (figures.own, figures.called) for end in _ends(ends) for line in end.failures]
    chosen = [*slowest, *scored[:WORTH_A_PAGE], *scored[-WORTH_A_PAGE:], *first_to_end.values(), *failures]
    by_id = {line.trajectory_id: line for line in figures.lines}
    called: defaultdict[str | None, list[str]] = defaultdict(list)
    for line in figures.lines:
        called[line.parent_id].append(line.trajectory_id)
    ids = dict.fromkeys(line.trajectory_id for line in chosen)
    waiting = list(ids)
    for trajectory_id in waiting:  # grows while it is read: callers of callers, sub-agents of sub-agents
        caller = by_id[trajectory_id].parent_id
        for relative in ([caller] if caller in by_id else []) + called[trajectory_id]:
            if relative is not None and relative not in ids:
                ids[relative] = None
                waiting.append(relative)
    return list(ids)


def _page(run: RunFolder, figures: Figures, flows: Sequence[Flow], links: Links) -> str:
    # 1. What several parts of the page need.
    lines, samples = figures.lines, figures.own
    columns = _columns(lines)
    names = [column.name for column in columns]
    scores = [line.score for line in samples if line.score is not None]
    means = [edge.score for flow in flows for edge in flow.edges if edge.score is not None]
    spent = {part: sum(line.parts[part] for line in samples) for part in PARTS}
    # 2. The table is drawn by the script from `data`, everything else by the template.
    return render_page(
        "report.html.jinja",
        title=f"run {run.folder.name}",
        states=list(dict.fromkeys(name for flow in flows for name in flow.states)),
        data={
            "kind": "report",
            "columns": [
                {"name": column.name, "number": column.digits is not None, "digits": column.digits or 0}
                for column in columns
            ],
            "rows": [
                [*(column.value(line) for column in columns), line.trajectory_id, links.to(line.trajectory_id)]
                for line in lines
            ],
            "reason": names.index("stop reason"),
            "agent": names.index("agent"),
            "command": links.command("TRAJECTORY"),
            "no_page": NO_PAGE,
            "pictures": picture_data(use.picture for use in figures.pictures.values()),
        },
        run=run,
        setting=setting_of(run, [flow.agent for flow in flows] or list(run.agents)),
        notes=run.notes,
        figures=figures,
        columns=columns,
        score_mean=sum(scores) / len(scores) if scores else None,
        groups=_groups(samples),
        length_bias=(run.summary or {}).get("length_bias"),
        running=list(running_costs(run.summary or {})),
        dropped=(run.summary or {}).get("groups_dropped", 0),
        group_count=len({line.group_id for line in samples}),
        ends=_ends(samples),
        failure_classes=Counter(str(line.failure) for line in samples if line.failure is not None).most_common(),
        called_ends=_ends(figures.called),
        endings=sorted({line.ending for line in lines}),
        agents=sorted({line.agent for line in lines}),
        histograms=[
            ("messages", histogram([line.messages for line in samples]), number),
            ("tokens after the prompt", histogram([line.tokens for line in samples]), number),
            ("score", histogram(scores), number),
            ("time", histogram([line.wall for line in samples]), duration),
        ],
        crossed=sum(len(line.versions) > 1 for line in samples),
        versions=sorted({version for line in lines for version in line.versions}),
        spent=spent if any(spent.values()) else {},
        tail=sorted((line for line in lines if line.wall > 0), key=lambda line: -line.wall)[:TAIL],
        pictures=[
            (use, words_of(use.picture, use.tokens), figures.seen[name]) for name, use in figures.pictures.items()
        ],
        tools=sorted(figures.tools.values(), key=lambda use: -sum(use.seconds)),
        flows=[(flow, traffic_picture(flow)) for flow in flows],
        scale=(min(means), max(means)) if means and min(means) < max(means) else None,
        link=links.to,
        unlinked=any(links.to(line.trajectory_id) is None for line in lines),
        version=links.version,
        listed=links.report() if links.version else None,
        no_page=NO_PAGE,
        row_of={line.trajectory_id: place for place, line in enumerate(lines)},
    )


def setting_of(run: RunFolder, agents: Sequence[str]) -> list[str]:
    """Return what was run, in a few words: the agents, the engine, how much of it, and how it was sampled and scored.

    The configuration is that of a journal that any program may have written: what is not as expected is left out.
    """
    config, engine = run.config, run.config.get("engine")
    setting = [", ".join(agents)]
    if isinstance(engine, Mapping):
        replicas = engine.get("replicas") or 1
        many = f", {replicas} replicas" if replicas != 1 else ""
        where = " on Ray" if engine.get("placement") == "ray" else ""
        setting.append(f"{engine.get('kind', 'engine')} {engine.get('model') or ''}".strip() + many + where)
    if config.get("n") and config.get("n") != 1:
        setting.append(f"{config['n']} per prompt")
    sampling = config.get("validation_sampling" if config.get("validate") else "sampling")
    if isinstance(sampling, Mapping):
        setting += [f"{name} {value}" for name, value in sampling.items() if value is not None]
    if config.get("seed") is not None:
        setting.append(f"seed {config['seed']}")
    rewards = config.get("reward")
    for reward in rewards if isinstance(rewards, list) else ():
        if isinstance(reward, Mapping):
            times = "" if reward.get("weight") == 1.0 else f"{reward.get('weight')} × "
            setting.append(f"reward {times}{str(reward.get('use')).rpartition(':')[2]}")
    return [words for words in setting if words]


@dataclass(frozen=True, slots=True)
class _End:
    """The trajectories that ended for one reason."""

    reason: str
    kind: EndKind
    count: int
    share: float
    score: float | None  # the mean of those that have one
    failures: Sequence[Line]  # of failures, the first with each of the first few messages


def _ends(lines: Sequence[Line]) -> list[_End]:
    by_reason: defaultdict[str, list[Line]] = defaultdict(list)
    for line in lines:
        by_reason[line.ending].append(line)
    ends = []
    for reason, ended in sorted(by_reason.items(), key=lambda item: -len(item[1])):
        scores = [line.score for line in ended if line.score is not None]
        mean = sum(scores) / len(scores) if scores else None
        kind, first = ended[0].kind, dict[str, Line]()
        for line in ended if kind == "cut" else ():
            if line.detail:
                first.setdefault(line.detail, line)
        failures = list(first.values())[:FAILURES_SHOWN]
        ends.append(_End(reason, kind, len(ended), len(ended) / len(lines), mean, failures))
    return ends


@dataclass(frozen=True, slots=True)
class _Spread:
    """The scores of one group, the lowest first."""

    group: str
    scores: list[float]
    mean: float
    deviation: float


def _groups(lines: Sequence[Line]) -> dict[str, object] | None:
    """Return the groups of several scored trajectories, the widest spread first; without spread nothing is learned.

    Where every score is 0 or 1, groups of one size differ only in how many of them are solved: those are counted.
    """
    by_group: defaultdict[str, list[float]] = defaultdict(list)
    for line in lines:
        if line.score is not None:
            by_group[line.group_id].append(line.score)
    spreads = []
    for group, scores in by_group.items():
        mean = sum(scores) / len(scores)
        deviation = (sum((score - mean) ** 2 for score in scores) / len(scores)) ** 0.5
        if len(scores) > 1:
            spreads.append(_Spread(group, sorted(scores), mean, deviation))
    if not spreads:
        return None
    solved: defaultdict[int, Counter[int]] = defaultdict(Counter)
    if all(score in (0.0, 1.0) for spread in spreads for score in spread.scores):
        for spread in spreads:
            solved[len(spread.scores)][round(sum(spread.scores))] += 1
    spreads.sort(key=lambda spread: (-spread.deviation, spread.mean))
    wide = [spread for spread in spreads if spread.deviation > 0]
    flats = Counter(spread.mean for spread in spreads if not spread.deviation > 0).most_common()
    return {
        "shown": [] if solved else wide[:GROUPS_SHOWN],
        "solved": [
            (size, [(count, counts[count]) for count in (range(size + 1) if size <= MOST_SOLVED else sorted(counts))])
            for size, counts in sorted(solved.items())
        ],
        "most_alike": max((max(counts.values()) for counts in solved.values()), default=0),
        "dots": SCORES_SHOWN,
        "count": len(spreads),
        "spread": len(wide),
        "flat": len(spreads) - len(wide),
        "flats": flats[:FLATS_SHOWN],
        "more_flats": len(flats) > FLATS_SHOWN,
        "low": min(spread.scores[0] for spread in spreads),
        "high": max(spread.scores[-1] for spread in spreads),
    }


@dataclass(frozen=True, slots=True)
class _Column:
    """One column of the table of trajectories."""

    name: str
    value: Callable[[Line], object]
    digits: int | None = None  # behind the point, of numbers


def _columns(lines: Sequence[Line]) -> list[_Column]:
    """Return the columns, without those that would say the same of every trajectory."""
    columns = [
        _Column("trajectory", lambda line: visible(line.trajectory_id)),
        _Column("called by", lambda line: visible(line.parent_id or "")),
        _Column("group", lambda line: visible(line.group_id)),
        _Column("agent", lambda line: visible(line.agent)),
        _Column("stop reason", lambda line: visible(line.ending)),
        _Column("score", lambda line: line.score, 3),
        _Column("messages", lambda line: line.messages, 0),
        _Column("generations", lambda line: line.generations, 0),
        _Column("tokens", lambda line: line.tokens, 0),
        _Column("trained", lambda line: line.trained, 0),
        _Column("cost", lambda line: line.cost, 6),
        _Column("calls", lambda line: line.calls, 0),
        _Column("failed", lambda line: line.failures, 0),
        _Column("seconds", lambda line: line.wall, 2),
        _Column("resumed", lambda line: line.resumed, 0),
        _Column("away", lambda line: line.away, 2),
        _Column("weights", lambda line: " → ".join(map(str, sorted({*line.versions[:1], *line.versions[-1:]}))) or "–"),
    ]
    needed = {
        "called by": any(line.parent_id for line in lines),
        "cost": any(line.cost is not None for line in lines),
        "resumed": (resumed := any(line.resumed for line in lines)),
        "away": resumed,
        "weights": len({version for line in lines for version in line.versions}) > 1,
    }
    return [column for column in columns if needed.get(column.name, True)]
