"""The command line: ``fsm-rollout check | draw | run | resume | show | schema | new``.

Invariant: bad input ends with exit code 2 and one line per problem on stderr, never with a traceback. What a command
needs is imported inside it, so that each starts as fast as it can.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from fsm_rollout.errors import ConfigError, Problem

if TYPE_CHECKING:
    from fsm_rollout.jobs.runner import Progress

app = typer.Typer(
    name="fsm-rollout",
    help="Agent rollouts as explicit state machines: a YAML graph that provably ends, run on any engine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[key=value ...]", help="changes to the run", show_default=False)
]


@app.callback()
def _commands() -> None:
    """Agent rollouts as explicit state machines.

    Start with `fsm-rollout new my_agent`, then `fsm-rollout check my_agent.yaml`, then a run of it:
    `fsm-rollout run configs/runs/demo.yaml` shows how.
    """


@app.command()
def check(
    files: Annotated[list[Path], typer.Argument(metavar="YAML...", help="agent files", show_default=False)],
) -> None:
    """Verify agents and print how long each can run at most.

    Example: fsm-rollout check configs/agents/*.yaml

    solver (solver.yaml): ends within 18 transitions, 8 generations, 4,096 response tokens, 600 s

    Every problem is printed with its file, line and rule, and the exit code is 2.
    """
    from fsm_rollout.agent.loader import read_agent
    from fsm_rollout.agent.proof import prove

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
        _refuse(ConfigError(problems))


@app.command()
def draw(
    file: Annotated[Path, typer.Argument(metavar="AGENT.yaml", help="agent file", show_default=False)],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="F", help="the picture: .svg, .png, .dot or .mmd (Mermaid)")
    ],
    implicit: Annotated[
        bool, typer.Option("--implicit", help="show the ends that need no row too: failed, timed_out, limits, ...")
    ] = False,
) -> None:
    """Draw an agent: its states, what they may spend and what is trained; its rows; how long it can run at most.

    Example: fsm-rollout draw configs/agents/tool_user.yaml -o tool_user.svg
    """
    from fsm_rollout.agent.loader import load_agent
    from fsm_rollout.diagrams import draw as diagrams

    try:
        diagrams.form_of(output)  # before any work
        diagrams.draw(load_agent(file), output, implicit=implicit)
    except ConfigError as error:
        _refuse(error)
    except diagrams.DrawingError as error:
        _refuse(ConfigError(str(error)))
    typer.echo(f"{_short(output)} written")


@app.command()
def run(
    file: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="the run's file", show_default=False)],
    overrides: Overrides = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="begin anew where a run of that name has not come to its end")
    ] = False,
) -> None:
    """Run an agent on prompts and write the run's folder: journal.sqlite, batch/, summary.json and report.html.

    Example: fsm-rollout run configs/runs/demo.yaml n=8 sampling.temperature=0.7 engine.model=embedded:early

    A key that starts with `agent.` changes the agent: agent.limits.tool_calls=3
    """
    from fsm_rollout.jobs.run_config import load_run
    from fsm_rollout.jobs.runner import execute

    try:
        config = load_run(file, overrides or [])
    except ConfigError as error:
        _refuse(error)
    _carry_out(config.out, lambda progress: execute(config, progress, replace=replace))


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="a run's folder", show_default=False)],
    overrides: Overrides = None,
) -> None:
    """Go on with a run that was interrupted, or cut off by a crash, and write the results of the whole.

    Example: fsm-rollout resume runs/demo engine.threads=2

    What has ended stays as it is; what is half-finished goes on from its last complete turn or call.
    """
    from fsm_rollout.jobs.runner import resume as go_on

    _carry_out(folder.absolute(), lambda progress: go_on(folder, overrides or [], progress))


def _carry_out(out: Path, work: Callable[[Progress], dict[str, Any]]) -> None:
    """Do a run, or the rest of one, and print what came of it."""
    from rich.console import Console

    from fsm_rollout.errors import RolloutError
    from fsm_rollout.jobs.progress import RunProgress
    from fsm_rollout.jobs.summary import summary_table
    from fsm_rollout.report.token_texts import shortened

    console = Console(stderr=True)
    try:
        summary = work(lambda total, done: RunProgress(total, done, console))
    except ConfigError as error:
        _refuse(error)
    except RolloutError as error:
        _refuse(ConfigError(str(error)))
    except KeyboardInterrupt:
        more = f"; to go on: fsm-rollout resume {_short(out)}" if (out / "journal.sqlite").exists() else ""
        typer.echo(f"interrupted{more}", err=True)
        raise typer.Exit(130) from None
    Console().print(summary_table(summary))
    for error_text in summary.get("reward_errors", [])[:5]:
        typer.echo(f"no score: {error_text}", err=True)
    failures: dict[str, str] = summary.get("failures", {})
    for part, whose in ((summary, ""), (summary["sub_agents"], " sub-agents")):
        for reason, detail in list(part.get("failures", {}).items())[:5]:
            count = f"{part['stop_reasons'][reason]:,} of {part['trajectories']:,}{whose}"
            typer.echo(f"{reason} ({count}): {shortened(detail)}", err=True)
    report = ", report.html" if (out / "report.html").is_file() else ""
    typer.echo(f"{_short(out)}: journal.sqlite, batch/, summary.json{report}")
    if failures and sum(summary["stop_reasons"][reason] for reason in failures) == summary["trajectories"]:
        typer.echo("every trajectory failed", err=True)
        raise typer.Exit(1)


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="a run's folder", show_default=False)],
    trajectory: Annotated[
        str | None, typer.Option("--trajectory", metavar="ID", help="one trajectory of it", show_default=False)
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="F", help="a page (.html) or a Perfetto timeline (.trace.json); none: here"
        ),
    ] = None,
) -> None:
    """Look at a run, or at one trajectory token by token, also while it is being written.

    Example: fsm-rollout show runs/demo --trajectory 0/0 -o trajectory.html
    """
    from rich.console import Console

    from fsm_rollout.report.show import show as view_of

    try:
        view = view_of(folder, trajectory, output)
    except ConfigError as error:
        _refuse(error)
    if view is not None:
        Console().print(view)
    elif output is not None:
        typer.echo(f"{_short(output)} written")


@app.command()
def schema() -> None:
    """Print the JSON Schema of an agent's YAML, for editors.

    Example: fsm-rollout schema > agent.schema.json

    Then let the first line of a YAML be: # yaml-language-server: $schema=agent.schema.json
    """
    import json

    from fsm_rollout.agent.json_schema import agent_schema

    typer.echo(json.dumps(agent_schema(), indent=2))


@app.command()
def new(name: Annotated[str, typer.Argument(help="what to call the agent", show_default=False)]) -> None:
    """Write NAME.yaml here: a working agent with a tool, to be changed.

    Example: fsm-rollout new my_agent && fsm-rollout check my_agent.yaml
    """
    from fsm_rollout.agent.new_agent import new_agent

    try:
        path = new_agent(name, Path())
    except ConfigError as error:
        _refuse(error)
    typer.echo(f"{path} written; try: fsm-rollout check {path}")


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _refuse(error: ConfigError) -> NoReturn:
    for problem in dict.fromkeys(error.problems):
        typer.echo(" ".join(str(problem).split("\n")), err=True)
    raise typer.Exit(2)


def main() -> None:
    """Run the command line (the console script's entry)."""
    from fsm_rollout.agent.handlers import look_in

    look_in(Path.cwd())  # as `python -m` does
    app()
