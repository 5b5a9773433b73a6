"""The value of each state and transition over a run: what followed, on average, from being there and from going there.

Invariant: a visit's return is all that its trajectory was given from the visit's beginning on (scores of turns, what
tools gave, at the end the trajectory's score), and each visit that was left counts once, with the transition that left
it. So what is said of a state is said of the ways out of it together. Trajectories whose score is missing, that have
not ended, or in whose place others began count nowhere. Uncertainty is read off the spread between prompts, as
everywhere.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.errors import ConfigError, did_you_mean
from fsm_rollout.report.recording import Recording, open_run
from fsm_rollout.report.texts import percent
from fsm_rollout.statistics.estimates import mean
from fsm_rollout.trajectory.events import Called, Prompted, Scored, Transitioned
from fsm_rollout.trajectory.latest_attempts import latest_attempts

_Way = tuple[str, str, str, int | None]  # source, trigger, dest, and the place in `transitions`


def values_of_run(graph: AgentGraph, folder: str | Path) -> RunValues:
    """Return the values of an agent over the run in a folder.

    Raises:
        ConfigError: the folder is no run's, or none of its trajectories is of an agent of that name.
        JournalError: the journal cannot be read.
    """
    run = open_run(folder)
    if graph.agent not in run.agents:
        hint = did_you_mean(graph.agent, run.agents)
        raise ConfigError(f"{run.folder} is a run of {', '.join(run.agents) or 'no agent'}, not of {graph.agent}{hint}")
    standing = (Recording.of(history) for _, history in latest_attempts(run.run, run.note))
    return RunValues(graph.agent, run.folder.name, standing)


class RunValues:
    """The values of an agent's states and transitions over recordings of a run, of which none is kept."""

    def __init__(self, agent: str, run: str, recordings: Iterable[Recording]) -> None:
        self._returns: defaultdict[_Way, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        prompts, count = set[str](), 0
        for recording in recordings:
            trajectory = recording.trajectory
            if trajectory.agent == agent and trajectory.stop_reason is not None and not trajectory.score_is_missing:
                prompts.add(trajectory.group_id)
                count += 1
                self._add(recording)
        self.about = (
            f"values over {run}: what followed, mean ± standard error by prompt, of {count:,} scored trajectories of "
            f"{len(prompts):,} prompts"
        )

    def _add(self, recording: Recording) -> None:
        # From the end to the beginning: a visit's return is what was given after it began. Of a trajectory's scores the
        # last one stands.
        later = recording.trajectory.score or 0.0
        left: Transitioned | None = None
        group = recording.trajectory.group_id
        for event in reversed(recording.events):
            match event:
                case Scored() if event.turn is not None:
                    later += event.value
                case Called() if event.reward is not None:
                    later += event.reward
                case Transitioned() | Prompted():
                    if left is not None:
                        self._returns[left.source, left.trigger, left.dest, left.row][group].append(later)
                    left = event if isinstance(event, Transitioned) else None

    def of_state(self, name: str) -> str:
        """Return the mean return of its visits, and how many there were."""
        said = self._said([way for way in self._returns if way[0] == name])
        return f"value {said}" if said else ""

    def of_transition(self, sources: Collection[str], trigger: str, dest: str, row: int | None) -> tuple[str, float]:
        """Return the mean return of the visits that ended this way, and their share of all visits of its sources."""
        ways = [way for way in self._returns if way[0] in sources and way[1:] == (trigger, dest, row)]
        every = self._count(way for way in self._returns if way[0] in sources)
        share = self._count(ways) / every if every else 0.0
        return (f"{percent(share)}: {self._said(ways)}" if ways else "never"), share

    def _count(self, ways: Iterable[_Way]) -> int:
        return sum(len(visits) for way in ways for visits in self._returns[way].values())

    def _said(self, ways: Collection[_Way]) -> str:
        """Return the mean return of visits that ended in one of these ways, with its error."""
        by_prompt: defaultdict[str, list[float]] = defaultdict(list)
        for way in ways:
            for group, returns in self._returns[way].items():
                by_prompt[group] += returns
        found = mean(by_prompt.values())
        if math.isnan(found.value):
            return ""
        error = "" if math.isnan(found.error) else f" ± {found.error:.2f}"
        return f"{found.value:.2f}{error}"
