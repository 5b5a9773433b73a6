"""The command that tells what a schedule would cost: ``simulate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsm_rollout.cli.terminal import Overrides, loading, short
from fsm_rollout.errors import ConfigError
from fsm_rollout.files import written_whole

if TYPE_CHECKING:
    from fsm_rollout.simulation.simulate import Simulated


def simulate(
    file: Annotated[Path | None, typer.Argument(metavar="[RUN.yaml]", help="the run's file; default: none")] = None,
    overrides: Overrides = None,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", metavar="NAME", help="auto, today or count:N, or auto+paced; may be given again"),
    ] = None,
    workload: Annotated[
        str, typer.Option("--workload", metavar="NAME", help="lengths that are drawn: coding, search, math, tools, …")
    ] = "coding",
    lengths: Annotated[
        Path | None, typer.Option("--lengths", metavar="RUN|FILE", help="lengths of a run, or of a .jsonl file")
    ] = None,
    replicas: Annotated[int | None, typer.Option("--replicas", metavar="N", min=1, help="servers")] = None,
    workers: Annotated[int | None, typer.Option("--workers", metavar="N", min=1, help="shards that share them")] = None,
    groups: Annotated[int | None, typer.Option("--groups", metavar="N", min=1, help="prompts")] = None,
    n: Annotated[int | None, typer.Option("--n", metavar="N", min=1, help="trajectories of each")] = None,
    memory: Annotated[
        int | None, typer.Option("--memory", metavar="TOKENS", min=2, help="what each server has room for")
    ] = None,
    window: Annotated[int, typer.Option("--window", metavar="TOKENS", min=2, help="the longest context")] = 65_536,
    turns: Annotated[int | None, typer.Option("--turns", metavar="N", min=1, help="the most of a trajectory")] = None,
    target: Annotated[
        int | None, typer.Option("--target", metavar="N", min=1, help="groups of a batch, with +paced and the like")
    ] = None,
    staleness: Annotated[
        int | None, typer.Option("--staleness", metavar="N", min=0, help="batches that one may be late; default: 2")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="of all that is drawn")] = 0,
    out: Annotated[
        Path | None, typer.Option("-o", metavar="FILE.svg", help="a picture: utilisation and residency over time")
    ] = None,
) -> None:
    """Tell what a schedule would cost: the real scheduler, in virtual time, on servers that are simulated.

    \b
    Example: fsm-rollout simulate --replicas 8 --workload search -o search.svg
    Example: fsm-rollout simulate run.yaml --lengths runs/first --policy auto --policy count:64
    Example: fsm-rollout simulate --workload math_hard_tail --groups 64 --policy auto+carry --policy auto+paced

    Printed are the makespan and how many times the bound it is, the share of prompt tokens that are computed twice, how
    long turns wait and how that goes with the size of their prompts (r), whether groups are done in order, how long the
    trajectories of batches are, of all (1.00: as long), and what the servers' time costs. docs/simulation.md says what
    a simulation cannot tell.
    """  # noqa: D301  # click wants the character itself
    if out is not None and out.suffix != ".svg":
        raise ConfigError(f"-o {out}: the picture is an SVG; write FILE.svg")
    with loading():
        from rich.console import Console
        from rich.table import Table

        from fsm_rollout.jobs.run_config import load_run
        from fsm_rollout.simulation.job import Asked, simulations
        from fsm_rollout.simulation.report import FIGURES, column, picture, sentences

    config = None if file is None else load_run(file, overrides or [])
    asked = Asked(
        policy or (), workload, lengths, replicas, workers, groups, n, memory, window, turns, seed, target, staleness
    )
    console = Console()
    status = Console(stderr=True).status("simulating …")

    def each(simulated: Simulated) -> None:
        status.update(f"{simulated.policy.name}: {simulated.ratio:.2f} × the bound; simulating …")

    with status:
        found = simulations(config, asked, each)
    for sentence in sentences(found[0]):
        typer.echo(sentence)
    # A line for each figure, as there are few policies and many of these.
    heading, *lines = zip(FIGURES, *map(column, found), strict=True)
    table = Table(*heading, box=None, header_style="bold")
    for line in lines:
        table.add_row(*line)
    console.print(table)
    if out is not None:
        with written_whole(out) as partial:
            partial.write_text(picture(found), "utf-8")
        typer.echo(f"{short(out.absolute())}: utilisation and residency over time")
