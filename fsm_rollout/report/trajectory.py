"""The page of one trajectory: what it did, why it ended, what is trained, where the time went.

Invariant: the page holds the token streams themselves (ids and logprobs bit for bit, the spans that say who put each
token there), and its script derives mask, colours and underlines from these alone, as the batch does.
"""

from __future__ import annotations

import base64
import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.agent.limits import spent
from fsm_rollout.diagrams.picture import shown
from fsm_rollout.report.cards import Card, cards
from fsm_rollout.report.figures import versions_of
from fsm_rollout.report.flow import Flow, path_picture
from fsm_rollout.report.links import Links
from fsm_rollout.report.moments import BUSY, Clock, Stretch, covered, packed, stays, stretches
from fsm_rollout.report.pages import render_page
from fsm_rollout.report.recorded import Recorded, RecordedRun
from fsm_rollout.report.token_texts import TokenTexts, visible
from fsm_rollout.trajectory.events import Message, Transitioned
from fsm_rollout.trajectory.tokens import Ids, Logprobs
from fsm_rollout.trajectory.trajectory import Trajectory

Texts = Callable[[str], TokenTexts | None]
"""Gives the token texts of an engine, by its name."""
STEPS_SHOWN = 200
"""Steps of the path that are listed; the picture has them all."""
TICKS = 5
GIST = 240
"""Characters of what was asked and answered that stand at the top."""


def page_of_run(run: RecordedRun, trajectory_id: str, links: Links) -> str:
    """Return the page of one of a run's trajectories, with what ``links`` leads to.

    Raises:
        ConfigError: the run has no such trajectory.
        JournalError: the journal cannot be read.
    """
    recorded = run.trajectory(trajectory_id)
    for stream in recorded.trajectory.streams:
        run.texts(stream.engine)  # asked now, so that what is missing is among the notes
    graph = run.agents.get(recorded.trajectory.agent)
    return trajectory_page(recorded, graph=graph, texts=run.texts, notes=run.notes, run=run.folder.name, links=links)


def trajectory_page(
    recorded: Recorded,
    *,
    graph: AgentGraph | None = None,
    texts: Texts = lambda engine: None,
    notes: Sequence[str] = (),
    run: str = "",
    links: Links | None = None,
) -> str:
    """Return one self-contained HTML page about a trajectory.

    Without its events there are no steps and no times, only visits; without its graph, no rows that were not taken;
    without token texts, ids in their place.
    """
    trajectory, events = recorded.trajectory, recorded.events
    names = list(dict.fromkeys([*(graph.states if graph else ()), *recorded.state_names]))
    traffic = Flow(trajectory.agent, graph)
    traffic.add(recorded)
    steps = [event for event in events if isinstance(event, Transitioned)]
    return render_page(
        "trajectory.html.jinja",
        title=f"trajectory {trajectory.trajectory_id} of {trajectory.agent}",
        states=names,
        data=token_data(trajectory, texts),
        t=trajectory,
        run=run,
        links=links,
        notes=list(notes) if events else [*notes, _NO_EVENTS],
        ending=ending_of(recorded),
        gist=_gist(trajectory),
        versions=versions_of(trajectory),
        picture=path_picture(traffic) if events or graph else None,
        flow=traffic,
        steps=steps[:STEPS_SHOWN],
        more_steps=len(steps) - STEPS_SHOWN,
        lanes=time_lanes(recorded, names),
        cards=cards(recorded),
        limits=_limits(trajectory),
        described=describe,
    )


_NO_EVENTS = (
    "made from the trajectory alone: its path, its tool calls and its times are in the journal only "
    "(rollout.page(trajectory) finds them there, and the tokens' texts)"
)


def token_data(trajectory: Trajectory, texts: Texts) -> dict[str, Any]:
    """Return what the page's script draws tokens from.

    ``streams``: ids (int32) and logprobs (float32) as base64 of little-endian bytes, ``spans`` as
    ``[start, end, owner, state, turn, version]``, ``spread`` and ``guarded`` by position; ``vocabularies``: visible
    text by engine and id; ``markers``: the ids that are control markers.
    """
    vocabularies: dict[str, dict[int, str]] = {}
    markers: dict[str, list[int]] = {}
    streams: list[dict[str, Any]] = []
    used: dict[str, set[int]] = {}
    for stream in trajectory.streams:
        used.setdefault(stream.engine, set()).update(stream.tokens.ids)
        known = texts(stream.engine)
        streams.append(
            {
                "context": stream.context,
                "engine": stream.engine,
                "trained": stream.tokens.trained,
                "ids": _packed(stream.tokens.ids),
                "logprobs": _packed(logprobs_of(trajectory, len(streams))),
                "spans": [[s.start, s.end, s.owner.value, s.state, s.turn, s.version] for s in stream.tokens.spans],
                "spread": {at: visible(text) for at, text in known.spread(stream.tokens).items()} if known else {},
                "guarded": stream.guarded_at,
            }
        )
    for engine, ids in used.items():
        known = texts(engine)
        if known is not None:
            vocabularies[engine] = {id_: visible(text) for id_, text in known.vocabulary(ids).items()}
            markers[engine] = sorted(ids & set(known.markers))
    return {"kind": "trajectory", "streams": streams, "vocabularies": vocabularies, "markers": markers}


def logprobs_of(trajectory: Trajectory, number: int) -> Logprobs:
    """Return the logprobs of a whole stream, prompt included (0.0 there)."""
    tokens = trajectory.streams[number].tokens
    return array("f", [0.0] * tokens.prompt_length + tokens.response_logprobs().tolist())


def ending_of(recorded: Recorded) -> str:
    """Return in one sentence why the trajectory is over, or that it is not."""
    trajectory = recorded.trajectory
    if trajectory.stop_reason is None:
        if trajectory.suspended is not None:
            return f"It was set aside in {trajectory.state} ({trajectory.suspended}) and may be resumed."
        return f"It has not ended: it is in {trajectory.state}."
    row = trajectory.exit
    if row is None:
        return f"It ended in {trajectory.state} without a row: {trajectory.detail or trajectory.stop_reason}."
    parts = [f"In {row.source}, {row.trigger}"]
    if row.limit:
        spent, most = trajectory.spent.get(row.limit), trajectory.limits.get(row.limit)
        parts.append(f" of {row.limit}" + (f" ({spent:,} of {most:,.0f} spent)" if spent and most else ""))
    parts.append(f" led to {row.dest}")
    detail = row.detail or trajectory.detail
    return "".join(parts) + (f": {detail}" if detail else ".")


def _gist(trajectory: Trajectory) -> list[tuple[str, str]]:
    """Return what a reader wants first: what was asked and the answer to that, and the last that was asked and said.

    Said by what is trained, where there is such: a critic's verdict is not what a trajectory came to.
    """
    spoken = [stream for stream in trajectory.streams if stream.turn is not None]
    spoken = [stream for stream in spoken if stream.tokens.trained] or spoken
    latest = max(spoken, key=lambda stream: stream.turn or 0).messages if spoken else []
    asked, again = _said("user", trajectory.messages), _said("user", latest)
    told = [
        ("asked", asked),
        ("answer", _text(trajectory.extra.get("answer"))),
        ("asked last", again if again != asked else ""),
        ("said last", _said("assistant", latest)),
    ]
    return [(name, shown(" ".join(text.split()), GIST)) for name, text in told if text.strip()]


def _said(role: str, messages: Sequence[Message]) -> str:
    """Return what somebody said last."""
    return next((_text(message.get("content")) for message in reversed(messages) if message.get("role") == role), "")


def _text(value: object) -> str:
    """Return text as it is, and other data (the parts of a message, an answer that is a number) as JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False, default=str)


def time_lanes(recorded: Recorded, names: Sequence[str]) -> dict[str, Any] | None:
    """Return the lanes, one per state that took time, with places in percent; ``None`` when nothing took any.

    Time for which it was set aside is left out: where that was stands a mark.
    """
    events = recorded.events
    if not events:
        return None
    real = stretches(events)
    clock = Clock((stretch.start, stretch.end) for stretch in real if stretch.kind == "away")
    start, away = clock(events[0].at), [(stretch, clock(stretch.start)) for stretch in real if stretch.kind == "away"]
    found = [replace(s, start=clock(s.start), end=clock(s.end)) for s in real if s.kind != "away"]
    visits = [replace(visit, start=clock(visit.start), end=clock(visit.end)) for visit in stays(events)]
    end = max([visit.end for visit in visits] + [stretch.end for stretch in found], default=start)
    if end <= start:
        return None

    def place(since: float, until: float) -> str:
        return f"left:{(since - start) / (end - start):.4%};width:{max(0.0, until - since) / (end - start):.4%}"

    totals, idle = _totals(found), max(0.0, end - start - covered(found))
    largest = sorted([*totals, ("other", idle)], key=lambda total: -total[1])
    lanes = []
    for state in names:
        own = [stretch for stretch in found if stretch.state == state]
        inside = [visit for visit in visits if visit.state == state]
        if not own and not any(visit.end > visit.start for visit in inside):
            continue
        rows = packed(own)
        depth = max(rows, default=0) + 1
        lanes.append(
            {
                "state": state,
                "visits": [{"place": place(v.start, v.end), "label": f"visit, ended by {v.trigger}"} for v in inside],
                "bars": [
                    {"place": f"{place(s.start, s.end)};top:{row / depth:.2%};height:{1 / depth:.2%}", "of": s}
                    for s, row in zip(own, rows, strict=True)
                ]
                + [{"place": place(at, at) + ";top:0;height:100%", "of": s} for s, at in away if s.state == state],
                "totals": _totals(own),
                "share": sum(v.end - v.start for v in inside) / (end - start),
                "seconds": sum(v.end - v.start for v in inside),
            }
        )
    return {
        "seconds": end - start,
        "lanes": lanes,
        "totals": totals,
        "idle": idle,
        "largest": [total for total in largest[:2] if total[1] >= 0.005 * (end - start)],
        "ticks": [{"at": f"{tick / TICKS:.0%}", "seconds": (end - start) * tick / TICKS} for tick in range(TICKS + 1)],
    }


def _totals(found: Sequence[Stretch]) -> list[tuple[str, float]]:
    totals = [(kind, covered([item for item in found if item.kind == kind])) for kind in BUSY]
    return [(kind, seconds) for kind, seconds in totals if seconds > 0]


def _limits(trajectory: Trajectory) -> list[dict[str, Any]]:
    until = trajectory.latest_at if trajectory.ended_at is None else trajectory.ended_at
    used = {name: spent(trajectory, name, until) for name, most in trajectory.limits.items() if most}
    return [
        {"name": name, "spent": used[name], "most": most, "share": min(1.0, used[name] / most)}
        for name, most in trajectory.limits.items()
        if most
    ]


def describe(card: Card) -> str:
    """Return what a card's tokens are, in a word or two."""
    if card.kind == "model":
        return "assistant"
    if card.kind == "prompt":
        return " + ".join(card.roles) or "prompt"
    return " + ".join(card.roles) or "environment"


def _packed(values: Ids | Logprobs) -> str:
    import numpy as np

    kind = "<i4" if values.typecode == "i" else "<f4"
    return base64.b64encode(np.frombuffer(values, dtype=values.typecode).astype(kind).tobytes()).decode()
