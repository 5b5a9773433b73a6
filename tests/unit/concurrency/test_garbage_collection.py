"""Garbage collection during a run: calmer, and afterwards as before."""

import gc
from collections.abc import Iterator
from weakref import ref

import pytest

from fsm_rollout.concurrency import garbage_collection
from fsm_rollout.concurrency.garbage_collection import OF_TRAJECTORY, YOUNG, calm_collection


@pytest.fixture(autouse=True)
def _no_other_block(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a run has left open that an interruption cut off."""
    monkeypatch.setattr(garbage_collection, "_calm", 0)
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    gc.unfreeze()  # of what such a run has frozen, some is freed at any time: its number would not stand still
    yield
    gc.set_threshold(*before)


class Node:
    def __init__(self) -> None:
        self.me = self


def test_what_lives_is_left_out_and_everything_is_as_before_afterwards() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    with calm_collection():
        assert gc.get_freeze_count() > 1000
        assert gc.get_threshold() == (max(YOUNG, before[0]), *before[1:])
        with calm_collection(1000):
            assert gc.get_threshold()[0] == YOUNG + 1000 * OF_TRAJECTORY
        assert gc.get_freeze_count() > 1000  # the outer block is still open
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, frozen)


def test_cycles_made_inside_are_still_freed() -> None:
    with calm_collection():
        gone = ref(Node())
        gc.collect()
        assert gone() is None


def test_a_collector_that_is_switched_off_stays_off() -> None:
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with calm_collection():
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)
