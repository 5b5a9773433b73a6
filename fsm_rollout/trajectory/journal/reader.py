"""Reading a journal, also one that is being written, was cut off, is damaged, or comes from elsewhere.

Invariant: what is read of a trajectory is a prefix of what was written of it, and folds. What is damaged is left out
and reported in a sentence; it never keeps the rest from being read. Nothing that is read is run.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from fsm_rollout.errors import JournalError
from fsm_rollout.trajectory.events import AnyEvent, Generated, unpack
from fsm_rollout.trajectory.journal.salvage import salvaged
from fsm_rollout.trajectory.journal.schema import APPLICATION_ID, FACTS, FORMAT, checksum, show_as_present
from fsm_rollout.trajectory.tokens import Note, NoteKind
from fsm_rollout.trajectory.trajectory import Trajectory

logger = logging.getLogger(__name__)

Report = Callable[[str], None]  # hears in a sentence of what is damaged, and left out
JOURNAL = "journal.sqlite"  # a journal's name in the folder of its run
_FORMATS = 1000  # a file of a larger format is a damaged one


_DURATIONS = ("seconds", "queue_seconds", "away")
_LATEST = 2.0**53  # seconds; no clock says so much, and reports calculate with them
# What SQLite raises over a damaged file; its own message may be no text.
DAMAGED = (sqlite3.DatabaseError, UnicodeDecodeError)


class _NotAJournal(sqlite3.DatabaseError):
    """SQLite can read the file, and it is not marked as a journal."""

    sqlite_errorcode = sqlite3.SQLITE_NOTADB


Recorded = tuple[Trajectory, list[AnyEvent]]  # a trajectory, and its events

_UNFINISHED = """
WHERE group_id NOT IN (SELECT group_id FROM handed_over WHERE yes) OR group_id IN (
    SELECT group_id FROM trajectories AS begun WHERE parent_id IS NULL AND NOT EXISTS (
        SELECT 1 FROM events WHERE events.trajectory_id = begun.trajectory_id AND ended
    )
)
"""


def metadata(path: str | os.PathLike[str], report: Report = logger.warning) -> dict[str, Any]:
    """Return the data that the journal keeps about its run, and ``code_version``; what is damaged is reported."""
    found: dict[str, Any] = {}
    for key, value in _query(path, "SELECT key, value FROM run", report):
        try:
            fact = json.loads(value)
            json.dumps(fact, ensure_ascii=False).encode()  # half of a surrogate pair is no text
            found[key] = msgspec.convert(fact, FACTS.get(key, Any))
        except (ValueError, TypeError, RecursionError) as error:
            report(f"{os.fspath(path)}: what it says of its run's '{key}' cannot be read: {error}")
    return found


def journal_of(run: Path) -> Path:
    """Return the journal of a run, of which the folder is given, or the journal itself."""
    return run if run.is_file() else run / JOURNAL


def is_journal(path: str | os.PathLike[str]) -> bool:
    """Say whether there is a journal at ``path``, readable or damaged."""
    try:
        with open(path, "rb") as file:
            head = file.read(72)
    except OSError:
        return False
    return head.startswith(b"SQLite format 3\x00") and head[68:] == APPLICATION_ID.to_bytes(4, "big")


def is_empty(path: str | os.PathLike[str]) -> bool:
    """Say whether at ``path`` is the beginning of a journal that holds nothing: its run ended before its first event.

    (Since format 2 a journal is put in place whole, so only older ones can be so.)
    """
    path = Path(path)
    if not path.is_file():
        return False
    if not path.stat().st_size:
        return True
    try:
        with closing(_open(path)) as connection:
            (tables,) = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
            return int(tables) == 0
    except (sqlite3.Error, UnicodeDecodeError):
        return False


def events(path: str | os.PathLike[str], trajectory_id: str, report: Report = logger.warning) -> list[AnyEvent]:
    """Return the events of one trajectory, in order."""
    for _, history in recordings(path, only=trajectory_id, report=report):
        return history
    raise JournalError(f"{os.fspath(path)} has no trajectory '{trajectory_id}' that can be read")


def trajectory_ids(path: str | os.PathLike[str], report: Report = logger.warning) -> list[str]:
    """Return the ids of all trajectories, in the order in which they began."""
    rows = _query(path, "SELECT trajectory_id FROM trajectories ORDER BY rowid", report)
    return [trajectory_id for (trajectory_id,) in rows if isinstance(trajectory_id, str)]


def histories(
    path: str | os.PathLike[str], *, unfinished: bool = False, report: Report = logger.warning
) -> Iterator[list[AnyEvent]]:
    """Yield the events of every trajectory, in the order in which they began, as they stood when reading began.

    ``unfinished``: only of groups that were not delivered, or were while a sample was set aside. A group is marked as
    delivered when the caller comes back for the next (:meth:`fsm_rollout.scheduler.scheduler.Scheduler.run`), so each
    group comes at least once.
    """
    for _, history in recordings(path, unfinished=unfinished, report=report):
        yield history


def read(path: str | os.PathLike[str], report: Report = logger.warning) -> Iterator[Trajectory]:
    """Yield every trajectory, in the order in which they began, as it stood when reading began.

    The file may still be written to: what is read is one moment of the run.
    """
    for trajectory, _ in recordings(path, report=report):
        yield trajectory


def recordings(
    path: str | os.PathLike[str], *, unfinished: bool = False, only: str | None = None, report: Report = logger.warning
) -> Iterator[Recorded]:
    """Yield every trajectory with its events; see :func:`histories`. ``only``: the one of that id."""
    seen: set[str] = set()
    try:
        with _reading(path) as connection:
            yield from _recordings(connection, os.fspath(path), unfinished, only, report, seen)
    except DAMAGED as error:
        with _salvaging(path, error, report) as connection:
            yield from _recordings(connection, os.fspath(path), unfinished, only, report, seen)


def _recordings(
    connection: sqlite3.Connection, name: str, unfinished: bool, only: str | None, report: Report, seen: set[str]
) -> Iterator[Recorded]:
    connection.execute("BEGIN")  # one snapshot for all that follows
    query = f"SELECT trajectory_id FROM trajectories {_UNFINISHED if unfinished else ''} ORDER BY rowid"
    chosen: Iterator[str] = (row[0] for row in connection.execute(query)) if only is None else iter([only])
    for trajectory_id in chosen:
        if trajectory_id not in seen:
            recorded = _recording(connection, name, trajectory_id, report)
            seen.add(trajectory_id)
            if recorded is not None:
                yield recorded


def _recording(connection: sqlite3.Connection, name: str, trajectory_id: str, report: Report) -> Recorded | None:
    """Return a trajectory as far as it can be read, or ``None`` when nothing of it can."""
    trajectory: Trajectory | None = None
    history: list[AnyEvent] = []
    query = "SELECT seq, payload, crc, seq IS NULL OR seq < 0 FROM events WHERE trajectory_id = ? ORDER BY seq"
    for seq, payload, crc, displaced in connection.execute(query, (trajectory_id,)):
        if displaced:
            report(f"{name}: an event of trajectory {trajectory_id} is left out, as its place is damaged ({seq})")
            continue
        why = "those before it are gone" if seq != len(history) else None
        try:
            if why is None and checksum(payload, seq) != crc:
                why = "it is not what was written"
            for event in unpack(payload) if why is None else ():
                _check(event)
                if trajectory is not None:
                    event = _with_notes(event, trajectory)
                    trajectory.apply(event)
                elif (trajectory := Trajectory.fold([event])).trajectory_id != trajectory_id:
                    raise ValueError(f"it belongs to trajectory {trajectory.trajectory_id}")
                history.append(event)
        except Exception as error:  # data from outside may be wrong in every way; what it is does not matter
            why = f"{type(error).__name__}: {error}"
        if why is not None:
            place, kept = max(seq, len(history)), len(history)
            what = f"it and what follows it there are left out, {kept} events are kept"
            report(f"{name}: event {place} of trajectory {trajectory_id} is damaged ({why}); {what}")
            # Nothing of the event that does not fit may stay behind.
            trajectory = Trajectory.fold(history) if history else None
            break
    return None if trajectory is None else (trajectory, history)


def _with_notes(event: AnyEvent, trajectory: Trajectory) -> AnyEvent:
    """Return an event as it is now: journals had sampling masks by token, without saying where its tokens begin."""
    if not isinstance(event, Generated) or not event.kept:
        return event
    stream = trajectory.stream(event.context)
    counts, values = array("i", map(len, event.kept)), array("i", chain.from_iterable(event.kept))
    mask = Note(NoteKind.SAMPLING_MASK, len(stream.tokens) if stream is not None else 0, counts, values)
    return msgspec.structs.replace(event, notes=[mask], kept=[])


def _check(event: AnyEvent) -> None:
    """Raise ValueError for what no run writes, and what looks at a run would stumble over."""
    if not all(abs(getattr(event, name, 0.0)) < _LATEST for name in ("at", *_DURATIONS)):
        raise ValueError("its time is no finite number")
    messages = [event.message] if isinstance(event, Generated) else getattr(event, "messages", ())
    if not all(isinstance(message.get("role"), str) for message in messages):
        raise ValueError("a message in it has no role")


def handed_over(path: str | os.PathLike[str], report: Report) -> list[tuple[str, int]]:
    """Return of each group whether it was delivered, and the caller came back for more."""
    return _query(path, "SELECT group_id, yes FROM handed_over", report)


def _query(path: str | os.PathLike[str], query: str, report: Report) -> list[tuple[Any, ...]]:
    try:
        with _reading(path) as connection:
            return connection.execute(query).fetchall()
    except DAMAGED as error:
        with _salvaging(path, error, report) as connection:
            return connection.execute(query).fetchall()


@contextmanager
def _reading(path: str | os.PathLike[str]) -> Iterator[sqlite3.Connection]:
    """Open a journal of whatever format, to be read as one of today's; JournalError: there is none, or a later one."""
    path = Path(path)
    if not path.is_file():
        raise JournalError(f"there is no journal at {path}")
    if is_empty(path):
        raise JournalError(
            f"{path} is an empty journal: its run was cut off before anything was written; start it again with "
            "`fsm-rollout run`"
        )
    with closing(_open(path)) as connection:
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (form,) = connection.execute("PRAGMA user_version").fetchone()
        if application != APPLICATION_ID or form not in range(1, _FORMATS):
            raise _NotAJournal("it is an SQLite file of something else")
        if form > FORMAT:
            raise JournalError(
                f"{path} has journal format {form} and this version reads up to {FORMAT}; "
                "use the version of fsm-rollout that wrote it, or a later one"
            )
        show_as_present(connection, form)
        yield connection


@contextmanager
def _salvaging(path: str | os.PathLike[str], error: Exception, report: Report) -> Iterator[sqlite3.Connection]:
    """Open what is left of a journal that SQLite cannot read; JournalError: nothing, or another program is at it."""
    path = Path(path)
    if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF not in (
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
    ):
        raise JournalError(f"{path} cannot be read: {error}") from error
    with salvaged(path) as connection:
        (count,) = connection.execute("SELECT COUNT(*) FROM events").fetchone()
        if not count:
            raise JournalError(f"{path} is not a journal that can be read: {error}") from error
        report(f"{path} is damaged ({error}); {count:,} events could be found in it, what is gone is left out")
        yield connection


def _open(path: Path) -> sqlite3.Connection:
    if path.with_name(f"{path.name}-journal").exists():
        # Its writer was killed while it changed between a log and none; only who may write can take that back.
        with suppress(sqlite3.Error), closing(sqlite3.connect(path, timeout=0)) as writer:
            writer.execute("PRAGMA schema_version").fetchone()
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
    connection.text_factory = _text  # what is damaged may be no text
    return connection


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")
