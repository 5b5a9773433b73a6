"""Prompts that come while their run is under way.

Invariant: a run over a queue ends when the queue is closed and every prompt that was put into it has come back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from fsm_rollout.trajectory.prompt import Prompt


class PromptQueue(Iterator[Prompt]):
    """What a run takes its prompts from, one after the other. All methods are called on the run's event loop."""

    def __init__(self) -> None:
        self._prompts: deque[Prompt] = deque()
        self._closed = False
        self.on_change: Callable[[], object] = lambda: None
        """Called when there is something to take, or never will be again."""

    def put(self, prompt: Prompt) -> None:
        """Let the run begin one more prompt."""
        self._prompts.append(prompt)
        self.on_change()

    def close(self) -> None:
        """Take no more."""
        self._closed = True
        self.on_change()

    @property
    def ready(self) -> bool:
        """Whether :meth:`__next__` has an answer: a prompt, or that there are no more."""
        return bool(self._prompts) or self._closed

    def __next__(self) -> Prompt:
        """Return the next one. With none left, the run has come to the end of its prompts."""
        if not self._prompts:
            raise StopIteration
        return self._prompts.popleft()
