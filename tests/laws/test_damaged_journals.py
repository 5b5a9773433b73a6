"""Whatever is overwritten in a journal's file, or cut off it, costs what stood there and nothing else.

The oracle knows where the bytes of each row of events stand in the file, and SQLite's page size; it reads no page.
"""

import logging
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fsm_rollout.errors import JournalError
from fsm_rollout.trajectory.event_bytes import encode, pack
from fsm_rollout.trajectory.events import AnyEvent, LimitCharged
from fsm_rollout.trajectory.journal import Journal, histories, metadata
from fsm_rollout.trajectory.journal.schema import PAGE
from tests.events import prompted

TRAJECTORIES, EVENTS = 30, 12
ROW = 2
"""Events between two commits, which are one row."""


@cache
def written() -> tuple[dict[str, list[AnyEvent]], bytes]:
    """Return what a journal holds, and its file."""
    whole: dict[str, list[AnyEvent]] = {}
    for number in range(TRAJECTORIES):
        name = f"{number}/0"
        # Some fill a page, and some need another.
        size = 3 * PAGE // 4 if number % 7 == 3 else 3 * PAGE // 2 if number % 7 == 5 else 40
        whole[name] = [prompted(name)]
        whole[name] += [LimitCharged(at=0.5 + at, limit=f"{name} {at} {'x' * size}") for at in range(1, EVENTS)]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "j.sqlite"
        with Journal(path, {"run": "{}"}, interval=3600.0) as journal:
            for number, events in enumerate(zip(*whole.values(), strict=True), 1):
                for name, event in zip(whole, events, strict=True):
                    journal.append(name, event)
                if number % ROW == 0:
                    journal.persist()
        return whole, path.read_bytes()


def pages_of(payload: bytes, file: bytes) -> set[int]:
    """Return the pages on which the first and the last bytes of a row stand."""
    places = [file.find(payload[:60]), file.find(payload[-30:])]
    assert min(places) >= 0
    return {place // PAGE for place in places} | {place // PAGE - 1 for place in places if len(payload) > PAGE}


def read_damaged(file: bytes, damaged: set[int]) -> None:
    """Check what is read of a damaged file; ``damaged`` are the pages that are not what they were."""
    whole, intact = written()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "j.sqlite"
        path.write_bytes(file)
        said: list[str] = []
        try:
            found = {h[0].trajectory_id: h for h in histories(path, report=said.append)}  # type: ignore[union-attr]
            metadata(path, said.append)
        except JournalError as error:  # nothing could be found
            found = {}
            said.append(str(error))
    short = []
    for name, history in whole.items():
        read = found.pop(name, [])
        assert read == history[: len(read)], "a prefix of what was written"
        if len(read) < len(history):
            short.append(name)
            rows = [pack([encode(event) for event in history[at : at + ROW]]) for at in range(0, EVENTS, ROW)]
            hit = [bool(pages_of(row, intact) & damaged) for row in rows]
            # A long row stands on pages that need not follow one another: then any damage may be its.
            long = any(len(row) > PAGE for row in rows)
            assert any(hit[: len(read) // ROW + 1]) or (long and damaged), f"{name} lost event {len(read)} for nothing"
    assert not found
    assert bool(said) >= bool(short), "what is lost is said"


@given(st.integers(0), st.binary(min_size=1, max_size=3 * PAGE))
@example(68, b"\x00\x00\x00\x00")  # the mark of a journal
@example(0, b"\x00" * 100)  # SQLite's header
@example(0, b"\x00" * PAGE)
@example(60, b"\xff\xff\xff\xff")
@example(20 * PAGE, b"\x00" * PAGE)
def test_overwritten_bytes_cost_what_stood_there(at: int, junk: bytes) -> None:
    _, intact = written()
    at %= len(intact)
    junk = junk[: len(intact) - at]
    logging.disable(logging.WARNING)
    try:
        read_damaged(
            intact[:at] + junk + intact[at + len(junk) :], set(range(at // PAGE, (at + len(junk)) // PAGE + 1))
        )
    finally:
        logging.disable(logging.NOTSET)


@given(st.integers(1))
@example(PAGE)
@example(1)
def test_a_file_that_was_cut_off_costs_what_stood_there(cut: int) -> None:
    _, intact = written()
    left = len(intact) - cut % len(intact)
    read_damaged(intact[:left], set(range(left // PAGE, len(intact) // PAGE + 1)))


@pytest.mark.parametrize("number", range(12))
def test_each_page_can_be_lost(number: int) -> None:
    """Also those of the tables' roots and of the index, which SQLite needs, and the first one, which says the size."""
    _, intact = written()
    read_damaged(intact[: number * PAGE] + b"\xff" * PAGE + intact[(number + 1) * PAGE :], {number})
