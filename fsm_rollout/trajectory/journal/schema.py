"""What a journal's file looks like: its tables, its marks, and the checksum of every row.

Invariant: the last column of a row is :func:`checksum` of the others (a blob is named by its SHA-256 instead). So a row
says by itself whether it is what was written.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

APPLICATION_ID = 0x46534D52  # "FSMR"
FORMAT = 4
PAGE = 16_384  # bytes; what a turn adds, often 2 kB, takes twice the time on SQLite's own 4,096

SCHEMA = f"""
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {FORMAT};
CREATE TABLE run (key TEXT PRIMARY KEY, value TEXT NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE events (
    id INTEGER PRIMARY KEY, trajectory_id TEXT NOT NULL, seq INTEGER NOT NULL, ended INTEGER NOT NULL,
    payload BLOB NOT NULL, crc INTEGER NOT NULL, UNIQUE (trajectory_id, seq)
);
CREATE TABLE delivered (group_id TEXT PRIMARY KEY, yes INTEGER NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE blobs (sha256 TEXT PRIMARY KEY, data BLOB NOT NULL);
"""

# What `run` holds about a run, and in which form; programs may add to it.
FACTS: Mapping[str, Any] = {
    "agents": dict[str, str], "engines": dict[str, dict[str, Any]], "base": str, "run": str | dict[str, Any],
    "file": str, "code_version": str, "run_id": str, "events": int,
}  # fmt: skip


def checksum(*values: object) -> int:
    """Return the checksum of a row whose other columns are ``values``."""
    crc = 0
    for value in values:
        crc = zlib.crc32(value if isinstance(value, bytes) else repr(value).encode(), crc)
    return crc


def summed(*values: object) -> tuple[object, ...]:
    """Return a row of these values and their checksum."""
    return (*values, checksum(*values))


def is_sound(row: Sequence[object]) -> bool:
    """Say whether a row, the last column of which is its checksum, is what was written."""
    return checksum(*row[:-1]) == row[-1]


def facts(metadata: Mapping[str, object]) -> Iterator[tuple[object, ...]]:
    """Yield the rows of ``run``."""
    return (summed(key, json.dumps(value)) for key, value in metadata.items())
