"""The looks at a run that ends once its score is known well enough (``until``).

Invariant: what a look sees are all samples of the first so many prompts, in an order that the seed has drawn: never
those that happened to be done first, since what is hard takes longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from random import Random

from fsm_rollout.jobs.summary import Summary
from fsm_rollout.statistics.estimates import confidence_of_a_look, looks, mean
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.trajectory import Trajectory


class Looks:
    """The looks at one run; without ``until`` there are none, and its prompts come as they are, all at once."""

    def __init__(self, prompts: Sequence[Prompt], until: float | None, seed: int) -> None:
        self.prompts = list(prompts) if until is None else Random(seed).sample(prompts, len(prompts))
        """The prompts in the order in which they are taken."""
        self._until = until

    def parts(self) -> Iterator[list[Prompt]]:
        """Yield the prompts up to each look."""
        ends = [len(self.prompts)] if self._until is None else looks(len(self.prompts))
        for start, end in pairwise([0, *ends]):
            yield self.prompts[start:end]

    def enough(self, groups: Iterable[Sequence[Trajectory]]) -> bool:
        """Say whether the score of the samples of these groups is known to ± ``until``."""
        if self._until is None:
            return False
        scores = [[t.score for t in group if t.score is not None] for group in groups]
        return mean(scores, confidence_of_a_look(len(self.prompts))).margin <= self._until

    def samples_enough(self, groups: Mapping[str, Sequence[Trajectory]], n: int) -> int:
        """Return how many samples the look saw that was enough; 0: none was, or not all ``n`` of its prompts' ended."""
        seen: list[Sequence[Trajectory]] = []
        for part in self.parts():
            seen += [groups.get(prompt.prompt_id or "", ()) for prompt in part]
            if any(len(group) < n for group in seen):
                break
            if self.enough(seen):
                return n * len(seen)
        return 0

    def facts(self) -> Summary:
        """Return what the run's summary says of them."""
        return {} if self._until is None else {"confidence": confidence_of_a_look(len(self.prompts))}
