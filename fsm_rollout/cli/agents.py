"""Commands about agents, which run nothing: ``check | draw | schema | new``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

import typer

from fsm_rollout.cli.terminal import STANDARD_OUTPUT, look_here, short
from fsm_rollout.errors import ConfigError, Problem


def check(
    files: Annotated[list[Path], typer.Argument(metavar="YAML...", help="files of agents, runs, scripts")],
) -> None:
    """Verify agents and print how long each can run at most; runs and scripts are checked, and not run.

    \b
    Example: fsm-rollout check configs/agents/*.yaml
      solver (solver.yaml): ends within 18 transitions, 8 generations, 4,096 response tokens, 600 s

    Below stands what to know of its tools and users. Every problem is printed with its file, line and rule, and the
    exit code is 2.
    """  # noqa: D301  # click wants the character itself
    look_here()
    problems: list[Problem] = []
    for file in files:
        try:
            for line in _checked(file):
                typer.echo(line)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)


def _checked(file: Path) -> Iterator[str]:
    """Yield what is to be known of a YAML that is sound; ConfigError: it is not."""
    from fsm_rollout.agent.loader import load_agent
    from fsm_rollout.agent.yaml.source import MAX_VALUES, SourceMap, kind_of, read_text, read_yaml

    text = read_text(file)
    match kind_of(read_yaml(text, SourceMap(), max_lines=MAX_VALUES)[0]) if isinstance(text, str) else None:
        case "run":
            from fsm_rollout.jobs.checking import check_run

            yield from check_run(file)
        case "script":
            from fsm_rollout.engines.scripted.script import read_script

            script = read_script(file)
            turns = script.values() if isinstance(script, Mapping) else [script]
            yield f"{file}: a script of {sum(map(len, turns)):,} turns"
        case _:
            from fsm_rollout.agent.proof import prove
            from fsm_rollout.tools.notes import notes

            graph = load_agent(file)
            yield f"{graph.agent} ({file}): {prove(graph)}"
            for note in chain.from_iterable(map(notes, graph.with_sub_agents())):
                yield f"  {note}"


def draw(
    file: Annotated[Path, typer.Argument(metavar="AGENT.yaml", help="agent file")],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="F",
            help="the picture: .svg, .png, .dot or .mmd (Mermaid); -: to stdout (default: beside the YAML)",
        ),
    ] = None,
    implicit: Annotated[
        bool,
        typer.Option("--implicit", help="also show the ends that need no transition: failed, timed_out, limits, ..."),
    ] = False,
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="RUN", help="a run's folder: also show what followed from where it went"),
    ] = None,
) -> None:
    """Draw an agent: its states, transitions, limits and bound; with --run, where a run went and what followed.

    Example: fsm-rollout draw configs/agents/tool_user.yaml -o tool_user.svg
    """
    from fsm_rollout.agent.loader import load_agent
    from fsm_rollout.diagrams import draw as diagrams

    look_here()
    if output is not None and output != STANDARD_OUTPUT:
        diagrams.form_of(output)  # before any work
    graph, values = load_agent(file), None
    if run is not None:
        from fsm_rollout.report.values import values_of_run

        values = values_of_run(graph, run)
    if output == STANDARD_OUTPUT:
        typer.echo(diagrams.to_mermaid(graph, implicit=implicit, values=values))
        return
    try:
        output = diagrams.draw(graph, output or file.with_suffix(".svg"), implicit=implicit, values=values)
    except diagrams.DrawingError:  # there is no Graphviz
        if output is not None:
            raise
        output = diagrams.draw(graph, file.with_suffix(".mmd"), implicit=implicit, values=values)
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
    name: Annotated[str, typer.Argument(help="what to call the agent")],
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
