"""The journal: every event of a run in one SQLite file, written behind the run's back.

Invariant: at any moment, also after a crash, the file holds of each trajectory a prefix of its events; so each can be
folded, and a run that is still being written can be read. The order of all events is kept too. No event loop waits for
the disk: a thread commits what was appended. A crash of the process loses what was appended within the last
``interval`` and was not yet flushed.

Tables: ``run(key, value)``, values as JSON; ``trajectories(trajectory_id, group_id, sample, agent, parent_id)``;
``handed_over(group_id, yes)``, of the groups that were delivered and after which the caller asked for more;
``events(id, trajectory_id, seq, at, kind, payload)``, where ``id`` is the place in the run, ``seq`` the place in the
trajectory, and ``payload`` what :func:`fsm_rollout.trajectory.events.encode` gives. SQLite's ``application_id`` marks
the file as a journal and its ``user_version`` is the format. All functions raise
:class:`~fsm_rollout.errors.JournalError` for a file that cannot be read or written (any more), and say why.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec

from fsm_rollout import __version__
from fsm_rollout.errors import JournalError, StreamError
from fsm_rollout.trajectory.events import AnyEvent, Prompted, decode, encode
from fsm_rollout.trajectory.trajectory import Trajectory

APPLICATION_ID = 0x46534D52  # "FSMR"
FORMAT = 1

_SCHEMA = f"""
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {FORMAT};
CREATE TABLE run (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE trajectories (
    trajectory_id TEXT PRIMARY KEY, group_id TEXT NOT NULL, sample INTEGER NOT NULL, agent TEXT NOT NULL, parent_id TEXT
);
CREATE TABLE events (
    id INTEGER PRIMARY KEY, trajectory_id TEXT NOT NULL, seq INTEGER NOT NULL, at REAL NOT NULL, kind TEXT NOT NULL,
    payload BLOB NOT NULL, UNIQUE (trajectory_id, seq)
);
CREATE TABLE handed_over (group_id TEXT PRIMARY KEY, yes INTEGER NOT NULL);
"""
_INSERT_EVENT = "INSERT INTO events (trajectory_id, seq, at, kind, payload) VALUES (?, ?, ?, ?, ?)"
_UNFINISHED = """
WHERE group_id NOT IN (SELECT group_id FROM handed_over WHERE yes) OR group_id IN (
    SELECT group_id FROM trajectories AS begun WHERE parent_id IS NULL AND NOT EXISTS (
        SELECT 1 FROM events WHERE events.trajectory_id = begun.trajectory_id AND kind = 'ended'
    )
)
"""

logger = logging.getLogger(__name__)

Report = Callable[[str], None]
"""Hears in a sentence of what is damaged, and left out."""

_Insertion = tuple[str, tuple[object, ...]]
"""A statement and its values."""


class Journal(AbstractContextManager["Journal"]):
    """Writes the events of one run to a file.

    Args:
        path: the file, ``journal.sqlite`` in a run's folder.
        metadata: plain data about the run to keep with it: the agents' YAML, the run's configuration. The package's
            version is added as ``code_version``.
        interval: seconds over which events are gathered into one transaction.
        append: the file is there, and the run in it goes on; else it must be new.

    Raises:
        JournalError: there is something at ``path`` already; or (``append``) it is no journal, or somebody else still
            writes to it; or the file cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        metadata: Mapping[str, object] | None = None,
        *,
        interval: float = 0.1,
        append: bool = False,
    ) -> None:
        self.path = Path(path)
        self._interval = interval
        self._rows: deque[_Insertion] = deque()
        """Appended, and not yet committed."""
        self._appended, self._closed = threading.Event(), threading.Event()
        self._committing = threading.Lock()
        self._failure: Exception | None = None
        self._connection = _connect(self.path, {**(metadata or {}), "code_version": __version__}, append)
        lengths = self._connection.execute("SELECT trajectory_id, MAX(seq) + 1 FROM events GROUP BY trajectory_id")
        self._next: dict[str, int] = dict(lengths)
        groups = self._connection.execute("SELECT DISTINCT group_id FROM trajectories")
        self.groups: set[str] = {group_id for (group_id,) in groups}
        """The ids of all groups that are in it."""
        self._thread = threading.Thread(target=self._write_behind, name=f"journal {self.path.name}", daemon=True)
        self._thread.start()

    def describe(self, metadata: Mapping[str, object]) -> None:
        """Add plain data about the run, by keys; a key that is there already keeps its value."""
        self._put(*(("INSERT OR IGNORE INTO run VALUES (?, ?)", fact) for fact in _facts(metadata)))

    def append(self, trajectory_id: str, event: AnyEvent, payload: bytes | None = None) -> None:
        """Take in the next event of a trajectory; microseconds, from any one thread. It is on disk after a flush.

        ``payload`` is the event as :func:`~fsm_rollout.trajectory.events.encode` gives it, where that is known already.

        Raises:
            JournalError: a trajectory's first event, and no other, is ``prompted``.
            TypeError: the event holds something that is not plain data.
        """
        payload = encode(event) if payload is None else payload
        kind = str(event.__struct_config__.tag)
        seq = self._next.get(trajectory_id, 0)
        if isinstance(event, Prompted) != (seq == 0):
            raise JournalError(
                f"event {seq} of trajectory {trajectory_id} is {kind}; 'prompted' comes first and only there"
            )
        row = (_INSERT_EVENT, (trajectory_id, seq, event.at, kind, payload))
        if isinstance(event, Prompted):  # committed together: no trajectory is there without its first event
            trajectory = (trajectory_id, event.group_id, event.sample, event.agent, event.parent_id)
            self._put(("INSERT INTO trajectories VALUES (?, ?, ?, ?, ?)", trajectory), row)
            self.groups.add(event.group_id)
        else:
            self._put(row)
        self._next[trajectory_id] = seq + 1

    def __contains__(self, trajectory_id: str) -> bool:
        """Say whether it has a trajectory of that id."""
        return trajectory_id in self._next

    def handed_over(self, group_id: str, yes: bool = True) -> None:
        """Keep that a group was delivered, and the caller came back for more; or that it is under way again."""
        self._put(("INSERT OR REPLACE INTO handed_over VALUES (?, ?)", (group_id, yes)))

    def flush(self) -> None:
        """Commit everything appended so far. Blocks: in async code, call it in a thread."""
        if not self._closed.is_set():
            self._commit()
        self._check()

    def close(self) -> None:
        """Flush, and leave one self-contained file. Safe to call twice."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._appended.set()
        self._commit(last=True)
        if not sys.is_finalizing():
            self._thread.join()
        if self._failure is not None:
            self._check()

    def __exit__(self, *error: object) -> None:
        """Close."""
        self.close()

    def _put(self, *rows: _Insertion) -> None:
        self._check()
        self._rows.extend(rows)
        if not self._appended.is_set():
            self._appended.set()

    def _check(self) -> None:
        if self._failure is not None:
            raise JournalError(f"journal {self.path} cannot be written: {self._failure}") from self._failure
        if self._closed.is_set():
            raise JournalError(f"journal {self.path} is closed")

    def _write_behind(self) -> None:
        while not self._closed.is_set():
            self._appended.wait()
            self._closed.wait(self._interval)
            self._commit()

    def _commit(self, last: bool = False) -> None:
        """Commit all that was appended; ``last``: and close the file."""
        # 1. One thread at a time. At the interpreter's end the others stand still, and one of them may hold the lock.
        if not self._committing.acquire(blocking=not sys.is_finalizing()):
            self._failure = RuntimeError("the interpreter has stopped the thread that writes it")
            return
        try:
            # 2. One transaction, in the order of appending. Nothing follows one that failed: there would be a gap.
            self._appended.clear()
            rows = [self._rows.popleft() for _ in range(len(self._rows))]
            if rows and self._failure is None:
                with self._connection:
                    self._connection.execute("BEGIN")
                    for statement, group in groupby(rows, key=itemgetter(0)):
                        self._connection.executemany(statement, (values for _, values in group))
            # 3. One file, which can be read from read-only media too; a reader that is busy with it keeps the log.
            if last and self._failure is None:
                self._connection.execute("PRAGMA busy_timeout = 0")
                try:
                    self._connection.execute("PRAGMA journal_mode = DELETE")
                except sqlite3.OperationalError as error:
                    if "locked" not in str(error):
                        raise
        except (sqlite3.Error, OSError) as error:
            self._failure = error
        finally:
            if last:
                self._connection.close()
            self._committing.release()


def _connect(path: Path, metadata: Mapping[str, object], append: bool) -> sqlite3.Connection:
    if append:
        with _reading(path):
            pass  # it is a journal
    elif path.exists():
        raise JournalError(f"{path} exists, and a journal holds one run; choose another folder or remove it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA journal_mode = DELETE")  # not granted while anybody else has its log open
            connection.execute("PRAGMA busy_timeout = 5000")
            # WAL: readers and the writer do not wait for each other, and a torn write is never seen.
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.executescript("BEGIN" if append else f"BEGIN; {_SCHEMA}")
            connection.executemany("INSERT OR REPLACE INTO run VALUES (?, ?)", _facts(metadata))
            connection.execute("COMMIT")
        except BaseException:
            connection.close()
            raise
    except (sqlite3.Error, OSError) as error:
        why = "another process has it open: the run is still going on" if "locked" in str(error) else error
        raise JournalError(f"journal {path} cannot be written: {why}") from error
    return connection


def _facts(metadata: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    return ((key, json.dumps(value)) for key, value in metadata.items())


# -- reading ----------------------------------------------------------------------------------------------------


FACTS: Mapping[str, Any] = {
    "agents": dict[str, str], "engines": dict[str, dict[str, Any]], "base": str, "run": str | dict[str, Any],
    "file": str, "code_version": str,
}  # fmt: skip
"""What a run's journal says about the run, and in which form."""


def metadata(path: str | os.PathLike[str], report: Report = logger.warning) -> dict[str, Any]:
    """Return the data that the journal keeps about its run, and ``code_version``; what is damaged is reported."""
    facts: dict[str, Any] = {}
    with _reading(path) as connection:
        for key, value in connection.execute("SELECT key, value FROM run"):
            try:
                facts[key] = msgspec.convert(json.loads(value), FACTS.get(key, Any))
            except (ValueError, TypeError, RecursionError) as error:
                report(f"{os.fspath(path)}: what it says of its run's '{key}' cannot be read: {error}")
    return facts


def is_journal(path: str | os.PathLike[str]) -> bool:
    """Say whether there is a journal at ``path`` that this version can read."""
    try:
        metadata(path)
    except JournalError:
        return False
    return True


def events(path: str | os.PathLike[str], trajectory_id: str) -> list[AnyEvent]:
    """Return the events of one trajectory, in order."""
    with _reading(path) as connection:
        history = _events(connection, path, trajectory_id)
    if not history:
        raise JournalError(f"{os.fspath(path)} has no trajectory '{trajectory_id}'")
    return history


def trajectory_ids(path: str | os.PathLike[str]) -> list[str]:
    """Return the ids of all trajectories, in the order in which they began."""
    with _reading(path) as connection:
        return [row[0] for row in connection.execute("SELECT trajectory_id FROM trajectories ORDER BY rowid")]


def histories(path: str | os.PathLike[str], *, unfinished: bool = False) -> Iterator[list[AnyEvent]]:
    """Yield the events of every trajectory, in the order in which they began, as they stood when reading began.

    ``unfinished``: only of groups that were not delivered, or were while a sample was set aside. A group is marked as
    delivered when the caller comes back for the next (:meth:`fsm_rollout.scheduler.scheduler.Scheduler.run`), so each
    group comes at least once.
    """
    with _reading(path) as connection:
        connection.execute("BEGIN")  # one snapshot for all that follows
        chosen = _UNFINISHED if unfinished else ""
        for (trajectory_id,) in connection.execute(f"SELECT trajectory_id FROM trajectories {chosen} ORDER BY rowid"):
            yield _events(connection, path, trajectory_id)


def read(path: str | os.PathLike[str]) -> Iterator[Trajectory]:
    """Yield every trajectory, in the order in which they began, as it stood when reading began.

    The file may still be written to: what is read is one moment of the run.
    """
    for history in histories(path):
        try:
            yield Trajectory.fold(history)
        except StreamError as error:
            first = getattr(history[0], "trajectory_id", "?") if history else "?"
            raise JournalError(f"{os.fspath(path)}: trajectory {first} cannot be rebuilt: {error}") from error


def _events(connection: sqlite3.Connection, path: str | os.PathLike[str], trajectory_id: str) -> list[AnyEvent]:
    history: list[AnyEvent] = []
    query = "SELECT seq, payload FROM events WHERE trajectory_id = ? ORDER BY seq"
    for seq, payload in connection.execute(query, (trajectory_id,)):
        try:
            history.append(decode(payload))
        except (msgspec.DecodeError, ValueError, TypeError) as error:
            where = f"{os.fspath(path)}: event {seq} of trajectory {trajectory_id}"
            raise JournalError(f"{where} cannot be read: {error}") from error
    return history


@contextmanager
def _reading(path: str | os.PathLike[str]) -> Iterator[sqlite3.Connection]:
    path = Path(path)
    if not path.is_file():
        raise JournalError(f"there is no journal at {path}")
    address = f"{path.absolute().as_uri()}?mode=ro"
    try:
        with closing(sqlite3.connect(address, uri=True, isolation_level=None)) as connection:
            (application,) = connection.execute("PRAGMA application_id").fetchone()
            (form,) = connection.execute("PRAGMA user_version").fetchone()
            if application != APPLICATION_ID:
                raise JournalError(f"{path} is not a journal: it is empty, or an SQLite file of something else")
            if form > FORMAT:
                raise JournalError(
                    f"{path} has journal format {form} and this version reads up to {FORMAT}; "
                    "use the version of fsm-rollout that wrote it, or a later one"
                )
            yield connection
    except sqlite3.DatabaseError as error:
        raise JournalError(f"{path} is not a journal that can be read: {error}") from error
