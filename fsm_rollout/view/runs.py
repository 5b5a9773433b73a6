"""The runs of a folder, as far as they have been read.

Invariant: nothing is written, and a run is read only while somebody looks at it; what is read of it is kept.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fsm_rollout.errors import ConfigError
from fsm_rollout.jobs.run_folder import SUMMARY, is_written
from fsm_rollout.jobs.samples import RunReader, RunSamples
from fsm_rollout.report.recording import NOT_ENDED, RunFolder, open_run
from fsm_rollout.trajectory.journal import JOURNAL, JournalFolder, Search, is_journal
from fsm_rollout.view.table import Overview

DEEPEST = 4  # folders below the one that is looked through
AT_ONCE = 200  # trajectories that are read between two looks at who waits
WATCHED = 10.0  # seconds for which a run is read on after somebody has asked for it
SEARCHES = 8  # of which what they found is kept


class ViewedRun:
    """One run: its folder, and what was read of it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.asked_at = -WATCHED
        self.reader = RunReader(folder, self._note)
        self._opened: tuple[object, RunFolder] | None = None
        self._searches: dict[tuple[str, ...], tuple[int, Search, set[str]]] = {}
        self._damages: list[str] = []
        self._reading = threading.Lock()
        self._overview: tuple[int, Overview] | None = None

    def _note(self, damage: str) -> None:
        if damage not in self._damages:
            self._damages.append(damage)

    @property
    def run(self) -> RunFolder:
        """Its folder as it is now: the summary comes at its end."""
        state = [_changed_at(self.folder / name) for name in (SUMMARY, "report.html")]
        if self._opened is None or self._opened[0] != state:
            run = open_run(self.folder)
            run.notes = [note for note in run.notes if note != NOT_ENDED]  # its status says so
            self._opened = state, run
        run = self._opened[1]
        for damage in self._damages:
            run.note(damage)
        return run

    @property
    def status(self) -> str:
        """``running``, ``ended``, or ``open``: nobody writes to it, and it has not come to its end."""
        if is_written(self.folder):
            return "running"
        return "ended" if (self.folder / SUMMARY).is_file() else "open"

    @property
    def summary(self) -> dict[str, Any]:
        """What a run that has ended came to."""
        return dict(self.run.summary or {})

    @property
    def written_at(self) -> float:
        """When its journal was written to last, in seconds since 1970."""
        journal = JournalFolder(self.folder).first
        return max(_changed_at(journal), _changed_at(journal.with_name(f"{journal.name}-wal")))

    def read(self) -> bool:
        """Read a part of what there is to be read; return whether that was anything."""
        with self._reading:
            return self.reader.read(AT_ONCE)

    def watch(self) -> RunReader:
        """Have it read on for a while, from at least its beginning."""
        self.asked_at = time.monotonic()
        if not self.reader.version:
            self.read()
        return self.reader

    @property
    def overview(self) -> Overview:
        """What it has come to, as far as it was read."""
        version = self.reader.version
        if self._overview is None or self._overview[0] != version:
            self._overview = version, Overview.of(list(self.reader.trajectories.values()))
        return self._overview[1]

    def samples(self) -> RunSamples:
        """Return all of its samples, for which all of it is read."""
        while self.read():
            pass
        return self.reader.samples()

    def holding(self, words: Sequence[str]) -> set[str]:
        """Return the trajectories that hold all of some words."""
        key = tuple(words)
        version, search, found = self._searches.pop(key, (-1, Search(self.folder, words), set()))
        if version != self.reader.version:
            version, found = self.reader.version, search.found()
        self._searches[key] = version, search, found
        for old in list(self._searches)[:-SEARCHES]:
            del self._searches[old]
        return found


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


class Runs:
    """All runs in a folder, by their paths from where it is; those that are made later are found, too."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ConfigError(f"'{folder}' is no folder; give that in which runs have their folders, or a run's own")
        self.folder = folder.absolute()
        self._runs: dict[str, ViewedRun] = {}

    def all(self) -> list[ViewedRun]:
        """Return them, the one that was written to last first."""
        found = {folder.relative_to(self.folder.parent).as_posix(): folder for folder in _with_journals(self.folder)}
        self._runs = {name: self._runs.get(name) or ViewedRun(name, folder) for name, folder in found.items()}
        return sorted(self._runs.values(), key=lambda run: (-run.written_at, run.name))

    def watched(self) -> list[ViewedRun]:
        """Return those that somebody has asked for."""
        return [run for run in self._runs.values() if time.monotonic() - run.asked_at < WATCHED]


def _with_journals(folder: Path, depth: int = 0) -> Iterator[Path]:
    if is_journal(folder / JOURNAL):
        yield folder
    if depth < DEEPEST:
        try:
            inside = sorted(entry.path for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
        except OSError:
            return
        for path in inside:
            if not os.path.basename(path).startswith((".", "__")):
                yield from _with_journals(Path(path), depth + 1)
