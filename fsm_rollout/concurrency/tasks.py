"""Tasks that run beside what began them.

Invariant: a task is held here until it has ended, since an event loop itself holds its tasks by weak references.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Tasks(set[asyncio.Task[Any]]):
    """Those that have not ended."""

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin something on the running event loop."""
        task = asyncio.get_running_loop().create_task(work)
        self.add(task)
        task.add_done_callback(self.discard)
        return task
