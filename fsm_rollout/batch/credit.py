"""Credit for turns: what each turn's choice was followed by, less what others of its group came to in its place.

Invariant: what is subtracted from a turn's return does not depend on anything that its own sample did from that turn
on. So the policy gradient's mean is exact, also where the policy itself decides how many turns there are. (A baseline
summed over the sample's own later turns is none such: it pays for stopping, see verl#7244.) Each other sample counts
once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from fsm_rollout.batch.advantages import SampleScore
from fsm_rollout.batch.rows import TrainingRow

CreditMethod = Literal["trajectory", "turn", "state", "gae"]
METHODS: tuple[CreditMethod, ...] = ("trajectory", "turn", "state", "gae")


@dataclass(frozen=True, slots=True)
class Course:
    """One trajectory as the choices that were trained in it, in order."""

    group_id: str
    sample: int
    agent: str
    turns: Sequence[int]
    """The generations with trained tokens."""
    states: Sequence[str]
    """The state that each was said in."""
    rewards: Sequence[float]
    """What each turn was given, by scores of turns and by tools; the last has the trajectory's score too."""
    values: Sequence[float | None]
    """The latest score of a state before each turn; ``None``: there was none yet."""
    missing: bool
    """Whether its score is missing, so that nothing is learned of it."""

    def returns(self, gamma: float) -> list[float]:
        """Return of each turn its reward and those that came after it."""
        found, later = [], 0.0
        for reward in reversed(self.rewards):
            later = reward + gamma * later
            found.append(later)
        return found[::-1]


def courses_of(rows: Sequence[TrainingRow], tool_rewards: float) -> dict[str, Course]:
    """Return the trajectories of rows by their ids; rewards of tools are multiplied by ``tool_rewards``."""
    by_trajectory: defaultdict[str, list[TrainingRow]] = defaultdict(list)
    for row in rows:
        by_trajectory[row.trajectory_id].append(row)
    courses: dict[str, Course] = {}
    for name, own in by_trajectory.items():
        # 1. Its turns.
        states: dict[int, str] = {}
        for row in own:
            trained = row.mask == 1
            for turn, state in zip(row.turn_ids[trained].tolist(), row.state_ids[trained].tolist(), strict=True):
                states.setdefault(turn, row.state_names[state])
        if not (turns := sorted(states)):
            continue  # its mask was taken away: it counts by its score
        # 2. What each was given; a turn that is trained nowhere gives what it was given to the one before it.
        first = own[0]
        given = [(int(turn), value) for turn, value in first.turn_scores]
        pairs = zip(first.tool_reward_turns, first.tool_rewards, strict=True)
        given += [(turn, tool_rewards * value) for turn, value in pairs if tool_rewards]
        rewards = [0.0] * len(turns)
        for turn, value in given:
            rewards[max(0, sum(other <= turn for other in turns) - 1)] += value
        rewards[-1] += first.score or 0.0
        missing = any(math.isnan(value) for row in own for value in row.scores.tolist())
        scored = first.state_scores[::-1]
        values = [next((value for _, value, by in scored if by <= turn), None) for turn in turns]
        of_turns = [states[turn] for turn in turns]
        courses[name] = Course(first.group_id, first.sample, first.agent, turns, of_turns, rewards, values, missing)
    return courses


def turn_advantages(
    courses: Mapping[str, Course],
    sample_scores: Sequence[SampleScore],
    method: CreditMethod,
    *,
    gamma: float,
    lam: float,
    values: Mapping[tuple[str, int], float] | None,
) -> dict[tuple[str, int], float]:
    """Return the advantage of each turn by trajectory and generation; NaN where the trajectory's score is missing.

    ``values``, for ``gae``, are a critic's of the same turns; ``None``: scores of states, and before the first of them
    what the others came to. A sample that has no turn counts by its score.
    """
    # 1. What each scored sample of a group came to: by agent, its trajectories; or only its score.
    groups: defaultdict[str, dict[int, list[tuple[Course | None, list[float]]]]] = defaultdict(dict)
    returns = {name: course.returns(gamma) for name, course in courses.items()}
    for name, course in courses.items():
        if not course.missing:
            groups[course.group_id].setdefault(course.sample, []).append((course, returns[name]))
    scores = {(group_id, sample): score for group_id, sample, score in sample_scores if score is not None}
    for (group_id, sample), score in scores.items():
        groups[group_id].setdefault(sample, [(None, [score])])
    # 2. Each turn's return, less what others came to.
    advantages: dict[tuple[str, int], float] = {}
    for name, course in courses.items():
        others: list[CameTo] = []
        for sample, came_to in sorted(groups[course.group_id].items()):
            if sample != course.sample:
                alike = [(other, gs) for other, gs in came_to if other is not None and other.agent == course.agent]
                only = scores.get((course.group_id, sample))
                others += [alike] if alike else [] if only is None else [[(None, [only])]]
        known = []
        if method == "gae" and values is not None:
            known = [values[name, turn] for turn in course.turns]
        elif method == "gae":
            base = _baseline(others, 0, None) if others else 0.0
            known = [base if value is None else value for value in course.values]
        for place, turn in enumerate(course.turns):
            at, state = (0 if method == "trajectory" else place), course.states[place] if method == "state" else None
            if course.missing:
                advantages[name, turn] = math.nan
            elif method == "gae":
                advantages[name, turn] = _generalized(course.rewards, known, place, gamma, lam)
            else:
                advantages[name, turn] = returns[name][at] - _baseline(others, at, state) if others else 0.0
    return advantages


CameTo = Sequence[tuple[Course | None, Sequence[float]]]
"""What one sample came to: trajectories with the returns of their turns."""


def _baseline(others: Sequence[CameTo], at: int, state: str | None) -> float:
    """Return the mean of what other samples came to from the same state on, or from the same turn on."""
    if state is not None:
        by_sample = []
        for sample in others:
            found = [g for course, gs in sample if course for s, g in zip(course.states, gs, strict=True) if s == state]
            by_sample += [fmean(found)] if found else []
        if by_sample:
            return fmean(by_sample)
    # One that had ended by then counts with the latest turn that it has.
    return fmean(fmean(returns[min(at, len(returns) - 1)] for _, returns in sample) for sample in others)


def _generalized(rewards: Sequence[float], values: Sequence[float], place: int, gamma: float, lam: float) -> float:
    """Return the generalized advantage of a turn, by the values of turns."""
    total, weight = 0.0, 1.0
    for at in range(place, len(rewards)):
        following = values[at + 1] if at + 1 < len(values) else 0.0
        total += weight * (rewards[at] + gamma * following - values[at])
        weight *= gamma * lam
    return total
