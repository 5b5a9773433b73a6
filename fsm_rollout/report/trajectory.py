"""The page of one trajectory: what it did, why it ended, what is trained, where the time went.

Invariant: the page holds the token streams themselves (ids and logprobs bit for bit, the spans that say who put each
token there), and its script derives mask, colours and underlines from these alone, as the batch does.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from msgspec.structs import replace

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.agent.limits import spent
from fsm_rollout.diagrams.picture import shown
from fsm_rollout.names.attribute_docs import attribute_docs
from fsm_rollout.report.cards import cards
from fsm_rollout.report.flow import Flow, path_picture
from fsm_rollout.report.folding import Block, folded_repeats
from fsm_rollout.report.pages import Links, render_page
from fsm_rollout.report.pictures import picture_data, pictures_in, words_of
from fsm_rollout.report.recording import Recording, RunFolder
from fsm_rollout.report.spans import BUSY, Clock, Interval, packed, parts_of
from fsm_rollout.report.texts import TokenTexts, visible
from fsm_rollout.trajectory.enums import ForkReason
from fsm_rollout.trajectory.events import Message
from fsm_rollout.trajectory.pictures import StoredPicture
from fsm_rollout.trajectory.stream import text_of
from fsm_rollout.trajectory.trajectory import Trajectory

Texts = Callable[[str], TokenTexts | None]  # gives the token texts of an engine, by its name
BLOCKS_SHOWN = 60  # steps of the path that are listed, repeated ones folded; the picture has them all
TURN_LENGTH = 90  # characters of a turn that the index of turns says
TICKS = 5
# The id of a prompt's own trajectory; a sub-agent's ends in its tool's name and a number.
_SAMPLE = re.compile(r".*/\d+(~\d+)?", re.DOTALL)
GIST = 240  # characters of what was asked and answered that stand at the top
GIST_PICTURES = 8  # and pictures
NO_EVENTS = (
    "made from the trajectory alone: its path, its tool calls and its times are in the journal only "
    "(rollout.page(trajectory) finds them there, and the tokens' texts)"
)


@cache
def why_apart(why: str) -> str:
    """Return why a stream is one of its own, in words: those that :class:`ForkReason` has for it."""
    words = attribute_docs(ForkReason).get(why.upper(), "").partition(":")[0].rstrip(".")
    return words[:1].lower() + words[1:]


def page_of_run(run: RunFolder, trajectory_id: str, links: Links) -> str:
    """Return the page of one of a run's trajectories, with what ``links`` leads to.

    Raises:
        ConfigError: the run has no such trajectory.
        JournalError: the journal cannot be read.
    """
    recording = run.recording(trajectory_id)
    for stream in recording.trajectory.streams:
        run.texts(stream.engine)  # asked now, so that what is missing is among the notes
    graph = run.agents.get(recording.trajectory.agent)
    return trajectory_page(
        recording, graph=graph, texts=run.texts, notes=run.notes, run=run.folder.name, links=links,
        neighbours=neighbours_of(recording.trajectory, run.trajectory_ids(), links),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The trajectories beside one, by id: those before and after it in the run, and all of its group."""

    before: str | None
    after: str | None
    group: list[str]


def neighbours_of(trajectory: Trajectory, ids: Sequence[str], links: Links) -> Neighbours | None:
    """Return a trajectory's neighbours in the run, the next with a page each way; None for a sub-agent's."""
    samples = [id_ for id_ in ids if _SAMPLE.fullmatch(id_)]
    if trajectory.parent_id is not None or trajectory.trajectory_id not in samples:
        return None
    place = samples.index(trajectory.trajectory_id)
    earlier, later = samples[:place][::-1], samples[place + 1 :]
    before, after = (
        next((id_ for id_ in side if links.to(id_) is not None), side[0] if side else None) for side in (earlier, later)
    )
    group = re.compile(re.escape(trajectory.group_id) + r"/\d+(~\d+)?")
    return Neighbours(before, after, [id_ for id_ in ids if group.fullmatch(id_)]) if len(samples) > 1 else None


def path_of(recording: Recording) -> list[Block[tuple[str, str | None, str | None]]]:
    """Return the states in order, each with the trigger (and the limit) that left it, repeated ones folded."""
    steps = recording.steps
    departures = [(step.source, step.trigger, step.limit) for step in steps]
    return folded_repeats([*departures, *((step.dest, None, None) for step in steps[-1:])])


def trajectory_page(
    recording: Recording,
    *,
    graph: AgentGraph | None = None,
    texts: Texts = lambda engine: None,
    notes: Sequence[str] = (),
    run: str = "",
    links: Links | None = None,
    neighbours: Neighbours | None = None,
) -> str:
    """Return one self-contained HTML page about a trajectory.

    Without its events there are no steps and no times, only visits; without its graph, no transitions but those taken;
    without token texts, ids in their place.
    """
    trajectory = recording.trajectory
    names = list(dict.fromkeys([*(graph.states if graph else ()), *recording.state_names]))
    flow = Flow(trajectory.agent, graph)
    flow.add(recording)
    until = trajectory.latest_at if trajectory.ended_at is None else trajectory.ended_at
    return render_page(
        "trajectory.html.jinja",
        title=f"trajectory {trajectory.trajectory_id} of {trajectory.agent}",
        states=names,
        data=token_data(trajectory, texts),
        t=trajectory,
        relations=[why_apart(stream.why) for stream in trajectory.streams],
        run=run,
        links=links,
        version=links.version if links else "",
        notes=list(notes) if recording.events else [*notes, NO_EVENTS],
        reason_of_end=recording.ending,
        ending=ending_of(recording),
        gist=_gist(trajectory),
        versions=recording.versions,
        picture=path_picture(flow) if recording.events or graph else None,
        flow=flow,
        path=(path := path_of(recording))[:BLOCKS_SHOWN],
        more_steps=sum(len(block.items) * block.times for block in path[BLOCKS_SHOWN:]),
        steps=recording.steps,
        lanes=time_lanes(recording, names),
        cards=(dealt := cards(recording)),
        turns=[(place, card) for place, card in enumerate(dealt) if card.kind == "model"],
        turn_length=TURN_LENGTH,
        neighbours=neighbours,
        limits=[(name, spent(trajectory, name, until), most) for name, most in trajectory.limits.items() if most],
    )


def token_data(trajectory: Trajectory, texts: Texts) -> dict[str, object]:
    """Return what the page's script draws tokens from.

    ``streams``: ids (int32) and logprobs (float32, 0.0 in the prompt) as base64 of little-endian bytes, ``spans`` as
    ``[start, end, owner, state, turn, version]``, ``spread`` and ``guarded`` by position; ``vocabularies``: visible
    text by engine and id; ``markers``: the ids that are control markers, by engine; ``media``: a stream's pictures as
    ``[start, length, hash, words]``; ``pictures``: see :func:`~fsm_rollout.report.pictures.picture_data`.
    """
    streams: list[dict[str, object]] = []
    vocabularies: dict[str, dict[int, str]] = {}
    markers: dict[str, list[int]] = {}
    used: dict[str, set[int]] = {}
    for stream in trajectory.streams:
        tokens, token_texts = stream.tokens, texts(stream.engine)
        used.setdefault(stream.engine, set()).update(tokens.ids)
        logprobs = np.concatenate([np.zeros(tokens.prompt_length), tokens.response_logprobs()])
        streams.append(
            {
                "context": stream.context,
                "engine": stream.engine,
                "trained": tokens.trained,
                "ids": base64.b64encode(np.asarray(tokens.ids, "<i4").tobytes()).decode(),
                "logprobs": base64.b64encode(logprobs.astype("<f4").tobytes()).decode(),
                "spans": [(s.start, s.end, s.owner.value, s.state, s.turn, s.version) for s in tokens.spans],
                "spread": {at: visible(text) for at, text in token_texts.spread(tokens).items()} if token_texts else {},
                "guarded": stream.guarded_at,
                "media": [(s.start, s.length, s.picture.sha256, words_of(s.picture, [s.length])) for s in stream.media],
            }
        )
    for engine, ids in used.items():
        token_texts = texts(engine)
        if token_texts is not None:
            vocabularies[engine] = {id_: visible(text) for id_, text in token_texts.vocabulary(ids).items()}
            markers[engine] = sorted(ids & set(token_texts.markers))
    seen = [([span.picture for span in stream.media], stream.messages) for stream in trajectory.streams]
    return {
        "kind": "trajectory", "streams": streams, "vocabularies": vocabularies, "markers": markers,
        "pictures": picture_data(pictures_in(trajectory.prompt_messages, seen)),
    }  # fmt: skip


def ending_of(recording: Recording) -> str:
    """Return in one sentence why the trajectory is over, or that it is not."""
    trajectory, row = recording.trajectory, recording.trajectory.exit
    if trajectory.stop_reason is None:
        if trajectory.suspended is not None:
            return f"It was suspended in {trajectory.state} ({trajectory.suspended}) and can be resumed."
        return f"It has not ended: it is in {trajectory.state}."
    if row is None:
        return f"It ended in {trajectory.state} without a transition: {trajectory.detail or trajectory.stop_reason}."
    limit, detail = "", row.detail or trajectory.detail
    if row.limit:
        spent, most = trajectory.spent.get(row.limit), trajectory.limits.get(row.limit)
        limit = f" of {row.limit}" + (f" ({spent:,} of {most:,.0f} spent)" if spent and most else "")
    return f"In {row.source}, {row.trigger}{limit} led to {row.dest}" + (f": {detail}" if detail else ".")


def _gist(trajectory: Trajectory) -> list[tuple[str, str, list[StoredPicture]]]:
    """Return what a reader wants first: what was asked and what is expected, and the last that was asked and said.

    Said by what is trained, where there is such: a critic's verdict is not what a trajectory came to.
    """
    spoken = [stream for stream in trajectory.streams if stream.turn is not None]
    spoken = [stream for stream in spoken if stream.tokens.trained] or spoken
    latest = max(spoken, key=lambda stream: stream.turn or 0).messages if spoken else []
    first_request, last_request = _last_of("user", trajectory.prompt_messages), _last_of("user", latest)
    gist = [
        ("question", first_request),
        ("expected", (_expected(trajectory.extra), [])),
        ("last question", last_request if last_request != first_request else ("", [])),
        ("last answer", _last_of("assistant", latest)),
    ]
    return [
        (name, shown(" ".join(text.split()), GIST), pictures)
        for name, (text, pictures) in gist
        if text.strip() or pictures
    ]


def _expected(extra: Mapping[str, object]) -> str:
    """Return a prompt's answer, and those to what its scripted user asks then."""
    later = extra.get("interaction_kwargs")
    answers = later.get("answers") if isinstance(later, Mapping) else None
    every = [extra.get("answer"), *(answers if isinstance(answers, list | tuple) else ())]
    return ", then ".join(text for answer in every if (text := _text(answer)))


def _last_of(role: str, messages: Sequence[Message]) -> tuple[str, list[StoredPicture]]:
    message = next((message for message in reversed(messages) if message.get("role") == role), {})
    return text_of(message), pictures_in(message)[:GIST_PICTURES]


def _text(value: object) -> str:
    """Return text as it is, and other data (the parts of a message, an answer that is a number) as JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False, default=str)


@dataclass(frozen=True, slots=True)
class Lane:
    """What happened in one state: its visits, and the intervals in them, each in a row of its own."""

    state: str
    visits: list[Interval]
    intervals: list[tuple[Interval, int]]  # those that overlap are in different rows
    marks: list[tuple[Interval, float]]  # for how long it was suspended, and where that stands in the lane

    @property
    def rows(self) -> int:
        """How many rows its intervals take."""
        return max((row for _, row in self.intervals), default=0) + 1

    @property
    def seconds(self) -> float:
        """How long it was in the state."""
        return sum(visit.end - visit.start for visit in self.visits)


@dataclass(frozen=True, slots=True)
class Lanes:
    """A trajectory's time from 0 to ``seconds``, without that for which it was suspended: there stands a mark."""

    seconds: float
    lanes: list[Lane]  # one per state that took time
    parts: dict[str, float]  # the seconds by what they went into
    ticks: int = TICKS

    @property
    def largest(self) -> list[tuple[str, float]]:
        """The two parts that took most of the time."""
        parts = sorted(self.parts.items(), key=lambda part: -part[1])
        return [part for part in parts[:2] if part[1] >= 0.005 * self.seconds]


def time_lanes(recording: Recording, names: Sequence[str]) -> Lanes | None:
    """Return the lanes of the states called ``names``; ``None`` when nothing took any time."""
    # 1. The clock stands still while the trajectory was away, and begins at 0.
    away = recording.intervals("away")
    clock = Clock(interval.times for interval in away)
    start = clock(recording.events[0].at) if recording.events else 0.0
    moved = [
        replace(interval, start=clock(interval.start) - start, end=clock(interval.end) - start)
        for interval in recording.intervals("visit", *BUSY)
    ]
    seconds = max((interval.end for interval in moved), default=0.0)
    if seconds <= 0:
        return None
    # 2. A lane for each state that took time.
    lanes = []
    for state in names:
        visits = [interval for interval in moved if interval.state == state and interval.kind == "visit"]
        inside = [interval for interval in moved if interval.state == state and interval.kind != "visit"]
        if inside or any(visit.end > visit.start for visit in visits):
            rows = list(zip(inside, packed(inside), strict=True))
            marks = [(interval, clock(interval.start) - start) for interval in away if interval.state == state]
            lanes.append(Lane(state, visits, rows, marks))
    return Lanes(seconds, lanes, parts_of(recording.trajectory))
