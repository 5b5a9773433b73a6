"""Commands about agents, which run nothing: ``check | draw | schema | new``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fsm_rollout.cli.terminal import look_here, short
from fsm_rollout.errors import ConfigError, Problem


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

    look_here()
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

    look_here()
    diagrams.form_of(output)  # before any work
    diagrams.draw(load_agent(file), output, implicit=implicit)
    typer.echo(f"{short(output)} written")


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


def new(name: Annotated[str, typer.Argument(help="what to call the agent", show_default=False)]) -> None:
    """Write NAME.yaml here: a working agent with a tool, to change.

    Example: fsm-rollout new my_agent && fsm-rollout check my_agent.yaml
    """
    from fsm_rollout.agent.new_agent import new_agent

    path = new_agent(name, Path())
    typer.echo(f"{path} written; try: fsm-rollout check {path}")
