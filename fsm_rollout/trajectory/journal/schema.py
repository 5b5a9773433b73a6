"""What a journal's file looks like: its tables, its marks, its checksums.

Invariant: a row of ``events`` whose ``crc`` is :func:`checksum` of its payload and place is the row that was written.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

APPLICATION_ID = 0x46534D52  # "FSMR"
FORMAT = 2

SCHEMA = f"""
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {FORMAT};
CREATE TABLE run (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE trajectories (
    trajectory_id TEXT PRIMARY KEY, group_id TEXT NOT NULL, sample INTEGER NOT NULL, agent TEXT NOT NULL, parent_id TEXT
);
CREATE TABLE events (
    id INTEGER PRIMARY KEY, trajectory_id TEXT NOT NULL, seq INTEGER NOT NULL, at REAL NOT NULL, kind TEXT NOT NULL,
    payload BLOB NOT NULL, crc INTEGER, UNIQUE (trajectory_id, seq)
);
CREATE TABLE handed_over (group_id TEXT PRIMARY KEY, yes INTEGER NOT NULL);
"""
INSERT_EVENT = "INSERT INTO events (trajectory_id, seq, at, kind, payload, crc) VALUES (?, ?, ?, ?, ?, ?)"
INSERT_TRAJECTORY = "INSERT INTO trajectories VALUES (?, ?, ?, ?, ?)"

FACTS: Mapping[str, Any] = {
    "agents": dict[str, str], "engines": dict[str, dict[str, Any]], "base": str, "run": str | dict[str, Any],
    "file": str, "code_version": str,
}  # fmt: skip
"""What ``run`` holds about a run, and in which form; programs may add to it."""


def checksum(payload: bytes, seq: int) -> int:
    """Return the checksum of an event at its place in the trajectory."""
    return zlib.crc32(payload, seq)


def facts(metadata: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield the rows of ``run``."""
    return ((key, json.dumps(value)) for key, value in metadata.items())
