"""``fsm-rollout show``: which view of a run is asked for, by what it is written to."""

from __future__ import annotations

from pathlib import Path

from rich.console import RenderableType

from fsm_rollout.errors import ConfigError, JournalError
from fsm_rollout.report.links import Links
from fsm_rollout.report.pages import write_page
from fsm_rollout.report.recorded import open_run
from fsm_rollout.report.report import write_report
from fsm_rollout.report.terminal import run_view, trajectory_view
from fsm_rollout.report.timeline import write_trace
from fsm_rollout.report.trajectory import page_of_run

FORMS = "F.html (a page) or F.trace.json (a timeline for ui.perfetto.dev)"


def show(folder: Path, trajectory_id: str | None = None, out: Path | None = None) -> RenderableType | None:
    """Write the view that ``out`` names, or return the one for the terminal.

    Raises:
        ConfigError: not a run's folder, no such trajectory, an output of another kind, a journal that cannot be read
            or a file that cannot be written.
    """
    if out is not None and not out.name.endswith((".html", ".trace.json")):
        raise ConfigError(f"-o {out}: its name says what to write; give {FORMS}")
    try:
        run = open_run(folder)
        if out is None:
            return run_view(run) if trajectory_id is None else trajectory_view(run, trajectory_id)
        if out.name.endswith(".trace.json"):
            write_trace(run.histories() if trajectory_id is None else [run.trajectory(trajectory_id)], out)
        elif trajectory_id is None:
            write_report(folder, out)
        else:
            write_page(out, page_of_run(run, trajectory_id, Links(run.folder, out)))
    except JournalError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror or error}") from error
    return None
