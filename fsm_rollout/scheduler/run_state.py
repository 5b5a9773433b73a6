"""One run of a scheduler: what was asked for, and how far it is; and the prompts that come while it is under way.

Invariant: whoever changes what others wait for sets ``changed``, so nothing is asked for again and again.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import InitVar, dataclass, field

from fsm_rollout.errors import RunStopped, TargetNotReached, check_at_least
from fsm_rollout.scheduler.failure_policy import Watch
from fsm_rollout.scheduler.group import Group
from fsm_rollout.states.active_trajectory import Stop
from fsm_rollout.trajectory.prompt import Prompt


class PromptQueue(Iterator[Prompt]):
    """What a run takes its prompts from where they come while it is under way; it ends when the queue is closed.

    All methods are called on the run's event loop.
    """

    def __init__(self) -> None:
        self._prompts: deque[Prompt] = deque()
        self._closed = False
        # Called when there is something to take, or never will be again.
        self.on_change: Callable[[], object] = lambda: None

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


@dataclass(slots=True, eq=False)
class RunState:
    """One call of :meth:`fsm_rollout.scheduler.scheduler.Scheduler.run`; the first arguments are its own.

    Raises:
        ConfigError: a number is too small.
    """

    prompts: Iterator[Prompt]
    n: int
    target: int | None
    over_sample: InitVar[float]
    max_filtered: InitVar[float | None]
    deliver_at_end: bool
    slots: asyncio.Semaphore
    carried: frozenset[str]  # the groups that earlier runs carried over
    watch: Watch  # counts what has failed in it, and says when that is too much
    max_groups: float = math.inf  # at most so many groups are open, done or delivered (dropped ones do not count)
    most_filtered: float = math.inf  # at most so many groups may be turned down by the filter
    feeder: asyncio.Task[None] = field(init=False)
    # Groups resumed in this run whose prompt has not been read yet.
    resumed: dict[str, Group] = field(default_factory=dict)
    prompt_ids: set[str] = field(default_factory=set)  # the ids of the prompts that have been read, and of their groups
    counted: set[str] = field(default_factory=set)  # the groups that were delivered and count
    filtered: int = 0  # how many groups the filter has turned down
    exhausted: bool = False  # whether there are no further prompts
    # The error that the run is to raise, because too much has failed or was turned down.
    stopped_by: RunStopped | TargetNotReached | None = None
    # How the run's end stops what still runs: set aside (`CARRIED`), cancelled or interrupted; `None` before. What
    # `Scheduler.stop` asks for is in `Scheduler.stopping`: the run goes on, and its groups come back.
    stop: Stop | None = None
    # Whether the caller takes no more groups: it has had the last one, or has closed the iterator.
    closing: bool = False
    scoring: set[asyncio.Task[None]] = field(default_factory=set)  # the tasks that score groups
    # Set when something has changed that `until` may wait for.
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self, over_sample: float, max_filtered: float | None) -> None:
        check_at_least(1, "trajectory per prompt", "n", self.n)
        check_at_least(1, "group per group of the target", "over_sample", over_sample, int | float)
        if max_filtered is not None:
            check_at_least(0, "groups per group of the target", "max_filtered", max_filtered, int | float)
        if self.target is not None:
            check_at_least(1, "group", "target_groups", self.target)
            self.max_groups = math.ceil(self.target * over_sample)
            self.most_filtered = math.inf if max_filtered is None else self.target * max_filtered

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until ``holds`` returns true; it is asked again whenever ``changed`` is set."""
        while not holds():
            self.changed.clear()
            await self.changed.wait()
