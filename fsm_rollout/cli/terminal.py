"""What the commands share: the arguments of several, the working directory, and sentences for whoever sits there."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

WORDS = "fsm_rollout.words"  # where a command's context has what was typed
STANDARD_OUTPUT = Path("-")  # what `-o -` names
SLOW_AFTER = 2.0  # seconds after which packages that are still being loaded are worth a word


def _no_yaml(given: Any) -> Any:
    """Refuse a YAML where runs' folders are wanted, and say which folder a run's YAML writes."""
    from fsm_rollout.errors import ConfigError, Problem

    for path in given if isinstance(given, list) else [given]:
        if isinstance(path, Path) and path.suffix in (".yaml", ".yml") and path.is_file():
            from fsm_rollout.agent.yaml.source import SourceMap, kind_of, read_yaml
            from fsm_rollout.jobs.run_config import load_run

            if kind_of(read_yaml(path.read_text("utf-8", "replace"), SourceMap(str(path)))[0]) == "agent":
                eval_ = shlex.join(["fsm-rollout", "eval", str(path), "--data"])
                raise ConfigError(Problem(f"is an agent's YAML; give a run's folder: `{eval_} F` makes one", str(path)))
            raise ConfigError(Problem(f"is a YAML; give the run's folder, {short(load_run(path).out)}", str(path)))
    return given


Folder = Annotated[Path, typer.Argument(metavar="RUN", help="a run's folder", callback=_no_yaml)]
Folders = Annotated[list[Path], typer.Argument(metavar="RUN...", help="runs' folders", callback=_no_yaml)]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="key=value", help="changes to the run's keys")]
RunFile = Annotated[Path | None, typer.Option("--file", metavar="RUN.yaml", help="the run's YAML, if not where it was")]


def look_here() -> None:
    """Let the user's files name modules in the working directory; for commands that are to run them."""
    from fsm_rollout.names.objects import look_in

    look_in(Path.cwd())


@contextmanager
def loading() -> Iterator[None]:
    """Say that packages are being loaded, if that takes long: from a cold disk it may be most of a command."""
    timer = threading.Timer(SLOW_AFTER, typer.echo, ["loading packages …"], {"err": True})
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def typed_again(context: typer.Context) -> str:
    """Return the command that was given, without ``--replace``."""
    return shlex.join(["fsm-rollout", *(word for word in context.meta[WORDS] if word != "--replace")])


def short(path: Path) -> Path:
    """Return a path as one would type it here."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def say(sentence: str) -> None:
    """Write a sentence to stderr; names in it may come from files."""
    from fsm_rollout.report.texts import visible

    typer.echo(visible(sentence), err=True)


def watched(items: Iterable[Any], total: int) -> Iterable[Any]:
    """Pass items on, and show how far they are where there is a terminal."""
    from rich.console import Console
    from rich.progress import track

    return track(items, "trajectories", total, console=Console(stderr=True), transient=True)
