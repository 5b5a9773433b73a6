"""What a journal's file looks like: its tables, its marks, its checksums, and what earlier formats had instead.

Invariant: a row of ``events`` whose ``crc`` is :func:`checksum` of its payload and place is the row that was written.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fsm_rollout.trajectory.events import pack

APPLICATION_ID = 0x46534D52  # "FSMR"
FORMAT = 3
# Bytes of a page. Earlier journals have SQLite's own; what a turn adds, often 2 kB, takes twice the time there.
PAGE, EARLIER_PAGE = 16_384, 4096

SCHEMA = f"""
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {FORMAT};
CREATE TABLE run (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE trajectories (
    trajectory_id TEXT PRIMARY KEY, group_id TEXT NOT NULL, sample INTEGER NOT NULL, agent TEXT NOT NULL, parent_id TEXT
);
CREATE TABLE events (
    id INTEGER PRIMARY KEY, trajectory_id TEXT NOT NULL, seq INTEGER NOT NULL, ended INTEGER NOT NULL,
    payload BLOB NOT NULL, crc INTEGER NOT NULL, UNIQUE (trajectory_id, seq)
);
CREATE TABLE handed_over (group_id TEXT PRIMARY KEY, yes INTEGER NOT NULL);
"""
INSERT_EVENTS = "INSERT INTO events (trajectory_id, seq, ended, payload, crc) VALUES (?, ?, ?, ?, ?)"
INSERT_TRAJECTORY = "INSERT INTO trajectories VALUES (?, ?, ?, ?, ?)"

# What `run` holds about a run, and in which form; programs may add to it.
FACTS: Mapping[str, Any] = {
    "agents": dict[str, str], "engines": dict[str, dict[str, Any]], "base": str, "run": str | dict[str, Any],
    "file": str, "code_version": str,
}  # fmt: skip


def checksum(payload: bytes, seq: int) -> int:
    """Return the checksum of a row's events at their place in the trajectory."""
    return zlib.crc32(payload, seq)


def events_row(trajectory_id: str, seq: int, encoded: Sequence[bytes], ended: bool) -> tuple[object, ...]:
    """Return the row of events that follow one another in a trajectory, the first of which has the place ``seq``."""
    payload = pack(encoded)
    return trajectory_id, seq, ended, payload, checksum(payload, seq)


def present_payload(payload: object) -> bytes | None:
    """Return what a row of an earlier format, which held one event, has as its payload now."""
    return pack([payload]) if isinstance(payload, bytes) else None


def present_checksum(payload: object, seq: object, crc: object) -> int | None:
    """Return the checksum of a row of an earlier format as it is now, wrong if it was; format 1 had none."""
    if not isinstance(payload, bytes) or not isinstance(seq, int) or seq < 0:
        return None
    return checksum(pack([payload]), seq) if crc in (None, checksum(payload, seq)) else -1


def show_as_present(connection: sqlite3.Connection, form: int) -> None:
    """Have a journal of an earlier format read like one of the present."""
    if form < FORMAT:
        connection.create_function("present_payload", 1, present_payload)
        connection.create_function("present_checksum", 3, present_checksum)
        connection.execute(
            "CREATE TEMP VIEW events AS SELECT id, trajectory_id, seq, kind = 'ended' AS ended, "
            f"present_payload(payload) AS payload, present_checksum(payload, seq, {'crc' if form > 1 else 'NULL'}) "
            "AS crc FROM main.events"
        )


def facts(metadata: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield the rows of ``run``."""
    return ((key, json.dumps(value)) for key, value in metadata.items())
