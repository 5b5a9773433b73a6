"""How a trainer's last run stands, in a file beside the journal: all that is needed to go on in another process.

Invariant: the journal has the events and says what was delivered; the file has what follows from neither. A run that
goes on gives its groups the names, and its trajectories the seeds, that they would have had.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from fsm_rollout.files import written_whole
from fsm_rollout.jobs.shard_run import PackedPicture, packed_pictures
from fsm_rollout.rollout import Rollout
from fsm_rollout.scheduler.group import Group, GroupState
from fsm_rollout.scheduler.leased_group import LeasedGroup
from fsm_rollout.scheduler.leased_scheduler import LeasedScheduler
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.serve.pushed_weights import WeightRecord
from fsm_rollout.serve.training_wire import Begin, Waiting, packed_prompt, prompts_of
from fsm_rollout.trajectory.event_bytes import encode
from fsm_rollout.trajectory.events import AnyEvent, Prompted
from fsm_rollout.trajectory.journal import histories, metadata
from fsm_rollout.trajectory.journal.reader import delivered
from fsm_rollout.trajectory.prompt import Prompt

FILE = "trainer.msgpack"
DROPPED = "dropped group "  # how the journal's word for a group that was handed over as dropped begins


class Earlier(NamedTuple):
    """What is known of a run that began in a process before this one."""

    resume: Sequence[Sequence[AnyEvent]] = ()
    places: Mapping[str, int] = {}
    """The indices of groups that go on."""
    has_group: Callable[[Prompt, int], bool] = lambda prompt, place: False
    """Whether a prompt, at a place of the run's, has a group."""
    counted: int = 0
    """How many groups that the trainer has count towards its target."""


class Standing(msgspec.Struct):
    """See the module."""

    client: str = ""
    """Who is served."""
    key: tuple[str, int] = ("", -1)
    """Whose the run is, and its number there."""
    digest: str = ""
    run_number: int = -1
    """The run's number in the scheduler, from which seeds follow."""
    named: int = 0
    """How many prompts had been taken before it."""
    before: list[str] = []
    """The groups that there were before it."""
    carried: list[Waiting] = []
    """What had waited for it."""
    remaining: list[Waiting] | None = None
    """What waits for the next one; ``None``: it has not ended."""
    named_after: int = 0
    """How many prompts had been taken at its end."""
    pictures: list[PackedPicture] = []
    """Those in the prompts of what had waited for it, and of what waits."""
    weights: list[WeightRecord] = []
    """Which weights the policy has beside those that it was built with, in the order in which they were loaded."""
    holds: list[str] = []
    """Why it samples nothing, as its trainer says."""

    @classmethod
    def read(cls, folder: Path) -> Standing:
        """Return what the file of a folder says, if there is one."""
        file = folder / FILE
        return msgspec.msgpack.decode(file.read_bytes(), type=cls) if file.exists() else cls()

    def keep(self, folder: Path) -> None:
        """Write it."""
        with written_whole(folder / FILE) as partial:
            partial.write_bytes(msgspec.msgpack.encode(self))

    def of_run(self, question: Begin, scheduler: Scheduler, before: set[str]) -> Standing:
        """Return how a run stands that is about to begin."""
        standing = Standing(
            question.client, (question.client, question.run), question.digest, scheduler.starter.run_number + 1
        )
        standing.named, standing.before = scheduler.groups.named, sorted(before)
        standing.carried, standing.pictures = waiting(scheduler)
        standing.weights, standing.holds = self.weights, self.holds
        return standing

    def over(self, scheduler: Scheduler) -> None:
        """Take in that the run has ended."""
        self.remaining, pictures = waiting(scheduler)
        self.pictures += [picture for picture in pictures if picture not in self.pictures]
        self.named_after = scheduler.groups.named

    def is_at(self, state: Mapping[str, Any], folder: Path) -> Literal["after", "before"] | None:
        """Say whether a state is of after the last run, or of before it, while the trainer has done with none of it."""
        saved = state["runs"], state["prompts_named"], [group["group_id"] for group in state["groups"]]
        if self.remaining is not None and saved == (self.run_number + 1, self.named_after, names(self.remaining)):
            return "after"
        then = {*self.before} - {*names(self.carried)}
        acknowledged = any(yes for group_id, yes in delivered(folder).items() if group_id not in then)
        return "before" if saved == (self.run_number, self.named, names(self.carried)) and not acknowledged else None

    def is_of(self, question: Begin) -> bool:
        """Whether a trainer asks for this run again, which may have been started again itself."""
        return self.digest == question.digest and (
            self.key == (question.client, question.run) or self.key[0] != question.client
        )

    def restore(self, question: Begin, rollout: Rollout, folder: Path, events: dict[str, list[bytes]]) -> Earlier:
        """Have a new process's scheduler stand as the earlier one's did; return what that had of the run asked for.

        ``events`` get those of the trajectories that go on.
        """
        scheduler, journal, again = rollout.scheduler, rollout.journal, self.is_of(question)
        assert journal is not None
        # 1. What had waited, for this run or for the one after it; what had not begun waits again.
        waits = self.carried if again or self.remaining is None else self.remaining
        scheduler.starter.run_number = self.run_number - again
        scheduler.groups.named = first = self.named if again else self.named_after
        scheduler.groups.earlier = frozenset(self.before)
        prompts = prompts_of([each[3] for each in waits], self.pictures)
        for (group_id, index, n, _), prompt in zip(waits, prompts, strict=True):
            if group_id in journal.groups:
                continue
            if isinstance(scheduler, LeasedScheduler):
                group: Group = LeasedGroup.of(group_id, index, prompt, n)
            else:
                group = Group(group_id, index, prompt, scheduler.agents.of_prompt(prompt), n)
            scheduler.groups.put(group, GroupState.WAITING)
        # 2. What had begun, and was not acknowledged; what the trainer holds is its own.
        own = journal.groups.difference(self.before) if again else set[str]()
        ours = own.union(names(waits))
        acknowledged = {group_id for group_id, yes in delivered(folder).items() if yes}
        begun = ours - acknowledged - set(question.held if again else ())
        resume = []
        for history in histories(folder, unfinished=True):
            opening = history[0]
            if isinstance(opening, Prompted) and opening.group_id in begun:
                resume.append(history)
                events[opening.trajectory_id] = list(map(encode, history))
        places = {each[0]: each[1] for each in waits}
        if not again:
            return Earlier(resume, places)
        # 3. Which prompt has which group: groups are named as the scheduler names them.
        known = set(self.before)

        def has_group(prompt: Prompt, place: int) -> bool:
            name = group_id = prompt.prompt_id or str(first + place)
            epoch = 1
            while group_id in known:
                epoch += 1
                group_id = f"{name}#{epoch}"
            known.add(group_id)
            places[group_id] = first + place
            return group_id in own

        dropped = {key.removeprefix(DROPPED) for key in metadata(folder) if key.startswith(DROPPED)}
        return Earlier(resume, places, has_group, len(ours & acknowledged - dropped) + question.counted)


def names(groups: Sequence[Waiting]) -> list[str]:
    """Return the ids of groups that wait."""
    return [each[0] for each in groups]


def waiting(scheduler: Scheduler) -> tuple[list[Waiting], list[PackedPicture]]:
    """Return what a scheduler carries over, as plain data, and the pictures in it."""
    waits = [(group.group_id, group.index, group.n, packed_prompt(group.prompt)) for group in scheduler.carried]
    return waits, packed_pictures(each[3] for each in waits)
