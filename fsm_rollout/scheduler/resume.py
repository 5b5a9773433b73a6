"""Going on with trajectories that were set aside, or cut off by a crash.

Invariant: a trajectory that is resumed is the fold of its events, whole; its limits, its seed and its prompt's own
fields are those that it began with.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from typing import Any

from pydantic import ValidationError

from fsm_rollout.errors import ConfigError, Problem, did_you_mean
from fsm_rollout.scheduler.group import Group
from fsm_rollout.scheduler.run_agents import RunAgents, RunnableAgent
from fsm_rollout.trajectory.events import AnyEvent
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.settings import Limits, Sampling
from fsm_rollout.trajectory.trajectory import Trajectory

# A trajectory as it stood: the object itself, or its events as a journal has them (`journal.histories`).
History = Trajectory | Sequence[AnyEvent]


def resumed_groups(
    trajectories: Iterable[Trajectory], n: int, agents: RunAgents, *, under_way: Container[str]
) -> list[Group]:
    """Return the groups of some trajectories, ready to go on; samples that never began begin with the others.

    Args:
        trajectories: those of whole groups, sub-agents' among them.
        n: how many samples a group has, at least.
        agents: those of the run.
        under_way: ids of groups that cannot be resumed, because they have not come back.

    Raises:
        ConfigError: a trajectory's agent is not one of the run's, or its group is under way; all such problems at once.
    """
    # 1. What belongs together.
    problems: list[Problem] = []
    by_group: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        by_group.setdefault(trajectory.group_id, []).append(trajectory)
    groups: list[Group] = []
    for group_id, members in by_group.items():
        # 2. Agent and prompt of each group, which must be the run's.
        try:
            if group_id in under_way:
                raise ConfigError(f"group '{group_id}' is under way already; give its trajectories once")
            of = {t.agent: _agent(t, agents.by_name.values() if t.parent_id is None else agents.all) for t in members}
            samples = sorted((t for t in members if t.parent_id is None), key=_attempt)
            if not samples:
                raise ConfigError(f"group '{group_id}' has trajectories of sub-agents only; give all of its histories")
            prompt = _prompt(group_id, samples[0])
        except ConfigError as error:
            problems += error.problems
            continue
        # 3. The group as it stood: sub-agents in their order, and of each sample the latest attempt.
        sample_count = max(n, *(trajectory.sample + 1 for trajectory in samples))
        group = Group(group_id, len(groups), prompt, of[samples[0].agent], sample_count)
        for trajectory in members:
            if trajectory.parent_id is not None:
                group.add_child(trajectory)
        for trajectory in samples:
            if group.latest(trajectory.sample) is not None:
                group.restart(trajectory.sample)
            group.add(trajectory)
            group.attempts[trajectory.sample] = _attempt(trajectory)
        group.discard_unread()
        groups.append(group)
    if problems:
        raise ConfigError(problems)
    return groups


def _attempt(trajectory: Trajectory) -> int:
    """Return how many attempts at its sample were given up before it."""
    return int(trajectory.trajectory_id.removeprefix(f"{trajectory.group_id}/").partition("~")[2] or 0)


def _agent(trajectory: Trajectory, agents: Collection[RunnableAgent]) -> RunnableAgent:
    """Return the agent of the run that a trajectory is of."""
    name = trajectory.agent
    found = [agent for agent in agents if agent.graph.agent == name]
    if not found:
        hint = did_you_mean(name, {agent.graph.agent for agent in agents})
        raise ConfigError(f"agent '{name}' of a trajectory to resume is not one of the run's{hint}")
    if any(agent.graph != found[0].graph for agent in found):
        raise ConfigError(
            f"several agents of the run are called '{name}' in their YAML, so it is unclear to which one the "
            "trajectories to resume belong; give each a name of its own"
        )
    if trajectory.exit is None and trajectory.state not in found[0].graph.states:
        raise ConfigError(
            f"trajectory '{trajectory.trajectory_id}' stands in state '{trajectory.state}', which agent '{name}' "
            "does not have any more; resume with the agent that it began with"
        )
    return found[0]


def _prompt(group_id: str, trajectory: Trajectory) -> Prompt:
    fields: dict[str, Any] = dict(trajectory.extra)
    try:
        sampling = Sampling.model_validate(dict(trajectory.sampling)) if trajectory.sampling else None
        limits = Limits.model_validate({name: most for name, most in trajectory.limits.items() if most is not None})
        return Prompt(
            prompt_id=group_id, messages=tuple(trajectory.prompt_messages), limits=limits, sampling=sampling, **fields
        )
    except (ConfigError, ValidationError, TypeError) as error:
        raise ConfigError(f"trajectory '{trajectory.trajectory_id}' cannot be resumed: {error}") from error
