"""What the commands share: the arguments of several, the working directory, and sentences for whoever sits there."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

Folder = Annotated[Path, typer.Argument(metavar="RUN", help="a run's folder", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="key=value", help="changes to the run's keys", show_default=False)
]
RunFile = Annotated[
    Path | None,
    typer.Option("--file", metavar="RUN.yaml", help="the run's YAML, if not where it was", show_default=False),
]


def look_here() -> None:
    """Let the user's files name modules in the working directory; for commands that are to run them."""
    from fsm_rollout.names.objects import look_in

    look_in(Path.cwd())


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
