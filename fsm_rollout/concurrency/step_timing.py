"""Steps of a coroutine: what it does between two awaits, while everything else on its event loop waits.

Invariant: a watched coroutine does what it does unwatched; it is only timed.

A blocked event loop is noticed in two places. This module times the steps of users' code wherever it runs, and
interrupts nothing: in a run a slow step is logged, in a conformance check (which counts CPU seconds) it is a failure.
In simulated runs, :mod:`fsm_rollout.testing.simulation.blocked_loop` also refuses calls that wait and interrupts steps
that do not end.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from functools import partial
from time import monotonic
from types import coroutine
from typing import Any, TypeVar

T = TypeVar("T")

BLOCKING_SECONDS = 2.0  # a step longer than this blocks its event loop


@coroutine
def watch_steps(
    work: Coroutine[Any, Any, T],
    blocked: Callable[[float], object],
    *,
    seconds: float = BLOCKING_SECONDS,
    clock: Callable[[], float] | None = None,
    waits: Callable[[], object] | None = None,
) -> Generator[Any, Any, T]:
    """Await ``work``; call ``blocked`` with the seconds of each step that was longer than ``seconds``.

    ``clock`` counts them, by default those that pass; ``waits`` is called before each wait.
    """
    step: Callable[[], Any] = partial(work.send, None)
    now = clock or monotonic
    while True:
        began = now()
        try:
            awaited = step()
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            if (took := now() - began) > seconds:
                blocked(took)
        if waits is not None:
            waits()
        try:
            step = partial(work.send, (yield awaited))
        except BaseException as error:
            step = partial(work.throw, error)
