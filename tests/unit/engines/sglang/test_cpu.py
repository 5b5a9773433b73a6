"""Which cores the processes of an SGLang on a CPU get."""

import os

import pytest

from fsm_rollout.engines.sglang.cpu import cores_of


@pytest.mark.parametrize(
    ("cores", "ranks", "threads", "expected"),
    [
        ({0, 1}, 2, 1, "0|1"),
        ({3, 5, 7, 9}, 2, 2, "3,5|7,9"),
        ({0, 1, 2}, 2, 2, "0,1|2,0"),  # too few: they share
        ({4}, 3, 2, "4|4|4"),
    ],
)
def test_each_rank_has_as_many_cores_as_threads(
    cores: set[int], ranks: int, threads: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    assert cores_of(ranks, threads) == expected
