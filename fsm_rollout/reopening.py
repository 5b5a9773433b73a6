"""Going on with trajectories that were set aside, or cut off by a crash.

Invariant: a trajectory that is reopened is the fold of its events, whole; what it was given (its limits, its seed, its
prompt's own fields) is what it was given then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from fsm_rollout.errors import ConfigError, Problem, did_you_mean
from fsm_rollout.events import AnyEvent, Ended
from fsm_rollout.graph import Sampling
from fsm_rollout.live import Group, LiveTrajectory
from fsm_rollout.open_groups import OpenGroup
from fsm_rollout.program import Program
from fsm_rollout.prompts import Prompt
from fsm_rollout.trajectory import Trajectory

if TYPE_CHECKING:
    from fsm_rollout.scheduler import Scheduler

History = Trajectory | Sequence[AnyEvent]
"""A trajectory as it stood: the object itself, or its events as a journal has them (``journal.histories``)."""


def reopen(scheduler: Scheduler, histories: Iterable[History], n: int, now: float) -> list[OpenGroup]:
    """Return the groups of some histories, ready to go on; samples that never began begin with the others.

    Events are written into the scheduler's journal first (a trajectory object must be in it already). A sub-agent's
    trajectory that has not ended is ended as ``cancelled``: the call that it served is made again.

    Raises:
        ConfigError: a trajectory's agent is not one of the run's; all such problems at once.
        StreamError: a history is not one.
    """
    problems: list[Problem] = []
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in _folded(scheduler, histories):
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    opened: list[OpenGroup] = []
    for group_id, trajectories in groups.items():
        samples = [trajectory for trajectory in trajectories if trajectory.parent_id is None]
        current = {trajectory.sample: trajectory for trajectory in samples}  # a later attempt stands for earlier ones
        try:
            programs = {trajectory.agent: _program(scheduler, trajectory.agent) for trajectory in trajectories}
            if not samples:
                raise ConfigError(f"group '{group_id}' has trajectories of sub-agents only; give all of its histories")
            prompt = _prompt(group_id, samples[0])
        except ConfigError as error:
            problems += error.problems
            continue
        group = Group(group_id, len(opened), prompt)
        group.children = [trajectory for trajectory in trajectories if trajectory.parent_id is not None]
        group.discarded = [trajectory for trajectory in samples if current[trajectory.sample] is not trajectory]
        one = OpenGroup(group, programs[samples[0].agent], max(n, *(sample + 1 for sample in current)))
        for child in group.children:
            if not child.ended:
                event = Ended(at=now, stop_reason="cancelled", detail="the run was interrupted")
                child.apply(event)
                scheduler.tell(child, event)
        for sample, trajectory in sorted(current.items()):
            one.begun(LiveTrajectory(scheduler, one.program, prompt, group, trajectory))
            _, _, attempt = trajectory.trajectory_id.removeprefix(f"{group_id}/").partition("~")
            one.attempts[sample] = int(attempt or 0)
        opened.append(one)
    if problems:
        raise ConfigError(problems)
    return opened


def _folded(scheduler: Scheduler, histories: Iterable[History]) -> Iterator[Trajectory]:
    for history in histories:
        if isinstance(history, Trajectory):
            yield history
            continue
        trajectory = Trajectory.fold(history)
        for event in history:
            scheduler.tell(trajectory, event)
        yield trajectory


def _program(scheduler: Scheduler, agent: str) -> Program:
    for program in scheduler.programs.values():
        if program.graph.agent == agent:
            return program
    names = {program.graph.agent for program in scheduler.programs.values()}
    raise ConfigError(f"agent '{agent}' of a trajectory to resume is not one of the run's{did_you_mean(agent, names)}")


def _prompt(group_id: str, trajectory: Trajectory) -> Prompt:
    said: dict[str, Any] = dict(trajectory.extra)
    try:
        sampling = Sampling.model_validate(dict(trajectory.sampling)) if trajectory.sampling else None
        return Prompt(prompt_id=group_id, messages=tuple(trajectory.messages), sampling=sampling, **said)
    except (ValidationError, TypeError) as error:
        raise ConfigError(f"trajectory '{trajectory.trajectory_id}' cannot be resumed: {error}") from error
