"""Journals: what was appended is what is read, by anyone at any time, and a crash costs the last moment only."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
import zlib
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise, zip_longest
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsm_rollout import __version__
from fsm_rollout.errors import JournalError
from fsm_rollout.testing.strategies.histories import several_event_sequences
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.events import (
    AnyEvent,
    ContextOpened,
    Ended,
    Generated,
    LimitCharged,
    MessagesAppended,
    Prompted,
    PromptExtended,
    Resumed,
    encode,
    pack,
    unpack,
)
from fsm_rollout.trajectory.journal import (
    Journal,
    events,
    histories,
    is_empty,
    is_journal,
    metadata,
    read,
    trajectory_ids,
)
from fsm_rollout.trajectory.journal.schema import checksum
from fsm_rollout.trajectory.tokens import Note, NoteKind
from fsm_rollout.trajectory.trajectory import Trajectory


def prompted(trajectory_id: str = "t") -> Prompted:
    return Prompted(
        at=0.0,
        trajectory_id=trajectory_id,
        group_id="g",
        sample=0,
        agent="solver",
        initial="PENDING",
        messages=[],
        extra={},
        limits={},
        seed=0,
        date="2020-01-01T00:00:00",
    )


def interleaved(several: list[list[AnyEvent]]) -> Iterator[tuple[str, AnyEvent]]:
    ids = [sequence[0].trajectory_id for sequence in several]  # type: ignore[union-attr]
    for round_ in zip_longest(*several):
        yield from ((i, event) for i, event in zip(ids, round_, strict=True) if event is not None)


@settings(max_examples=min(20, settings().max_examples))  # each writes a file
@given(several=several_event_sequences, data=st.data())
def test_what_was_appended_is_what_is_read_at_any_moment(
    several: list[list[AnyEvent]], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("journal") / "deep" / "journal.sqlite"
    order = list(interleaved(several))
    at = data.draw(st.integers(0, len(order)), label="read after")
    middle = data.draw(st.integers(at, len(order)), label="close after")
    with Journal(path, {"agent": "…"}, interval=0.0) as journal:
        for trajectory_id, event in order[:at]:
            journal.append(trajectory_id, event)
        journal.flush()
        early = list(read(path))
        for trajectory_id, event in order[at:middle]:
            journal.append(trajectory_id, event)
    with Journal(path, {"more": 1}, interval=0.0, append=True) as journal:
        for trajectory_id, event in order[middle:]:
            journal.append(trajectory_id, event)
    assert metadata(path) == {"agent": "…", "more": 1, "code_version": __version__}
    so_far: dict[str, list[AnyEvent]] = {}
    for trajectory_id, event in order[:at]:
        so_far.setdefault(trajectory_id, []).append(event)
    assert early == [Trajectory.fold(sequence) for sequence in so_far.values()]
    assert list(read(path)) == [Trajectory.fold(sequence) for sequence in several]
    for sequence in several:
        assert events(path, sequence[0].trajectory_id) == sequence  # type: ignore[union-attr]
    assert os.listdir(path.parent) == ["journal.sqlite"], "one self-contained file is left"


def test_only_a_journal_that_nobody_writes_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with pytest.raises(JournalError, match="there is no journal"):
        Journal(path, append=True)
    with Journal(path) as journal:
        journal.append("t", prompted())
        with pytest.raises(JournalError, match="the run is still going on"):
            Journal(path, append=True)
        journal.append("u", prompted("u"))
    assert [trajectory.trajectory_id for trajectory in read(path)] == ["t", "u"]


def test_a_reader_beside_the_writer_sees_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    names, length = [f"t{i}" for i in range(5)], 200
    seen: list[dict[str, int]] = []
    started, stop = threading.Event(), threading.Event()

    def look() -> None:
        while not stop.is_set():
            seen.append({t.trajectory_id: t.spent.get("tool_calls", 0) for t in read(path)})
            started.set()

    with Journal(path, interval=0.0) as journal, ThreadPoolExecutor(1) as pool:
        reader = pool.submit(look)
        reader.add_done_callback(lambda _: started.set())  # also when it fails
        started.wait()
        try:
            for name in names:
                journal.append(name, prompted(name))
            for number in range(length):
                for name in names:
                    journal.append(name, LimitCharged(at=float(number), limit="tool_calls"))
            journal.flush()
        finally:
            stop.set()
        reader.result()
    for early, late in pairwise(seen):
        assert all(late[name] >= count for name, count in early.items()), "nothing that was read is lost"
    for moment in seen:  # the events were appended in rounds, and no moment of the run mixes rounds
        counts = [moment[name] for name in names if name in moment]
        assert list(moment) == names[: len(moment)]
        assert counts == sorted(counts, reverse=True)
        assert not counts or counts[0] - counts[-1] <= 1
    assert {t.spent["tool_calls"] for t in read(path)} == {length}


def test_what_is_read_is_one_moment_and_holds_nobody_up(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    with Journal(path, interval=0.0) as journal:
        for name in ("a", "b"):
            journal.append(name, prompted(name))
        journal.flush()
        reading = read(path)
        early = [next(reading)]
        journal.append("b", LimitCharged(at=1.0, limit="tool_calls"))
        journal.append("c", prompted("c"))
        journal.flush()
        early += reading
    assert [(t.trajectory_id, t.spent) for t in early] == [("a", {}), ("b", {})]
    assert [(t.trajectory_id, t.spent) for t in read(path)] == [("a", {}), ("b", {"tool_calls": 1}), ("c", {})]


def test_nothing_is_written_after_a_write_that_failed(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    journal = Journal(path, interval=0.0)
    journal.append("t", prompted())
    journal.flush()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")  # the writer waits for this one
        journal.append("t", LimitCharged(at=1.0, limit="tool_calls"))
        while journal._rows:
            time.sleep(0.001)
        journal.append("t", LimitCharged(at=2.0, limit="tool_calls"))  # comes with the next transaction
        other.execute("INSERT INTO events VALUES (NULL, 't', 1, 0, x'00', 0)")
        other.execute("COMMIT")
        with pytest.raises(JournalError, match="cannot be written: UNIQUE"):
            journal.close()
        assert list(other.execute("SELECT seq FROM events ORDER BY seq")) == [(0,), (1,)], "no gap"


def test_the_facts_of_the_run_and_the_tables(tmp_path: Path) -> None:
    path = tmp_path / "journal ?#%.sqlite"
    a, b = msgspec.structs.replace(prompted("a"), parent_id="b"), prompted("b")
    charged, ended = LimitCharged(at=1.5, limit="tool_calls"), Ended(at=2.0, stop_reason="answered")
    facts = {"agents": {"solver": "agent: solver\n"}, "run": "{}"}
    with Journal(path, metadata=facts, interval=3600.0) as journal:
        for name, event in (("b", b), ("a", a), ("b", charged)):
            journal.append(name, event)
        journal.persist()
        journal.append("b", ended)
    assert metadata(path) == {"agents": {"solver": "agent: solver\n"}, "run": "{}", "code_version": __version__}
    with sqlite3.connect(path) as connection:
        assert list(connection.execute("SELECT * FROM trajectories")) == [
            ("b", "g", 0, "solver", None),
            ("a", "g", 0, "solver", "b"),
        ]
        rows = connection.execute("SELECT id, trajectory_id, seq, ended, payload FROM events ORDER BY id").fetchall()
    connection.close()
    assert [(*row, unpack(payload)) for *row, payload in rows] == [
        (1, "b", 0, 0, [b, charged]),
        (2, "a", 0, 0, [a]),
        (3, "b", 2, 1, [ended]),
    ], "a row for what a trajectory did between two commits"


def test_a_journal_from_before_a_field_was_there_is_read(tmp_path: Path) -> None:
    """``guarded_at`` came later than ``guarded``: what has it not says how many, and not where."""
    path = tmp_path / "j.sqlite"
    opened = ContextOpened(
        at=1.0, context="main", state="PENDING", messages=[], ids=array("i", [1, 2, 3]), trained=True, engine="policy",
        guarded=1, guarded_at=[1, 2],
    )  # fmt: skip
    glued = PromptExtended(at=2.0, context="main", state="PENDING", ids=array("i", [4, 5]), guarded=2, guarded_at=[0])
    with Journal(path, interval=3600.0) as journal:
        for event in (prompted(), opened, glued):
            journal.append("t", event)
    (trajectory,) = read(path)
    assert (trajectory.guarded, trajectory.streams[0].guarded_at) == (3, [1, 2, 3])
    with closing(sqlite3.connect(path)) as connection, connection:
        (payload,) = connection.execute("SELECT payload FROM events").fetchone()
        events_before = msgspec.msgpack.decode(payload)
        for fields in events_before:
            fields.pop("guarded_at", None)
        payload = msgspec.msgpack.encode(events_before)
        connection.execute("UPDATE events SET payload = ?, crc = ?", (payload, checksum(payload, 0)))
    (trajectory,) = read(path)
    assert (trajectory.guarded, trajectory.streams[0].guarded_at) == (3, [])


def test_sampling_masks_of_a_journal_from_before_notes_are_read(tmp_path: Path) -> None:
    """``kept`` had the mask of each token; what reads it sees a note."""
    path = tmp_path / "j.sqlite"
    opened = ContextOpened(
        at=1.0, context="main", state="A", messages=[], ids=array("i", [1, 2]), trained=True, engine="policy"
    )
    turn = Generated(
        at=2.0, context="main", state="A", ids=array("i", [5, 6]), logprobs=array("f", [-1.0, -2.0]), versions=[(2, 0)],
        finish_reason=FinishReason.STOP, message={"role": "assistant"},
        notes=[Note(NoteKind.SAMPLING_MASK, 2, array("i", [2, 1]), array("i", [4, 5, 6]))],
    )  # fmt: skip
    with Journal(path, interval=3600.0) as journal:
        for event in (prompted(), opened, turn):
            journal.append("t", event)
    (whole,) = read(path)
    assert whole.streams[0].tokens.notes == turn.notes
    with closing(sqlite3.connect(path)) as connection, connection:
        (payload,) = connection.execute("SELECT payload FROM events").fetchone()
        *before, generated = msgspec.msgpack.decode(payload)
        del generated["notes"]
        generated["kept"] = [("i", array("i", ids).tobytes()) for ids in ([4, 5], [6])]
        payload = msgspec.msgpack.encode([*before, generated])
        connection.execute("UPDATE events SET payload = ?, crc = ?", (payload, checksum(payload, 0)))
    assert [whole] == list(read(path))
    assert events(path, "t")[-1] == turn


def test_a_trajectory_begins_with_prompted_and_only_there(tmp_path: Path) -> None:
    with Journal(tmp_path / "j.sqlite") as journal:
        with pytest.raises(JournalError, match="event 0 of trajectory t is charged; 'prompted' comes first"):
            journal.append("t", LimitCharged(at=0.0, limit="tool_calls"))
        with pytest.raises(TypeError, match="plain data"):
            journal.append("t", msgspec.structs.replace(prompted(), extra={"x": object()}))
        journal.append("t", prompted())
        with pytest.raises(JournalError, match="event 1 of trajectory t is prompted"):
            journal.append("t", prompted())
    assert len(events(tmp_path / "j.sqlite", "t")) == 1, "what was refused leaves no gap"


def test_a_closed_journal_takes_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.sqlite")
    journal.close()
    journal.close()
    for use in (lambda: journal.append("t", prompted()), journal.flush):
        with pytest.raises(JournalError, match=r"j\.sqlite is closed"):
            use()


def test_a_journal_is_closed_while_its_thread_is_about_to_wait(tmp_path: Path) -> None:
    """The thread has seen that the journal is open; then all of closing happens, and only then it begins to wait."""
    looked, committed = threading.Event(), threading.Event()

    class Late(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            looked.set()
            committed.wait()
            return super().wait(timeout)

        def clear(self) -> None:
            super().clear()
            if looked.is_set():
                committed.set()

    journal = Journal(tmp_path / "j.sqlite", interval=0.0)
    waited_for, journal._appended = journal._appended, Late()
    waited_for.set()
    looked.wait()
    closing_thread = threading.Thread(target=journal.close, daemon=True)
    closing_thread.start()
    closing_thread.join(60)
    assert not closing_thread.is_alive()


def test_a_write_that_fails_is_told_and_what_is_there_stays_whole(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    journal = Journal(path)
    journal.append("t", prompted())
    journal.flush()
    with sqlite3.connect(path) as other:  # stands for a full disk: the next event cannot go in
        other.execute("INSERT INTO events VALUES (NULL, 't', 1, 0, x'00', 0)")
    other.close()
    journal.append("t", LimitCharged(at=1.0, limit="tool_calls"))
    journal.append("t", LimitCharged(at=2.0, limit="tool_calls"))
    with pytest.raises(JournalError, match="cannot be written: UNIQUE constraint failed"):
        journal.flush()
    with pytest.raises(JournalError, match="cannot be written: UNIQUE"):
        journal.append("t", LimitCharged(at=3.0, limit="tool_calls"))
    with pytest.raises(JournalError, match="cannot be written: UNIQUE"):
        journal.close()
    with sqlite3.connect(path) as other:
        other.execute("DELETE FROM events WHERE seq = 1")
    other.close()
    assert events(path, "t") == [prompted()], "no half of a batch"


def test_one_file_holds_one_run(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    with Journal(path) as journal:
        journal.append("old", prompted("old"))
    with pytest.raises(JournalError, match=r"exists, and a journal holds one run; go on with that one \(append=True\)"):
        Journal(path)
    assert [t.trajectory_id for t in read(path)] == ["old"]


def test_what_is_no_journal_is_left_alone(tmp_path: Path) -> None:
    text, empty, other = tmp_path / "notes.txt", tmp_path / "empty", tmp_path / "other.sqlite"
    text.write_text("dear diary, " * 100)
    empty.touch()
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE events (id)")
    connection.close()
    for path, message in (
        (text, "is not a journal that can be read: file is not a database"),
        (empty, "is an empty journal: its run was cut off before anything was written; start it again"),
        (other, "is not a journal that can be read: it is an SQLite file of something else"),
        (tmp_path, "there is no journal at"),
        (tmp_path / "missing", "there is no journal at"),
    ):
        for use in (lambda p: list(read(p)), lambda p: events(p, "t"), metadata):
            with pytest.raises(JournalError, match=message):
                use(path)
        if path.exists():
            before = path.read_bytes() if path.is_file() else None
            with pytest.raises(JournalError, match="exists, and a journal holds one run"):
                Journal(path)
            assert (path.read_bytes() if path.is_file() else None) == before
    with pytest.raises(JournalError, match="cannot be written"):
        Journal(text / "journal.sqlite")


def test_a_newer_format_says_so(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    Journal(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 4")
    connection.close()
    with pytest.raises(JournalError, match="has journal format 4 and this version reads up to 3; use the version"):
        list(read(path))


def overwritten(path: Path, trajectory_id: str, seq: int, payload: bytes) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        where = "WHERE trajectory_id = ? AND seq = ?"
        connection.execute(f"UPDATE events SET payload = ? {where}", (payload, trajectory_id, seq))


def several(path: Path, count: int = 20, length: int = 10, rounds: int = 1) -> dict[str, list[AnyEvent]]:
    """Write a journal of some trajectories, in turns, and return what it holds. ``rounds`` events are in a row."""
    histories: dict[str, list[AnyEvent]] = {}
    for number in range(count):
        name = f"{number}/0"
        histories[name] = [prompted(name)]
        histories[name] += [LimitCharged(at=float(at), limit=f"tool_calls {number} {at}") for at in range(1, length)]
    with Journal(path, {"run": "{}", "agents": {"a": "agent: a"}}, interval=3600.0) as journal:
        for number, events_of_a_round in enumerate(zip(*histories.values(), strict=True), 1):
            for name, event in zip(histories, events_of_a_round, strict=True):
                journal.append(name, event)
            if number % rounds == 0:
                journal.persist()
        for name in list(histories)[: count // 2]:
            journal.handed_over(name)
    return histories


@pytest.mark.parametrize(
    "payload", [b"\x00", pack([encode(prompted("x"))]), pack([encode(LimitCharged(at=1.0, limit="x"))])]
)
@pytest.mark.parametrize("seq", [0, 4, 9])
def test_a_damaged_event_costs_its_trajectory_the_rest_and_nothing_else(
    tmp_path: Path, seq: int, payload: bytes
) -> None:
    path = tmp_path / "j.sqlite"
    whole = several(path)
    overwritten(path, "7/0", seq, payload)
    said: list[str] = []
    found = {history[0].trajectory_id: history for history in histories(path, report=said.append)}  # type: ignore[union-attr]
    expected = {name: history[: seq if name == "7/0" else None] for name, history in whole.items()}
    assert found == {name: history for name, history in expected.items() if history}
    assert [line.partition(": ")[2].partition(" (")[0] for line in said] == [
        f"event {seq} of trajectory 7/0 is damaged"
    ]
    assert [t.trajectory_id for t in read(path, said.append)] == list(found)


def test_a_damaged_row_costs_its_trajectory_what_it_did_since_the_commit_before(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    whole = several(path, rounds=3)
    overwritten(path, "7/0", 3, b"\x00")
    found = {t.trajectory_id: t for t in read(path, lambda _: None)}
    assert found == {name: Trajectory.fold(events[: 3 if name == "7/0" else None]) for name, events in whole.items()}
    with Journal(path, append=True) as journal:
        journal.append("7/0", LimitCharged(at=9.0, limit="new"))
    assert [len(history) for history in histories(path)] == [4 if name == "7/0" else 10 for name in whole]


@pytest.mark.parametrize("seq", [-92, -9000000000])
def test_an_event_whose_place_is_damaged_costs_those_before_it_nothing(tmp_path: Path, seq: int) -> None:
    path = tmp_path / "j.sqlite"
    whole = several(path)
    last = len(whole["7/0"]) - 1
    with closing(sqlite3.connect(path)) as connection, connection:
        where = "WHERE trajectory_id = '7/0' AND seq = ?"
        connection.execute(f"UPDATE events SET seq = ?, payload = X'8165' {where}", (seq, last))
    said: list[str] = []
    found = {history[0].trajectory_id: history for history in histories(path, report=said.append)}  # type: ignore[union-attr]
    assert found == {**whole, "7/0": whole["7/0"][:last]}
    assert said == [f"{path}: an event of trajectory 7/0 is left out, as its place is damaged ({seq})"]
    with Journal(path, append=True) as journal:
        journal.append("7/0", LimitCharged(at=9.0, limit="new"))
    again = {t.trajectory_id: t for t in read(path)}
    assert again["7/0"] == Trajectory.fold([*whole["7/0"][:last], LimitCharged(at=9.0, limit="new")])


@pytest.mark.parametrize(
    ("event", "says"),
    [
        (LimitCharged(at=1e308, limit="x"), "its time is no finite number"),
        (LimitCharged(at=float("nan"), limit="x"), "its time is no finite number"),
        (Resumed(at=1e300, away=-1e300), "its time is no finite number"),
        (MessagesAppended(at=4.0, context="main", state="A", messages=[{"content": "?"}]), "has no role"),
    ],
)
def test_an_event_that_no_run_writes_is_a_damaged_one(tmp_path: Path, event: AnyEvent, says: str) -> None:
    """Its sum is right: whoever made it knew how. Reports and exports would stumble over it."""
    path = tmp_path / "j.sqlite"
    whole = several(path, rounds=2)
    with closing(sqlite3.connect(path)) as connection, connection:
        payload = pack([encode(whole["7/0"][4]), encode(event)])
        update = "UPDATE events SET payload = ?, crc = ? WHERE trajectory_id = '7/0' AND seq = 4"
        connection.execute(update, (payload, checksum(payload, 4)))
    said: list[str] = []
    found = {history[0].trajectory_id: history for history in histories(path, report=said.append)}  # type: ignore[union-attr]
    assert found == {**whole, "7/0": whole["7/0"][:5]}, "what stands before it in its row is read"
    assert "event 5 of trajectory 7/0" in said[0]
    assert says in said[0]


def test_a_trajectory_whose_name_is_damaged_is_left_out_of_their_list(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    whole = several(path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE trajectories SET trajectory_id = NULL WHERE trajectory_id = '7/0'")
    assert set(trajectory_ids(path)) == whole.keys() - {"7/0"}


def test_what_follows_a_gap_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    whole = several(path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM events WHERE trajectory_id = '7/0' AND seq = 4")
    said: list[str] = []
    found = {history[0].trajectory_id: history for history in histories(path, report=said.append)}  # type: ignore[union-attr]
    assert found == {**whole, "7/0": whole["7/0"][:4]}
    assert "event 5 of trajectory 7/0 is damaged (those before it are gone)" in said[0]


def test_what_is_in_the_log_of_a_damaged_journal_is_read_too(tmp_path: Path) -> None:
    """As a killed run leaves them: the file, and beside it the log with all that was not moved into it yet."""
    path, left = tmp_path / "j.sqlite", tmp_path / "left.sqlite"
    log = path.with_name("j.sqlite-wal")
    with Journal(path, interval=3600.0) as journal:
        journal.append("t", prompted())
        journal.append("t", LimitCharged(at=1.0, limit="tool_calls"))
        journal.persist()
        data = bytearray(path.read_bytes())
        left.with_name("left.sqlite-wal").write_bytes(log.read_bytes())
    data[100:4096] = b"\xff" * 3996  # what SQLite knows of its tables
    left.write_bytes(data)
    said: list[str] = []
    (trajectory,) = read(left, said.append)
    assert trajectory.spent == {"tool_calls": 1}
    assert "is damaged" in said[0]


def test_a_table_that_only_an_index_still_answers_for_is_made_anew(tmp_path: Path) -> None:
    """The ids are in an index of their own; the first to read the table would be the run that goes on."""
    path = tmp_path / "j.sqlite"
    whole = several(path)
    with closing(sqlite3.connect(path)) as connection:
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'trajectories'").fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    data = bytearray(path.read_bytes())
    data[(page - 1) * size] = 7  # no kind of page
    path.write_bytes(data)
    with Journal(path, append=True) as journal:
        assert "7/0" in journal
        journal.append("new/0", prompted("new/0"))
    assert {t.trajectory_id for t in read(path)} == {*whole, "new/0"}


def test_a_damaged_journal_goes_on_with_the_rest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "j.sqlite"
    whole = several(path)
    overwritten(path, "3/0", 0, b"")
    overwritten(path, "7/0", 4, b"")
    before = path.read_bytes()
    with Journal(path, append=True) as journal:
        assert "3/0" not in journal
        journal.append("3/0", prompted("3/0"))
        journal.append("7/0", LimitCharged(at=9.0, limit="new"))
    assert (tmp_path / "j.damaged.sqlite").read_bytes() == before
    assert "event 4 of trajectory 7/0 is damaged" in caplog.text
    said: list[str] = []
    found = {t.trajectory_id: t for t in read(path, said.append)}
    assert said == []
    assert found["3/0"] == Trajectory.fold(whole["3/0"][:1])
    assert found["7/0"] == Trajectory.fold([*whole["7/0"][:4], LimitCharged(at=9.0, limit="new")])
    rest = whole.keys() - {"3/0", "7/0"}
    assert {name: found[name] for name in rest} == {name: Trajectory.fold(whole[name]) for name in rest}
    assert metadata(path) == {"run": "{}", "agents": {"a": "agent: a"}, "code_version": __version__}
    with closing(sqlite3.connect(path)) as connection:
        assert len(connection.execute("SELECT * FROM handed_over WHERE yes").fetchall()) == 10
    assert trajectory_ids(path) == [*(name for name in whole if name != "3/0"), "3/0"], "in the order of the run"


def of_an_earlier_format(path: Path, form: int) -> dict[str, list[AnyEvent]]:
    """Write a journal as formats 1 and 2 were: a row for each event, and in format 1 no checksums."""
    whole = several(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.executescript(
            f"""
            PRAGMA user_version = {form};
            DROP TABLE events;
            CREATE TABLE events (
                id INTEGER PRIMARY KEY, trajectory_id TEXT NOT NULL, seq INTEGER NOT NULL, at REAL NOT NULL,
                kind TEXT NOT NULL, payload BLOB NOT NULL, {"crc INTEGER," if form == 2 else ""}
                UNIQUE (trajectory_id, seq)
            );
            """
        )
        for seq, events_of_a_round in enumerate(zip(*whole.values(), strict=True)):
            for name, event in zip(whole, events_of_a_round, strict=True):
                payload = encode(event)
                row = [None, name, seq, event.at, event.__struct_config__.tag, payload]
                row += [zlib.crc32(payload, seq)] * (form == 2)
                connection.execute(f"INSERT INTO events VALUES ({', '.join('?' * len(row))})", row)
    return whole


@pytest.mark.parametrize("form", [1, 2])
def test_a_damaged_journal_of_an_earlier_format_is_read_as_far_as_it_goes(tmp_path: Path, form: int) -> None:
    path = tmp_path / "j.sqlite"
    whole = of_an_earlier_format(path, form)
    overwritten(path, "7/0", 4, b"")
    whole["7/0"] = whole["7/0"][:4]
    if form == 2:  # what only the checksum knows of
        overwritten(path, "8/0", 5, encode(LimitCharged(at=5.0, limit="x")))
        whole["8/0"] = whole["8/0"][:5]
    for data in (path.read_bytes(), path.read_bytes()[:100] + b"\xff" * 3996 + path.read_bytes()[4096:]):
        path.write_bytes(data)
        said: list[str] = []
        found = {history[0].trajectory_id: history for history in histories(path, report=said.append)}  # type: ignore[union-attr]
        assert found == whole
        assert "event 4 of trajectory 7/0 is damaged" in "".join(said)


@pytest.mark.parametrize("form", [1, 2])
def test_a_journal_of_an_earlier_format_is_read_and_goes_on(tmp_path: Path, form: int) -> None:
    path = tmp_path / "j.sqlite"
    whole = of_an_earlier_format(path, form)
    assert list(read(path)) == [Trajectory.fold(history) for history in whole.values()]
    assert len(list(histories(path, unfinished=True))) == len(whole), "none of them has ended"
    with Journal(path, append=True) as journal:
        journal.append("7/0", LimitCharged(at=9.0, limit="new"))
    whole["7/0"].append(LimitCharged(at=9.0, limit="new"))
    assert list(read(path)) == [Trajectory.fold(history) for history in whole.values()]
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (3,)
    assert os.listdir(tmp_path) == ["j.sqlite"], "nothing was damaged, so nothing is kept"


def test_damaged_facts_of_the_run_are_left_out_and_said(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    several(path)
    half = '{"a": {"\\ud800": 1}}'
    for value, why in (
        ("{", "Expecting"), ("7", "Expected `object`"), ("[" * 10_000, "maximum recursion"), (half, "surrogates"),
    ):  # fmt: skip
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE run SET value = ? WHERE key = 'agents'", (value,))
        said: list[str] = []
        assert metadata(path, said.append) == {"run": "{}", "code_version": __version__}
        assert len(said) == 1
        assert "of its run's 'agents' cannot be read" in said[0]
        assert why in said[0]


def test_a_new_journal_is_never_empty(tmp_path: Path) -> None:
    """The file appears with its tables and its metadata in it, so that a run can go on from its first moment."""
    path = tmp_path / "j.sqlite"
    journal = Journal(path, {"run": "{}"}, interval=3600.0)
    copy = tmp_path / "copy.sqlite"
    copy.write_bytes(path.read_bytes())  # what is there without the log
    assert metadata(copy) == {"run": "{}", "code_version": __version__}
    assert not is_empty(copy)
    journal.close()
    (tmp_path / "empty").touch()
    assert is_empty(tmp_path / "empty")
    assert not is_journal(tmp_path / "empty")


def test_what_was_appended_is_kept_when_it_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    with Journal(path, interval=3600.0) as journal:
        journal.append("t", prompted())
        assert list(read(path)) == []
        journal.persist()
        assert [t.trajectory_id for t in read(path)] == ["t"]


def test_a_journal_whose_writer_was_killed_between_a_log_and_none_is_read(tmp_path: Path) -> None:
    path, cut_off = tmp_path / "journal.sqlite", tmp_path / "cut_off.sqlite"
    with Journal(path) as book:
        book.append("t", prompted())
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.executescript("PRAGMA cache_size = 1; BEGIN; CREATE TABLE half (data)")
        connection.executemany("INSERT INTO half VALUES (?)", [(bytes(10_000),)] * 100)  # more than stays in memory
        for name in ("", "-journal"):
            Path(f"{cut_off}{name}").write_bytes(Path(f"{path}{name}").read_bytes())
    assert [trajectory.trajectory_id for trajectory in read(cut_off)] == ["t"]
