"""The journal: every event of a run in one SQLite file, and what it takes to read it whatever has become of it.

Invariant: at any moment, also after a crash, the file holds of each trajectory a prefix of its events; so each can be
folded, and a run that is still being written can be read.

What is lost, and when: the end of the process (SIGKILL, ``os._exit``, out of memory) loses what was appended since the
last generation was asked for, and never more than ``interval`` seconds of it; so all that a turn did is kept before its
next generation begins, and that a call which must not be made twice has begun is kept before it begins. A loss of power
may also lose what the operating system had not written yet, because SQLite waits for the disk only when it moves its
log into the file. What is damaged is found by the checksum of each row, and of each page of the log; what is gone, by
the number of events that the file is known to have had. It is left out together with what followed it in its
trajectory, which is said, and nothing else is.

Tables: ``run(key, value, crc)``, values as JSON, among them ``run_id`` and the number of ``events``;
``delivered(group_id, yes, crc)``, of the groups that were delivered and after which the caller asked for more;
``events(id, trajectory_id, seq, ended, payload, crc)``, a row for what one trajectory did between two commits: ``seq``
is the place of its first event in the trajectory, ``ended`` says whether the trajectory ended in it, ``payload`` is
what :func:`fsm_rollout.trajectory.event_bytes.pack` makes of the events; ``blobs(sha256, data)``, bytes that events
refer to: pictures, the states of tools. ``crc`` is the checksum of the row's other columns. SQLite's ``application_id``
marks the file as a journal and its ``user_version`` is the format; journals of other formats are refused.

All functions raise :class:`~fsm_rollout.errors.JournalError` for a file that cannot be read or written (any more), and
say why.
"""

from fsm_rollout.trajectory.journal.folder import JOURNAL, JournalFolder, is_journal, run_journal, shard_journal
from fsm_rollout.trajectory.journal.reader import (
    Recorded,
    Report,
    blob,
    changed,
    events,
    histories,
    metadata,
    read,
    recordings,
    rows_of,
    trajectory_ids,
)
from fsm_rollout.trajectory.journal.search import Search
from fsm_rollout.trajectory.journal.writer import Journal

__all__ = [
    "JOURNAL", "Journal", "JournalFolder", "Recorded", "Report", "Search", "blob", "changed", "events", "histories",
    "is_journal", "metadata", "read", "recordings", "rows_of", "run_journal", "shard_journal", "trajectory_ids",
]  # fmt: skip
