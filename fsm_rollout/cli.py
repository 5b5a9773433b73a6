"""The command line: ``fsm-rollout check | run | schema | new``.

Invariant: bad input ends with exit code 2 and one line per problem on stderr, never with a traceback. What a command
needs is imported inside it, so that each starts as fast as it can.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from fsm_rollout.errors import ConfigError, Problem

app = typer.Typer(
    name="fsm-rollout",
    help="Agent rollouts as explicit state machines: a YAML graph that provably ends, run on any engine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


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
    from fsm_rollout.loader import read_agent
    from fsm_rollout.proof import prove

    problems: list[Problem] = []
    for file in files:
        reading = read_agent(file)
        problems += reading.problems
        if reading.graph is not None and not reading.problems:
            typer.echo(f"{reading.graph.agent} ({file}): {prove(reading.graph)}")
    if problems:
        _refuse(ConfigError(problems))


@app.command()
def run(
    file: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="the run's file", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[key=value ...]", help="changes to the run", show_default=False)
    ] = None,
) -> None:
    """Run an agent on prompts and write the run's folder: journal.sqlite, batch/ and summary.json.

    Example: fsm-rollout run configs/runs/demo.yaml n=8 sampling.temperature=0.7 engine.model=embedded:early

    A key that starts with `agent.` changes the agent: agent.limits.tool_calls=3
    """
    from rich.console import Console

    from fsm_rollout.errors import RolloutError
    from fsm_rollout.execute import execute
    from fsm_rollout.progress import RunProgress, summary_table
    from fsm_rollout.run_config import load_run

    console = Console(stderr=True)
    try:
        config = load_run(file, overrides or [])
        summary = execute(config, lambda total: RunProgress(total, console))
    except ConfigError as error:
        _refuse(error)
    except RolloutError as error:
        _refuse(ConfigError(str(error)))
    except KeyboardInterrupt:
        typer.echo("interrupted; what was done until then is in the run's journal.sqlite", err=True)
        raise typer.Exit(130) from None
    Console().print(summary_table(summary))
    for error_text in summary.get("reward_errors", [])[:5]:
        typer.echo(f"no score: {error_text}", err=True)
    typer.echo(f"{_short(config.out)}: journal.sqlite, batch/, summary.json")


@app.command()
def schema() -> None:
    """Print the JSON Schema of an agent's YAML, for editors.

    Example: fsm-rollout schema > agent.schema.json

    Then let the first line of a YAML be: # yaml-language-server: $schema=agent.schema.json
    """
    import json

    from fsm_rollout.agent_schema import agent_schema

    typer.echo(json.dumps(agent_schema(), indent=2))


@app.command()
def new(name: Annotated[str, typer.Argument(help="what to call the agent", show_default=False)]) -> None:
    """Write NAME.yaml here: a working agent with a tool, to be changed.

    Example: fsm-rollout new my_agent && fsm-rollout check my_agent.yaml
    """
    from fsm_rollout.scaffold import new_agent

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
    app()
