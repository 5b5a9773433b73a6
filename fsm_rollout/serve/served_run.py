"""A run that a trainer elsewhere has asked for, from its prompts to its groups.

Invariant: what comes over the wire changes a run once, however often it comes. A group is here from its end until the
trainer says that it has done with it; where rows may grow old, no further one is taken before that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from fsm_rollout.batch.part import joined_parts, part_of, part_to_bytes, parts_of
from fsm_rollout.jobs.shard_run import packed_error, said_of
from fsm_rollout.rollout import Rollout
from fsm_rollout.scheduler.group import Group, GroupState, log_failures
from fsm_rollout.scheduler.leased_group import LeasedGroup
from fsm_rollout.scheduler.run_state import GroupTable, PromptQueue
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.serve.standing import waiting
from fsm_rollout.serve.training_wire import Begin, Groups, packed_prompt, prompts_of
from fsm_rollout.trajectory.prompt import Prompt

MOST_WAITING = 64  # so many groups are taken from the scheduler before the trainer has done with them


class TrainerPrompts(PromptQueue):
    """The prompts of a run as they come from its trainer, each of which has its place among them."""

    def __init__(self, table: GroupTable, check: Callable[[list[Prompt]], None]) -> None:
        super().__init__()
        self._table, self._check = table, check
        self._ahead: deque[Prompt | None] = deque()  # `None`: it has a group
        self.received = 0
        self.wanted = False
        """Whether the run could begin one more."""
        self.on_wanted: Callable[[], object] = lambda: None

    def take(self, prompt: Prompt, *, has_group: bool) -> None:
        """Take in the next prompt."""
        self.received += 1
        self.wanted = False
        self._ahead.append(None if has_group else prompt)
        self.on_change()

    def close(self) -> None:
        """See there."""
        self.wanted = False
        super().close()

    @property
    def ready(self) -> bool:
        """See there; asked where a prompt is wanted."""
        while self._ahead and not self._prompts:
            if (prompt := self._ahead.popleft()) is None:
                self._table.named += 1
            else:
                self._prompts.append(prompt)
        if not (ready := super().ready) and not self.wanted:
            self.wanted = True
            self.on_wanted()
        return ready

    def __next__(self) -> Prompt:
        """Return the next one; ConfigError: it does not fit."""
        prompt = super().__next__()
        self._check([prompt])
        return prompt


class ServedRun:
    """A run that a trainer has asked for: its groups, until the trainer has done with them."""

    def __init__(self, question: Begin, scheduler: Scheduler, changed: Callable[[], None]) -> None:
        self.question, self.scheduler = question, scheduler
        self.key = question.client, question.run
        self.prompts = TrainerPrompts(scheduler.groups, scheduler.check)
        self.unacked: dict[str, Group] = {}
        """The groups that the trainer has not done with, in the order in which they ended."""
        self.order: list[str] = []
        """Those that are handed over since it was begun, or begun again."""
        self.places: Mapping[str, int] = {}
        """The indices of groups that went on, among the prompts."""
        self.has_group: Callable[[Prompt, int], bool] = lambda prompt, place: False
        self.error: Exception | None = None
        self.task: asyncio.Task[None] | None = None
        self.changed = asyncio.Event()
        self._on_end = changed
        self.prompts.on_wanted = self.changed.set
        # What is handed over must not be too old for the weights of that time.
        self._most = 1 if scheduler.staleness.most is not None else MOST_WAITING

    @property
    def ended(self) -> bool:
        """Whether it is over; groups of it may still wait."""
        return self.task is not None and self.task.done()

    def begin(self, stream: AsyncGenerator[Group, None]) -> None:
        """Begin."""
        self.task = asyncio.create_task(self._run(stream))

    async def _run(self, stream: AsyncGenerator[Group, None]) -> None:
        try:
            async with aclosing(stream) as groups:
                async for group in groups:
                    group.index = self.places.get(group.group_id, group.index)
                    self.unacked[group.group_id] = group
                    self.order.append(group.group_id)
                    self.changed.set()
                    while not self.question.at_end and len(self.unacked) >= self._most:
                        self.changed.clear()
                        await self.changed.wait()
            if self.question.at_end:
                log_failures(list(self.unacked.values()))
        except Exception as error:  # it is the trainer's
            self.error = error
        self._on_end()
        self.changed.set()

    def take_prompts(self, packed: Sequence[bytes], pictures: Sequence[Any], position: int, closed: bool) -> None:
        """Take in prompts of which the first is at a position; those that came before are known."""
        for prompt in prompts_of(packed[max(0, self.prompts.received - position) :], pictures):
            self.prompts.take(prompt, has_group=self.has_group(prompt, self.prompts.received))
        if closed and self.prompts.received == position + len(packed):
            self.prompts.close()

    def attach(self, held: Sequence[str]) -> None:
        """Hand over again what the trainer does not have."""
        self.order = [group_id for group_id in self.unacked if group_id not in held]

    async def end(self) -> None:
        """End it before its end; a run with a target keeps what nobody has had."""
        if self.task is not None and not self.task.done():
            self.task.cancel()
            await asyncio.wait({self.task})
        if self.question.target_groups is not None and self.question.evaluation is None:
            for group in self.unacked.values():
                self.scheduler.groups.put(group, GroupState.DONE)
        self.unacked.clear()

    def answer(self, at: int, rollout: Rollout, events: Mapping[str, list[bytes]]) -> Groups:
        """Return the groups from a place on, and how the run stands; ``events``: those of trajectories, as kept."""
        known = rollout._of_batches
        groups = [self.unacked[group_id] for group_id in self.order[at : at + MOST_WAITING]]
        answer = Groups(
            weight_version=rollout.weight_version, stats=rollout.engine_stats(), wanted=self.prompts.wanted,
            received=self.prompts.received,
        )  # fmt: skip
        if self.ended and at + len(groups) == len(self.order):
            answer.ended, answer.error = True, None if self.error is None else packed_error(self.error)
            if self.question.evaluation is None:
                answer.carried, answer.pictures = waiting(self.scheduler)
        if not groups:
            return answer
        if self.question.evaluation is None and rollout.journal is not None:
            rollout.journal.persist()  # what the trainer gets is whole in it, should this process die now
        # 1. Their rows.
        if isinstance(groups[0], LeasedGroup):
            order = [group.group_id for group in groups]
            part = joined_parts(parts_of(groups), order, known["state_names"], known["processor"])
        else:
            part = part_of(
                groups, state_names=known["state_names"], processor=known["processor"], **self.question.batch
            )
        answer.part = part_to_bytes(part)
        # 2. What is said of each, as shards say it.
        kept = events if self.question.histories and not self.question.at_end else None
        for group in groups:
            prompt = b"" if kept is None else packed_prompt(group.prompt)
            answer.groups.append((group.index, group.n, prompt, list(said_of(group, kept))))
        return answer
