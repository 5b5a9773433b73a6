"""Memory that batches have in turn: nobody's is taken away, what is free is used again, and not too much is kept."""

import numpy as np
import pytest
import torch

from fsm_rollout.batch import memory
from fsm_rollout.batch.memory import LARGE, room

INT64 = np.dtype(np.int64)


@pytest.fixture(autouse=True)
def nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    memory._waiting.clear()


def large(rows: int = 16) -> np.ndarray:
    made, cleared = room((rows, LARGE // 64), INT64, filled=True)
    assert not cleared or not made.any()
    return made


@pytest.mark.parametrize(
    "hold",
    [
        lambda tensor: tensor,
        lambda tensor: tensor[3:5, ::2],
        lambda tensor: tensor.numpy()[2:],
        lambda tensor: tensor.view(torch.uint8).T,
        lambda tensor: np.asarray(tensor)[1][:7],
    ],
)
def test_memory_that_anything_refers_to_is_nobody_elses(hold) -> None:  # type: ignore[no-untyped-def]
    made = large()
    made.fill(7)
    held = hold(torch.from_numpy(made))
    before = np.array(held)
    del made
    others = [large() for _ in range(3)]
    for other in others:
        other.fill(-1)
    assert np.array_equal(np.asarray(held), before)
    address = np.asarray(held).ctypes.data
    del held
    again = large()
    assert again.ctypes.data <= address < again.ctypes.data + again.nbytes, "and then it is used again"


@pytest.mark.parametrize(
    ("rows", "filled", "cleared"),
    [(16, True, False), (9, True, False), (7, True, True), (17, True, True), (2, True, True), (16, False, True)],
)
def test_memory_is_used_again_for_what_fills_it(rows: int, filled: bool, cleared: bool) -> None:
    large().fill(7)
    made, said = room((rows, LARGE // 64), INT64, filled=filled)
    assert said is cleared
    assert (made == (0 if cleared else 7)).all()


def test_what_came_back_first_goes_when_too_much_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "KEPT", 3 * LARGE)
    made = [large() for _ in range(3)]  # 2 * LARGE each
    while made:
        last = made[0].ctypes.data
        del made[0]
    assert [waiting.nbytes for waiting in memory._waiting.values()] == [2 * LARGE]
    assert large().ctypes.data == last
