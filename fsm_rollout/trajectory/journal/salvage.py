"""Rows of a journal's file that SQLite cannot read any more: cut off, overwritten, or with a hole.

Invariant: every row that stands whole in a page that is left is found, whatever has become of the other pages, of the
file's header and of its indexes; for a row says by itself what it is (its columns, an event's checksum). Only pages are
looked at, so what is read may be wrong in a way that only the caller can see: it checks the sums.

The form of SQLite's files: https://www.sqlite.org/fileformat2.html (1.6 B-tree pages, 2.1 records, 4 the log).
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec

from fsm_rollout.trajectory.events import Prompted, unpack
from fsm_rollout.trajectory.journal.schema import (
    EARLIER_PAGE,
    INSERT_TRAJECTORY,
    PAGE,
    SCHEMA,
    present_checksum,
    present_payload,
)

_TABLE_LEAF = 0x0D
_LOG_HEADER, _FRAME_HEADER = 32, 24
_SIZES = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8, 7: 8, 8: 0, 9: 0}  # bytes of a value by its type in a record
_LONGEST = 1 << 31
_INSERT = "INSERT OR IGNORE INTO events VALUES (?, ?, ?, ?, ?, ?)"

Value = None | int | float | str | bytes


@contextmanager
def salvaged(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a temporary database of all rows that can be found in a journal's file and its log."""
    with closing(sqlite3.connect("", isolation_level=None)) as connection:
        connection.executescript(f"PRAGMA synchronous = OFF; {SCHEMA} BEGIN")
        for size in _page_sizes(path):
            for rowid, row in _rows(_Pages(path, size)):
                _insert(connection, rowid, row)
        # Trajectories follow from their first events, where those are left.
        for (payload,) in connection.execute("SELECT payload FROM events WHERE seq = 0 ORDER BY id").fetchall():
            with suppress(msgspec.DecodeError, ValueError, TypeError, IndexError, sqlite3.Error):
                event = unpack(payload)[0]
                if isinstance(event, Prompted):
                    connection.execute(
                        INSERT_TRAJECTORY.replace("INSERT", "INSERT OR IGNORE"),
                        (event.trajectory_id, event.group_id, event.sample, event.agent, event.parent_id),
                    )
        connection.execute("COMMIT")
        yield connection


def _insert(connection: sqlite3.Connection, rowid: int, row: Sequence[Value]) -> None:
    """Put a row where rows of its form belong; what has no such form is none of a journal's."""
    with suppress(sqlite3.Error, OverflowError):
        match row:
            case (None, str(), int(), int(), bytes(), int()):
                connection.execute(_INSERT, (rowid, *row[1:]))
            case (None, str(), int(seq), int() | float(), str(kind), bytes(payload), *crc) if len(crc) < 2:  # earlier
                sum_now = present_checksum(payload, seq, crc[0] if crc else None)
                connection.execute(_INSERT, (rowid, row[1], seq, kind == "ended", present_payload(payload), sum_now))
            case (str(), str()):
                connection.execute("INSERT OR IGNORE INTO run VALUES (?, ?)", row)
            case (str(), int()):
                connection.execute("INSERT OR IGNORE INTO handed_over VALUES (?, ?)", row)


def _page_sizes(path: Path) -> Sequence[int]:
    """Return how large a file's pages are; or may be, where nothing is left that says so."""
    for file, form, at in ((path, ">H", 16), (_log_of(path), ">I", 8)):
        if file.is_file():
            with file.open("rb") as opened:
                head = opened.read(100)
            size = struct.unpack_from(form, head, at)[0] if len(head) == 100 else 0
            if size in (PAGE, EARLIER_PAGE):
                return (size,)
    return (PAGE, EARLIER_PAGE)


def _log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


class _Pages:
    """The pages of a file, each as the newest whole transaction in its log left it."""

    def __init__(self, path: Path, size: int) -> None:
        self.size = size
        self._data = path.read_bytes()
        self._newer: dict[int, bytes] = {}
        if _log_of(path).is_file():
            self._read_log(_log_of(path).read_bytes())
        self.count = max([len(self._data) // size, *self._newer])

    def _read_log(self, log: bytes) -> None:
        salts, pending = log[16:24], dict[int, bytes]()
        size = _FRAME_HEADER + self.size
        for at in range(_LOG_HEADER, len(log) - size + 1, size):
            number, size_after_commit = struct.unpack_from(">II", log, at)
            if log[at + 8 : at + 16] != salts:
                return  # of an earlier round of the log
            pending[number] = log[at + _FRAME_HEADER : at + size]
            if size_after_commit:
                self._newer |= pending
                pending.clear()

    def __getitem__(self, number: int) -> bytes:
        """Return a page, counted from 1; what is not there is empty."""
        return self._newer.get(number) or self._data[(number - 1) * self.size : number * self.size]


def _rows(pages: _Pages) -> Iterator[tuple[int, tuple[Value, ...]]]:
    for number in range(1, pages.count + 1):
        page = pages[number]
        header = 100 if number == 1 else 0
        if len(page) < pages.size or page[header] != _TABLE_LEAF:
            continue
        (cells,) = struct.unpack_from(">H", page, header + 3)
        for cell in range(min(cells, (pages.size - header - 8) // 2)):
            with suppress(IndexError, ValueError, struct.error):
                yield _row(pages, page, *struct.unpack_from(">H", page, header + 8 + 2 * cell))


def _row(pages: _Pages, page: bytes, at: int) -> tuple[int, tuple[Value, ...]]:
    """Return the row id and the values of the cell at a place of a page."""
    # 1. The cell: how long it is, whose, and how much of it is on this page.
    length, at = _varint(page, at)
    rowid, at = _varint(page, at)
    most, least = pages.size - 35, (pages.size - 12) * 32 // 255 - 23
    here = length
    if length > most:
        here = least + (length - least) % (pages.size - 4)
        here = here if here <= most else least
    record = page[at : at + here]
    # 2. The rest, on pages that each name the next.
    if here < length <= _LONGEST:
        parts, left = [record], length - here
        (following,) = struct.unpack_from(">I", page, at + here)
        while left > 0 and following:
            overflow = pages[following]
            (following,) = struct.unpack_from(">I", overflow, 0)
            parts.append(overflow[4 : 4 + min(left, pages.size - 4)])
            left -= pages.size - 4
        record = b"".join(parts)
    if len(record) != length:
        raise ValueError("a part of it is gone")
    return rowid, tuple(_values(record))


def _values(record: bytes) -> Iterator[Value]:
    end, at = _varint(record, 0)
    place = end
    while at < end:
        kind, at = _varint(record, at)
        size = _SIZES[kind] if kind in _SIZES else (kind - 12) // 2 if kind >= 12 else -1
        piece = record[place : place + size]
        if size < 0 or len(piece) != size:
            raise ValueError("no value")
        place += size
        if kind == 0:
            yield None
        elif kind == 7:
            yield float(struct.unpack(">d", piece)[0])
        elif kind in (8, 9):
            yield kind - 8
        elif kind < 7:
            yield int.from_bytes(piece, "big", signed=True)
        else:
            yield piece.decode("utf-8") if kind % 2 else piece


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number of 1 to 9 bytes, and where it ends."""
    value = 0
    for count in range(9):
        byte = data[at + count]
        if count == 8:
            return (value << 8) | byte, at + 9
        value = (value << 7) | (byte & 0x7F)
        if byte < 0x80:
            return value, at + count + 1
    raise AssertionError
