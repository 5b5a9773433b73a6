"""Journals that something has damaged: what stood there is lost and said, all else is read, and a run goes on."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsm_rollout import __version__
from fsm_rollout.trajectory.event_bytes import encode, pack
from fsm_rollout.trajectory.events import AnyEvent, Ended, LimitCharged, MessagesAppended, Resumed
from fsm_rollout.trajectory.journal import Journal, blob, events, histories, metadata, read, trajectory_ids, writer
from fsm_rollout.trajectory.journal.log import damage_of
from fsm_rollout.trajectory.journal.reader import delivered
from fsm_rollout.trajectory.journal.salvage import _Pages, _rows
from fsm_rollout.trajectory.journal.schema import PAGE, checksum
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.cases import table
from tests.events import changed, overwritten, prompted, several, written

ALIEN = pack([encode(prompted("x"))]), pack([encode(LimitCharged(at=1.0, limit="x"))])
VALUES = (
    st.none() | st.integers(-(2**63), 2**63 - 1) | st.sampled_from([0, 1, -1, 127, 128, -129, 2**15, -(2**23), 2**47])
    | st.floats(allow_nan=False) | st.text(max_size=9)
    | st.builds(bytes, st.integers(0, 90) | st.integers(PAGE - 60, PAGE + 60) | st.integers(2 * PAGE, 5 * PAGE))
)  # fmt: skip
OF = "WHERE trajectory_id = '7/0' AND seq ="


@pytest.mark.parametrize(
    ("rounds", "statement", "values", "kept", "says"),
    [
        *((1, f"UPDATE events SET payload = ? {OF} {seq}", [payload], seq, f"event {seq} of trajectory 7/0 is damaged")
          for seq in (0, 4, 9) for payload in (b"\x00", *ALIEN)),
        (3, f"UPDATE events SET payload = x'00' {OF} 3", [], 3, "event 3 of trajectory 7/0 is damaged"),
        (1, f"UPDATE events SET seq = -92, payload = x'8165' {OF} 9", [], 9, "as its place is damaged (-92)"),
        (1, f"UPDATE events SET seq = -9000000000 {OF} 9", [], 9, "as its place is damaged (-9000000000)"),
        (1, f"DELETE FROM events {OF} 4", [], 4, "event 5 of trajectory 7/0 is damaged (those before it are gone)"),
        (1, f"UPDATE events SET ended = 1 {OF} 9", [], 9, "event 9 of trajectory 7/0 is damaged"),
        (1, f"UPDATE events SET trajectory_id = '7/1' {OF} 9", [], 9, "event 9 of trajectory 7/1 is damaged"),
        (1, f"DELETE FROM events {OF} 9", [], 9, ""),
    ],
)  # fmt: skip
def test_what_is_damaged_costs_its_trajectory_the_rest_and_nothing_else(
    tmp_path: Path, rounds: int, statement: str, values: list[bytes], kept: int, says: str
) -> None:
    path = tmp_path / "j.sqlite"
    whole = several(path, rounds=rounds)
    changed(path, statement, *values)
    said: list[str] = []
    found = {history[0].trajectory_id: history for history in histories(path, report=said.append)}  # type: ignore[union-attr]
    expected = whole | {"7/0": whole["7/0"][:kept]}
    assert found == {name: history for name, history in expected.items() if history}
    *first, last = said
    assert len(first) == bool(says)
    assert says in "".join(first)
    assert f"{10 - kept} of the 200 events that were written are missing" in last
    assert [t.trajectory_id for t in read(path, said.append)] == list(found)
    with Journal(path, append=True) as journal:
        journal.append("7/0", LimitCharged(at=9.0, limit="new") if kept else prompted("7/0"))
    assert len(events(path, "7/0", pytest.fail)) == kept + 1


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
        connection.execute(update, (payload, checksum("7/0", 4, 0, payload)))
    said: list[str] = []
    found = {history[0].trajectory_id: history for history in histories(path, report=said.append)}  # type: ignore[union-attr]
    assert found == {**whole, "7/0": whole["7/0"][:5]}, "what stands before it in its row is read"
    assert "event 5 of trajectory 7/0" in said[0]
    assert says in said[0]


def test_what_was_read_before_the_damage_was_met_is_not_missing(tmp_path: Path) -> None:
    """SQLite reads up to a page that is overwritten; the rest is found in the pages."""
    long = {"note": "x" * 2000}
    path = written(tmp_path / "j.sqlite", *([prompted(f"{number}/0", extra=long)] for number in range(100)))
    data = bytearray(path.read_bytes())
    last = max(place for place in range(0, len(data), PAGE) if data[place] == 0x0D)  # of a table's rows
    data[last : last + PAGE] = bytes(PAGE)
    path.write_bytes(data)
    said: list[str] = []
    found = list(read(path, said.append))
    assert 50 < len(found) < 100
    assert f"{100 - len(found)} of the 100 events that were written are missing" in said[-1]


def test_a_table_that_only_an_index_still_answers_for_is_made_anew(tmp_path: Path) -> None:
    """The names are in an index of their own; the first to read the table would be the run that goes on."""
    path = tmp_path / "j.sqlite"
    whole = several(path)
    with Journal(path, append=True) as journal:
        journal.keep(b"a picture")
    with closing(sqlite3.connect(path)) as connection:
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'blobs'").fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    data = bytearray(path.read_bytes())
    data[(page - 1) * size] = 7  # no kind of page
    path.write_bytes(data)
    with Journal(path, append=True) as journal:
        assert "7/0" in journal
        journal.append("new/0", prompted("new/0"))
        name = journal.keep(b"another")
    assert blob(path, name) == b"another"
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
    facts = {"run": "{}", "agents": {"a": "agent: a"}, "code_version": __version__, "run_id": journal.run_id}
    assert metadata(path) == facts | {"events": 186}
    assert delivered(path) == dict.fromkeys(list(whole)[:10], True)
    assert trajectory_ids(path) == [*(name for name in whole if name != "3/0"), "3/0"], "in the order of the run"


def test_facts_of_the_run_that_nobody_writes_are_left_out_and_said(tmp_path: Path) -> None:
    """Their sums are right: whoever made them knew how."""
    path = tmp_path / "j.sqlite"
    several(path)
    known = metadata(path)
    half = '{"a": {"\\ud800": 1}}'
    for value, why in (
        ("{", "Expecting"), ("7", "Expected `object`"), ("[" * 10_000, "maximum recursion"), (half, "surrogates"),
    ):  # fmt: skip
        changed(path, "UPDATE run SET value = ?, crc = ? WHERE key = 'agents'", value, checksum("agents", value))
        said: list[str] = []
        assert metadata(path, said.append) == {key: fact for key, fact in known.items() if key != "agents"}
        assert len(said) == 1
        assert "of its run's 'agents' cannot be read" in said[0]
        assert why in said[0]


def test_a_damaged_fact_is_said_once_and_written_anew_by_who_knows_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "j.sqlite"
    several(path)
    changed(path, "UPDATE run SET value = replace(value, 'agent: a', 'agent: b') WHERE key = 'agents'")
    for _ in range(3):
        assert "agents" not in metadata(path)
    (said,) = caplog.messages
    assert "of its run's 'agents' is left out" in said
    with Journal(path, append=True) as journal:
        journal.describe({"agents": {"a": "agent: a"}})
    found: list[str] = []
    assert metadata(path, found.append)["agents"] == {"a": "agent: a"}
    assert found == []
    assert len(list(read(path))) == 20


# -- one byte that was overwritten ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statement", "says"), table("trajectory")["what is not what was written is said whatever it is"]
)
def test_what_is_not_what_was_written_is_said_whatever_it_is(tmp_path: Path, statement: str, says: str) -> None:
    path = tmp_path / "j.sqlite"
    several(path)
    changed(path, f"{'UPDATE' if ' SET ' in statement else 'DELETE FROM'} {statement}")
    said: list[str] = []
    metadata(path, said.append)
    list(histories(path, report=said.append))
    delivered(path, said.append)
    assert says in "".join(said)


def test_a_group_counts_as_delivered_only_by_a_row_that_was_written(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    with Journal(path) as journal:
        for name in ("a", "b"):
            for event in (prompted(name), Ended(at=1.0, stop_reason="answered")):
                journal.append(name, event)
            journal.delivered(name)
    assert list(histories(path, unfinished=True)) == []
    changed(path, "UPDATE delivered SET crc = crc + 1 WHERE group_id = 'b'")
    assert [history[0].trajectory_id for history in histories(path, unfinished=True)] == ["b"]  # type: ignore[union-attr]


@settings(max_examples=min(20, settings().max_examples))  # each writes a file
@given(
    rows=st.dictionaries(st.integers(0, 2**63 - 1) | st.integers(0, 300), st.tuples(VALUES, VALUES, VALUES), max_size=9)
)
def test_rows_are_found_as_sqlite_reads_them(
    rows: dict[int, tuple[object, ...]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("table") / "t.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.executescript(f"PRAGMA page_size = {PAGE}; CREATE TABLE t (a, b, c)")
        for rowid, row in rows.items():
            connection.execute("INSERT INTO t (rowid, a, b, c) VALUES (?, ?, ?, ?)", (rowid, *row))
        expected = connection.execute("SELECT rowid, a, b, c FROM t ORDER BY rowid").fetchall()
    found = sorted((rowid, *row) for rowid, row in _rows(_Pages(path)) if len(row) == 3)
    assert [*map(repr, found)] == [*map(repr, expected)]


@pytest.fixture
def killed(tmp_path: Path) -> tuple[Path, dict[str, list[AnyEvent]]]:
    """What a killed run leaves: the file, a log beside it with most of the run, and nothing said of its end."""
    path, left = tmp_path / "j.sqlite", tmp_path / "left.sqlite"
    whole = {f"{number}/0": [prompted(f"{number}/0"), Ended(at=1.0, stop_reason="x" * 2000)] for number in range(31)}
    with Journal(path, interval=3600.0) as journal:
        for name, history in whole.items():
            for event in history:
                journal.append(name, event)
            journal.persist()
        left.write_bytes(path.read_bytes())
        left.with_name("left.sqlite-wal").write_bytes(path.with_name("j.sqlite-wal").read_bytes())
    return left, whole


def test_a_flipped_byte_in_the_log_costs_what_stood_there_and_is_said(
    killed: tuple[Path, dict[str, list[AnyEvent]]], caplog: pytest.LogCaptureFixture
) -> None:
    """SQLite reads a log up to there, and says nothing of what follows it."""
    path, whole = killed
    log = path.with_name("left.sqlite-wal")
    intact = log.read_bytes()
    assert {h[0].trajectory_id: h for h in histories(path, report=pytest.fail)} == whole  # type: ignore[union-attr]
    frames = len(intact) // (24 + PAGE)
    for place in (
        3,
        9,
        20,
        32 + 2,
        32 + 6,
        32 + 9,
        32 + 17,
        *(32 + (24 + PAGE) * n + 24 + PAGE - 50 for n in range(frames)),
    ):
        flipped = bytearray(intact)
        flipped[place] ^= 4
        log.write_bytes(flipped)
        said: list[str] = []
        found = {h[0].trajectory_id: h for h in histories(path, report=said.append)}  # type: ignore[union-attr]
        assert said, f"byte {place}"
        assert " pages in its log are not what was written); " in said[0]
        lost = whole.keys() - found.keys()
        assert len(lost) <= 1, f"byte {place} costs {lost}"
        assert all(found[name] == whole[name] for name in found)
    # It goes on with all that was found, and what was there is kept.
    with Journal(path, append=True) as journal:
        assert sum(name in journal for name in whole) == len(found)
    assert "the journal goes on without what is damaged" in caplog.text
    assert path.with_name("left.damaged.sqlite-wal").read_bytes() == flipped
    assert list(read(path, pytest.fail)) == [Trajectory.fold(history) for history in found.values()]


@pytest.mark.parametrize("start", [0, 32 + (24 + PAGE), 32 + (24 + PAGE) * 7, 32 + (24 + PAGE) * 12 - 2000])
def test_a_lost_block_of_the_log_costs_what_stood_there_and_is_said(
    killed: tuple[Path, dict[str, list[AnyEvent]]], start: int
) -> None:
    """Also one with the header of the log, or of a frame: nothing there says any more of which round it is."""
    path, whole = killed
    log = bytearray(path.with_name("left.sqlite-wal").read_bytes())
    log[start : start + 4096] = bytes(4096)
    path.with_name("left.sqlite-wal").write_bytes(log)
    said: list[str] = []
    found = {h[0].trajectory_id: h for h in histories(path, report=said.append)}  # type: ignore[union-attr]
    assert " pages in its log are not what was written); " in said[0]
    assert len(whole) - len(found) <= 2
    assert all(found[name] == whole[name] for name in found)


def test_a_log_that_ends_anywhere_is_that_of_a_killed_process(killed: tuple[Path, dict[str, list[AnyEvent]]]) -> None:
    path, whole = killed
    log = path.with_name("left.sqlite-wal")
    intact = log.read_bytes()
    lengths = []
    for end in range(0, len(intact), 4999):
        log.write_bytes(intact[:end])
        lengths.append(len(list(histories(path, report=pytest.fail))))
    assert lengths == sorted(lengths)
    assert lengths[0] == 0 < lengths[-1] < len(whole)


def test_what_is_left_of_an_earlier_round_of_the_log_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log is begun anew from its start, over what it held, when a reader has kept it from being emptied."""
    monkeypatch.setattr(writer, "LOG_BYTES", 1 << 40)
    path = tmp_path / "j.sqlite"
    log = path.with_name("j.sqlite-wal")
    with Journal(path, interval=3600.0) as journal:
        journal.append("t", prompted("t"))
        for number in range(20):
            journal.append("t", LimitCharged(at=1.0, limit=f"{number}" * PAGE))
            journal.persist()
        size = log.stat().st_size
        changed(path, "PRAGMA wal_checkpoint(PASSIVE)")
        for number in range(3):
            journal.append("t", LimitCharged(at=2.0, limit=f"last {number}"))
            journal.persist()
        assert log.stat().st_size == size, "what is left stands behind what is new"
        assert damage_of(path) is None
        intact = log.read_bytes()
        frames = [at for at in range(32, size, 24 + PAGE) if intact[at + 8 : at + 16] == intact[16:24]]
        copy = tmp_path / "copy.sqlite"
        for at in frames:
            torn = bytearray(intact)
            torn[at + 24 + PAGE - 9] ^= 1  # the last: as if a kill had come before this byte was written
            copy.with_name("copy.sqlite-wal").write_bytes(torn)
            assert (damage_of(copy) is None) == (at == frames[-1])
        journal._move_log()
        assert log.stat().st_size == 0
