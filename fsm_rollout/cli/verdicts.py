"""Commands that judge what runs came to: ``eval | stats | compare``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from fsm_rollout.cli.runs import carried_out, end_if_failed
from fsm_rollout.cli.terminal import Folder, Folders, Overrides, loading, look_here, say, short, typed_again
from fsm_rollout.errors import ConfigError

Passes = Annotated[float, typer.Option("--passes", metavar="SCORE", help="the least score of a sample that passes")]
By = Annotated[list[str] | None, typer.Option("--by", metavar="FIELD", help="also by a field of the prompts")]
Counts = Annotated[
    str,
    typer.Option("-k", metavar="1,4", help="of how many samples pass@k and pass^k are told", show_default="1, 2, 4, …"),
]
Json = Annotated[bool, typer.Option("--json", help="print JSON instead")]


def evaluate(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="AGENT.yaml|RUN.yaml", help="an agent's or a run's file")],
    overrides: Overrides = None,
    data: Annotated[Path | None, typer.Option("--data", metavar="F", help="the prompts, instead of the run's")] = None,
    n: Annotated[int | None, typer.Option("-n", metavar="K", help="samples per prompt")] = None,
    until: Annotated[
        float | None, typer.Option("--until", metavar="D", help="end once the score is known to ± this")
    ] = None,
    by: By = None,
    k: Counts = "",
    passes: Passes = 1.0,
    replace: Annotated[bool, typer.Option("--replace", help="delete what is in the folder")] = False,
    as_json: Json = False,
) -> None:
    """Evaluate an agent, or each of a run's `variants`, and print the table of what they came to.

    \b
    Example: fsm-rollout eval run.yaml --data held_back.jsonl -n 4 --until 0.02
    An agent's file runs on the embedded model unless it is told: engine.model=... reward=module:function

    It is a run (`validate: true`: greedy where -n is 1, else sampled as the agent says, unless validation_sampling
    says how) in a folder of its own, OUT-eval, which `stats`, `compare` and `show` take. The same command goes on where
    it was interrupted.
    """  # noqa: D301  # click wants the character itself
    with loading():
        from fsm_rollout.jobs.evaluate import evaluate as carry_out_evaluation
        from fsm_rollout.jobs.evaluate import evaluations

    look_here()
    settings = {"validate": True, "prompts": data, "n": n, "until": until}
    chosen = [f"{key}={value}" for key, value in settings.items() if value is not None]
    configs = evaluations(file, [*chosen, *(overrides or [])])
    for config in configs:
        carry_out = partial(carry_out_evaluation, config, replace=replace, say=say)
        end_if_failed(carried_out(config.out, overrides or [], carry_out, again=typed_again(context)))
    _print_stats([config.out for config in configs], by or (), k, passes, as_json)


def stats(runs: Folders, by: By = None, k: Counts = "", passes: Passes = 1.0, as_json: Json = False) -> None:
    """Print what runs came to: score, pass@k, pass^k, turns, tokens, errors, with standard errors and intervals.

    Example: fsm-rollout stats runs/early runs/final --by difficulty

    Prompts are what chance drew, so the samples of one prompt count together. A run may still be going on.
    """
    _print_stats(runs, by or (), k, passes, as_json)


def _print_stats(runs: Sequence[Path], by: Sequence[str], k: str, passes: float, as_json: bool) -> None:
    from rich.console import Console

    from fsm_rollout.jobs.samples import read_samples
    from fsm_rollout.jobs.stats import stats_of, stats_table

    found = [stats_of(read_samples(run, say), by=by, k=_counts(k), passes=passes) for run in runs]
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        Console().print(stats_table(found))


def _counts(k: str) -> list[int]:
    try:
        counts = [int(count) for count in k.split(",") if count.strip()]
    except ValueError:
        counts = [0]
    if min(counts, default=1) < 1:
        raise ConfigError(f"-k {k}: give numbers of samples, from 1: -k 1,4,8")
    return counts


def compare(
    first: Folder,
    others: Folders,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="F.html", help="write a page as well")
    ] = None,
    passes: Passes = 1.0,
    points: Annotated[
        float, typer.Option("--points", metavar="D", help="say how many prompts would tell so much of a difference")
    ] = 0.02,
    as_json: Json = False,
) -> None:
    """Say whether runs on the same prompts can be told apart, by how much, and on which prompts they differ.

    Example: fsm-rollout compare runs/early runs/final -o comparison.html

    Prompts are paired by their ids. Each further run is compared with the first.
    """
    from rich.console import Console

    from fsm_rollout.jobs.compare import comparison_of, comparison_view, write_comparison
    from fsm_rollout.jobs.samples import read_samples

    if output is not None and (output.suffix != ".html" or len(others) > 1):
        raise ConfigError(f"-o {output}: a page (F.html) compares two runs")
    if points <= 0:
        raise ConfigError(f"--points {points}: give a difference above 0")
    runs = [read_samples(run, say) for run in (first, *others)]
    found = [comparison_of(runs[0], run, passes=passes, points=points) for run in runs[1:]]
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    for run, comparison in zip(others, found, strict=True):
        if not as_json:
            Console().print(comparison_view(comparison, (first, run)))
        if output is not None:
            write_comparison(comparison, (first, run), output)
            say(f"{short(output)} written")
