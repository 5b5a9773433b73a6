"""Writing a journal: in a thread, and at once where that is asked for.

Invariant: transactions hold events in the order in which they were appended, and nothing follows one that failed. A
thread commits what was appended; :meth:`Journal.persist` does so before the next generation is asked for, which waits
for the operating system, and not for the disk. The thread alone moves the log into the file, where SQLite does wait.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

import msgspec

from fsm_rollout import __version__
from fsm_rollout.errors import JournalError
from fsm_rollout.trajectory.event_bytes import encode, pack, pictures_in
from fsm_rollout.trajectory.events import AnyEvent, Ended, Prompted
from fsm_rollout.trajectory.journal.folder import JournalFolder, is_journal
from fsm_rollout.trajectory.journal.reader import (
    DAMAGED,
    beginning,
    blobs,
    delivered,
    events_written,
    groups_in,
    logger,
    opened,
    recordings,
)
from fsm_rollout.trajectory.journal.reader import metadata as read_metadata
from fsm_rollout.trajectory.journal.schema import PAGE, SCHEMA, facts, is_sound, summed

LOG_BYTES = 16 << 20  # a log longer than this is moved into the file, in one go with what is appended meanwhile

_Insertion = tuple[str, tuple[object, ...]]  # a statement and its values
# An event: its trajectory, its place there, the event as encoded, and whether the trajectory ended by it.
_Appended = tuple[str, int, bytes, bool]
_ROW = 16  # so many events are in a row of a journal that is written anew

_EVENTS = "INSERT INTO events (trajectory_id, seq, ended, payload, crc) VALUES (?, ?, ?, ?, ?)"
_FACT = "INTO run VALUES (?, ?, ?)"
_DELIVERED = "INSERT OR REPLACE INTO delivered VALUES (?, ?, ?)"
_BLOB = "INSERT OR IGNORE INTO blobs VALUES (?, ?)"


class Journal(AbstractContextManager["Journal"]):
    """Writes the events of one run to a file.

    Args:
        path: the file, ``journal.sqlite`` in a run's folder.
        metadata: plain data about the run to keep with it: the agents' YAML, the run's configuration. The package's
            version is added as ``code_version``, and a random ``run_id``, which the run keeps when it goes on, unless
            there is one: all journals of a run have the same.
        interval: seconds over which events are gathered into one transaction where nobody asks for one sooner.
        append: the file is there, and the run in it goes on; else it must be new. One that is damaged is written anew
            without what is damaged, and kept beside that as it was.

    Raises:
        JournalError: there is something at ``path`` already; or (``append``) it is no journal, or one of another
            format, or somebody else still writes to it; or the file cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        metadata: Mapping[str, object] | None = None,
        *,
        interval: float = 0.5,
        append: bool = False,
    ) -> None:
        self.path = Path(path)
        self._interval = interval
        self._rows: deque[_Appended | _Insertion] = deque()  # appended, and not yet committed
        self._appended, self._closed = threading.Event(), threading.Event()
        self._committing = threading.Lock()
        self._failure: Exception | None = None
        self._pictures: set[str] = set()  # the hashes of those that were kept
        self._next: dict[str, int] = {}  # how many events each trajectory has
        try:
            if append:
                self._next = _made_sound(self.path)
            known = read_metadata(self.path) if append else metadata or {}
            self.run_id = str(known.get("run_id") or uuid4().hex)
            """A random name of the run, which it keeps when it goes on."""
            own = {"code_version": __version__, "run_id": self.run_id}
            self._connection = _connect(self.path, {**(metadata or {}), **own}, append)
        except (sqlite3.Error, OSError) as error:
            why = "another process has it open: the run is still going on" if "locked" in str(error) else error
            raise JournalError(f"journal {self.path} cannot be written: {why}") from error
        firsts = (beginning(self._connection, trajectory_id) for trajectory_id in self._next)
        self.groups: set[str] = {first.group_id for first in firsts if first is not None}
        """The ids of all groups that are in it, or in the journals of its run's shards."""
        for sibling in JournalFolder(self.path).journals()[1:] if append else ():
            with suppress(JournalError, *DAMAGED), opened(sibling) as connection:
                self.groups |= groups_in(connection)
        self._written = sum(self._next.values())  # events that were committed
        self._thread = threading.Thread(target=self._write_behind, name=f"journal {self.path.name}", daemon=True)
        self._thread.start()

    def describe(self, metadata: Mapping[str, object], *, anew: bool = False) -> None:
        """Add plain data about the run, by keys; a key that is there already keeps its value, unless ``anew``."""
        self._put(*((f"INSERT OR {'REPLACE' if anew else 'IGNORE'} {_FACT}", fact) for fact in facts(metadata)))

    def append(self, trajectory_id: str, event: AnyEvent, payload: bytes | None = None) -> None:
        """Take in the next event of a trajectory; microseconds, from any one thread. It is in the file after a flush.

        ``payload`` is the event as :func:`~fsm_rollout.trajectory.event_bytes.encode` gives it, where that is known.

        Raises:
            JournalError: a trajectory's first event, and no other, is ``prompted``.
            TypeError: the event holds something that is not plain data.
        """
        seq, kind = self._next.get(trajectory_id, 0), type(event)
        payload = encode(event) if payload is None else payload
        row = (trajectory_id, seq, payload, kind is Ended)
        if (kind is Prompted) != (seq == 0):
            tag = event.__struct_config__.tag
            raise JournalError(
                f"event {seq} of trajectory {trajectory_id} is {tag}; 'prompted' comes first and only there"
            )
        for picture in pictures_in(payload):
            if picture.sha256 not in self._pictures:
                self._pictures.add(picture.sha256)
                self._put((_BLOB, (picture.sha256, picture.data)))
        self._put(row)
        if isinstance(event, Prompted):
            self.groups.add(event.group_id)
        self._next[trajectory_id] = seq + 1

    def __contains__(self, trajectory_id: str) -> bool:
        return trajectory_id in self._next

    def delivered(self, group_id: str, yes: bool = True) -> None:
        """Keep that a group was delivered, and the caller came back for more; or that it is under way again."""
        self._put((_DELIVERED, summed(group_id, int(yes))))

    def keep(self, data: bytes) -> str:
        """Keep bytes that events refer to (a picture, a tool's state), once, and return their name for :func:`blob`."""
        name = sha256(data).hexdigest()
        self._put((_BLOB, (name, data)))
        return name

    def persist(self) -> None:
        """Commit everything appended so far: the process may end at any moment, and it is kept.

        Some 50 microseconds, in which no disk is waited for. A failure is raised by the next append.
        """
        if not self._closed.is_set():
            self._commit()  # also when there is nothing new: the thread may be at work on the rest

    def flush(self) -> None:
        """Commit everything appended so far.

        Raises:
            JournalError: it, or something before it, cannot be written.
        """
        self.persist()
        self._check()

    def close(self) -> None:
        """Flush, and leave one self-contained file. Safe to call twice."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._commit(last=True)
        self._appended.set()  # after the commit, which clears it: the thread may only now begin to wait for it
        if not sys.is_finalizing():
            self._thread.join()
        if self._failure is not None:
            self._check()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _put(self, *rows: _Appended | _Insertion) -> None:
        if self._failure is not None or self._closed.is_set():
            self._check()
        self._rows.extend(rows)
        if not self._appended.is_set():
            self._appended.set()

    def _check(self) -> None:
        if self._failure is not None:
            why = str(self._failure)
            if not self.path.exists():
                why = "the file was deleted, or moved away, while it was written"  # SQLite: "a readonly database"
            elif "full" in why:
                why = f"{why}; free space, then `fsm-rollout resume`"
            raise JournalError(f"journal {self.path} cannot be written: {why}") from self._failure
        if self._closed.is_set():
            raise JournalError(f"journal {self.path} is closed")

    def _write_behind(self) -> None:
        log = self.path.with_name(f"{self.path.name}-wal")
        while not self._closed.is_set():
            self._appended.wait()
            self._closed.wait(self._interval)
            self._commit()
            with suppress(OSError):  # it is gone once the journal is closed
                if log.stat().st_size > LOG_BYTES and not self._closed.is_set():
                    self._move_log()

    def _move_log(self) -> None:
        """Move the log into the file and empty it. Nobody waits for the large part of that, nor that for a reader."""
        with (
            suppress(sqlite3.Error),
            closing(sqlite3.connect(self.path, timeout=0, isolation_level=None)) as connection,
        ):
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
            with self._committing:  # what was appended meanwhile
                self._connection.execute(f"INSERT OR REPLACE {_FACT}", *facts({"events": self._written}))
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _commit(self, last: bool = False) -> None:
        """Commit all that was appended; ``last``: and close the file."""
        # 1. One thread at a time. At the interpreter's end the others stand still, and one of them may hold the lock.
        if not self._committing.acquire(blocking=not sys.is_finalizing()):
            self._failure = RuntimeError("the interpreter has stopped the thread that writes it")
            return
        try:
            # 2. One transaction, and in it one row of each trajectory: a row costs as much as packing many events.
            #    Nothing follows a transaction that failed: there would be a gap.
            self._appended.clear()
            rows = [self._rows.popleft() for _ in range(len(self._rows))]
            if rows and self._failure is None:
                events: dict[str, list[_Appended]] = {}
                with self._connection:
                    self._connection.execute("BEGIN")
                    for row in rows:
                        if len(row) == 2:
                            self._connection.execute(*row)
                        else:
                            events.setdefault(row[0], []).append(row)
                    self._connection.executemany(_EVENTS, map(_row, events.values()))
                self._written += sum(map(len, events.values()))
            # 3. One file, which can be read from read-only media too; a reader that is busy with it keeps the log.
            if last and self._failure is None:
                self._connection.execute(f"INSERT OR REPLACE {_FACT}", *facts({"events": self._written}))
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


def _row(events: Sequence[_Appended]) -> tuple[object, ...]:
    """Return the row of some events of one trajectory that follow one another."""
    ids, places, encoded, ended = zip(*events, strict=True)
    return summed(ids[0], places[0], int(any(ended)), pack(encoded))


def _connect(path: Path, metadata: Mapping[str, object], append: bool) -> sqlite3.Connection:
    """Open a journal for writing; a new one is put in place with its tables and metadata, so that none is ever empty.

    Raises:
        JournalError: there is one already.
        sqlite3.Error, OSError: it cannot be written.
    """
    if not append:
        if path.exists():
            raise JournalError(
                f"{path} exists, and a journal holds one run; go on with that one (append=True), choose another, or "
                "remove it"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.new")
        try:
            partial.unlink(missing_ok=True)
            with closing(sqlite3.connect(partial, isolation_level=None)) as connection:
                connection.executescript(f"PRAGMA page_size = {PAGE}; BEGIN; {SCHEMA}")
                connection.executemany(f"INSERT {_FACT}", facts(metadata))
                connection.execute("COMMIT")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    connection = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA busy_timeout = 5000")
        # WAL: readers and the writer do not wait for each other, and a torn write is never seen.
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA wal_autocheckpoint = 0")  # the thread does
        connection.execute("PRAGMA cache_spill = OFF")  # each page is written once, when its transaction commits
        connection.execute("SELECT key FROM run").fetchall()  # takes hold of the log: from now on nobody else writes
        if append:
            with connection:
                connection.execute("BEGIN")
                connection.executemany(f"INSERT OR REPLACE {_FACT}", facts(metadata))
    except BaseException:
        connection.close()
        raise
    return connection


# -- one that is to go on -----------------------------------------------------------------------------------------


def _made_sound(path: Path) -> dict[str, int]:
    """Return how many events each trajectory of a journal has, after what is damaged was taken out of it."""
    # 1. It is there, and of this format. SQLite deletes what it does not read of a log: that is kept before.
    if not path.is_file() or not is_journal(path):
        read_metadata(path)  # says what is wrong with it
    whole = True
    try:
        with opened(path):
            pass
    except DAMAGED:
        whole = False
        _set_aside(path)
    # 2. Nobody else writes to it.
    with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as connection:
        try:
            connection.execute("PRAGMA journal_mode = DELETE")  # not granted while anybody else has its log open
        except DAMAGED as error:
            if "locked" in str(error):
                raise
    # 3. It is whole; else what is whole of it is written anew.
    lengths: dict[str, int] | None = None
    with (
        suppress(*DAMAGED, TypeError, OverflowError, msgspec.DecodeError),
        closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection,
    ):
        if whole and connection.execute("PRAGMA integrity_check(1)").fetchone() == ("ok",):  # it is to grow
            lengths = _lengths(connection)
    if lengths is None:
        if whole:
            _set_aside(path)
        lengths = _rewrite(path)
    return lengths


def _lengths(connection: sqlite3.Connection) -> dict[str, int] | None:
    """Return how many events each trajectory has; ``None`` where something is not what was written, or is missing."""
    if not all(is_sound(row) for table in ("run", "delivered") for row in connection.execute(f"SELECT * FROM {table}")):
        return None
    lengths: dict[str, int] = {}
    for row in connection.execute("SELECT trajectory_id, seq, ended, payload, crc FROM events ORDER BY id"):
        trajectory_id, seq, _, payload, _ = row
        if lengths.get(trajectory_id, 0) != seq or not is_sound(row):
            return None
        lengths[trajectory_id] = seq + len(msgspec.msgpack.decode(payload, type=list[msgspec.Raw]))
    return lengths if sum(lengths.values()) >= events_written(connection) else None


def _damaged(path: Path) -> Path:
    return path.with_name(f"{path.stem}.damaged{path.suffix}")


def _set_aside(path: Path) -> None:
    """Copy a journal, and the log beside it, as they are: they may be worth a look."""
    for end in ("", "-wal"):
        _damaged(path).with_name(_damaged(path).name + end).unlink(missing_ok=True)
        if (file := path.with_name(path.name + end)).exists():
            shutil.copyfile(file, _damaged(path).with_name(_damaged(path).name + end))


def _rewrite(path: Path) -> dict[str, int]:
    """Write a journal anew with what can be read of it as it was set aside. Return its lengths."""
    damages: list[str] = []
    kept, sound = _damaged(path), path.with_name(f"{path.name}.sound")
    sound.unlink(missing_ok=True)
    with Journal(sound, read_metadata(kept, damages.append), interval=3600.0) as anew:
        for trajectory, history in recordings(kept, report=damages.append):
            for number, event in enumerate(history, 1):
                anew.append(trajectory.trajectory_id, event)
                if number % _ROW == 0 or number == len(history):
                    anew.persist()
        for group_id, yes in delivered(kept, damages.append).items():
            anew.delivered(group_id, yes)
        for _, data in blobs(kept, damages.append):
            anew.keep(data)
    for end in ("", "-wal", "-shm"):
        path.with_name(path.name + end).unlink(missing_ok=True)
    sound.replace(path)
    for damage in dict.fromkeys(damages):
        logger.warning("%s", damage)
    logger.warning("the journal goes on without what is damaged; as it was, it is kept as %s", kept)
    return anew._next
