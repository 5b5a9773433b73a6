"""``fsm-rollout compare``: whether a run is better than another, by how much, and on which prompts it changed.

Invariant: prompts are paired by name and only where they are the same messages; what one of the runs lacks is counted
and said, never filled in. JSON holds all that terminal and page show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from operator import methodcaller
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fsm_rollout.errors import ConfigError
from fsm_rollout.jobs.samples import FIGURES, PromptSamples, RunSamples, Sample
from fsm_rollout.jobs.stats import PASSES, shown, told
from fsm_rollout.report.pages import Links, page_path, render_page, write_page
from fsm_rollout.report.pictures import line_of
from fsm_rollout.report.recording import Recording, RunFolder, open_run
from fsm_rollout.report.texts import number, visible
from fsm_rollout.report.trajectory import page_of_run
from fsm_rollout.statistics.compare import PairedDifference, compare
from fsm_rollout.trajectory.pictures import StoredPicture
from fsm_rollout.trajectory.stream import Stream

POINTS = 0.02  # the difference of which is said how many prompts would show it, unless another is asked for
FLIPS_SHOWN = 20  # on a page; of them in a terminal
FLIPS_PRINTED = 5
NEWLINE = "\n"
BEFORE, AFTER = 4, 8  # tokens that are shown of either side where two trajectories part


def comparison_of(
    first: RunSamples, second: RunSamples, *, passes: float = PASSES, points: float = POINTS
) -> dict[str, Any]:
    """Return how the second run differs from the first, as JSON data; every difference is the second less the first.

    Raises:
        ConfigError: no prompt has been scored in both.
    """
    # 1. What can be paired.
    both = [name for name in first.prompts if name in second.prompts]
    other = [name for name in both if first.prompts[name].digest != second.prompts[name].digest]
    pairs = {name: (first.prompts[name], second.prompts[name]) for name in both if name not in set(other)}
    confidence = max(first.confidence, second.confidence)

    def paired(values: Callable[[PromptSamples], list[float]]) -> PairedDifference:
        before, after = ({name: values(pair[side]) for name, pair in pairs.items()} for side in (0, 1))
        return compare(before, after, confidence)

    score = paired(lambda prompt: prompt.scores)
    if not score.estimate.prompts:
        raise ConfigError(
            f"'{first.folder}' and '{second.folder}' have no prompt that both have scored; runs are compared on the "
            "same prompts, by their ids"
        )
    # 2. The score, and what else was measured.
    known = {*first.figures, *second.figures}
    figures = {name: told(paired(methodcaller("took", name)).estimate) for name in FIGURES if name in known}
    counts = {
        key: {name: [ofs[name] for ofs in both_runs] for name in {**both_runs[0], **both_runs[1]}}
        for key, both_runs in {
            "stop_reasons": [run.counted(lambda sample: [sample.ending]) for run in (first, second)],
            "states": [run.counted(lambda sample: sample.visits) for run in (first, second)],
        }.items()
    }
    # 3. The prompts that changed sides.
    flips = [flip for name, pair in pairs.items() if (flip := _flip(name, *pair, passes)) is not None]
    return {
        "first": first.name,
        "second": second.name,
        "confidence": confidence,
        "prompts": {
            "compared": score.estimate.prompts,
            "only first": len(first.prompts) - len(both),
            "only second": len(second.prompts) - len(both),
            "other messages": len(other),
        },
        "score": told(score.estimate) | {"p_value": _finite(score.p_value), "told_apart": score.told_apart},
        "in words": in_words(first.name, second.name, score, points),
        "figures": figures,
        **counts,
        "samples": [sum(1 for _ in run.samples) for run in (first, second)],
        "flips": sorted(flips, key=lambda flip: -abs(flip["difference"])),
    }


def in_words(first: str, second: str, difference: PairedDifference, points: float) -> str:
    """Return what a comparison of two scores comes to, as a sentence or two."""
    estimate = difference.estimate
    interval = f"[{number(estimate.low)}, {number(estimate.high)}]"
    prompts = f"{estimate.prompts:,} prompts"
    if not estimate.prompts > 1:
        return f"{first} and {second} share one scored prompt, which says nothing of others"
    if difference.told_apart:
        more = "higher" if estimate.value > 0 else "lower"
        size = number(abs(estimate.value))
        return f"{second} scores {more} than {first} by {size} {interval}, p = {number(difference.p_value)}, {prompts}"
    text = (
        f"{first} and {second} cannot be told apart: {second} scores {number(estimate.value)} more {interval}, "
        f"p = {number(difference.p_value)}, {prompts}"
    )
    if not difference.spread:
        return f"{text}; no two prompts differ otherwise, so nothing says how many more it would take"
    missing = difference.prompts_for(points) - estimate.prompts
    if missing <= 0:
        return f"{text}; a true difference of {number(points)} would have shown in four runs of five"
    return (
        f"{text}; {missing:,} more prompts would tell {number(points)}, these tell {number(difference.visible)} "
        "(in four runs of five)"
    )


def _flip(name: str, before: PromptSamples, after: PromptSamples, passes: float) -> dict[str, Any] | None:
    """Return what changed on a prompt that passed mostly in one run and mostly not in the other."""
    shares = [sum(passed) / len(passed) if (passed := each.passed(passes)) else None for each in (before, after)]
    if shares[0] is None or shares[1] is None or (shares[0] > 0.5) == (shares[1] > 0.5):
        return None
    better = shares[1] > shares[0]
    examples = [_example(each, passes, passed) for each, passed in ((before, not better), (after, better))]
    return {
        "prompt": name,
        "difference": shares[1] - shares[0],
        "passed": shares,
        "trajectories": [example.trajectory_id for example in examples],
        "stop_reasons": [example.ending for example in examples],
    }


def _example(prompt: PromptSamples, passes: float, passed: bool) -> Sample:
    scored = [sample for sample in prompt.samples if sample.score is not None]
    return next((s for s in scored if s.score is not None and (s.score >= passes) is passed), scored[0])


def _finite(value: float) -> float | None:
    return None if math.isnan(value) else value


# -- where two trajectories part -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Parting:
    """The first token, or picture, at which two trajectories differ; one of them may have ended before it."""

    stream: int
    position: int
    texts: tuple[str, str]
    """What stands there in either, from shortly before."""


def parting(first: RunFolder, second: RunFolder, trajectory_ids: Sequence[str]) -> Parting | None:
    """Return where two trajectories of two runs part; ``None``: they are the same tokens and pictures."""
    runs = (first, second)
    recordings = [run.recording(trajectory_id) for run, trajectory_id in zip(runs, trajectory_ids, strict=True)]
    streams = zip_longest(*(recording.trajectory.streams for recording in recordings))
    for number_, pair in enumerate(streams):
        ids = [[] if stream is None else _seen(stream) for stream in pair]
        at = next((i for i, (a, b) in enumerate(zip_longest(*ids)) if a != b), None)
        if at is not None:
            shown_ids = [of[max(0, at - BEFORE) : at + AFTER] for of in ids]
            texts = (_text(*side) for side in zip(runs, recordings, shown_ids, strict=True))
            return Parting(number_, at, (next(texts), next(texts)))
    return None


def _seen(stream: Stream) -> list[int | StoredPicture]:
    """Return what the model saw, by position: ids, which say nothing of a picture but its size, and pictures."""
    seen: list[int | StoredPicture] = [*stream.tokens.ids]
    for span in stream.media:
        seen[span.start : span.end] = [span.picture] * span.length
    return seen


def _text(run: RunFolder, recording: Recording, seen: Sequence[int | StoredPicture]) -> str:
    texts = run.texts(recording.trajectory.streams[0].engine) if recording.trajectory.streams else None
    ids = [id_ for id_ in seen if isinstance(id_, int)]
    words = {id_: str(id_) for id_ in ids} if texts is None else texts.vocabulary(ids)
    parts: list[str] = []
    for before, thing in pairwise([None, *seen]):
        if isinstance(thing, int):
            parts.append(words[thing])
        elif isinstance(thing, StoredPicture) and thing is not before:
            parts.append(line_of(thing))
    return (" " if texts is None else "").join(parts)


# -- what people see -----------------------------------------------------------------------------------------------


def comparison_view(comparison: dict[str, Any], runs: tuple[Path, Path]) -> RenderableType:
    """Return a comparison for the terminal."""
    first, second = comparison["first"], comparison["second"]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("", f"{second} less {first}"):
        table.add_column(Text(visible(name)))
    table.add_row("score", Text(shown(comparison["score"])))
    for name, estimate in comparison["figures"].items():
        table.add_row(name, Text(shown(estimate)))
    for what, shares in _changes(comparison):
        table.add_row(Text(visible(what)), Text(f"{shares[0]:.1%} → {shares[1]:.1%} of samples"))
    parts: list[RenderableType] = [Text(visible(comparison["in words"]), style="bold"), *_left_out(comparison), table]
    flips = comparison["flips"]
    if flips:
        better = sum(flip["difference"] > 0 for flip in flips)
        parts.append(Text(f"prompts that changed sides: {better:,} to pass, {len(flips) - better:,} to fail"))
    opened = open_run(runs[0]), open_run(runs[1])
    for flip in flips[:FLIPS_PRINTED]:
        ids, at = flip["trajectories"], parting(*opened, flip["trajectories"])
        share = " → ".join(f"{passed:.0%}" for passed in flip["passed"])
        where = "" if at is None else f"; they part at token {at.position:,}:"
        parts.append(Text(visible(f"  {flip['prompt']}: {share} pass, {ids[0]} and {ids[1]}{where}")))
        parts += [Text(f"    {visible(text.replace(NEWLINE, '↵'))}", style="dim") for text in (at.texts if at else ())]
    if len(flips) > FLIPS_PRINTED:
        parts.append(Text(f"  … and {len(flips) - FLIPS_PRINTED:,} more; -o F.html shows them, --json names them"))
    return Group(*parts)


def _changes(comparison: dict[str, Any]) -> list[tuple[str, tuple[float, float]]]:
    """Return how samples ended and what states they visited, where that has changed: the shares of either run."""
    found = []
    for key, what in (("stop_reasons", "ended"), ("states", "visited")):
        for name, counts in comparison[key].items():
            first, second = (count / max(1, of) for count, of in zip(counts, comparison["samples"], strict=True))
            if first != second:
                found.append((f"{what} {name}", (first, second)))
    return found


def _left_out(comparison: dict[str, Any]) -> list[Text]:
    prompts = comparison["prompts"]
    words = {
        "only first": f"prompts are in {comparison['first']} only",
        "only second": f"prompts are in {comparison['second']} only",
        "other messages": "prompts have one name and different messages",
    }
    return [Text(visible(f"{prompts[key]:,} {text}, and were left out")) for key, text in words.items() if prompts[key]]


def write_comparison(comparison: dict[str, Any], runs: tuple[Path, Path], out: Path) -> None:
    """Write a comparison as one page, and pages of the trajectories in which it changed sides beside the runs' own.

    Raises:
        ConfigError: a page cannot be written.
    """
    opened = open_run(runs[0]), open_run(runs[1])

    def link(run: RunFolder, trajectory_id: str) -> str | None:
        path = page_path(run.folder, trajectory_id)
        write_page(path, page_of_run(run, trajectory_id, Links(run.folder, path)))
        return Links(run.folder, out).to(trajectory_id)

    write_page(out, comparison_page(comparison, opened, link))


def comparison_page(
    comparison: dict[str, Any],
    runs: tuple[RunFolder, RunFolder],
    link: Callable[[RunFolder, str], str | None],
    both: Callable[[Sequence[str]], str] | None = None,
    homes: Sequence[str] = (),
    version: str = "",
) -> str:
    """Return the page of a comparison.

    ``link``: to the page of a run's trajectory; ``both``: to one of a trajectory of either run, side by side;
    ``homes``: to what either run is listed by; ``version``: see :func:`~fsm_rollout.report.pages.render_page`.
    """
    flips = []
    for flip in comparison["flips"][:FLIPS_SHOWN]:
        at = parting(*runs, flip["trajectories"])
        anchor = "" if at is None else f"#token-{at.stream}-{at.position}"
        links = [f"{link(run, id_)}{anchor}" for run, id_ in zip(runs, flip["trajectories"], strict=True)]
        flips.append((flip, links, at, None if both is None else both(flip["trajectories"])))
    return render_page(
        "compare.html.jinja",
        title=f"{comparison['first']} and {comparison['second']}",
        states=[],
        data={"kind": "compare"},
        version=version,
        notes=[line.plain for line in _left_out(comparison)],
        comparison=comparison,
        changes=_changes(comparison),
        flips=flips,
        homes=homes,
        shown_estimate=shown,
    )
