"""Going on with trajectories that were set aside, or cut off by a crash.

Invariant: a trajectory that is resumed is the fold of its events, whole; its limits, its seed and its prompt's own
fields are those that it began with. One that has twice ended the process that ran it does not do so again.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from typing import Any

from pydantic import ValidationError

from fsm_rollout.errors import ConfigError, Problem, did_you_mean
from fsm_rollout.scheduler.group import Group
from fsm_rollout.scheduler.run_agents import RunAgents, RunnableAgent
from fsm_rollout.scheduler.staleness import trained_versions
from fsm_rollout.trajectory.events import AnyEvent, ToolCall
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
            prompt = prompt_of(group_id, samples[0])
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
        group.version = min(trained_versions(group.all), default=group.version)
        groups.append(group)
    if problems:
        raise ConfigError(problems)
    return groups


class DeadProcess:
    """What is known of the process that ran some trajectories, and whose hands it died in.

    Of the first death it is only known which trajectories ran. So from then on a call that runs in the run's process is
    recorded before it is made (``careful``). A trajectory that was alone in its call at a later death is given up if
    that was the second one it lived through; of several nobody knows which it was, so each of them runs alone.
    """

    def __init__(self, trajectories: Iterable[Trajectory], agents: RunAgents) -> None:
        """Take in the trajectories as they stood."""
        open_ones = [trajectory for trajectory in trajectories if not trajectory.ended]
        cut_off = [trajectory for trajectory in open_ones if trajectory.suspended is None]
        self.careful = bool(cut_off) or any(trajectory.deaths for trajectory in open_ones)
        """Whether calls are to be recorded before they are made."""
        under_way = [(t, call) for t in cut_off if (call := _call_under_way(t, agents)) is not None]
        self.in_its_hands = [trajectory for trajectory, _ in under_way]
        """The trajectories in whose hands it may have died."""
        self.suspects = {trajectory.group_id for trajectory in self.in_its_hands}
        """The groups of those that are to run alone."""
        self.given_up: dict[str, str] = {}
        """Why a trajectory is given up, by its id."""
        for trajectory, call in under_way if len(under_way) == 1 else ():
            if trajectory.deaths:
                self.suspects.clear()
                self.given_up[trajectory.trajectory_id] = (
                    f"the process died {trajectory.deaths + 1} times with this trajectory in its hands, at last while "
                    f"tool '{call.name}' carried out call {call.id}: {call.arguments!r:.200}"
                )


def _call_under_way(trajectory: Trajectory, agents: RunAgents) -> ToolCall | None:
    """Return a call that was recorded as begun, of a tool whose code runs in the run's own process."""
    toolbox = next(agent.toolbox for agent in agents.all if agent.graph.agent == trajectory.agent)
    for attempt in trajectory.attempts:
        if attempt.id in trajectory.begun_calls and isinstance(attempt, ToolCall):
            tool = toolbox.tool(attempt.name)
            if tool is not None and tool.runs_here:
                return attempt
    return None


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


def prompt_of(group_id: str, trajectory: Trajectory) -> Prompt:
    """Return the prompt that a trajectory began with."""
    fields: dict[str, Any] = dict(trajectory.extra)
    try:
        sampling = Sampling.model_validate(dict(trajectory.sampling)) if trajectory.sampling else None
        limits = Limits.model_validate({name: most for name, most in trajectory.limits.items() if most is not None})
        return Prompt(
            prompt_id=group_id, messages=tuple(trajectory.prompt_messages), limits=limits, sampling=sampling, **fields
        )
    except (ConfigError, ValidationError, TypeError) as error:
        raise ConfigError(f"trajectory '{trajectory.trajectory_id}' cannot be resumed: {error}") from error
