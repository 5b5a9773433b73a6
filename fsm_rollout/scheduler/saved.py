"""What goes on in another process as if nothing had happened: the state of a rollout, beside its trainer's checkpoint.

Invariant: a run that is saved, thrown away and loaded gives the rows of the undisturbed one. Everything random follows
from the seed, the number of the run and the names of trajectories, so these, how far the prompts were read, and what is
carried over are all of it. A state is plain data: numbers, texts, bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import chain, islice
from typing import Any, TypeVar

from fsm_rollout.errors import ConfigError
from fsm_rollout.scheduler.group import Group, GroupState
from fsm_rollout.scheduler.leased_group import LeasedGroup, furthest
from fsm_rollout.scheduler.leased_scheduler import LeasedScheduler
from fsm_rollout.scheduler.resume import resumed_groups
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.trajectory import journal
from fsm_rollout.trajectory.enums import DropReason
from fsm_rollout.trajectory.event_bytes import encode, pack, pictures_in, unpack_plain, unpacker
from fsm_rollout.trajectory.pictures import stored
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.trajectory import Trajectory

T = TypeVar("T")

FORMAT = 2  # goes up with each change of what a state holds, so that none is read halfway
_unpack = unpacker()


class Position:
    """How many prompts were taken from an iterator, which runs with a target read on and on."""

    def __init__(self) -> None:
        self.taken = 0
        self._of: Iterator[object] | None = None

    def read(self, prompts: Iterable[T]) -> Iterator[T]:
        """Yield prompts; of the first iterator after a state was loaded, those behind the ones that had been taken."""
        if not isinstance(prompts, Iterator):
            yield from prompts
            return
        if self._of is not prompts:
            if self._of is not None:
                self.taken = 0
            self._of = prompts
            next(islice(prompts, self.taken, self.taken), None)
        for prompt in prompts:
            self.taken += 1
            yield prompt


class SavedRollout:
    """The part of a rollout that can be saved."""

    scheduler: Scheduler
    _common: dict[str, Any]
    _due: int | None = None  # the version of the weights that a loaded state goes on with, until they are there

    @cached_property
    def _position(self) -> Position:
        return Position()

    def state_dict(self) -> dict[str, Any]:
        """Return what the next run depends on, between two runs, as plain data: save it with the model.

        How far prompts were read from an iterator, the groups that are carried over, the number of the run, the version
        of the weights. Groups that have begun are saved by their events, which the journal has.

        Raises:
            ConfigError: a run is under way, or groups are carried over and there is no journal.
        """
        scheduler = self.scheduler
        if scheduler.under_way:
            raise ConfigError("a run is under way; save the state between two runs")
        carried, events = scheduler.carried, _events_of(scheduler)
        histories = {group.group_id: events.get(group.group_id, []) for group in carried}
        groups: list[dict[str, Any]] = [
            {
                "group_id": group.group_id,
                "index": group.index,
                "n": group.n,
                "place": group.place,
                "version": group.version,
                "done": group.state is GroupState.DONE,
                "drop_reason": None if group.drop_reason is None else str(group.drop_reason),
                "reward_errors": list(group.reward_errors),
                "prompt": encode(group.prompt.model_dump(exclude_none=True)),
                "histories": histories[group.group_id],
            }
            for group in carried
        ]
        encoded = [event for of_group in histories.values() for history in of_group for event in history]
        encoded += [group["prompt"] for group in groups]
        pictures = {picture.sha256: picture for data in encoded for picture in pictures_in(data)}
        log = scheduler.recorder.journal
        return {
            "format": FORMAT,
            "seed": self._common["seed"],
            "runs": scheduler.starter.run_number + 1,
            "weight_version": scheduler.staleness.version(),
            "prompts_named": scheduler.groups.named,
            "groups_opened": scheduler.groups.opened,
            "position": self._position.taken,
            "group_ids": sorted(log.groups if log is not None else ()),
            "groups": groups,
            "pictures": [(p.data, p.mime, p.width, p.height) for p in pictures.values()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was called, in a rollout that has not run yet.

        The next run goes on with what was carried over; the first iterator of prompts that a run is given is read on
        from where it was. Where the weights had another version than the engine's own, load them first, under that
        version: ``rollout.update_weights(model, version=state["weight_version"])``.

        Raises:
            ConfigError: the state is of another seed, or does not fit the agents; or this rollout has run already.
        """
        scheduler = self.scheduler
        if state.get("format") != FORMAT:
            saved = f"its format is {state['format']}, not {FORMAT}" if "format" in state else f"it has {sorted(state)}"
            raise ConfigError(f"this is no state of a rollout, or another version of fsm_rollout has saved it: {saved}")
        if scheduler.under_way or scheduler.starter.run_number >= 0:
            raise ConfigError("this rollout has run already; load the state into a new one")
        if state["seed"] != (seed := self._common["seed"]):
            raise ConfigError(f"the state is of a rollout with seed {state['seed']}, and this one has {seed}")
        pictures = [stored(*picture) for picture in state["pictures"]]  # held, so that the events find them
        for saved in state["groups"]:
            _restore(scheduler, saved)
        del pictures
        scheduler.starter.run_number = state["runs"] - 1
        scheduler.groups.named, scheduler.groups.opened = state["prompts_named"], state["groups_opened"]
        scheduler.groups.earlier = frozenset(state["group_ids"])
        self._position.taken = state["position"]
        self._due = state["weight_version"]

    def _check_weights_due(self) -> None:
        """Raise ConfigError where a loaded state goes on with other weights than the policy has."""
        version = self.scheduler.staleness.version()
        if self._due not in (None, version):
            raise ConfigError(
                f"the state that was loaded goes on with weights of version {self._due}, and the policy has version "
                f"{version}; load them first: rollout.update_weights(model, version={self._due})"
            )
        self._due = None


def _events_of(scheduler: Scheduler) -> dict[str, list[list[bytes]]]:
    """Return the events of the groups that are carried over, as the journal has them, by group."""
    begun = {group.group_id for group in scheduler.carried if _has_begun(group)}
    if not begun:
        return {}
    if (log := scheduler.recorder.journal) is None:
        raise ConfigError(
            f"{len(begun)} group(s) that have begun are carried over, and their events are kept nowhere; give the "
            "rollout a journal (`journal=Journal(path)`), or drop them: `await rollout.scheduler.drop_carried()`"
        )
    log.flush()
    found: dict[str, list[list[bytes]]] = {group_id: [] for group_id in begun}
    for trajectory, events in journal.recordings(log.path):
        if trajectory.group_id in begun:
            found[trajectory.group_id].append(list(map(encode, events)))
    for group in scheduler.carried:
        if isinstance(group, LeasedGroup) and group.histories:  # which are in no journal before a shard goes on with it
            found[group.group_id] = furthest(group.histories, found[group.group_id])
    return found


def _has_begun(group: Group) -> bool:
    """Whether a group has events; those of one that runs in shards are where these keep them."""
    if isinstance(group, LeasedGroup):
        return group.shard is not None or bool(group.histories)
    return bool(group.trajectories)


def _restore(scheduler: Scheduler, saved: Mapping[str, Any]) -> None:
    """Let a group wait for the next run, as it did for that of the process before."""
    group_id, n, log = saved["group_id"], saved["n"], scheduler.recorder.journal
    prompt = Prompt.model_validate(unpack_plain(saved["prompt"]))
    drop_reason = None if saved["drop_reason"] is None else DropReason(saved["drop_reason"])
    if saved["histories"] and log is not None:
        if group_id in log.groups:
            raise ConfigError(
                f"the journal has group '{group_id}' already, perhaps with what came after the state was saved; give "
                "the rollout a new journal, into which the state's events are written"
            )
        log.groups.add(group_id)
    if isinstance(scheduler, LeasedScheduler):  # one that is done, too: a shard makes its rows
        leased = LeasedGroup.of(group_id, saved["index"], prompt, n)
        leased.histories, leased.drop_reason = saved["histories"], drop_reason
        leased.place, leased.version = saved["place"], saved["version"]
        events = chain([saved["prompt"]], *leased.histories)
        leased.glue_entries[""] = {picture for event in events for picture in pictures_in(event)}  # held
        scheduler.groups.put(leased, GroupState.WAITING)
        return
    group = Group(group_id, saved["index"], prompt, scheduler.agents.of_prompt(prompt), n)
    if saved["histories"]:
        histories = [_unpack(pack(history)) for history in saved["histories"]]
        trajectories = list(map(Trajectory.fold, histories))
        (group,) = resumed_groups(trajectories, n, scheduler.agents, under_way=scheduler.groups)
        group.index, group.prompt = saved["index"], prompt
        for trajectory, history in zip(trajectories, histories, strict=True):
            if log is not None:
                for event in history:
                    log.append(trajectory.trajectory_id, event)  # who listens has heard it in the process before
    group.reward_errors, group.drop_reason = list(saved["reward_errors"]), drop_reason
    group.place, group.version = saved["place"], saved["version"]
    scheduler.groups.put(group, GroupState.DONE if saved["done"] else GroupState.WAITING)
