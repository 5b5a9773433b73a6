"""SQLite's log beside a journal: its frames, and whether each of them is what was written.

Invariant: what a killed process leaves is never called damaged. SQLite reads a log up to the first frame whose checksum
is wrong, and says nothing of those behind it. A kill leaves whole frames and at most a part of one behind them, for a
journal's writer writes frames once, one after the other, when it commits. So a frame of full length that is not what
was written is damage, also when it is the last.

The form of the log, and its checksum: https://www.sqlite.org/fileformat2.html#walformat. The checksum of a frame is a
sum of its words (of 4 bytes) and of the checksum before it, each times a Fibonacci number, modulo 2**32; so frames are
checked all at once, and each by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fsm_rollout.trajectory.journal.schema import PAGE

HEADER, FRAME_HEADER = 32, 24
_MAGIC = 0x377F0682  # its last bit says in which order the bytes of a word are summed up
_WORDS = (8 + PAGE) // 4  # of a frame that enter its checksum: two of its header, and its page

Words = npt.NDArray[np.uint32]


def _fibonacci(count: int) -> Words:
    numbers = [0, 1]
    while len(numbers) < count:
        numbers.append((numbers[-2] + numbers[-1]) % (1 << 32))
    return np.array(numbers, np.uint32)


_FIBONACCI = _fibonacci(_WORDS + 2)


def log_of(journal: Path) -> bytes:
    """Return what is in the log beside a journal; nothing if there is none."""
    try:
        return journal.with_name(f"{journal.name}-wal").read_bytes()
    except FileNotFoundError:
        return b""


def frames(log: bytes) -> Iterator[tuple[int, bytes, bool, bool]]:
    """Yield the frames of a log, in order, without those that are left of an earlier round of it.

    Each is the number of a page, the page, whether it is the last of its transaction, and whether it is what was
    written.
    """
    heads, sound, _ = _checked(log)
    for number, (head, whole) in enumerate(zip(heads.tolist(), sound.tolist(), strict=True), 1):
        end = HEADER + number * (FRAME_HEADER + PAGE)
        yield head[0], log[end - PAGE : end], head[1] != 0, whole


def damage_of(journal: Path) -> str | None:
    """Return what is wrong with the log of a journal, or ``None``. It may be written to meanwhile."""
    log = log_of(journal)
    while (damage := _damage(log)) is not None:
        again = log_of(journal)
        if again.startswith(log):  # else a write was under way
            return damage
        log = again
    return None


def _damage(log: bytes) -> str | None:
    heads, sound, begun = _checked(log)
    if sound.all():
        return None
    first = int(np.argmin(sound))
    older = begun and (len(log) - HEADER) // (FRAME_HEADER + PAGE) > len(heads)
    if first == len(heads) - 1 and older:  # one that a kill cut off may look so, over what is left of an earlier round
        return None
    return f"{np.count_nonzero(~sound)} of the {len(heads)} pages in its log are not what was written"


def _checked(log: bytes) -> tuple[Words, npt.NDArray[np.bool_], bool]:
    """Return the headers of a log's frames (six words each), which of them are what was written, and if its own is."""
    count = max(0, (len(log) - HEADER) // (FRAME_HEADER + PAGE))
    raw = np.frombuffer(log, np.uint8, count * (FRAME_HEADER + PAGE), HEADER if count else 0)
    raw = raw.reshape(count, FRAME_HEADER + PAGE)
    heads = raw[:, :FRAME_HEADER].copy().view(">u4").astype(np.uint32)
    if not count:
        return heads, np.ones(0, np.bool_), True
    # 1. The log's own header.
    head = np.frombuffer(log, ">u4", HEADER // 4).astype(np.uint32)
    order = ">u4" if head[0] == _MAGIC | 1 else "<u4"
    begun = bool(head[0] | 1 == _MAGIC | 1 and head[2] == PAGE)
    begun = begun and bool((_sums(np.frombuffer(log, order, 6)[None], np.zeros((1, 2), np.uint32)) == head[6:]).all())
    # 2. The checksum of each frame follows from it and from the one before.
    words = np.concatenate([raw[:, :8], raw[:, FRAME_HEADER:]], axis=1).view(order)
    sums = _sums(words, np.concatenate([head[None, 6:], heads[:-1, 4:]]))
    sound = (sums == heads[:, 4:]).all(axis=1)
    # 3. The log's header names its round, by two words that each frame of it has; if it is damaged, the first whole
    #    frame does. Damage may change both words of a frame: the round ends with the last that has one of them.
    alike = heads[:, 2:4] == (head[4:6] if begun else heads[np.argmax(sound), 2:4])
    count = int(np.flatnonzero(alike.any(axis=1)).max(initial=-1)) + 1
    sound = sound[:count] & alike[:count].all(axis=1)
    sound[:1] &= begun  # SQLite reads nothing behind a header that is damaged
    return heads[:count], sound, begun


def _sums(words: npt.NDArray[np.unsignedinteger], before: Words) -> Words:
    """Return SQLite's checksum of each row of words; ``before`` are those of the rows before (two words each)."""
    size = words.shape[1]
    weights = np.stack([_FIBONACCI[size - 1 :: -1][:size], _FIBONACCI[size:0:-1]], axis=1)
    carried = np.array([_FIBONACCI[[size - 1, size]], _FIBONACCI[[size, size + 1]]])
    sums: Words = words.astype(np.uint32) @ weights + before @ carried
    return sums
