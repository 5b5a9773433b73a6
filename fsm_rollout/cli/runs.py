"""Commands that run agents: ``run | resume | serve``."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fsm_rollout.cli.terminal import Folder, Overrides, RunFile, loading, look_here, say, short
from fsm_rollout.errors import ConfigError, RunStopped, TargetNotReached

if TYPE_CHECKING:
    from fsm_rollout.jobs.runner import Progress
    from fsm_rollout.jobs.summary import Summary


def run(
    file: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="the run's file")],
    overrides: Overrides = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="delete the run, finished or not, that is in its folder")
    ] = False,
) -> None:
    """Run an agent on prompts and write the run's folder.

    \b
    Example: fsm-rollout run configs/runs/demo.yaml n=8 sampling.temperature=0.7

    The folder holds journal.sqlite (every event), batch/ (the tensors), summary.json and report.html. A key that starts
    with `agent.` changes the agent: agent.limits.tool_calls=3. A folder that holds a run is left alone, unless you give
    --replace. Ctrl-C, SIGTERM and SIGHUP suspend the run; `fsm-rollout resume` continues it.
    """  # noqa: D301  # click wants the character itself
    with loading():
        from fsm_rollout.jobs.run_config import load_run
        from fsm_rollout.jobs.runner import execute

    look_here()
    config = load_run(file, changes := overrides or [])
    _print(config.out, carried_out(config.out, changes, lambda progress: execute(config, progress, replace=replace)))


def serve(
    file: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="the run's file")],
    overrides: Overrides = None,
    port: Annotated[int | None, typer.Option("--port", metavar="N", help="instead of serve.port; 0: any")] = None,
    training: Annotated[
        bool, typer.Option("--training", help="serve a trainer elsewhere: fsm_rollout.RemoteRollout(URL)")
    ] = False,
) -> None:
    """Serve a run's agents: an endpoint for clients of OpenAI's and Anthropic's protocols, and a chat page.

    \b
    Example: fsm-rollout serve configs/runs/demo.yaml --port 8000
    Then http://127.0.0.1:8000 is a chat page and the base URL of Anthropic's clients, with /v1 that of OpenAI's.

    Each request is a trajectory of the agent that `model` names: its tools run here. A conversation that comes again
    with one message more goes on where it waits in INTERACTING. Only this machine is served (serve.host=0.0.0.0
    serves others, serve.api_keys=FILE asks for keys). What is said is in the folder OUT-serve, for `show`, `export` and
    `rescore`. Ctrl-C ends it; conversations that wait go on when it is started again.

    With --training it is a trainer that is served: on another machine, fsm_rollout.RemoteRollout("http://HOST:8000") is
    used as a Rollout is: prompts in, batches out, new weights. The run's reward, filter, workers and seed hold, its
    prompts do not. A trainer, or this server, that dies and is started again goes on where it was.
    """  # noqa: D301  # click wants the character itself
    from fsm_rollout.jobs.run_config import load_run
    from fsm_rollout.trajectory.journal import JournalFolder

    try:
        with loading():
            from fsm_rollout.serve.command import serve as serve_agents
    except ImportError as error:
        raise ConfigError(f"serving needs the package `{error.name}`: pip install 'fsm-rollout[serve]'") from error
    look_here()
    config = load_run(file, [*(overrides or []), *([] if port is None else [f"serve.port={port}"])])
    out = short(config.serve.out or config.out)
    try:
        whom = " to a trainer" if training else ""
        served = partial(serve_agents, training=training)
        served(config, lambda url, agents: typer.echo(f"{url} serves {', '.join(agents)}{whom}; Ctrl-C ends it"))
    except KeyboardInterrupt:
        said = JournalFolder(out).first.exists()
        typer.echo(f"ended; what was said: fsm-rollout show {out}" if said else "ended before it served", err=True)


def resume(folder: Folder, overrides: Overrides = None, file: RunFile = None) -> None:
    """Continue a run that was interrupted or that crashed.

    Example: fsm-rollout resume runs/demo engine.threads=2

    Finished trajectories stay as they are; an unfinished one continues from its last complete turn or call. Code is
    imported only as the run's own YAML (or the command line) names it, never because the folder does.
    """
    with loading():
        from fsm_rollout.jobs.runner import resume as continue_run

    look_here()
    out = folder.absolute()
    changes = overrides or []
    _print(out, carried_out(out, changes, lambda progress: continue_run(folder, changes, progress, file=file, say=say)))


def replicas(
    folder: Folder,
    what: Annotated[Literal["list", "add", "remove"], typer.Argument(help="what to do with them")] = "list",
    which: Annotated[
        str | None, typer.Argument(metavar="[URL|NAME]", help="a server to add (none: one is started), or who leaves")
    ] = None,
    within: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0, help="so long who leaves may go on with what it has")
    ] = None,
    engine: Annotated[str, typer.Option(metavar="NAME", help="of which engine")] = "policy",
) -> None:
    """List the replicas of a run (or of serve) that is under way on this machine, add one, or have one leave.

    \b
    Example: fsm-rollout replicas runs/demo remove replica-1 --within 30
    Example: fsm-rollout replicas runs/demo add http://node9:30000

    The command ends once that is done. No token is lost: what one that leaves has not said goes on in others.
    """  # noqa: D301  # click wants the character itself
    from fsm_rollout.jobs.control import Order, ask
    from fsm_rollout.report.texts import visible

    if what == "remove" and which is None:
        raise ConfigError("say which one is to leave: fsm-rollout replicas RUN lists them")
    answer = ask(folder, Order(what, which, within, engine))
    for row in answer.rows:
        version = "" if row["weight_version"] is None else f"weights {row['weight_version']}"
        counts = f"{row['in_flight']:,} under way, {row['requests']:,} requests, {row['tokens']:,} tokens"
        last = row["cause"] if row["state"] in ("starting", "dead") else ""
        words = [f"{row['name']:<12}", f"{row['state']:<9}", f"{version:<12}", counts, row["url"], last]
        typer.echo(visible("  ".join(filter(None, words)).rstrip()))


def carried_out(
    out: Path, overrides: Sequence[str], work: Callable[[Progress], Summary], again: str | None = None
) -> Summary:
    """Do a run, or the rest of one, and return its summary; where it is cut off, say how it goes on.

    That is by the command ``again``, or by ``resume``, which takes no code from the folder: what ``overrides`` name of
    the user's code is part of it.
    """
    from rich.console import Console

    from fsm_rollout.report.progress import RunProgress, said_while_slow
    from fsm_rollout.report.texts import visible
    from fsm_rollout.trajectory.journal import JournalFolder

    console = Console(stderr=True)
    code = [text for text in overrides if text.startswith(("agent", "reward", "track", "group_filter", "engine"))]
    to_continue = f"to continue: {again or shlex.join(['fsm-rollout', 'resume', str(short(out)), *code])}"
    try:
        with said_while_slow("reading agents and prompts", console) as read:

            def progress(total: int, ended: Collection[tuple[str, int]]) -> RunProgress:
                read()
                if console.is_terminal:
                    hint = shlex.join(["fsm-rollout", "view", str(short(out.parent))])
                    console.print(f"in a browser, while it runs: {hint}", style="dim", markup=False, highlight=False)
                return RunProgress(total, ended, console)

            return work(progress)
    except KeyboardInterrupt as interruption:
        number = getattr(interruption, "signal", signal.SIGINT)
        by = "" if number == signal.SIGINT else f" by {number.name}"
        hint = f"; {to_continue}" if JournalFolder(out).first.exists() else ""
        typer.echo(f"interrupted{by}{hint}", err=True)
        raise typer.Exit(128 + number) from None
    except TargetNotReached as error:
        typer.echo(visible(f"{error}; {to_continue} max_filtered=…"), err=True)
        raise typer.Exit(1) from None
    except RunStopped as error:
        typer.echo(f"{error}; {to_continue}", err=True)
        raise typer.Exit(1) from None


def _print(out: Path, summary: Summary) -> None:
    """Print a run's results."""
    from rich.console import Console

    from fsm_rollout.jobs.summary import summary_table

    Console().print(summary_table(summary))
    report = ", report.html" if (out / "report.html").is_file() else ""
    typer.echo(f"{short(out)}: journal.sqlite, batch/, summary.json{report}")
    end_if_failed(summary)


def end_if_failed(summary: Summary) -> None:
    """Say what failed in a run, and end with exit code 1 where that is most of it."""
    from fsm_rollout.jobs.summary import every_trajectory_failed, failure_lines, most_rewards_failed

    for line in failure_lines(summary):
        typer.echo(line, err=True)
    failed = ["every trajectory failed"] if every_trajectory_failed(summary) else []
    if most_rewards_failed(summary):
        failed.append(f"the reward failed for {len(summary['reward_errors']):,} of {summary['trajectories']:,}")
    if failed:
        typer.echo("; ".join(failed), err=True)
        raise typer.Exit(1)
