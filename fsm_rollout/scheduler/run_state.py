"""One run of a scheduler: what was asked for, how far it is, where its groups are, and whether too much has failed.

Invariant: whoever changes what others wait for sets ``changed``, so nothing is asked for again and again.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from itertools import accumulate, islice
from pathlib import Path
from typing import Any
from weakref import WeakSet

from fsm_rollout.errors import ConfigError, RunStopped, TargetNotReached, check_at_least
from fsm_rollout.scheduler.failure_policy import Failures, is_the_policys
from fsm_rollout.scheduler.group import Group, GroupState
from fsm_rollout.scheduler.tail import Tail
from fsm_rollout.states.active_trajectory import Stop
from fsm_rollout.trajectory.event_bytes import comparable
from fsm_rollout.trajectory.journal import Journal
from fsm_rollout.trajectory.prompt import Prompt, as_prompt
from fsm_rollout.trajectory.trajectory import Trajectory


def one_by_one(
    prompts: Iterable[Prompt | Mapping[str, object] | str], check: Callable[[Sequence[Prompt]], None]
) -> Iterator[Prompt]:
    """Yield prompts as they are asked for, each checked then."""
    for index, item in enumerate(prompts):
        prompt = as_prompt(item, index, Path())
        check([prompt])
        yield prompt


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


class GroupTable(dict[str, Group]):
    """The groups of a scheduler that have not been delivered, by id, with a view of them by state.

    Invariant: each group stands in the view of its ``state``, behind those that came to that state before it.
    """

    def __init__(self, version: Callable[[], int] | None = None) -> None:
        super().__init__()
        self.version = version  # returns that of the policy's weights; `None`: groups need not have theirs
        self.by_state: dict[GroupState, dict[str, Group]] = {state: {} for state in GroupState}
        """The groups in each state, in the order in which they came to it: only read it."""
        self.delivered: WeakSet[Group] = WeakSet()  # those that the caller still holds
        self.opened = 0  # how many have been opened so far
        self.named = 0  # how many prompts have been taken, in all runs: their groups are called by their places
        self.earlier: frozenset[str] = frozenset()  # the ids of the groups before the state that was loaded

    @property
    def under_way(self) -> list[Group]:
        """The groups that run or are scored."""
        return [*self.by_state[GroupState.RUNNING].values(), *self.by_state[GroupState.SCORING].values()]

    def put(self, group: Group, state: GroupState) -> None:
        """Let a group, which may be new here, be in a state: behind the others that are."""
        if state is GroupState.RUNNING and group.place < 0:
            group.place, self.opened = self.opened, self.opened + 1
            if group.version < 0 and self.version is not None:
                group.version = self.version()
        self.by_state[group.state].pop(group.group_id, None)
        self[group.group_id] = self.by_state[state][group.group_id] = group
        group.state = state

    def put_first(self, groups: list[Group], state: GroupState) -> None:
        """Let groups be in a state before all others that are, in their order."""
        for group in groups:
            self.put(group, state)
        first = {group.group_id: group for group in groups}
        self.by_state[state] = first | self.by_state[state]

    def take(self, group: Group) -> None:
        """Take a group out."""
        del self[group.group_id], self.by_state[group.state][group.group_id]

    def deliver(self, group: Group) -> None:
        """Take a group out that the caller has from now on; what runs it is let go."""
        self.take(group)
        group.state = GroupState.DELIVERED
        group.active.clear()
        self.delivered.add(group)


class Watch:
    """What has failed in a run so far: says when it is to stop."""

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        window = 0 if failures.breaker is None else failures.breaker.window
        # The latest attempts that have ended, as many as the breaker looks at: those that failed by no fault of the
        # policy's, and `None` for others.
        self._latest: deque[Trajectory | None] = deque(maxlen=window)
        # Why the reward failed, of the latest trajectories that it was asked about.
        self._judged: deque[str | None] = deque(maxlen=window)

    def note(self, trajectory: Trajectory) -> RunStopped | None:
        """Take in an attempt that has ended, well or not; return why the run is to stop, if it is."""
        if (failure := trajectory.failure) is None:
            self._latest.append(None)
        else:
            self._latest.append(None if is_the_policys(trajectory) else trajectory)
            if self._failures.of(failure).do == "stop":
                return RunStopped(
                    f"the run stops, as `failures.{failure}` says: trajectory {trajectory.trajectory_id} ended as "
                    f"{trajectory.stop_reason} ({_first_line(trajectory)})"
                )
        if not self._breaks(self._latest):
            return None
        failed = [latest for latest in self._latest if latest is not None]
        return RunStopped(
            f"the run stops: {len(failed)} of the latest {len(self._latest)} trajectories failed through no fault of "
            f"the policy's: {_told(failed)} (failures.breaker)"
        )

    def judged(self, scored: int, errors: Sequence[str]) -> RunStopped | None:
        """Take in how many scores a reward has given and why others failed; return why the run is to stop, if it is."""
        self._judged += [*(None for _ in range(scored)), *errors]
        if not self._breaks(self._judged):
            return None
        failed = [error for error in self._judged if error is not None]
        return RunStopped(
            f"the run stops: the reward failed for {len(failed)} of the latest {len(self._judged)} trajectories; the "
            f"first of them: {failed[0]} (failures.breaker)"
        )

    def _breaks(self, latest: deque[Any]) -> bool:
        """Whether too many of the latest have failed; others are ``None``."""
        breaker = self._failures.breaker
        if breaker is None or len(latest) < breaker.window:
            return False
        return len(latest) - latest.count(None) >= breaker.share * breaker.window


def _told(failed: Iterable[Trajectory]) -> str:
    """Return how many failed in which way, and what the first of each said."""
    failed = list(failed)
    counts = Counter((trajectory.failure, trajectory.stop_reason) for trajectory in failed)
    first = {(trajectory.failure, trajectory.stop_reason): trajectory for trajectory in reversed(failed)}
    return "; ".join(
        f"{count} {reason} ({failure}: {_first_line(first[failure, reason])})"
        for (failure, reason), count in counts.most_common(3)
    )


def _first_line(trajectory: Trajectory) -> str:
    return (trajectory.detail or "no further detail").partition("\n")[0]


def check_numbers(n: int, target: int | None, over_sample: float, max_filtered: float | None) -> None:
    """Raise ConfigError for a number of a run that is too small."""
    check_at_least(1, "trajectory per prompt", "n", n)
    check_at_least(1, "group per group of the target", "over_sample", over_sample, int | float)
    if max_filtered is not None:
        check_at_least(0, "groups per group of the target", "max_filtered", max_filtered, int | float)
    if target is not None:
        check_at_least(1, "group", "target_groups", target)


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
    carried: frozenset[str]  # the groups that earlier runs carried over
    watch: Watch  # says when too much has failed
    journal: Journal | None
    cut_off: Stop  # how trajectories are stopped when the run is closed or fails: as the scheduler says
    tail: Tail  # says how many groups are open, and which of those that are done make a batch
    max_groups: float = math.inf  # at most so many groups are open, done or delivered (dropped ones do not count)
    most_filtered: float = math.inf  # at most so many groups may be turned down by the filter
    feeder: asyncio.Task[None] | None = None  # opens the groups and runs their samples
    feeding: bool = True  # whether the feeder has not come to its end
    failed: bool = False  # whether it has come to its end by an error, or was cancelled
    running: int = 0  # how many samples are under way
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
    # Set when something has changed that somebody may wait for.
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self, over_sample: float, max_filtered: float | None) -> None:
        check_numbers(self.n, self.target, over_sample, max_filtered)
        if self.target is not None:
            self.max_groups = self.tail.most_groups(self.target, over_sample)
            self.most_filtered = math.inf if max_filtered is None else self.target * max_filtered

    def change(self) -> Coroutine[object, object, bool]:
        """Return what is awaited until something changes."""
        self.changed.clear()
        return self.changed.wait()

    def counts_with(self, groups: Iterable[Group]) -> int:
        """Return how many groups count towards the target once these are delivered, too."""
        return len(self.counted) + sum(group.counts for group in groups)

    def not_reached(
        self, filter_name: str, groups: GroupTable, scores: Sequence[float | None]
    ) -> TargetNotReached | None:
        """Return the error of a run whose filter has turned down too much, the last group with these scores."""
        if self.filtered <= self.most_filtered:
            return None
        counted = self.counts_with(groups.by_state[GroupState.DONE].values())
        return TargetNotReached(
            f"the group filter '{filter_name}' has turned down {self.filtered:,} groups, and {counted:,} of the "
            f"{self.target:,} that were asked for are there (the last one's scores: {scores}); use other prompts, "
            "lower target_groups, or raise max_filtered (how many groups may be turned down for each of target_groups)"
        )

    def has_room(self, groups: GroupTable) -> bool:
        """Whether the next group may be opened: a target bounds how many are there at a time."""
        if self.target is None:
            return True
        under_way = len(groups.under_way)
        if self.tail.orders and not under_way:  # what is done may have to wait for this one
            return True
        return self.counts_with(groups.by_state[GroupState.DONE].values()) + under_way < self.max_groups

    def deliverable(self, groups: GroupTable) -> list[Group]:
        """Return the groups to deliver now: the next one; or, at the end, as many as the target takes, or all."""
        done: Collection[Group] = groups.by_state[GroupState.DONE].values()
        if done and self.target is not None and self.tail.orders:
            waiting = [group for group in groups.by_state[GroupState.WAITING].values() if group.version >= 0]
            lacks, version = self.target - len(self.counted), groups.version() if groups.version else 0
            done = self.tail.ready(done, [*groups.under_way, *waiting], self.target, lacks, version)
        if not self.deliver_at_end:
            return list(islice(done, 1))
        if self.target is not None:
            counted = list(accumulate(int(group.counts) for group in done))
            if self.target in counted:
                return list(islice(done, counted.index(self.target) + 1))
        return list(done) if self.exhausted and len(done) == len(groups) else []

    def next_prompt(self, groups: GroupTable) -> tuple[str, int, Prompt] | None:
        """Take the next prompt that has no group yet; return the id and the index of its group, and it, or ``None``.

        Raises:
            ConfigError: the run has no target, and two prompts of it have one id.
        """
        for prompt in self.prompts:
            index, groups.named = groups.named, groups.named + 1
            name = prompt.prompt_id or str(index)
            if name in self.prompt_ids and self.target is None:
                raise ConfigError(f"prompt id '{name}' is used twice; it names the group")
            self.prompt_ids.add(name)
            resumed = self.resumed.get(name)
            if resumed is not None and comparable(resumed.prompt.messages) == comparable(prompt.messages):
                self.resumed.pop(name).index = index
                continue
            journalled = () if self.journal is None else self.journal.groups
            group_id, epoch = name, 1
            while (
                group_id in groups or group_id in journalled or group_id in groups.earlier
            ):  # the next epoch's gets a number: ``7#2``
                epoch += 1
                group_id = f"{name}#{epoch}"
            self.prompt_ids.add(group_id)
            return group_id, index, prompt
        return None
