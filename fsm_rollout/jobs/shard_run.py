"""A run of a driver's, in one of its shards: the groups that it was leased, from their first event until they go back.

Invariant: what is said in one pass of the event loop travels as one message of its kind; rows are made here, of all
groups that have ended in one pass, and travel packed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from fsm_rollout.agent.graph import POLICY
from fsm_rollout.batch.part import part_of, part_to_bytes
from fsm_rollout.errors import ConfigError
from fsm_rollout.rollout import Rollout
from fsm_rollout.scheduler.group import Group, log_failures
from fsm_rollout.scheduler.leased_group import LeasedGroup
from fsm_rollout.scheduler.link import Link
from fsm_rollout.scheduler.run_counts import RunCounts
from fsm_rollout.scheduler.run_state import PromptQueue, Watch
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.scheduler.staleness import trained_versions
from fsm_rollout.tools.tool_messages import clean
from fsm_rollout.trajectory.event_bytes import decode, encode, pictures_in
from fsm_rollout.trajectory.events import AnyEvent, Prompted, Resumed
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.trajectory import Trajectory

logger = logging.getLogger(__name__)

PackedPicture = tuple[bytes, str, int, int]
TELL_EVERY = 0.25  # seconds between two messages that say how far it is


class ShardHost(Protocol):
    """Where a run is: what all runs of a shard have in common."""

    link: Link
    rollout: Rollout
    events: dict[str, list[bytes]]
    """The events of trajectories that are to come back with their groups."""
    runs: dict[int, ShardRun]


class LeaseQueue(PromptQueue):
    """The prompts that were leased and have not begun."""

    def __init__(self, begins: Callable[[str], None], attached: Callable[[], None]) -> None:
        self._on_change: Callable[[], object] = lambda: None
        self._begins, self._attached, self._is_made = begins, attached, False
        super().__init__()
        self._is_made = True

    @property
    def on_change(self) -> Callable[[], object]:
        """What a run that takes its prompts here is told by; setting it says that the run is under way."""
        return self._on_change

    @on_change.setter
    def on_change(self, on_change: Callable[[], object]) -> None:
        before, self._on_change = self._on_change, on_change
        if self._is_made and before is not on_change:
            self._attached()

    def __next__(self) -> Prompt:
        """Return the next one, which begins."""
        prompt = super().__next__()
        self._begins(str(prompt.prompt_id))
        return prompt

    def take_back(self, most: int) -> list[str]:
        """Give up the last ones, and return their ids."""
        return [str(self._prompts.pop().prompt_id) for _ in range(min(most, len(self._prompts)))]


class TellingWatch(Watch):
    """Tells what has failed; the driver, who hears it of all shards, says when that is too much."""

    def __init__(self, run: ShardRun, failures: Any) -> None:
        super().__init__(failures)
        self._shard_run = run

    def note(self, trajectory: Trajectory) -> None:
        """See there."""
        failure = None if trajectory.failure is None else str(trajectory.failure)
        end = trajectory.trajectory_id, failure, trajectory.stop_reason, trajectory.detail
        self._shard_run.tell("attempts", end)

    def judged(self, scored: int, errors: Sequence[str]) -> None:
        """See there."""
        self._shard_run.tell("judged", (scored, list(errors)))


@dataclass(eq=False)
class ShardRun:
    """A run of the driver's, here."""

    host: ShardHost
    number: int
    scheduler: Scheduler
    asked: Mapping[str, Any]
    queue: LeaseQueue = field(init=False)
    task: asyncio.Task[None] | None = None
    finished: list[Group] = field(default_factory=list)  # in this pass of the loop
    given_back: dict[str, Group] = field(default_factory=dict)
    outbox: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    under_way: bool = False  # whether the scheduler has begun it
    to_take_up: list[list[AnyEvent]] = field(default_factory=list)  # what goes on once it has
    ending: bool = False
    begun: bool = False  # whether its task has: one that is cancelled before its first step would say nothing any more
    cut: bool = False  # whether it is to end without having begun
    failure: Exception | None = None  # of what came back

    def __post_init__(self) -> None:
        self.queue = LeaseQueue(lambda group_id: self.tell("begun", group_id), self._attached)

    def _attached(self) -> None:
        self.under_way = True
        if self.to_take_up:
            self.scheduler.take_up(self.to_take_up)
        if self.ending:
            self.end(keep=True)

    async def run(self) -> None:
        """Run what is leased, until the driver ends it."""
        scheduler, asked, error = self.scheduler, self.asked, None
        self.begun = True
        scheduler.starter.run_number = asked["run_number"] - 1
        scheduler.marks = False  # the driver says what was delivered
        watch = TellingWatch(self, scheduler.failures)
        try:
            if self.cut:
                raise asyncio.CancelledError
            listens = self.host.rollout._listens_to(scheduler, run_id=asked["run_id"], times=self._timed)
            listens = listens if asked["run_id"] else None
            stream = scheduler.run(self.queue, asked["n"], step=asked["step"], listens=listens, watch=watch)
            async with aclosing(stream) as groups:
                async for group in groups:
                    self._finished(group)
        except asyncio.CancelledError:
            pass
        except Exception as raised:  # it is the driver's
            error = raised
        self._flush()
        error = error or self.failure
        log_failures(list(self.given_back.values()))
        carried = [] if error is not None else [group.group_id for group in scheduler.carried]
        journal = scheduler.recorder.journal
        if journal is not None:
            journal.flush()
        if asked["histories"]:  # another run may have trajectories of the same names
            kept = {t.trajectory_id for group in scheduler.carried for t in (*group.all, *group.discarded)}
            for name in self.host.events.keys() - kept:
                del self.host.events[name]
        self.send("ended", None if error is None else packed_error(error), carried,
                  self.host.rollout.engine_stats(), scheduler.loop_lag().get("run", {}))  # fmt: skip
        self.host.runs.pop(self.number, None)
        # Once that has gone out: a run is a cycle, and what it holds would stay until the collector looks.
        asyncio.get_running_loop().call_soon(self.given_back.clear)

    def _timed(self, times: Mapping[int | None, Any]) -> None:
        self.send("times", times)

    def send(self, kind: str, *parts: Any) -> None:
        """Say something of this run."""
        self.host.link.send(kind, self.number, *parts)

    def tell(self, kind: str, what: Any) -> None:
        """Say something with all that is said in this pass of the loop."""
        if not self.outbox and not self.finished:
            asyncio.get_running_loop().call_soon(self._flush)
        self.outbox[kind].append(what)

    def _finished(self, group: Group) -> None:
        if not self.outbox and not self.finished:
            asyncio.get_running_loop().call_soon(self._flush)
        self.finished.append(group)
        self.given_back[group.group_id] = group

    def _flush(self) -> None:
        for kind, said in self.outbox.items():
            self.send(kind, said)
        self.outbox.clear()
        groups, self.finished = self.finished, []
        if groups:
            try:
                self._give_back(groups)
            except Exception as error:  # rows that cannot be made, say
                self.failure = error
                if self.task is not None:
                    self.task.cancel()

    def _give_back(self, groups: Sequence[Group]) -> None:
        known: dict[str, Any] = {"state_names": self.host.rollout.state_names}
        known["processor"] = self.host.rollout.engines[POLICY].facts.processor
        part = part_to_bytes(part_of(groups, **known, **self.asked["batch"]))
        headers, filtered = [], self.scheduler.scoring.group_filter
        for group in groups:
            versions = [] if self.scheduler.staleness.most is None else trained_versions(group.all)
            scores = list(filtered.last_scores) if filtered is not None else []
            kept = self.host.events if self.asked["histories"] else None
            headers.append(said_of(group, kept, min(versions, default=None), scores))
        if (journal := self.scheduler.recorder.journal) is not None:
            journal.persist()  # what the driver has delivered is whole in it, should this process die now
        self.send("groups", headers, part)

    # -- what the driver says -----------------------------------------------------------------------------------------

    def lease(self, group_id: str, prompt: Prompt, histories: Sequence[Sequence[bytes]]) -> None:
        """Take a group: one that is new, or one that goes on."""
        if histories:
            events = [list(map(decode, history)) for history in histories]
            journal = self.scheduler.recorder.journal
            for history, packed in zip(events, histories, strict=True):
                assert isinstance(history[0], Prompted)
                name = history[0].trajectory_id
                # What the journal does not have yet is recorded as it is taken up, and so heard of again.
                self.host.events[name] = list(packed) if journal is not None and name in journal else []
            if self.under_way:
                self.scheduler.take_up(events)
            else:
                self.to_take_up += events
            self.tell("begun", group_id)
        else:
            named = prompt.model_copy(update={"prompt_id": group_id})
            try:
                self.scheduler.check([named])
            except ConfigError as error:
                self.send("refused", group_id, packed_error(error))
            else:
                self.queue.put(named)

    def give_back(self, most: int) -> None:
        """Return groups that have not begun."""
        self.send("returned", self.queue.take_back(most))

    def renew(self, group_id: str) -> None:
        """Let a group that was given back run again, where it is too old by now."""
        group = self.given_back.get(group_id)
        if group is not None:
            self.scheduler.take_back(group)

    def end(self, keep: bool) -> None:
        """Come to the end: set aside what runs, or cut it off."""
        if keep and not self.under_way:
            self.ending = True
        elif keep:
            self.queue.take_back(2**31)
            self.scheduler.set_aside()
            self.queue.close()
        elif not self.begun:
            self.cut = True
        elif self.task is not None:
            self.task.cancel()


def said_of(
    group: Group, kept: Mapping[str, list[bytes]] | None, oldest: int | None = None, scores: Sequence[float | None] = ()
) -> tuple[Any, ...]:
    """Return what is said of a group with its rows, as plain data (:meth:`LeasedGroup.came_back`).

    Args:
        group: it has ended, or is dropped.
        kept: the events of trajectories; ``None``: nobody looks at them.
        oldest: the oldest weights among its trained tokens.
        scores: those that the group filter saw.
    """
    kinds: Sequence[Sequence[list[bytes]]] = []
    if kept is not None and isinstance(group, LeasedGroup):
        kinds = group.packed
    elif kept is not None:
        kinds = [
            [kept.get(trajectory.trajectory_id, []) for trajectory in trajectories]
            for trajectories in (group.trajectories, group.children, group.discarded)
        ]
    pictures = packed_pictures(event for kind in kinds for history in kind for event in history)
    reason = None if group.drop_reason is None else str(group.drop_reason)
    return group.group_id, reason, group.ended, group.reward_errors, oldest, scores, kinds, pictures


def packed_pictures(packed: Iterable[bytes]) -> list[PackedPicture]:
    """Return the pictures that packed prompts or events name."""
    found = {picture.sha256: picture for each in packed for picture in pictures_in(each)}
    return [(picture.data, picture.mime, picture.width, picture.height) for picture in found.values()]


class ShardCounts(RunCounts):
    """Says now and then how far the trajectories of a run are, while there are any."""

    def __init__(self, link: Link, number: int) -> None:
        super().__init__()
        self._link, self._number = link, number
        self._tells = False

    def _began(self, trajectory: Trajectory, event: Prompted | Resumed) -> None:
        super()._began(trajectory, event)
        if not self._tells:
            self._tells = True
            asyncio.get_running_loop().call_later(TELL_EVERY, self._tell)

    def _tell(self) -> None:
        self._link.send("progress", self._number, dict(self.states), len(self.ended), self.tokens)
        self._tells = bool(self.open or self.sub_agents)
        if self._tells:
            asyncio.get_running_loop().call_later(TELL_EVERY, self._tell)


class KeptEvents:
    """Listens, and keeps events by trajectory."""

    def __init__(self, events: dict[str, list[bytes]]) -> None:
        self._events = events

    def __call__(self, trajectory: Trajectory, event: AnyEvent) -> None:
        """Keep an event."""
        self._events.setdefault(trajectory.trajectory_id, []).append(encode(event))


def packed_error(error: BaseException) -> tuple[str, list[tuple[Any, ...]], str]:
    """Return an error as plain data."""
    problems = error.problems if isinstance(error, ConfigError) else ()
    listed = [(problem.message, problem.file and str(problem.file), problem.line, problem.rule) for problem in problems]
    return type(error).__name__, listed, clean(str(error))
