"""The command line: what ``fsm-rollout --help`` lists.

Invariant: bad input ends with exit code 2 and one line per problem on stderr, never with a traceback. What a command
needs is imported inside it, so that each starts as fast as it can.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fsm_rollout.cli.agents import check, draw, new, schema
from fsm_rollout.cli.results import export, replay, rescore, show, view
from fsm_rollout.cli.runs import replicas, resume, run, serve
from fsm_rollout.cli.simulate import simulate
from fsm_rollout.cli.terminal import WORDS
from fsm_rollout.cli.verdicts import compare, evaluate, stats
from fsm_rollout.errors import ConfigError, RolloutError, close_match


class _Commands(TyperGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the words of the command, which may be typed again."""
        ctx.meta[WORDS] = list(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> object:
        """End the program with exit code 2 where the input is wrong; every problem is a line of its own."""
        try:
            return super().invoke(ctx)
        except UsageError as error:
            takes_keys = error.ctx and any(parameter.name == "overrides" for parameter in error.ctx.command.params)
            error.message = _in_plain_words(error.message, getattr(error, "option_name", "") if takes_keys else "")
            raise
        except RolloutError as error:
            problems = error.problems if isinstance(error, ConfigError) else (error,)
            from fsm_rollout.report.texts import visible

            for line in dict.fromkeys(" ".join(str(problem).split("\n")) for problem in problems):
                typer.echo(visible(line), err=True)  # names come from files
            raise typer.Exit(2) from None


UsageError: Any = typer.BadParameter.__mro__[1]  # click's, which typer may have brought along
_ONE_OF = re.compile(r"'(?P<given>.*)' is not one of (?P<words>.*)\.$")


def _in_plain_words(message: str, option: str) -> str:
    """Return what is wrong with an option, and the right spelling where there is one."""
    message = message.removeprefix("Value error, ").removeprefix("Input ")  # pydantic's, to which typer hands values
    if found := _ONE_OF.search(message):
        words = re.findall("'(.*?)'", found["words"])
        return message.rstrip(".") + close_match(found["given"], words)
    if key := option.lstrip("-"):
        from fsm_rollout.jobs.run_config import KEYS

        if key in KEYS:
            return f"{message}: keys of the run are written without dashes: {key}=…"
    return message


app = typer.Typer(
    name="fsm-rollout",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _say_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"fsm-rollout {version('fsm-rollout')}")
        raise typer.Exit


@app.callback()
def _commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="say which version this is")
    ] = False,
) -> None:
    """Agent rollouts as explicit state machines: a YAML graph that provably ends, run on any engine.

    \b
    A first session:
      fsm-rollout new my_agent                 writes the project my_agent, an agent with all that it needs
      cd my_agent
      fsm-rollout check agent.yaml             proves that it ends
      fsm-rollout draw agent.yaml              draws it
      fsm-rollout run run.yaml                 runs it on prompts
      fsm-rollout show runs/first              shows what happened
    """  # noqa: D301  # click wants the character itself


_COMMANDS = (
    check, draw, run, serve, resume, replicas, show, view, stats, compare, export, rescore, replay, simulate, schema,
    new,
)  # fmt: skip
for _command in _COMMANDS:
    app.command()(_command)
app.command("eval")(evaluate)


def main() -> None:
    """Run the command line (the console script's entry)."""
    # `python -m` has put the working directory first, where a file of a run from elsewhere may lie: rich.py, say.
    if sys.path[:1] in ([""], [str(Path.cwd())]):
        del sys.path[0]
    app()
