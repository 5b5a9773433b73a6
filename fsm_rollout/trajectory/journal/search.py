"""Which trajectories hold some words: a plain look through all that the journal says of them.

Invariant: a word is found in what a prompt, a model, a tool, a user or an error said, and in the names of trajectories,
agents and tools; never in the form in which an event is kept. There is no index: rows hold text as it is, and a look
through all of them (some 1 GB/s once the system has the file in memory) costs less than keeping one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from fsm_rollout.trajectory.journal.folder import JournalFolder
from fsm_rollout.trajectory.journal.reader import DAMAGED, Run, opened

# The fields of events that hold what somebody has written.
_WRITTEN = {
    "trajectory_id", "group_id", "parent_id", "agent", "messages", "message", "extra", "attempts", "name", "arguments",
    "result", "failure", "content", "text", "detail", "reason", "stop_reason",
}  # fmt: skip


class Search:
    """The trajectories that hold all of some words, ASCII letters in any case; :meth:`found` goes on where it was."""

    def __init__(self, run: Run, words: Sequence[str]) -> None:
        self._run = run
        self._words = [word.encode("utf-8", "surrogatepass").lower() for word in words]
        self._seen: dict[Path, int] = {}
        self._holding: dict[str, set[bytes]] = {}

    def found(self) -> set[str]:
        """Return their ids, as the journal stands now; what is damaged holds nothing."""
        for journal in JournalFolder(self._run).journals():
            try:
                with opened(journal) as connection:
                    since = self._seen.get(journal, 0)
                    rows = connection.execute("SELECT id, trajectory_id, payload FROM events WHERE id > ?", (since,))
                    for place, trajectory_id, payload in rows:
                        self._seen[journal] = place
                        if held := self._held(payload):
                            self._holding.setdefault(trajectory_id, set()).update(held)
            except DAMAGED:
                continue
        return {trajectory_id for trajectory_id, held in self._holding.items() if len(held) == len(set(self._words))}

    def _held(self, payload: bytes) -> list[bytes]:
        """Return which of the words are in the events of a row."""
        lowered = payload.lower()
        if not (maybe := [word for word in self._words if word in lowered]):
            return []
        try:
            events = msgspec.msgpack.decode(payload)
            written = [value for event in events for key, value in event.items() if key in _WRITTEN]
            text = "\n".join(_texts(written)).encode("utf-8", "surrogatepass").lower()
        except (msgspec.MsgspecError, AttributeError, TypeError, RecursionError):
            return []
        return [word for word in maybe if word in text]


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, part in value.items():
            if key != "role":
                yield from _texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)
