"""The command line: ``check | draw | run | resume | show | export | rescore | replay | serve | schema | new``.

Invariant: bad input ends with exit code 2 and one line per problem on stderr, never with a traceback. What a command
needs is imported inside it, so that each starts as fast as it can.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from fsm_rollout.errors import ConfigError, Problem, RolloutError, RunStopped, TargetNotReached

if TYPE_CHECKING:
    from fsm_rollout.jobs.runner import Progress
    from fsm_rollout.jobs.summary import Summary


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> object:
        """End the program with exit code 2 where the input is wrong; every problem is a line of its own."""
        try:
            return super().invoke(ctx)
        except RolloutError as error:
            problems = error.problems if isinstance(error, ConfigError) else (error,)
            from fsm_rollout.report.texts import visible

            for line in dict.fromkeys(" ".join(str(problem).split("\n")) for problem in problems):
                typer.echo(visible(line), err=True)  # names come from files
            raise typer.Exit(2) from None


app = typer.Typer(
    name="fsm-rollout",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Folder = Annotated[Path, typer.Argument(metavar="RUN", help="a run's folder", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="key=value", help="changes to the run's keys", show_default=False)
]
RunFile = Annotated[
    Path | None,
    typer.Option("--file", metavar="RUN.yaml", help="the run's YAML, if not where it was", show_default=False),
]


@app.callback()
def _commands() -> None:
    """Agent rollouts as explicit state machines: a YAML graph that provably ends, run on any engine.

    \b
    A first session:
      fsm-rollout new my_agent                    writes my_agent.yaml
      fsm-rollout check my_agent.yaml             proves that it ends
      fsm-rollout draw my_agent.yaml -o a.svg     draws it
      fsm-rollout run configs/runs/demo.yaml      runs an agent on prompts
      fsm-rollout show runs/demo                  shows what happened
    """  # noqa: D301  # click wants the character itself


@app.command()
def check(
    files: Annotated[list[Path], typer.Argument(metavar="YAML...", help="agent files", show_default=False)],
) -> None:
    """Verify agents and print how long each can run at most.

    \b
    Example: fsm-rollout check configs/agents/*.yaml
      solver (solver.yaml): ends within 18 transitions, 8 generations, 4,096 response tokens, 600 s

    Every problem is printed with its file, line and rule, and the exit code is 2.
    """  # noqa: D301  # click wants the character itself
    from fsm_rollout.agent.loader import read_agent
    from fsm_rollout.agent.proof import prove

    _look_here()
    problems: list[Problem] = []
    for file in files:
        reading = read_agent(file)
        problems += reading.problems
        if reading.graph is not None and not reading.problems:
            try:
                typer.echo(f"{reading.graph.agent} ({file}): {prove(reading.graph)}")
            except ConfigError as error:
                problems += error.problems
    if problems:
        raise ConfigError(problems)


@app.command()
def draw(
    file: Annotated[Path, typer.Argument(metavar="AGENT.yaml", help="agent file", show_default=False)],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="F", help="the picture: .svg, .png, .dot or .mmd (Mermaid)")
    ],
    implicit: Annotated[
        bool,
        typer.Option("--implicit", help="also show the ends that need no transition: failed, timed_out, limits, ..."),
    ] = False,
) -> None:
    """Draw an agent: its states, transitions, limits and bound.

    Example: fsm-rollout draw configs/agents/tool_user.yaml -o tool_user.svg
    """
    from fsm_rollout.agent.loader import load_agent
    from fsm_rollout.diagrams import draw as diagrams

    _look_here()
    diagrams.form_of(output)  # before any work
    diagrams.draw(load_agent(file), output, implicit=implicit)
    typer.echo(f"{_short(output)} written")


@app.command()
def run(
    file: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="the run's file", show_default=False)],
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
    from fsm_rollout.jobs.run_config import load_run
    from fsm_rollout.jobs.runner import execute

    _look_here()
    config = load_run(file, overrides or [])
    _carry_out(config.out, lambda progress: execute(config, progress, replace=replace))


@app.command()
def serve(
    file: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="the run's file", show_default=False)],
    overrides: Overrides = None,
    port: Annotated[
        int | None, typer.Option("--port", metavar="N", help="instead of serve.port; 0: any", show_default=False)
    ] = None,
) -> None:
    """Serve a run's agents: an endpoint for clients of OpenAI's and Anthropic's protocols, and a chat page.

    \b
    Example: fsm-rollout serve configs/runs/demo.yaml --port 8000
    Then http://127.0.0.1:8000 is a chat page and the base URL of Anthropic's clients, with /v1 that of OpenAI's.

    Each request is a trajectory of the agent that `model` names: its tools run here. A conversation that comes again
    with one message more goes on where it waits in INTERACTING. Only this machine is served (serve.host=0.0.0.0
    serves others, serve.api_keys=FILE asks for keys). What is said is in the folder OUT-serve, for `show`, `export` and
    `rescore`. Ctrl-C ends it; conversations that wait go on when it is started again.
    """  # noqa: D301  # click wants the character itself
    from fsm_rollout.jobs.run_config import load_run

    try:
        from fsm_rollout.serve.command import serve as serve_agents
    except ImportError as error:
        raise ConfigError(f"serving needs the package `{error.name}`: pip install 'fsm-rollout[serve]'") from error
    _look_here()
    config = load_run(file, [*(overrides or []), *([] if port is None else [f"serve.port={port}"])])
    out = _short(config.serve.out or config.out)
    try:
        serve_agents(config, lambda url, agents: typer.echo(f"{url} serves {', '.join(agents)}; Ctrl-C ends it"))
    except KeyboardInterrupt:
        typer.echo(f"ended; what was said: fsm-rollout show {out}", err=True)


@app.command()
def resume(folder: Folder, overrides: Overrides = None, file: RunFile = None) -> None:
    """Continue a run that was interrupted or that crashed.

    Example: fsm-rollout resume runs/demo engine.threads=2

    Finished trajectories stay as they are; an unfinished one continues from its last complete turn or call. Code is
    imported only as the run's own YAML (or the command line) names it, never because the folder does.
    """
    from fsm_rollout.jobs.runner import resume as continue_run

    _look_here()
    _carry_out(folder.absolute(), lambda progress: continue_run(folder, overrides or [], progress, file=file, say=_say))


def _carry_out(out: Path, work: Callable[[Progress], Summary]) -> None:
    """Do a run, or the rest of one, and print its results."""
    from rich.console import Console

    from fsm_rollout.jobs.progress import RunProgress, said_while_slow
    from fsm_rollout.jobs.summary import every_trajectory_failed, failure_lines, most_rewards_failed, summary_table
    from fsm_rollout.report.texts import visible

    console = Console(stderr=True)
    try:
        with said_while_slow("reading agents and prompts", console) as read:

            def progress(total: int, done: int) -> RunProgress:
                read()
                return RunProgress(total, done, console)

            summary = work(progress)
    except KeyboardInterrupt as interruption:
        number = getattr(interruption, "signal", signal.SIGINT)
        by = "" if number == signal.SIGINT else f" by {number.name}"
        hint = f"; to continue: fsm-rollout resume {_short(out)}" if (out / "journal.sqlite").exists() else ""
        typer.echo(f"interrupted{by}{hint}", err=True)
        raise typer.Exit(128 + number) from None
    except TargetNotReached as error:
        typer.echo(visible(f"{error}; to continue: fsm-rollout resume {_short(out)} max_filtered=…"), err=True)
        raise typer.Exit(1) from None
    except RunStopped as error:
        typer.echo(f"{error}; to continue: fsm-rollout resume {_short(out)}", err=True)
        raise typer.Exit(1) from None
    Console().print(summary_table(summary))
    for line in failure_lines(summary):
        typer.echo(line, err=True)
    report = ", report.html" if (out / "report.html").is_file() else ""
    typer.echo(f"{_short(out)}: journal.sqlite, batch/, summary.json{report}")
    failed = ["every trajectory failed"] if every_trajectory_failed(summary) else []
    if most_rewards_failed(summary):
        failed.append(f"the reward failed for {len(summary['reward_errors']):,} of {summary['trajectories']:,}")
    if failed:
        typer.echo("; ".join(failed), err=True)
        raise typer.Exit(1)


@app.command()
def show(
    folder: Folder,
    trajectory: Annotated[
        str | None, typer.Option("--trajectory", metavar="ID", help="one trajectory of it", show_default=False)
    ] = None,
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
        typer.echo(f"{_short(output)} written")


@app.command()
def export(
    folder: Folder,
    kind: Annotated[
        Literal["jsonl", "parquet"], typer.Option("--format", metavar="FORMAT", help="jsonl or parquet")
    ] = "jsonl",
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="F", help="the file, or - (default: rows.FORMAT in the run's folder)"),
    ] = None,
    scores: Annotated[
        Path | None,
        typer.Option("--scores", metavar="F", help="scores of `rescore`, for the run's own", show_default=False),
    ] = None,
) -> None:
    """Write a run's rows: ids, mask, logprobs, weight versions, scores, stop reasons, by the names of the batch.

    Example: fsm-rollout export runs/demo --format parquet

    One row per trained stream of each ended trajectory. The run may still be going on, and what is damaged is said.
    """
    from fsm_rollout.jobs import export as exporting
    from fsm_rollout.jobs.rescore import read_scores

    stream = sys.stdout if output == Path("-") else None
    if stream is not None and kind != "jsonl":
        raise ConfigError("only lines of JSON go to the terminal; give -o F.parquet")
    own = None if scores is None else read_scores(scores)
    result = exporting.export(folder, kind, output, scores=own, report=_say, watch=_watched, stream=stream)
    open_ones = f"; {result.unfinished:,} that have not ended are left out" if result.unfinished else ""
    what = "standard output" if result.path is None else f"{_short(result.path)}"
    _say(f"{what}: {result.rows:,} rows of {result.trajectories:,} trajectories{open_ones}")


@app.command()
def rescore(
    folder: Folder,
    reward: Annotated[str, typer.Option("--reward", metavar="module:function", help="the reward", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="F", help="the file (default: scores/ in the run's folder)")
    ] = None,
) -> None:
    """Judge a run's trajectories with another reward, without generating anything.

    Example: fsm-rollout rescore runs/demo --reward fsm_rollout.rewards:first_answer

    The run keeps its own scores; `export --scores F` writes rows with the new ones.
    """
    from rich.console import Console

    from fsm_rollout.jobs.progress import said_while_slow
    from fsm_rollout.jobs.rescore import mean_of
    from fsm_rollout.jobs.rescore import rescore as judge_again

    _look_here()
    with said_while_slow("judging again", Console(stderr=True)):
        path, scores = judge_again(folder, reward, output, report=_say)
    before, after = (mean_of(getattr(score, name) for score in scores) for name in ("recorded", "score"))
    changed = sum(score.recorded != score.score for score in scores)
    typer.echo(f"{_short(path)}: {len(scores):,} scores, {changed:,} of them changed; mean {before} to {after}")
    errors = dict.fromkeys(score.error for score in scores if score.error is not None)
    if errors:
        failed = sum(score.error is not None for score in scores)
        typer.echo(f"the reward failed for {failed:,} of {len(scores):,}: {next(iter(errors))}", err=True)
        raise typer.Exit(1)


@app.command()
def replay(
    folder: Folder,
    agent: Annotated[
        list[Path] | None,
        typer.Option("--agent", metavar="AGENT.yaml", help="run these agents instead of the run's", show_default=False),
    ] = None,
    trajectory: Annotated[
        str | None, typer.Option("--trajectory", metavar="ID", help="one sample only", show_default=False)
    ] = None,
    file: RunFile = None,
) -> None:
    """Run a run again from its recorded generations and tool results, and say where it first differs.

    Example: fsm-rollout replay runs/demo

    No model and no tool runs; handlers, predicates and templates do. So it shows what a change of an agent, of a chat
    template or of this package changes: by state, generation and token. It exits with 1 when anything differs.
    """
    from rich.console import Console

    from fsm_rollout.jobs.progress import said_while_slow
    from fsm_rollout.jobs.replay import replay as run_again
    from fsm_rollout.report.texts import visible

    _look_here()
    with said_while_slow("replaying", Console(stderr=True)):
        result = run_again(folder, agents=agent or [], only=trajectory, file=file, report=_say)
    for difference in result.differences[:20]:
        typer.echo(visible(str(difference)))
    more = len(result.differences) - 20
    if more > 0:
        typer.echo(f"… and {more:,} more")
    typer.echo(f"{result.replayed:,} trajectories replayed, {len(result.differences):,} of them differ")
    if result.differences:
        raise typer.Exit(1)


def _say(sentence: str) -> None:
    from fsm_rollout.report.texts import visible

    typer.echo(visible(sentence), err=True)


def _watched(items: Iterable[Any], total: int) -> Iterable[Any]:
    """Pass items on, and show how far they are where there is a terminal."""
    from rich.console import Console
    from rich.progress import track

    return track(items, "trajectories", total, console=Console(stderr=True), transient=True)


@app.command()
def schema(
    of: Annotated[Literal["agent", "run"], typer.Argument(help="of an agent's YAML or a run's")] = "agent",
) -> None:
    """Print the JSON Schema of an agent's YAML or of a run's, for editors: every key, with what it means.

    Example: fsm-rollout schema > agent.schema.json; fsm-rollout schema run > run.schema.json

    Then let the first line of a YAML be: # yaml-language-server: $schema=agent.schema.json
    """
    import json

    from fsm_rollout.agent.json_schema import agent_schema
    from fsm_rollout.jobs.run_schema import run_schema

    typer.echo(json.dumps(agent_schema() if of == "agent" else run_schema(), indent=2))


@app.command()
def new(name: Annotated[str, typer.Argument(help="what to call the agent", show_default=False)]) -> None:
    """Write NAME.yaml here: a working agent with a tool, to change.

    Example: fsm-rollout new my_agent && fsm-rollout check my_agent.yaml
    """
    from fsm_rollout.agent.new_agent import new_agent

    path = new_agent(name, Path())
    typer.echo(f"{path} written; try: fsm-rollout check {path}")


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _look_here() -> None:
    """Let the user's files name modules in the working directory; for commands that are to run them."""
    from fsm_rollout.agent.handlers import look_in

    look_in(Path.cwd())


def main() -> None:
    """Run the command line (the console script's entry)."""
    # `python -m` has put the working directory first, where a file of a run from elsewhere may lie: rich.py, say.
    if sys.path[:1] in ([""], [str(Path.cwd())]):
        del sys.path[0]
    app()
