"""Rows of a journal's file that SQLite cannot read any more: cut off, overwritten, or with a hole.

Invariant: every row that stands whole in a page that is left is found, whatever has become of the other pages, of the
file's header, of its log and of its indexes; for a row says by itself what it is (by its columns) and that it is what
was written (by its checksum). Rows that are not are left out.

The form of SQLite's files: https://www.sqlite.org/fileformat2.html (1.6 B-tree pages, 2.1 records).
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from fsm_rollout.trajectory.journal.log import frames, log_of
from fsm_rollout.trajectory.journal.schema import PAGE, SCHEMA, is_sound

_TABLE_LEAF = 0x0D
_SIZES = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8, 7: 8, 8: 0, 9: 0}  # bytes of a value by its type in a record
_LONGEST = 1 << 31

Value = None | int | float | str | bytes


@contextmanager
def salvaged(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a temporary database of all rows that can be found in a journal's file and its log."""
    with closing(sqlite3.connect("", isolation_level=None)) as connection:
        connection.executescript(f"PRAGMA synchronous = OFF; {SCHEMA} BEGIN")
        for rowid, row in _rows(_Pages(path)):
            _insert(connection, rowid, row)
        connection.execute("COMMIT")
        yield connection


def _insert(connection: sqlite3.Connection, rowid: int, row: Sequence[Value]) -> None:
    """Put a row that is what was written where rows of its form belong; what has no such form is not a journal's."""
    match row:
        case (None, str(), int(), int(), bytes(), int()):
            table, row, sound = "events", (rowid, *row[1:]), is_sound(row[1:])
        case (str(), str(), int()):
            table, sound = "run", is_sound(row)
        case (str(), int(), int()):
            table, sound = "delivered", is_sound(row)
        case (str(name), bytes(data)):
            table, sound = "blobs", sha256(data).hexdigest() == name
        case _:
            return
    if sound:
        with suppress(sqlite3.Error, OverflowError):
            connection.execute(f"INSERT OR IGNORE INTO {table} VALUES ({', '.join('?' * len(row))})", row)


class _Pages:
    """The pages of a file, each as the newest whole transaction in its log left it."""

    def __init__(self, path: Path) -> None:
        self._data = path.read_bytes()
        self._newer: dict[int, bytes] = {}
        self._damaged: list[bytes] = []  # in the log: what is not damaged in them is no less worth
        pending: dict[int, bytes] = {}
        for number, page, commits, whole in frames(log_of(path)):
            if whole:
                pending[number] = page
            else:
                self._damaged.append(page)
            if commits:
                self._newer |= pending
                pending.clear()

    def __getitem__(self, number: int) -> bytes:
        """Return a page, counted from 1; what is not there is empty."""
        return self._newer.get(number) or self._data[(number - 1) * PAGE : number * PAGE]

    def __iter__(self) -> Iterator[tuple[bytes, int]]:
        """Yield all pages, and where the header of each begins."""
        for number in range(1, max([len(self._data) // PAGE, *self._newer]) + 1):
            yield self[number], 100 if number == 1 else 0
        for page in self._damaged:
            yield page, 0


def _rows(pages: _Pages) -> Iterator[tuple[int, tuple[Value, ...]]]:
    for page, header in pages:
        if len(page) < PAGE or page[header] != _TABLE_LEAF:
            continue
        (cells,) = struct.unpack_from(">H", page, header + 3)
        for cell in range(min(cells, (PAGE - header - 8) // 2)):
            with suppress(IndexError, ValueError, struct.error):
                yield _row(pages, page, *struct.unpack_from(">H", page, header + 8 + 2 * cell))


def _row(pages: _Pages, page: bytes, at: int) -> tuple[int, tuple[Value, ...]]:
    """Return the row id and the values of the cell at a place of a page."""
    # 1. The cell: how long it is, whose, and how much of it is on this page.
    length, at = _varint(page, at)
    rowid, at = _varint(page, at)
    most, least = PAGE - 35, (PAGE - 12) * 32 // 255 - 23
    here = length
    if length > most:
        here = least + (length - least) % (PAGE - 4)
        here = here if here <= most else least
    record = page[at : at + here]
    # 2. The rest, on pages that each name the next.
    if here < length <= _LONGEST:
        parts, left = [record], length - here
        (following,) = struct.unpack_from(">I", page, at + here)
        while left > 0 and following:
            overflow = pages[following]
            (following,) = struct.unpack_from(">I", overflow, 0)
            parts.append(overflow[4 : 4 + min(left, PAGE - 4)])
            left -= PAGE - 4
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
