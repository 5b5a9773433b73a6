"""``fsm-rollout stats``: what runs came to, each figure with its standard error and interval.

Invariant: the tables are functions of what :mod:`fsm_rollout.jobs.samples` reads, and JSON holds all that they show.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from fsm_rollout.errors import ConfigError, did_you_mean
from fsm_rollout.jobs.samples import PromptSamples, RunSamples
from fsm_rollout.report.texts import number, visible
from fsm_rollout.statistics.estimates import CONFIDENCE, Estimate, mean, pass_all, pass_at

PASSES = 1.0  # the least score of a sample that passes, unless another is asked for
MOST_VALUES = 20  # values of a column that have a line of their own


def stats_of(
    run: RunSamples, *, by: Sequence[str] = (), k: Sequence[int] = (), passes: float = PASSES
) -> dict[str, Any]:
    """Return what a run came to, as JSON data; every estimate has its error, its interval, and what it is made of.

    ``by``: fields of the prompts, by whose values the score is told as well. ``k``: of how many samples pass@k and
    pass^k are told; by default 1, 2, 4, … as far as every prompt has as many.

    Raises:
        ConfigError: there is no such field.
    """
    prompts = list(run.prompts.values())
    confidence = run.confidence
    passed = [prompt.passed(passes) for prompt in prompts]
    fewest = min((len(each) for each in passed if each), default=0)
    counts = list(k) or [1 << power for power in range(fewest.bit_length())]
    samples = list(run.samples)
    return {
        "run": run.name,
        "prompts": len(prompts),
        "samples": len(samples),
        "unfinished": run.unfinished,
        "unscored": sum(sample.score is None for sample in samples),
        "confidence": confidence,
        "score": told(mean([prompt.scores for prompt in prompts], confidence)),
        "pass@k": {str(count): told(pass_at(passed, count, confidence)) for count in counts},
        "pass^k": {str(count): told(pass_all(passed, count, confidence)) for count in counts},
        "figures": {name: told(mean([prompt.took(name) for prompt in prompts], confidence)) for name in run.figures},
        **({"cost": sum(sum(prompt.took("cost")) for prompt in prompts)} if "cost" in run.figures else {}),
        "stop_reasons": dict(run.counted(lambda sample: [sample.ending]).most_common()),
        "by": {column: _by(column, prompts, confidence) for column in by},
    }


def _by(column: str, prompts: Sequence[PromptSamples], confidence: float) -> dict[str, Any]:
    columns = {name for prompt in prompts for name in prompt.columns}
    if column not in columns:
        raise ConfigError(f"the prompts have no field '{column}'{did_you_mean(column, columns)}")
    found: dict[str, list[PromptSamples]] = {}
    for prompt in prompts:
        value = prompt.columns.get(column)
        found.setdefault(value if isinstance(value, str) else json.dumps(value, default=str), []).append(prompt)
    return {value: told(mean([each.scores for each in found[value]], confidence)) for value in sorted(found)}


def told(estimate: Estimate) -> dict[str, float | None]:
    """Return an estimate as JSON has it: ``None`` where there is no number."""
    return {name: None if math.isnan(value) else value for name, value in asdict(estimate).items()}


def shown(estimate: Mapping[str, float | None]) -> str:
    """Return an estimate of JSON in words: the mean, its standard error, the interval."""
    value, error, low, high = (estimate[name] for name in ("value", "error", "low", "high"))
    if value is None or error is None or low is None or high is None:
        return number(value)
    return f"{number(value)} ± {number(error)} [{number(low)}, {number(high)}]"


def stats_table(all_stats: Sequence[Mapping[str, Any]]) -> Group:
    """Return what some runs came to as a table for people, a column for each, and below it what a reader must know."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    for stats in all_stats:
        table.add_column(Text(visible(stats["run"])))

    def row(name: str, cells: Sequence[str]) -> None:
        table.add_row(Text(visible(name)), *(Text(visible(cell)) for cell in cells))

    def estimates(name: str, key: str, of: str) -> None:
        row(name, [shown(stats[key][of]) if of in stats[key] else "" for stats in all_stats])

    row("prompts × samples", [f"{stats['prompts']:,} × {_each(stats)}" for stats in all_stats])
    row("score", [shown(stats["score"]) for stats in all_stats])
    for key in ("pass@k", "pass^k"):
        for count in _keys(all_stats, key):
            if count != "1" or key == "pass@k":  # of one sample they are the same
                estimates(f"{key[:-1]}{count}", key, count)
    for name in _keys(all_stats, "figures"):
        values = [stats["figures"].get(name, {"value": None})["value"] for stats in all_stats]
        row(name, [number(value) + _in_all(name, value, stats) for value, stats in zip(values, all_stats, strict=True)])
    for reason in _keys(all_stats, "stop_reasons"):
        row(f"ended: {reason}", [f"{stats['stop_reasons'].get(reason, 0):,}" for stats in all_stats])
    for column in _keys(all_stats, "by"):
        values = list(dict.fromkeys(value for stats in all_stats for value in stats["by"].get(column, {})))
        for value in values[:MOST_VALUES]:
            row(f"{column} {value}", [_part(stats["by"].get(column, {}).get(value)) for stats in all_stats])
        if len(values) > MOST_VALUES:
            row(f"{column} …", [f"{len(values) - MOST_VALUES:,} more values: --json has them"])
    return Group(table, Text("\n".join(map(visible, _caption(all_stats))), style="dim italic"))


def _part(estimate: Mapping[str, Any] | None) -> str:
    return "" if estimate is None else f"{shown(estimate)} ({estimate['prompts']:,} prompts)"


def _in_all(figure: str, value: float | None, stats: Mapping[str, Any]) -> str:
    """Return what all samples came to, of a figure that is to be added up: money."""
    return f" ({number(stats['cost'], 2)} in all)" if figure == "cost" and value is not None else ""


def _keys(all_stats: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    return list(dict.fromkeys(name for stats in all_stats for name in stats[key]))


def _each(stats: Mapping[str, Any]) -> str:
    return number(stats["samples"] / stats["prompts"], digits=1) if stats["prompts"] else "0"


def _caption(all_stats: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what a reader of the table must know."""
    lines = ["mean ± standard error [interval], over prompts: the samples of one prompt count together"]
    for stats in all_stats:
        left_out = {"have no score": stats["unscored"], "have not ended": stats["unfinished"]}
        lines += [f"{stats['run']}: {count:,} samples {what}" for what, count in left_out.items() if count]
        if (level := stats["confidence"]) > CONFIDENCE:
            lines.append(
                f"{stats['run']}: intervals of {level:.1%}, as it was looked at several times; so all hold in "
                f"{CONFIDENCE:.0%} of runs"
            )
    return lines
