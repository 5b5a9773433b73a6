"""Pictures in a journal: their bytes once, by their hash; what is read shows what was shown."""

import gc
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np

from fsm_rollout.trajectory import pictures
from fsm_rollout.trajectory.event_bytes import comparable, decode, encode
from fsm_rollout.trajectory.events import ContextOpened, MessagesAppended, PromptExtended
from fsm_rollout.trajectory.journal import Journal, read
from fsm_rollout.trajectory.pictures import StoredPicture, picture_of
from fsm_rollout.trajectory.tokens import MediaSpan, as_ids, collapsed
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.events import prompted
from tests.kit import new_objects

PAD = 7


def noise(seed: int) -> StoredPicture:
    return picture_of(np.random.default_rng(seed).integers(0, 255, (60, 60, 3), np.uint8))


def write_run(folder: Path, trajectories: int = 32) -> tuple[list[list[str]], int]:
    """Write trajectories that each show one picture twice and one of their own; return their hashes by trajectory."""
    shared, shown, size = noise(0), [], 0
    with Journal(folder / "journal.sqlite") as journal:
        for number in range(trajectories):
            own = noise(1 + number)
            first = {"role": "user", "content": [{"type": "image", "image": shared}, {"type": "text", "text": "?"}]}
            answer = {"role": "tool", "content": [{"type": "image", "image": own}, {"type": "image", "image": shared}]}
            events = [
                prompted(trajectory_id=f"{number}/0", messages=[first]),
                ContextOpened(
                    at=0.0, context="main", state="PENDING", messages=[first], ids=as_ids([1, PAD, PAD, PAD, 2]),
                    trained=True, engine="policy", media=[MediaSpan(1, 3, shared, PAD)],
                ),
                MessagesAppended(at=0.0, context="main", state="PENDING", messages=[answer]),
                PromptExtended(
                    at=0.0, context="main", state="PENDING", ids=as_ids([PAD, PAD, 3, PAD, PAD, PAD]),
                    media=[MediaSpan(0, 2, own, PAD), MediaSpan(3, 3, shared, PAD)],
                ),
            ]  # fmt: skip
            assert [decode(encode(event)) for event in events] == events
            for event in events:
                journal.append(f"{number}/0", event)
                journal.flush()  # a row each: a row is read whole or not at all
            shown.append([shared.sha256, own.sha256, shared.sha256])
            size += len(own.data)
    return shown, size + len(shared.data)


def stream_of(trajectory: Trajectory) -> tuple[list[str], list[tuple[int, int]], list[int]]:
    (stream,) = trajectory.streams
    places = [(span.start, span.length) for span in stream.media]
    return (
        [span.picture.sha256 for span in stream.media], places, collapsed(stream.tokens.ids, stream.media).tolist()
    )  # fmt: skip


def test_equal_pictures_are_kept_once_and_found_again(tmp_path: Path) -> None:
    with new_objects():
        shown, size = write_run(tmp_path)
        gc.collect()
    assert all(pictures.known(name) is None for names in shown for name in names), "nobody holds them any more"
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as connection:
        assert connection.execute("SELECT COUNT(*), SUM(LENGTH(data)) FROM blobs").fetchone() == (33, size)
    trajectories = list(read(tmp_path))
    for names, trajectory in zip(shown, trajectories, strict=True):
        assert stream_of(trajectory) == (names, [(1, 3), (5, 2), (8, 3)], [1, PAD, 2, PAD, 3, PAD])
        parts = [part for message in trajectory.messages for part in message["content"] if part["type"] == "image"]
        assert [part["image"].sha256 for part in parts] == names
        assert all(part["image"].image().size == (60, 60) for part in parts)


def test_a_picture_whose_bytes_are_gone_costs_what_showed_it(tmp_path: Path) -> None:
    with new_objects():
        shown, _ = write_run(tmp_path, trajectories=2)
        gc.collect()
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as connection, connection:
        connection.execute("UPDATE blobs SET data = x'00' WHERE sha256 = ?", (shown[1][1],))
    said: list[str] = []
    whole, cut = read(tmp_path, said.append)
    assert (len(whole.streams[0].media), len(cut.streams[0].media), len(cut.messages)) == (3, 1, 1)
    assert [shown[1][1][:12] in sentence for sentence in said] == [True, False], said


def test_messages_are_compared_by_what_they_show() -> None:
    shown = [[{"role": "user", "content": [{"type": "image", "image": picture}]}] for picture in (noise(0), noise(1))]
    assert comparable(shown[0]) == comparable(tuple(shown[0])) != comparable(shown[1])
