"""Two trajectories side by side: what is the same in both, and what each did from there on.

Invariant: what is said to be the same is: who spoke, in which state, the tokens, and what calls came to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from fsm_rollout.jobs.compare import parting
from fsm_rollout.report.cards import Card, cards
from fsm_rollout.report.pages import Links, render_page
from fsm_rollout.report.recording import Recording, RunFolder
from fsm_rollout.report.texts import number
from fsm_rollout.report.trajectory import ending_of, token_data


def beside_page(runs: Sequence[RunFolder], trajectory_ids: Sequence[str], links: Sequence[Links]) -> str:
    """Return the page of two trajectories, of one run or of two, each with the links of its run.

    Raises:
        ConfigError: a run has no such trajectory.
        JournalError: a journal cannot be read.
    """
    recordings = [run.recording(trajectory_id) for run, trajectory_id in zip(runs, trajectory_ids, strict=True)]
    dealt = [cards(recording) for recording in recordings]
    pairs = zip(*dealt, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: _same(pair, recordings), pairs))
    sides, data = (
        list[dict[str, Any]](),
        dict[str, Any](kind="beside", streams=[], vocabularies={}, markers={}, pictures={}),
    )
    for place, (run, recording, link) in enumerate(zip(runs, recordings, links, strict=True)):
        trajectory, offset = recording.trajectory, len(data["streams"])
        _add(data, token_data(trajectory, run.texts), place)
        sides.append(
            {
                "t": trajectory, "run": run.folder.name, "offset": offset, "links": link, "cards": dealt[place][same:],
                "page": link.to(trajectory.trajectory_id), "list": link.report(), "ended": recording.ending,
                "ending": ending_of(recording),
            }
        )  # fmt: skip
    return render_page(
        "beside.html.jinja",
        title=" and ".join(trajectory_ids),
        states=list(dict.fromkeys(name for recording in recordings for name in recording.state_names)),
        data=data,
        version=links[0].version,
        notes=list(dict.fromkeys(note for run in runs for note in run.notes)),
        sides=sides,
        same=dealt[0][:same],
        at=parting(runs[0], runs[1], trajectory_ids),
        number=number,
    )


def _same(pair: tuple[Card, ...], recordings: Sequence[Recording]) -> bool:
    first, second = (_facts(card, recording) for card, recording in zip(pair, recordings, strict=True))
    return first == second


def _facts(card: Card, recording: Recording) -> object:
    ids = recording.trajectory.streams[card.stream].tokens.ids[card.start : card.end] if card.stream >= 0 else ()
    calls = [(call.name, call.arguments, call.broken, call.called and call.called.result) for call in card.calls]
    step = card.step and (card.step.trigger, card.step.dest, card.step.stop_reason)
    return card.kind, card.state, card.stream, card.start, list(ids), card.messages, calls, step, card.pause


def _add(data: dict[str, Any], of_side: Mapping[str, Any], place: int) -> None:
    """Add a trajectory's tokens; engines of two runs may have one name and different vocabularies."""
    data["streams"] += [{**stream, "engine": f"{place} {stream['engine']}"} for stream in of_side["streams"]]
    data["pictures"] |= of_side["pictures"]
    for key in ("vocabularies", "markers"):
        data[key] |= {f"{place} {engine}": found for engine, found in of_side[key].items()}
