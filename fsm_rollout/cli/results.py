"""Commands about what runs have left in their folders: ``show | view | export | rescore | replay``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from fsm_rollout.cli.terminal import STANDARD_OUTPUT, Folder, RunFile, look_here, say, short, watched
from fsm_rollout.errors import ConfigError


def show(
    folder: Folder,
    trajectory: Annotated[str | None, typer.Option("--trajectory", metavar="ID", help="one trajectory of it")] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="F", help="write a page (.html) or a Perfetto timeline (.trace.json) instead"
        ),
    ] = None,
) -> None:
    """Show a run, or one trajectory token by token.

    Example: fsm-rollout show runs/demo --trajectory 0/0 -o trajectory.html

    It may still be running.
    """
    from rich.console import Console

    from fsm_rollout.report.show import show as view_of

    view = view_of(folder, trajectory, output)
    if view is not None:
        Console().print(view)
    elif output is not None:
        typer.echo(f"{short(output)} written")


def view(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="a run's folder, or one in which runs have theirs")
    ] = Path("runs"),
    port: Annotated[int, typer.Option("--port", metavar="N", help="where to listen; 0: any that is free")] = 7070,
    open_: Annotated[bool, typer.Option("--open", help="open it in a browser")] = False,
) -> None:
    """Look at runs in a browser, also while they run: pages on this machine, which change as the runs do.

    \b
    Example: fsm-rollout view runs
    Then http://127.0.0.1:7070 lists the runs in the folder. A run's page finds trajectories by what was said in
    them, agent, state, stop reason, tool error and score; a trajectory's page grows as it does. Two samples, or two
    trajectories of a prompt, are shown side by side; two runs are compared.

    It reads journals and writes nothing; only this machine is answered. Ctrl-C ends it. `fsm-rollout show` makes the
    same pages as files.
    """  # noqa: D301  # click wants the character itself
    from fsm_rollout.concurrency.interruption import interruptible
    from fsm_rollout.view.runs import Runs
    from fsm_rollout.view.server import serve_view

    runs = Runs(folder)

    def ready(url: str) -> None:
        typer.echo(f"{url} shows the runs in {short(runs.folder)}; Ctrl-C ends it")
        if open_:
            import webbrowser

            webbrowser.open(url)

    try:
        with interruptible() as main:
            main.run(serve_view(runs, port, ready))
    except KeyboardInterrupt:
        typer.echo("ended", err=True)


def export(
    folder: Folder,
    kind: Annotated[
        Literal["jsonl", "parquet", "otlp"], typer.Option("--format", metavar="FORMAT", help="jsonl, parquet or otlp")
    ] = "jsonl",
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="F", help="the file, or - (default: rows.FORMAT in the run's folder)"),
    ] = None,
    scores: Annotated[
        Path | None, typer.Option("--scores", metavar="F", help="scores of `rescore`, for the run's own")
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option("--endpoint", metavar="URL", help="otlp: the collector (default: the run's)")
    ] = None,
    use: Annotated[str | None, typer.Option("--use", metavar="READER", help="otlp: mlflow, phoenix or weave")] = None,
    project: Annotated[
        str | None, typer.Option("--project", metavar="NAME", help="otlp: where the reader puts them")
    ] = None,
    content: Annotated[
        Literal["none", "text", "tokens"] | None,
        typer.Option("--content", metavar="WHAT", help="otlp: none, text or tokens"),
    ] = None,
) -> None:
    """Write a run's rows: ids, mask, logprobs, weight versions, scores, messages and text, by the names of the batch.

    Example: fsm-rollout export runs/demo --format parquet

    One row per trained stream of each ended trajectory. The run may still be going on, and what is damaged is said.
    With --format otlp all spans go to a collector of OpenTelemetry's; a second time that changes nothing.
    """
    if kind == "otlp":
        from fsm_rollout.jobs.export_spans import send_spans

        if output is not None or scores is not None:
            raise ConfigError("spans go to a collector (--endpoint), as the run was; leave out -o and --scores")
        settings = {"endpoint": endpoint, "use": use, "project": project, "content": content}
        sent = send_spans(folder, {k: v for k, v in settings.items() if v is not None}, report=say, watch=watched)
        say(f"{sent.where}: {sent.spans:,} spans of {sent.trajectories:,} trajectories")
        return
    from fsm_rollout.jobs import export as exporting
    from fsm_rollout.jobs.rescore import read_scores

    stream = sys.stdout if output == STANDARD_OUTPUT else None
    if stream is not None and kind != "jsonl":
        raise ConfigError("only lines of JSON go to the terminal; give -o F.parquet")
    own = None if scores is None else read_scores(scores)
    result = exporting.export(folder, kind, output, scores=own, report=say, watch=watched, stream=stream)
    open_ones = f"; {result.unfinished:,} that have not ended are left out" if result.unfinished else ""
    what = "standard output" if result.path is None else f"{short(result.path)}"
    say(f"{what}: {result.rows:,} rows of {result.trajectories:,} trajectories{open_ones}")


def rescore(
    folder: Folder,
    reward: Annotated[str, typer.Option("--reward", metavar="module:function", help="the reward")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="F", help="the file, or - (default: scores/ in the run's folder)"),
    ] = None,
) -> None:
    """Judge a run's trajectories with another reward, without generating anything.

    Example: fsm-rollout rescore runs/demo --reward fsm_rollout.rewards:first_answer

    The run keeps its own scores; `export --scores F` writes rows with the new ones.
    """
    from rich.console import Console

    from fsm_rollout.jobs.rescore import mean_of
    from fsm_rollout.jobs.rescore import rescore as judge_again
    from fsm_rollout.report.progress import said_while_slow

    look_here()
    with said_while_slow("judging again", Console(stderr=True)):
        stream = sys.stdout if output == STANDARD_OUTPUT else None
        path, scores = judge_again(folder, reward, output, report=say, stream=stream)
    before, after = (mean_of(getattr(score, name) for score in scores) for name in ("recorded", "score"))
    changed = sum(score.recorded != score.score for score in scores)
    what = "standard output" if path is None else f"{short(path)}"
    line = f"{what}: {len(scores):,} scores, {changed:,} of them changed; mean {before} to {after}"
    typer.echo(line, err=path is None)
    errors = dict.fromkeys(score.error for score in scores if score.error is not None)
    if errors:
        failed = sum(score.error is not None for score in scores)
        typer.echo(f"the reward failed for {failed:,} of {len(scores):,}: {next(iter(errors))}", err=True)
        raise typer.Exit(1)


def replay(
    folder: Folder,
    agent: Annotated[
        list[Path] | None, typer.Option("--agent", metavar="AGENT.yaml", help="run these agents instead of the run's")
    ] = None,
    trajectory: Annotated[str | None, typer.Option("--trajectory", metavar="ID", help="one sample only")] = None,
    file: RunFile = None,
) -> None:
    """Run a run again from its recorded generations and tool results, and say where it first differs.

    Example: fsm-rollout replay runs/demo

    No model and no tool runs; handlers, predicates and templates do. So it shows what a change of an agent, of a chat
    template or of this package changes: by state, generation and token. It exits with 1 when anything differs.
    """
    from rich.console import Console

    from fsm_rollout.jobs.replay import replay as run_again
    from fsm_rollout.report.progress import said_while_slow
    from fsm_rollout.report.texts import visible

    look_here()
    with said_while_slow("replaying", Console(stderr=True)):
        result = run_again(folder, agents=agent or [], only=trajectory, file=file, report=say)
    for difference in result.differences[:20]:
        typer.echo(visible(str(difference)))
    more = len(result.differences) - 20
    if more > 0:
        typer.echo(f"… and {more:,} more")
    typer.echo(f"{result.replayed:,} trajectories replayed, {len(result.differences):,} of them differ")
    if result.differences:
        raise typer.Exit(1)
