"""Commands about agents, which run nothing: ``check | draw | schema | new``."""

from __future__ import annotations

from itertools import chain
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

    Below stands what to know of its tools and users. Every problem is printed with its file, line and rule, and the
    exit code is 2.
    """  # noqa: D301  # click wants the character itself
    from fsm_rollout.agent.loader import read_agent
    from fsm_rollout.agent.proof import prove
    from fsm_rollout.tools.notes import notes

    look_here()
    problems: list[Problem] = []
    for file in files:
        reading = read_agent(file)
        problems += reading.problems
        if reading.graph is not None and not reading.problems:
            try:
                typer.echo(f"{reading.graph.agent} ({file}): {prove(reading.graph)}")
                for note in chain.from_iterable(map(notes, reading.graph.with_sub_agents())):
                    typer.echo(f"  {note}")
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


def new(
    name: Annotated[str, typer.Argument(help="what to call the agent", show_default=False)],
    kind: Annotated[
        Literal["tools", "user", "plan-act-verify", "delegate", "external"],
        typer.Option(
            "--from", metavar="KIND", help="what it is like: tools, user, plan-act-verify, delegate, external"
        ),
    ] = "tools",
) -> None:
    """Write the folder NAME: an agent with a tool, a reward, prompts, a run, a test and a training step, to change.

    \b
    Example: fsm-rollout new my_agent && cd my_agent && fsm-rollout run run.yaml

    \b
    The kinds that --from takes:
      tools            calls a tool until it answers
      user             answers, and a user goes on asking
      plan-act-verify  makes a plan, carries it out, and revises its answer until a verifier accepts it
      delegate         calls another agent as a tool
      external         a loop of your own around OpenAI's client
    """  # noqa: D301  # click wants the character itself
    from fsm_rollout.cli.new_project import new_project

    folder = new_project(name, kind, Path())
    typer.echo(
        f"{folder} written; try: cd {folder} && fsm-rollout run run.yaml ({folder}/README.md says what is there)"
    )
