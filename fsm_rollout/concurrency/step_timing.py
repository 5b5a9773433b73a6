"""Steps of a coroutine: what it does between two awaits, while everything else on its event loop waits.

Invariant: a watched coroutine does what it does unwatched; it is only timed.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from functools import partial
from time import monotonic
from types import coroutine
from typing import Any, TypeVar

T = TypeVar("T")

BLOCKING_SECONDS = 2.0
"""A step longer than this blocks its event loop."""


@coroutine
def watch_steps(work: Coroutine[Any, Any, T], blocked: Callable[[float], None]) -> Generator[Any, Any, T]:
    """Await ``work``; call ``blocked`` with the seconds of each step that was longer than :data:`BLOCKING_SECONDS`."""
    step: Callable[[], Any] = partial(work.send, None)
    while True:
        began = monotonic()
        try:
            awaited = step()
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            if (seconds := monotonic() - began) > BLOCKING_SECONDS:
                blocked(seconds)
        try:
            step = partial(work.send, (yield awaited))
        except BaseException as error:
            step = partial(work.throw, error)
