"""Journals: what was appended is what is read, by anyone at any time, and a crash costs the last moment only."""

import gzip
import hashlib
import os
import sqlite3
import threading
import time
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
from fsm_rollout.scheduler.recorder import Recorder
from fsm_rollout.trajectory.event_bytes import pack, unpacker
from fsm_rollout.trajectory.events import AnyEvent, Ended, LimitCharged, Snapshotted
from fsm_rollout.trajectory.journal import (
    Journal,
    JournalFolder,
    blob,
    events,
    is_journal,
    metadata,
    read,
    shard_journal,
    trajectory_ids,
)
from fsm_rollout.trajectory.journal.reader import delivered
from fsm_rollout.trajectory.journal.schema import checksum
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.events import changed, overwritten, prompted, several
from tests.histories import several_event_sequences


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
    own = {"code_version": __version__, "run_id": journal.run_id, "events": len(order)}
    assert metadata(path) == {"agent": "…", "more": 1, **own}
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
        journal.append("t", prompted("t"))
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
    journal.append("t", prompted("t"))
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
    a, b = prompted("a", parent_id="b"), prompted("b")
    charged, ended = LimitCharged(at=1.5, limit="tool_calls"), Ended(at=2.0, stop_reason="answered")
    facts = {"agents": {"solver": "agent: solver\n"}, "run": "{}"}
    with Journal(path, metadata=facts, interval=3600.0) as journal:
        for name, event in (("b", b), ("a", a), ("b", charged)):
            journal.append(name, event)
        journal.persist()
        journal.append("b", ended)
    assert metadata(path) == facts | {"code_version": __version__, "run_id": journal.run_id, "events": 4}
    assert trajectory_ids(path) == ["b", "a"], "in the order in which they began"
    with sqlite3.connect(path) as connection:
        rows = connection.execute("SELECT id, trajectory_id, seq, ended, payload FROM events ORDER BY id").fetchall()
    connection.close()
    assert [(*row, unpacker()(payload)) for *row, payload in rows] == [
        (1, "b", 0, 0, [b, charged]),
        (2, "a", 0, 0, [a]),
        (3, "b", 2, 1, [ended]),
    ], "a row for what a trajectory did between two commits"


def test_a_trajectory_begins_with_prompted_and_only_there(tmp_path: Path) -> None:
    with Journal(tmp_path / "j.sqlite") as journal:
        with pytest.raises(JournalError, match="event 0 of trajectory t is charged; 'prompted' comes first"):
            journal.append("t", LimitCharged(at=0.0, limit="tool_calls"))
        with pytest.raises(TypeError, match="plain data"):
            journal.append("t", prompted("t", extra={"x": object()}))
        journal.append("t", prompted("t"))
        with pytest.raises(JournalError, match="event 1 of trajectory t is prompted"):
            journal.append("t", prompted("t"))
    assert len(events(tmp_path / "j.sqlite", "t")) == 1, "what was refused leaves no gap"


def test_a_closed_journal_takes_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.sqlite")
    journal.close()
    journal.close()
    for use in (lambda: journal.append("t", prompted("t")), journal.flush):
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
    journal.append("t", prompted("t"))
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
    assert events(path, "t") == [prompted("t")], "no half of a batch"


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
        (empty, "is not a journal that can be read: it is an SQLite file of something else"),
        (other, "is not a journal that can be read: it is an SQLite file of something else"),
        (tmp_path, r"there is no journal at .*/journal.sqlite .*; did you mean 'other.sqlite'\?"),
        (tmp_path / "emty", r"there is no journal at .*/emty .*; did you mean 'empty'\?"),
        (tmp_path / "8", "there is no journal at .*/8 .*; .* holds empty, notes.txt, other.sqlite"),
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


def test_a_new_journal_is_never_empty(tmp_path: Path) -> None:
    """The file appears with its tables and its metadata in it, so that a run can go on from its first moment."""
    path = tmp_path / "j.sqlite"
    journal = Journal(path, {"run": "{}"}, interval=3600.0)
    copy = tmp_path / "copy.sqlite"
    copy.write_bytes(path.read_bytes())  # what is there without the log
    assert metadata(copy) == {"run": "{}", "code_version": __version__, "run_id": journal.run_id}
    journal.close()
    (tmp_path / "empty").touch()
    assert not is_journal(tmp_path / "empty")


def test_what_was_appended_is_kept_when_it_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    with Journal(path, interval=3600.0) as journal:
        journal.append("t", prompted("t"))
        assert list(read(path)) == []
        journal.persist()
        assert [t.trajectory_id for t in read(path)] == ["t"]


def test_a_journal_whose_writer_was_killed_between_a_log_and_none_is_read(tmp_path: Path) -> None:
    path, cut_off = tmp_path / "journal.sqlite", tmp_path / "cut_off.sqlite"
    with Journal(path) as book:
        book.append("t", prompted("t"))
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.executescript("PRAGMA cache_size = 1; BEGIN; CREATE TABLE half (data)")
        connection.executemany("INSERT INTO half VALUES (?)", [(bytes(10_000),)] * 100)  # more than stays in memory
        for name in ("", "-journal"):
            Path(f"{cut_off}{name}").write_bytes(Path(f"{path}{name}").read_bytes())
    assert [trajectory.trajectory_id for trajectory in read(cut_off)] == ["t"]


# -- the run itself, other formats, bytes that events refer to --------------------------------------------------------


def test_a_run_keeps_its_id(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with Journal(path) as first, Journal(tmp_path / "other.sqlite") as other:
        assert first.run_id != other.run_id
    with Journal(path, {"run_id": "mine"}, append=True) as again:
        assert again.run_id == first.run_id == metadata(tmp_path)["run_id"], "a folder's journal is the one in it"
    with Journal(tmp_path / "shard.sqlite", {"run_id": first.run_id}) as shard:
        assert shard.run_id == first.run_id, "a run may have several journals"
    assert JournalFolder(tmp_path).journals() == JournalFolder(path).journals() == [path]


def test_what_a_dead_shard_has_kept_is_found_by_the_shard_that_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "any name.sqlite"
    with Journal(path), Journal(shard_journal(path, 1)) as dead, Journal(shard_journal(path, 2)) as other:
        name = dead.keep(b"the state of a tool")
        dead.persist()
        assert Recorder(other, ()).kept(name) == b"the state of a tool"


def test_what_the_run_says_of_a_delivery_counts_more_than_what_a_shard_says(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with Journal(path) as run, Journal(shard_journal(path, 1)) as shard:
        for journal, yes in ((shard, False), (run, False), (run, True)):  # taken up there, then delivered by the driver
            journal.delivered("7", yes)
        shard.delivered("8", False)
    assert delivered(path) == {"7": True, "8": False}


def test_journals_of_other_formats_are_refused_with_what_to_do(tmp_path: Path) -> None:
    earlier, later, event = tmp_path / "earlier.sqlite", tmp_path / "later.sqlite", tmp_path / "event.sqlite"
    earlier.write_bytes(gzip.decompress(Path(__file__).with_name("journal_format_3.sqlite.gz").read_bytes()))
    Journal(later).close()
    changed(later, "PRAGMA user_version = 5")
    several(event)  # what a later version of this format may have written
    payload = pack([msgspec.msgpack.encode({"event": "dreamt", "at": 1.0})])
    update = "UPDATE events SET payload = ?, crc = ? WHERE trajectory_id = '7/0' AND seq = 4"
    changed(event, update, payload, checksum("7/0", 4, 0, payload))
    its = f'use the version of fsm-rollout that wrote it, "{__version__}"'
    for path, says in (
        (earlier, f"has journal format 3 and this version reads 4; {its}; its `fsm-rollout export` writes the rows"),
        (later, f"has journal format 5 and this version reads 4; {its}, or a later one"),
        (event, f"event 4 of trajectory 7/0 is what was written, and none that this version knows .*; {its}, or a la"),
    ):
        with pytest.raises(JournalError, match=says):
            list(read(path))
    for path in (earlier, later):
        before = path.read_bytes()
        with pytest.raises(JournalError, match="has journal format"):
            Journal(path, append=True)
        assert path.read_bytes() == before


def test_bytes_are_kept_once_and_are_what_was_written_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    with Journal(path) as journal:
        name, other = journal.keep(b"state" * 10_000), journal.keep(b"picture")
        assert journal.keep(b"picture") == other == hashlib.sha256(b"picture").hexdigest()
        journal.append("t", prompted("t"))
        journal.append("t", Snapshotted(at=1.0, tool="browser", blob=name))
    (trajectory,) = read(path)
    assert blob(path, trajectory.snapshots["browser"]) == b"state" * 10_000
    with pytest.raises(JournalError, match="has no bytes 'x'"):
        blob(path, "x")
    changed(path, "UPDATE blobs SET data = x'00' WHERE sha256 = ?", other)
    said: list[str] = []
    with pytest.raises(JournalError, match=f"has no bytes '{other}'"):
        blob(path, other, said.append)
    assert said == [f"{path}: the bytes '{other}' are left out: they are not what was written"]
    overwritten(path, "t", 1, b"")
    with Journal(path, append=True):
        pass
    assert blob(path, name) == b"state" * 10_000, "what is written anew has the bytes, too"


@pytest.mark.parametrize(
    ("what", "told"), [("full", "disk is full; free space, then `fsm-rollout resume`"), ("deleted", "was deleted")]
)
def test_a_journal_that_cannot_go_on_says_what_to_do(what: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    if what == "full":
        journal._connection.execute("PRAGMA max_page_count = 1")
    else:
        path.unlink()
    for number in range(10):
        journal.append(f"g/{number}", prompted(f"g/{number}", extra={"long": "x" * 10_000}))
    with pytest.raises(JournalError, match=told):
        journal.close()
