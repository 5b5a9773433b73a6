"""The journal: every event of a run in one SQLite file, written behind the run's back.

Invariant: at any moment, also after a crash, the file holds of each trajectory a prefix of its events; so each can be
folded, and a run that is still being written can be read. The order of all events is kept too. One thread owns the
connection, so no event loop ever waits for a disk; a crash of the process loses what was appended within the last
``interval`` and was not yet flushed.

Tables: ``run(key, value)``, values as JSON; ``trajectories(trajectory_id, group_id, sample, agent, parent_id)``;
``handed_over(group_id, yes)``, of the groups that the caller has had and is done with;
``events(id, trajectory_id, seq, at, kind, payload)``, where ``id`` is the place in the run, ``seq`` the place in the
trajectory, and ``payload`` what :func:`fsm_rollout.trajectory.events.encode` gives. SQLite's ``application_id`` marks
the file as a journal and its ``user_version`` is the format.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any

import msgspec

from fsm_rollout import __version__
from fsm_rollout.errors import JournalError, StreamError
from fsm_rollout.trajectory.events import AnyEvent, Prompted, decode, encode
from fsm_rollout.trajectory.trajectory import Trajectory

APPLICATION_ID = 0x46534D52  # "FSMR"
FORMAT = 1
LOOK_EVERY = 0.5
"""Seconds between two looks whether the writer is still there."""

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
_INSERT_TRAJECTORY = "INSERT INTO trajectories VALUES (?, ?, ?, ?, ?)"

_INSERT_FACT = "INSERT OR REPLACE INTO run VALUES (?, ?)"
_INSERT_NEW_FACT = "INSERT OR IGNORE INTO run VALUES (?, ?)"
_INSERT_HANDED_OVER = "INSERT OR REPLACE INTO handed_over VALUES (?, ?)"
_LENGTHS = "SELECT trajectory_id, MAX(seq) + 1 FROM events GROUP BY trajectory_id"
_GROUPS = "SELECT DISTINCT group_id FROM trajectories"

_UNFINISHED = """
WHERE group_id NOT IN (SELECT group_id FROM handed_over WHERE yes) OR group_id IN (
    SELECT group_id FROM trajectories AS begun WHERE parent_id IS NULL AND NOT EXISTS (
        SELECT 1 FROM events WHERE events.trajectory_id = begun.trajectory_id AND kind = 'ended'
    )
)
"""

_Insertion = tuple[str, tuple[object, ...]]
"""A statement and its values."""


class _Flush:
    """Asks the writer to commit all that was appended before it."""

    def __init__(self, last: bool = False) -> None:
        self.done = threading.Event()
        self.last = last


class Journal:
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
        self._queue: SimpleQueue[list[_Insertion] | _Flush] = SimpleQueue()
        self._hurry = threading.Event()
        self._failure: Exception | None = None
        self._closed = False
        facts = {**(metadata or {}), "code_version": __version__}
        self._connection = (_reopen if append else _create)(self.path, facts)
        self._next: dict[str, int] = dict(self._connection.execute(_LENGTHS))
        self.groups: set[str] = {group_id for (group_id,) in self._connection.execute(_GROUPS)}
        """The ids of all groups that are in it."""
        self._thread = threading.Thread(target=self._write, name=f"journal {self.path.name}", daemon=True)
        self._thread.start()

    def describe(self, metadata: Mapping[str, object]) -> None:
        """Add plain data about the run, by keys; a key that is there already keeps its value.

        Raises:
            JournalError: the journal is closed or cannot be written to any more.
        """
        for key, value in metadata.items():
            self._put([(_INSERT_NEW_FACT, (key, json.dumps(value)))])

    def append(self, trajectory_id: str, event: AnyEvent, payload: bytes | None = None) -> None:
        """Take in the next event of a trajectory; microseconds, from any one thread. It is on disk after a flush.

        ``payload`` is the event as :func:`~fsm_rollout.trajectory.events.encode` gives it, where that is known already.

        Raises:
            JournalError: the journal is closed or cannot be written to any more, or a trajectory's first event is not
                ``prompted``.
            TypeError: the event holds something that is not plain data.
        """
        payload = encode(event) if payload is None else payload
        seq = self._next.get(trajectory_id, 0)
        if isinstance(event, Prompted) != (seq == 0):
            raise JournalError(
                f"event {seq} of trajectory {trajectory_id} is {_kind(event)}; 'prompted' comes first and only there"
            )
        rows: list[_Insertion] = [(_INSERT_EVENT, (trajectory_id, seq, event.at, _kind(event), payload))]
        if isinstance(event, Prompted):  # committed together: no trajectory is there without its first event
            trajectory = (trajectory_id, event.group_id, event.sample, event.agent, event.parent_id)
            rows.insert(0, (_INSERT_TRAJECTORY, trajectory))
        self._put(rows)
        self._next[trajectory_id] = seq + 1
        if isinstance(event, Prompted):
            self.groups.add(event.group_id)

    def __contains__(self, trajectory_id: str) -> bool:
        """Say whether it has a trajectory of that id."""
        return trajectory_id in self._next

    def handed_over(self, group_id: str, yes: bool = True) -> None:
        """Keep that the caller has had a group and come back for more; or (``yes=False``) that it is under way again.

        Raises:
            JournalError: the journal is closed or cannot be written to any more.
        """
        self._put([(_INSERT_HANDED_OVER, (group_id, yes))])

    def flush(self) -> None:
        """Return once everything appended so far is committed. Blocks: in async code, call it in a thread.

        Raises:
            JournalError: the journal is closed or something could not be written.
        """
        if self._closed:
            raise self._broken()
        self._finish(_Flush())

    def close(self) -> None:
        """Flush, and leave one self-contained file. Safe to call twice.

        Raises:
            JournalError: something could not be written.
        """
        if not self._closed:
            self._closed = True
            self._finish(_Flush(last=True))
            self._thread.join()

    def _put(self, rows: list[_Insertion]) -> None:
        if self._closed or self._failure is not None:
            raise self._broken()
        self._queue.put(rows)

    def _finish(self, flush: _Flush) -> None:
        self._queue.put(flush)
        self._hurry.set()
        while not flush.done.wait(LOOK_EVERY) and not self._abandoned():
            pass
        if not flush.done.is_set():
            self._failure = self._failure or RuntimeError("the interpreter has stopped the thread that writes it")
        if self._failure is not None:
            raise self._broken()

    def _abandoned(self) -> bool:
        """Whether the writer is gone: at the interpreter's end daemon threads stand still, and nobody says so."""
        return sys.is_finalizing() or not self._thread.is_alive()

    def _broken(self) -> JournalError:
        why = f"cannot be written: {self._failure}" if self._failure is not None else "is closed"
        error = JournalError(f"journal {self.path} {why}")
        error.__cause__ = self._failure
        return error

    def __enter__(self) -> Journal:
        """Use as a context manager to close it."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close."""
        self.close()

    # -- the writer's thread ------------------------------------------------------------------------------------

    def _write(self) -> None:
        last = False
        while not last:
            batch = [self._queue.get()]
            self._hurry.wait(self._interval)
            self._hurry.clear()
            while True:
                try:
                    batch.append(self._queue.get_nowait())
                except Empty:
                    break
            flushes = [item for item in batch if isinstance(item, _Flush)]
            last = any(flush.last for flush in flushes)
            if self._failure is None:
                try:
                    self._commit([row for item in batch if not isinstance(item, _Flush) for row in item])
                    if last:
                        _fold_log_in(self._connection)
                except (sqlite3.Error, OSError) as error:
                    self._failure = error
            if last:
                self._connection.close()
            for flush in flushes:
                flush.done.set()

    def _commit(self, batch: list[_Insertion]) -> None:
        with self._connection:  # one transaction, in the order of appending
            self._connection.execute("BEGIN")
            for statement, rows in groupby(batch, key=itemgetter(0)):
                self._connection.executemany(statement, (values for _, values in rows))


def _kind(event: AnyEvent) -> str:
    return str(event.__struct_config__.tag)


def _create(path: Path, metadata: Mapping[str, object]) -> sqlite3.Connection:
    if path.exists():
        raise JournalError(f"{path} exists, and a journal holds one run; choose another folder or remove it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            # WAL: readers and the writer do not wait for each other, and a torn write is never seen.
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.executescript(f"BEGIN; {_SCHEMA}")
            connection.executemany(_INSERT_FACT, _facts(metadata))
            connection.execute("COMMIT")
        except BaseException:
            connection.close()
            raise
    except (sqlite3.Error, OSError) as error:
        raise JournalError(f"journal {path} cannot be written: {error}") from error
    return connection


def _reopen(path: Path, metadata: Mapping[str, object]) -> sqlite3.Connection:
    with _reading(path):
        pass  # it is a journal
    try:
        connection = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA journal_mode = DELETE")  # not granted while anybody else has its log open
            connection.execute("PRAGMA busy_timeout = 5000")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.executemany(_INSERT_FACT, _facts(metadata))
        except BaseException:
            connection.close()
            raise
    except sqlite3.OperationalError as error:
        why = "another process has it open: the run is still going on" if "locked" in str(error) else error
        raise JournalError(f"journal {path} cannot be written: {why}") from error
    return connection


def _facts(metadata: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    return ((key, json.dumps(value)) for key, value in metadata.items())


def _fold_log_in(connection: sqlite3.Connection) -> None:
    """Leave one file that can be read from read-only media too; a reader that is busy with it keeps the log."""
    connection.execute("PRAGMA busy_timeout = 0")
    try:
        connection.execute("PRAGMA journal_mode = DELETE")
    except sqlite3.OperationalError as error:
        if "locked" not in str(error):
            raise


# -- reading ----------------------------------------------------------------------------------------------------


def metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the data that the journal keeps about its run, and ``code_version``.

    Raises:
        JournalError: no journal at ``path``, or one that this version cannot read.
    """
    with _reading(path) as connection:
        return {key: json.loads(value) for key, value in connection.execute("SELECT key, value FROM run")}


def is_journal(path: str | os.PathLike[str]) -> bool:
    """Say whether there is a journal at ``path`` that this version can read."""
    try:
        metadata(path)
    except JournalError:
        return False
    return True


def events(path: str | os.PathLike[str], trajectory_id: str) -> list[AnyEvent]:
    """Return the events of one trajectory, in order.

    Raises:
        JournalError: as for :func:`metadata`; or no such trajectory, or an event that cannot be read.
    """
    with _reading(path) as connection:
        found = _events(connection, path, trajectory_id)
    if not found:
        raise JournalError(f"{os.fspath(path)} has no trajectory '{trajectory_id}'")
    return found


def trajectory_ids(path: str | os.PathLike[str]) -> list[str]:
    """Return the ids of all trajectories, in the order in which they began.

    Raises:
        JournalError: as for :func:`metadata`.
    """
    with _reading(path) as connection:
        return [row[0] for row in connection.execute("SELECT trajectory_id FROM trajectories ORDER BY rowid")]


def histories(path: str | os.PathLike[str], *, unfinished: bool = False) -> Iterator[list[AnyEvent]]:
    """Yield the events of every trajectory, in the order in which they began, as they stood when reading began.

    ``unfinished``: only of groups that the caller of the run has not had, or had while a sample was set aside. What it
    was still at work on counts as not had: the journal is told when it comes back for more
    (:meth:`fsm_rollout.scheduler.scheduler.Scheduler.run`), so each group comes at least once.

    Raises:
        JournalError: as for :func:`metadata`; or an event that cannot be read.
    """
    with _reading(path) as connection:
        connection.execute("BEGIN")  # one snapshot for all that follows
        chosen = _UNFINISHED if unfinished else ""
        for (trajectory_id,) in connection.execute(f"SELECT trajectory_id FROM trajectories {chosen} ORDER BY rowid"):
            yield _events(connection, path, trajectory_id)


def read(path: str | os.PathLike[str]) -> Iterator[Trajectory]:
    """Yield every trajectory, in the order in which they began, as it stood when reading began.

    The file may still be written to: what is read is one moment of the run.

    Raises:
        JournalError: as for :func:`metadata`; or an event that cannot be read or does not fit those before it.
    """
    for history in histories(path):
        try:
            yield Trajectory.fold(history)
        except StreamError as error:
            first = getattr(history[0], "trajectory_id", "?") if history else "?"
            raise JournalError(f"{os.fspath(path)}: trajectory {first} cannot be rebuilt: {error}") from error


def _events(connection: sqlite3.Connection, path: str | os.PathLike[str], trajectory_id: str) -> list[AnyEvent]:
    found: list[AnyEvent] = []
    query = "SELECT seq, payload FROM events WHERE trajectory_id = ? ORDER BY seq"
    for seq, payload in connection.execute(query, (trajectory_id,)):
        try:
            found.append(decode(payload))
        except (msgspec.DecodeError, ValueError, TypeError) as error:
            where = f"{os.fspath(path)}: event {seq} of trajectory {trajectory_id}"
            raise JournalError(f"{where} cannot be read: {error}") from error
    return found


@contextmanager
def _reading(path: str | os.PathLike[str]) -> Iterator[sqlite3.Connection]:
    path = Path(path)
    if not path.is_file():
        raise JournalError(f"there is no journal at {path}")
    try:
        with closing(
            sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
        ) as connection:
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
