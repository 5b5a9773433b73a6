"""Where the journals of a run are.

Invariant: whoever reads a run's journals, or asks whether there are any, learns their places here.
"""

from __future__ import annotations

import os
import re
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
        """Return the journals, the first one first, then those of shards. The first may not be there.

        A group is whole in one of them; another may have the beginning of it, if its shard has died.
        """
        form = re.compile(rf"{re.escape(self.first.stem)}\.shard-(\d+){re.escape(self.first.suffix)}")
        found = ((form.fullmatch(path.name), path) for path in self.folder.glob(f"{self.first.stem}.shard-*"))
        return [self.first, *(path for _, path in sorted((int(match[1]), path) for match, path in found if match))]


def shard_journal(first: Path, number: int) -> Path:
    """Return where the shard of a number keeps its events, beside the first journal of its run."""
    return first.with_name(f"{first.stem}.shard-{number}{first.suffix}")


def run_journal(path: Path) -> Path:
    """Return the first journal of the run of which ``path`` is a journal, that of a shard maybe."""
    return path.with_name(re.sub(r"\.shard-\d+$", "", path.stem) + path.suffix)


def is_journal(path: str | os.PathLike[str]) -> bool:
    """Say whether there is a journal at ``path``, readable or damaged."""
    try:
        with open(path, "rb") as file:
            head = file.read(72)
    except OSError:
        return False
    return head.startswith(b"SQLite format 3\x00") and head[68:] == APPLICATION_ID.to_bytes(4, "big")
