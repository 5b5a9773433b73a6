"""Going on with trajectories that were set aside, or cut off by a crash.

Invariant: a trajectory that is reopened is the fold of its events, whole; what it was given (its limits, its seed, its
prompt's own fields) is what it was given then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from pydantic import ValidationError

from fsm_rollout.errors import ConfigError, Problem, did_you_mean
from fsm_rollout.scheduler.group import OpenGroup
from fsm_rollout.scheduler.live import CUT_OFF, ActiveTrajectory, Group
from fsm_rollout.scheduler.program import Program
from fsm_rollout.trajectory.events import AnyEvent, Ended, Prompted, Resumed
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.settings import Limits, Sampling
from fsm_rollout.trajectory.trajectory import Trajectory

if TYPE_CHECKING:
    from fsm_rollout.scheduler.scheduler import Scheduler

History = Trajectory | Sequence[AnyEvent]
"""A trajectory as it stood: the object itself, or its events as a journal has them (``journal.histories``)."""


def reopen(scheduler: Scheduler, histories: Iterable[History], n: int) -> list[OpenGroup]:
    """Return the groups of some histories, ready to go on; samples that never began begin with the others.

    What the scheduler's journal does not have yet is written into it first (a trajectory object must be in it already).
    A sub-agent's trajectory that has not ended is ended as ``cancelled``: the call that it served is made again.

    Raises:
        ConfigError: a trajectory's agent is not one of the run's, or its group is under way; all such problems at once.
        StreamError: a history is not one.
    """
    now = asyncio.get_running_loop().time()
    journal = scheduler.journal
    problems: list[Problem] = []
    groups: dict[str, list[Trajectory]] = {}
    given = list(histories)
    for trajectory in map(_folded, given):
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    opened: list[OpenGroup] = []
    for group_id, trajectories in groups.items():
        if group_id in scheduler.under_way:
            problems.append(Problem(f"group '{group_id}' is under way already; give its trajectories once"))
            continue
        samples = sorted((t for t in trajectories if t.parent_id is None), key=_attempt)
        current = {trajectory.sample: trajectory for trajectory in samples}  # a later attempt stands for earlier ones
        try:
            programs = {trajectory.agent: _program(scheduler, trajectory) for trajectory in trajectories}
            if not samples:
                raise ConfigError(f"group '{group_id}' has trajectories of sub-agents only; give all of its histories")
            prompt = _prompt(group_id, samples[0])
        except ConfigError as error:
            problems += error.problems
            continue
        group = Group(group_id, len(opened), prompt)
        group.discarded = [trajectory for trajectory in samples if current[trajectory.sample] is not trajectory]
        given_up = tuple(f"{trajectory.trajectory_id}/" for trajectory in group.discarded)
        for trajectory in trajectories:
            if trajectory.parent_id is not None:
                lost = trajectory.trajectory_id.startswith(given_up)
                (group.discarded if lost else group.children).append(trajectory)
        one = OpenGroup(group, programs[samples[0].agent], max(n, *(sample + 1 for sample in current)))
        for sample, trajectory in sorted(current.items()):
            one.begun(ActiveTrajectory(scheduler, one.program, prompt, group, trajectory))
            one.attempts[sample] = _attempt(trajectory)
        opened.append(one)
    if problems:
        raise ConfigError(problems)
    for history in given:  # into the journal, now that all of them are good
        if not isinstance(history, Trajectory):
            trajectory = Trajectory(history[0]) if isinstance(history[0], Prompted) else _folded(history)
            if journal is None or trajectory.trajectory_id not in journal:
                for event in history:
                    scheduler.tell(trajectory, event)
    for one in opened:
        if journal is not None:
            journal.handed_over(one.group.group_id, False)
        for child in one.group.children:
            if not child.ended:
                resumed = Resumed(at=now, away=now - child.latest_at)
                for event in (resumed, Ended(at=now, stop_reason="cancelled", detail=CUT_OFF)):
                    child.apply(event)
                    scheduler.tell(child, event)
    return opened


def same_prompt(one: Prompt, other: Prompt) -> bool:
    """Say whether two prompts ask the same, wherever they were read."""
    return bool(msgspec.to_builtins(one.messages) == msgspec.to_builtins(other.messages))


def _folded(history: History) -> Trajectory:
    return history if isinstance(history, Trajectory) else Trajectory.fold(history)


def _attempt(trajectory: Trajectory) -> int:
    """Return how many attempts at its sample were given up before it."""
    return int(trajectory.trajectory_id.removeprefix(f"{trajectory.group_id}/").partition("~")[2] or 0)


def _program(scheduler: Scheduler, trajectory: Trajectory) -> Program:
    agent = trajectory.agent
    there = scheduler.agents.values() if trajectory.parent_id is None else scheduler.programs.values()
    programs = [program for program in there if program.graph.agent == agent]
    if not programs:
        hint = did_you_mean(agent, {program.graph.agent for program in there})
        raise ConfigError(f"agent '{agent}' of a trajectory to resume is not one of the run's{hint}")
    if any(program.graph != programs[0].graph for program in programs):
        raise ConfigError(
            f"several agents of the run are called '{agent}' in their YAML, so it is not known whose the trajectories "
            "to resume are; give each a name of its own"
        )
    if trajectory.exit is None and trajectory.state not in programs[0].graph.states:
        raise ConfigError(
            f"trajectory '{trajectory.trajectory_id}' stands in state '{trajectory.state}', which agent '{agent}' "
            "does not have any more; resume with the agent that it began with"
        )
    return programs[0]


def _prompt(group_id: str, trajectory: Trajectory) -> Prompt:
    said: dict[str, Any] = dict(trajectory.extra)
    try:
        sampling = Sampling.model_validate(dict(trajectory.sampling)) if trajectory.sampling else None
        limits = Limits.model_validate({name: most for name, most in trajectory.limits.items() if most is not None})
        return Prompt(prompt_id=group_id, messages=tuple(trajectory.messages), limits=limits, sampling=sampling, **said)
    except (ValidationError, TypeError) as error:
        raise ConfigError(f"trajectory '{trajectory.trajectory_id}' cannot be resumed: {error}") from error
