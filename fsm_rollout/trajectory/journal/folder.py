"""Where the journals of a run are.

Invariant: whoever reads a run's journals, or asks whether there are any, learns their places here.
"""

from __future__ import annotations

import os
from pathlib import Path

from fsm_rollout.trajectory.journal.schema import APPLICATION_ID

JOURNAL = "journal.sqlite"  # a journal's name in the folder of its run


class JournalFolder:
    """The journals of a run, of which the folder is given, or the journal itself."""

    def __init__(self, run: str | os.PathLike[str]) -> None:
        run = Path(run)
        self.first = run / JOURNAL if run.is_dir() else run
        """The journal that has what is known of the run as a whole."""
        self.folder = self.first.parent

    def journals(self) -> list[Path]:
        """Return the journals, the first one first; each has trajectories of its own. They may not be there."""
        return [self.first]


def is_journal(path: str | os.PathLike[str]) -> bool:
    """Say whether there is a journal at ``path``, readable or damaged."""
    try:
        with open(path, "rb") as file:
            head = file.read(72)
    except OSError:
        return False
    return head.startswith(b"SQLite format 3\x00") and head[68:] == APPLICATION_ID.to_bytes(4, "big")
