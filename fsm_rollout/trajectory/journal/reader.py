"""Reading journals, also one that is being written, was cut off, is damaged, or comes from elsewhere.

Invariant: what is read of a trajectory is a prefix of what was written of it, and folds. What is damaged or missing is
left out and reported in a sentence; it never keeps the rest from being read. Nothing that is read is run.

``run`` is always a run's folder, or a journal; ``report`` hears of what is damaged.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from fsm_rollout.errors import JournalError, close_match
from fsm_rollout.trajectory.event_bytes import PictureName, unpacker
from fsm_rollout.trajectory.events import AnyEvent, Generated, Prompted
from fsm_rollout.trajectory.journal.folder import JournalFolder
from fsm_rollout.trajectory.journal.log import damage_of
from fsm_rollout.trajectory.journal.salvage import salvaged
from fsm_rollout.trajectory.journal.schema import APPLICATION_ID, FACTS, FORMAT, is_sound
from fsm_rollout.trajectory.pictures import StoredPicture, known, stored
from fsm_rollout.trajectory.trajectory import Trajectory

logger = logging.getLogger(__name__)

Report = Callable[[str], None]  # hears in a sentence of what is damaged, and left out
Run = str | os.PathLike[str]
Unpack = Callable[[bytes], list[AnyEvent]]
Recorded = tuple[Trajectory, list[AnyEvent]]  # a trajectory, and its events

_FORMATS = 1000  # a file of a larger format is a damaged one
_DURATIONS = ("seconds", "queue_seconds", "away")
_LATEST = 2.0**53  # seconds; no clock says so much, and reports calculate with them
# What SQLite raises over a damaged file; its own message may be no text.
DAMAGED = (sqlite3.DatabaseError, UnicodeDecodeError)

_UNREAD = StoredPicture(b"", "", 0, 0)
_glance = unpacker(lambda _: _UNREAD)  # for who asks whose an event is, not what it shows

_TRAJECTORIES = "SELECT trajectory_id FROM events GROUP BY trajectory_id ORDER BY MIN(id)"
_FIRST = "SELECT trajectory_id, payload FROM events WHERE seq = 0 ORDER BY id"
_ENDED = "SELECT trajectory_id, seq, ended, payload, crc FROM events WHERE trajectory_id = ? AND ended"


_said: set[str] = set()


def warn_once(damage: str) -> None:
    """Log what is damaged; a command reads a journal many times, and says of each damage once."""
    if damage not in _said:
        _said.add(damage)
        logger.warning("%s", damage)


class _Damage(sqlite3.DatabaseError):
    """What SQLite itself does not find."""

    def __init__(self, what: str, code: int = sqlite3.SQLITE_CORRUPT) -> None:
        super().__init__(what)
        self.sqlite_errorcode = code


# -- a run ------------------------------------------------------------------------------------------------------------


def metadata(run: Run, report: Report = warn_once) -> dict[str, Any]:
    """Return the data that the first journal keeps about its run, ``code_version`` and ``run_id`` among them."""
    journal = JournalFolder(run).first
    found: dict[str, Any] = {}
    for key, value in _query(journal, "SELECT key, value, crc FROM run", f"what {journal} says of its run's", report):
        try:
            fact = json.loads(value)
            json.dumps(fact, ensure_ascii=False).encode()  # half of a surrogate pair is no text
            found[key] = msgspec.convert(fact, FACTS.get(key, Any))
        except (ValueError, TypeError, RecursionError) as error:
            report(f"what {journal} says of its run's '{key}' cannot be read: {error}")
    return found


def delivered(run: Run, report: Report = warn_once) -> dict[str, bool]:
    """Return of each group that was delivered whether it still is: it may have been taken up again.

    Of shards' groups the first journal has the last word: a shard notes only that it has taken one up.
    """
    query, what = "SELECT group_id, yes, crc FROM delivered", "the delivery of group"
    journals = JournalFolder(run).journals()[::-1]
    return {group_id: bool(yes) for journal in journals for group_id, yes in _query(journal, query, what, report)}


def trajectory_ids(run: Run, report: Report = warn_once) -> list[str]:
    """Return the ids of all trajectories, in the order in which they began."""
    elsewhere = _elsewhere(run, report)
    found = ((journal, row[0]) for journal in elsewhere for row in _query(journal, _TRAJECTORIES, "", report))
    return [name for journal, name in found if isinstance(name, str) and name not in elsewhere[journal]]


def _elsewhere(run: Run, report: Report) -> dict[Path, set[str]]:
    """Return of each journal of a run which of its trajectories are whole in another, as those of a shard that died."""
    journals = JournalFolder(run).journals()
    elsewhere: dict[Path, set[str]] = {journal: set() for journal in journals}
    # 1. The groups that are in several.
    groups: dict[str, dict[Path, list[str]]] = {}
    for journal in journals if len(journals) > 1 else ():
        for trajectory_id, payload in _query(journal, _FIRST, "", report):
            if (first := _first_of(payload)) is not None:
                groups.setdefault(first.group_id, {}).setdefault(journal, []).append(trajectory_id)
    # 2. Each is whole where there is most of it.
    for places in groups.values():
        if len(places) > 1:
            lengths = {journal: _length(journal, ids, report) for journal, ids in places.items()}
            whole = max(lengths, key=lengths.__getitem__)
            for journal, ids in places.items():
                elsewhere[journal].update(ids if journal != whole else ())
    return elsewhere


def _length(journal: Path, trajectory_ids: Iterable[str], report: Report) -> int:
    """Return how many events a journal has of some trajectories."""
    query = "SELECT payload FROM events WHERE trajectory_id = ?"
    payloads = (row[0] for name in trajectory_ids for row in _query(journal, query, "", report, name))
    total = 0
    for payload in payloads:
        with suppress(msgspec.MsgspecError, TypeError):
            total += len(msgspec.msgpack.decode(payload, type=list[msgspec.Raw]))
    return total


def changed(run: Run, seen: dict[Path, int], report: Report = warn_once) -> list[str] | None:
    """Return the trajectories of which there is more since the last call, in the order of the news.

    ``seen`` is how far each journal was read; it is empty at first, and brought up to date. ``None``: what was read is
    no longer what is there, as another run has taken its place; ``seen`` is empty again.
    """
    found: list[str] = []
    for journal in JournalFolder(run).journals():
        since = seen.get(journal, 0)
        ((newest,),) = _query(journal, "SELECT COALESCE(MAX(id), 0) FROM events", "", report)
        if newest < since:
            seen.clear()
            return None
        if newest > since:
            query = "SELECT trajectory_id FROM events WHERE id > ? AND id <= ? GROUP BY trajectory_id ORDER BY MIN(id)"
            rows = _query(journal, query, "", report, since, newest)
            found += [trajectory_id for (trajectory_id,) in rows if isinstance(trajectory_id, str)]
        seen[journal] = newest
    return found


def rows_of(run: Run, trajectory_id: str, report: Report = warn_once) -> int:
    """Return in how many rows a trajectory is; more of it is in more of them."""
    query = "SELECT COUNT(*) FROM events WHERE trajectory_id = ?"
    return sum(
        count for of in JournalFolder(run).journals() for (count,) in _query(of, query, "", report, trajectory_id)
    )


def events(run: Run, trajectory_id: str, report: Report = warn_once) -> list[AnyEvent]:
    """Return the events of one trajectory, in order."""
    for _, history in recordings(run, only=[trajectory_id], report=report):
        return history
    raise JournalError(f"{os.fspath(run)} has no trajectory '{trajectory_id}' that can be read")


def histories(run: Run, *, unfinished: bool = False, report: Report = warn_once) -> Iterator[list[AnyEvent]]:
    """Yield the events of every trajectory, in the order in which they began, as they stood when reading began.

    ``unfinished``: only of groups that were not delivered, or were while a sample was set aside. A group is marked as
    delivered when the caller comes back for the next (:meth:`fsm_rollout.scheduler.scheduler.Scheduler.run`), so each
    group comes at least once.
    """
    return (history for _, history in recordings(run, unfinished=unfinished, report=report))


def read(run: Run, report: Report = warn_once) -> Iterator[Trajectory]:
    """Yield every trajectory, in the order in which they began, as it stood when reading began.

    The file may still be written to: what is read is one moment of the run.
    """
    return (trajectory for trajectory, _ in recordings(run, report=report))


def blobs(run: Run, report: Report = warn_once, only: str | None = None) -> Iterator[tuple[str, bytes]]:
    """Yield what :meth:`~fsm_rollout.trajectory.journal.writer.Journal.keep` has kept, by name; ``only``: that one."""
    query = "SELECT sha256, data FROM blobs" + (" WHERE sha256 = ?" if only is not None else "")
    for journal in JournalFolder(run).journals():
        for name, data in _query(journal, query, "", report, *([only] if only is not None else [])):
            if isinstance(data, bytes) and sha256(data).hexdigest() == name:
                yield name, data
            else:
                report(f"{journal}: the bytes '{name}' are left out: they are not what was written")


def blob(run: Run, name: str, report: Report = warn_once) -> bytes:
    """Return the bytes that were kept under a name; JournalError if they are not there, or not what was written."""
    for _, data in blobs(run, report, name):
        return data
    raise JournalError(f"{os.fspath(run)} has no bytes '{name}' that can be read")


def recordings(
    run: Run, *, unfinished: bool = False, only: Collection[str] | None = None, report: Report = warn_once
) -> Iterator[Recorded]:
    """Yield every trajectory with its events; see :func:`histories`. ``only``: those of these ids."""
    over = {group_id for group_id, yes in delivered(run, report).items() if yes} if unfinished else None
    for journal, elsewhere in _elsewhere(run, report).items():
        seen: dict[str, int] = {}
        try:
            with opened(journal) as connection:
                yield from _recordings(connection, journal, over, only, elsewhere, report, seen)
        except DAMAGED as error:
            with _salvaging(journal, error, report) as connection:
                yield from _recordings(connection, journal, over, only, elsewhere, report, seen)


# -- a journal --------------------------------------------------------------------------------------------------------


def _recordings(
    connection: sqlite3.Connection,
    journal: Path,
    over: Collection[str] | None,
    only: Collection[str] | None,
    elsewhere: Collection[str],
    report: Report,
    seen: dict[str, int],
) -> Iterator[Recorded]:
    """Yield trajectories; ``seen`` are those that were read before the damage was met, and how many events each has."""
    # 1. One snapshot for all that follows.
    connection.execute("BEGIN")
    ids: Iterable[str] = only if only is not None else [row[0] for row in connection.execute(_TRAJECTORIES)]
    ids = [name for name in ids if name not in elsewhere]
    if over is not None:
        ids = _unfinished(connection, ids, over)
    # 2. Each trajectory as far as it goes.
    unpack = unpacker(partial(_picture, connection))
    for trajectory_id in ids:
        if trajectory_id not in seen:
            recorded = _recording(connection, journal, trajectory_id, report, unpack)
            seen[trajectory_id] = 0 if recorded is None else len(recorded[1])
            if recorded is not None:
                yield recorded
    # 3. What is gone without a trace is still counted.
    read = sum(seen.values())
    if only is None and over is None and not elsewhere and (missing := events_written(connection) - read) > 0:
        report(
            f"{journal}: {missing:,} of the {read + missing:,} events that were written are missing; trajectories "
            "without their last events read as unfinished, and those without their first are not there"
        )


def _unfinished(connection: sqlite3.Connection, ids: Iterable[str], delivered: Iterable[str]) -> list[str]:
    """Return the trajectories of groups that were not delivered, or of which a sample has not ended."""
    over = set(delivered)
    group_of: dict[str, str | None] = {}
    for trajectory_id in ids:
        first = beginning(connection, trajectory_id)
        group_of[trajectory_id] = group = None if first is None else first.group_id
        is_sample = first is not None and first.parent_id is None
        if is_sample and group in over and not any(map(is_sound, connection.execute(_ENDED, (trajectory_id,)))):
            over.discard(group)
    return [trajectory_id for trajectory_id, group in group_of.items() if group not in over]


def beginning(connection: sqlite3.Connection, trajectory_id: str) -> Prompted | None:
    """Return a trajectory's first event, if it can be read."""
    query = "SELECT payload FROM events WHERE trajectory_id = ? AND seq = 0"
    for (payload,) in connection.execute(query, (trajectory_id,)):
        return _first_of(payload)
    return None


def groups_in(connection: sqlite3.Connection) -> set[str]:
    """Return the ids of the groups in a journal."""
    firsts = (_first_of(payload) for _, payload in connection.execute(_FIRST))
    return {first.group_id for first in firsts if first is not None}


def _first_of(payload: bytes) -> Prompted | None:
    with suppress(msgspec.MsgspecError, TypeError, ValueError, IndexError):
        first = _glance(payload)[0]
        return first if isinstance(first, Prompted) else None
    return None


def events_written(connection: sqlite3.Connection) -> int:
    """Return how many events a journal has at least, as it was told when it was last closed, or its log moved."""
    for row in connection.execute("SELECT * FROM run WHERE key = 'events'"):
        with suppress(ValueError):  # a sum may be right where whoever made it wrote no number
            return int(row[1]) if is_sound(row) else 0
    return 0


def _recording(
    connection: sqlite3.Connection, journal: Path, trajectory_id: str, report: Report, unpack: Unpack
) -> Recorded | None:
    """Return a trajectory as far as it can be read, or ``None`` when nothing of it can."""
    trajectory: Trajectory | None = None
    history: list[AnyEvent] = []
    query = "SELECT trajectory_id, seq, ended, payload, crc FROM events WHERE trajectory_id = ? ORDER BY seq"
    for row in connection.execute(query, (trajectory_id,)):
        _, seq, _, payload, _ = row
        if not isinstance(seq, int) or seq < 0:
            report(f"{journal}: an event of trajectory {trajectory_id} is left out, as its place is damaged ({seq})")
            continue
        why = "those before it are gone" if seq != len(history) else None
        if why is None and not is_sound(row):
            why = "it is not what was written"
        try:
            for event in unpack(payload) if why is None else ():
                _check(event)
                if trajectory is not None:
                    trajectory.apply(event)
                elif (trajectory := Trajectory.fold([event])).trajectory_id != trajectory_id:
                    raise ValueError(f"it belongs to trajectory {trajectory.trajectory_id}")
                history.append(event)
        except msgspec.ValidationError as error:
            raise JournalError(
                f"{journal}: event {len(history)} of trajectory {trajectory_id} is what was written, and none that "
                f"this version knows ({error}); {_with_its_version(connection)}, or a later one"
            ) from error
        except Exception as error:  # data from outside may be wrong in every way; what it is does not matter
            why = f"{type(error).__name__}: {error}"
        if why is not None:
            place, kept = max(seq, len(history)), len(history)
            what = f"it and what follows it there are left out, {kept} events are kept"
            report(f"{journal}: event {place} of trajectory {trajectory_id} is damaged ({why}); {what}")
            # Nothing of the event that does not fit may stay behind.
            trajectory = Trajectory.fold(history) if history else None
            break
    return None if trajectory is None else (trajectory, history)


def _picture(connection: sqlite3.Connection, name: PictureName) -> StoredPicture:
    """Return the picture of a name; ValueError: its bytes are not there, or not what was written."""
    picture_hash, mime, width, height = name
    if (picture := known(picture_hash)) is not None:
        return picture
    for (data,) in connection.execute("SELECT data FROM blobs WHERE sha256 = ?", (picture_hash,)):
        if isinstance(data, bytes) and sha256(data).hexdigest() == picture_hash:
            return stored(data, mime, width, height)
    raise ValueError(f"the bytes of its picture {picture_hash[:12]} are gone")


def _check(event: AnyEvent) -> None:
    """Raise ValueError for what no run writes, and what looks at a run would stumble over."""
    if not all(abs(getattr(event, name, 0.0)) < _LATEST for name in ("at", "epoch", *_DURATIONS)):
        raise ValueError("its time is no finite number")
    messages = [event.message] if isinstance(event, Generated) else getattr(event, "messages", ())
    if not all(isinstance(message.get("role"), str) for message in messages):
        raise ValueError("a message in it has no role")


# -- its file ---------------------------------------------------------------------------------------------------------


def _query(journal: Path, query: str, what: str, report: Report, *values: str | int) -> list[tuple[Any, ...]]:
    """Return rows; with ``what`` they end in their checksum, are checked, and come without it."""
    try:
        with opened(journal) as connection:
            rows = connection.execute(query, values).fetchall()
    except DAMAGED as error:
        with _salvaging(journal, error, report) as connection:
            rows = connection.execute(query, values).fetchall()
    if not what:
        return rows
    for row in rows:
        if not is_sound(row):
            report(f"{what} '{row[0]}' is left out: it is not what was written")
    return [row[:-1] for row in rows if is_sound(row)]


@contextmanager
def opened(journal: Path) -> Iterator[sqlite3.Connection]:
    """Open a journal for reading.

    Raises:
        JournalError: there is none, or one of another format.
        sqlite3.DatabaseError, UnicodeDecodeError: it is damaged, so far as that is known without reading it.
    """
    if not journal.is_file():
        around = sorted(path.name for path in journal.parent.glob("*"))
        hint = close_match(journal.name, around) or f"; {journal.parent} holds {', '.join(around[:4]) or 'nothing'}"
        raise JournalError(f"there is no journal at {journal} (give the `out` of a run){hint}")
    if damage := damage_of(journal):
        raise _Damage(damage)
    if journal.with_name(f"{journal.name}-journal").exists():
        # Its writer was killed while it changed between a log and none; only who may write can take that back.
        with suppress(sqlite3.Error), closing(sqlite3.connect(journal, timeout=0)) as writer:
            writer.execute("PRAGMA schema_version").fetchone()
    with closing(
        sqlite3.connect(f"{journal.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
    ) as connection:
        connection.text_factory = _text  # what is damaged may be no text
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (form,) = connection.execute("PRAGMA user_version").fetchone()
        if application != APPLICATION_ID or form not in range(1, _FORMATS):
            raise _Damage("it is an SQLite file of something else", sqlite3.SQLITE_NOTADB)
        if form != FORMAT:
            later = ", or a later one" if form > FORMAT else "; its `fsm-rollout export` writes the rows of a run"
            raise JournalError(
                f"{journal} has journal format {form} and this version reads {FORMAT}; "
                f"{_with_its_version(connection)}{later}"
            )
        yield connection


def _with_its_version(connection: sqlite3.Connection) -> str:
    for (version,) in connection.execute("SELECT value FROM run WHERE key = 'code_version'"):
        return f"use the version of fsm-rollout that wrote it, {version}"
    return "use the version of fsm-rollout that wrote it"


@contextmanager
def _salvaging(journal: Path, error: Exception, report: Report) -> Iterator[sqlite3.Connection]:
    """Open what is left of a journal that SQLite cannot read; JournalError: nothing, or another program is at it."""
    if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF not in (
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
    ):
        raise JournalError(f"{journal} cannot be read: {error}") from error
    with salvaged(journal) as connection:
        (count,) = connection.execute("SELECT COUNT(*) FROM events").fetchone()
        if not count:
            raise JournalError(f"{journal} is not a journal that can be read: {error}") from error
        report(f"{journal} is damaged ({error}); {count:,} rows of events could be found, what is gone is left out")
        yield connection


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")
