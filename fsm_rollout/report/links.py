"""From one page of a run to the others: report, trajectories, the sub-agents that they called, and back.

Invariant: a link leads only to a page that exists when the linking page is written, or that is written along with it;
where there is none, :meth:`Links.command` makes one. Links are relative, so a run's folder can be moved and served.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

PAGES = "trajectories"
"""The folder, in a run's folder, of trajectory pages that a report links to."""
REPORT = "report.html"
LONGEST_NAME = 150
"""Characters of a page's name; file systems take 255 in all."""


@dataclass(frozen=True, slots=True)
class Links:
    """What the page at ``page`` can link to in the run's folder ``folder``."""

    folder: Path
    page: Path
    planned: Collection[Path] = ()
    """Pages that are being written along with this one."""

    def to(self, trajectory_id: str) -> str | None:
        """Return the relative URL of a trajectory's page; ``None`` where it has none."""
        return self._relative(page_path(self.folder, trajectory_id))

    def report(self) -> str | None:
        """Return the relative URL of the run's report; ``None`` where there is none."""
        return self._relative(self.folder / REPORT)

    def command(self, trajectory_id: str) -> str:
        """Return the shell command that makes a trajectory's page."""
        return f"fsm-rollout show {shlex.quote(str(self.folder))} --trajectory {shlex.quote(trajectory_id)} -o F.html"

    def _relative(self, path: Path) -> str | None:
        if path not in self.planned and not path.is_file():
            return None
        return quote(os.path.relpath(path.absolute(), self.page.absolute().parent).replace(os.sep, "/"))


def page_path(folder: Path, trajectory_id: str) -> Path:
    """Return where the page of a trajectory belongs; no two ids share a name, whatever characters they have."""
    name = quote(trajectory_id, safe="", errors="backslashreplace").replace("~", "%7E").replace("%", "~")
    if len(name) > LONGEST_NAME:
        name = f"{name[:LONGEST_NAME]}~~{hashlib.sha256(trajectory_id.encode(errors='backslashreplace')).hexdigest()}"
    return folder / PAGES / f"{name}.html"
