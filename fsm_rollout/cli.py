"""The command line: ``fsm-rollout check | schema | new``.

Invariant: bad input ends with exit code 2 and one line per problem on stderr, never with a traceback. What a command
needs is imported inside it, so that each starts as fast as it can.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from fsm_rollout.errors import ConfigError

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

    Start with `fsm-rollout new my_agent`, then `fsm-rollout check my_agent.yaml`.
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

    problems = []
    for file in files:
        reading = read_agent(file)
        problems += reading.problems
        if reading.graph is not None and not reading.problems:
            typer.echo(f"{reading.graph.agent} ({file}): {prove(reading.graph)}")
    if problems:
        _refuse(ConfigError(problems))


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


def _refuse(error: ConfigError) -> NoReturn:
    for problem in dict.fromkeys(error.problems):
        typer.echo(" ".join(str(problem).split("\n")), err=True)
    raise typer.Exit(2)


def main() -> None:
    """Run the command line (the console script's entry)."""
    app()
