"""Which of a run's trajectories are listed, and in which order: what the address of a page asks for.

Invariant: all of it is in the address, so a list can be kept, sent and gone back to; what it asks for that there is not
is as if it were not asked.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsm_rollout.jobs.samples import FIGURES, Sample

PER_PAGE = 100
ANY = "any"
Key = Callable[[Sample], Any]

COLUMNS: Mapping[str, Key | None] = {
    "trajectory": None,  # in the order in which they began
    "agent": lambda sample: sample.agent,
    "state": lambda sample: sample.state,
    "ended": lambda sample: sample.ending,
    "score": lambda sample: sample.score,
    "generations": lambda sample: sample.figures["generations"],
    "tokens": lambda sample: sample.figures["tokens"],
    "tool calls": lambda sample: sample.figures["tool calls"],
    "tool errors": lambda sample: sample.figures["tool errors"],
    "seconds": lambda sample: sample.figures["seconds"],
}
"""What a list can be ordered by."""
WORDED = ("trajectory", "agent", "state", "ended")  # of these; the others are numbers


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked for; empty: all of it."""

    text: str = ""
    agent: str = ""
    state: str = ""
    """A state that it has visited; with ``now:`` before it, in which it is and has not ended."""
    ended: str = ""
    error: str = ""
    """A kind of failure of a tool call, or :data:`ANY`."""
    least: float = -math.inf
    most: float = math.inf
    sort: str = ""
    """A column, with ``-`` before it if the largest come first."""
    page: int = 0

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Wanted:
        """Read it off an address."""
        words = {name: query.get(name, "").strip() for name in ("text", "agent", "state", "ended", "error", "sort")}
        least, most = _number(query.get("least"), -math.inf), _number(query.get("most"), math.inf)
        return cls(**words, least=least, most=most, page=max(0, int(_number(query.get("page"), 0))))

    @property
    def words(self) -> list[str]:
        """The words of the text; those in quotation marks are one."""
        parts = self.text.split('"')
        return [word for place, part in enumerate(parts) for word in ([part] if place % 2 else part.split()) if word]

    def chosen(self, samples: Sequence[Sample], holding: Callable[[list[str]], set[str]]) -> list[Sample]:
        """Return those that are asked for, in that order; ``holding`` knows which hold some words."""
        ids = holding(self.words) if self.words else None
        found = [each for each in samples if self._wants(each) and (ids is None or each.trajectory_id in ids)]
        down, key = self.sort.startswith("-"), COLUMNS.get(self.sort.removeprefix("-"))
        if key is None:
            return found[::-1] if self.sort == "-trajectory" else found
        having = sorted((each for each in found if key(each) is not None), key=key, reverse=down)
        return having + [each for each in found if key(each) is None]

    def _wants(self, sample: Sample) -> bool:
        return (
            (not self.agent or sample.agent == self.agent)
            and (not self.ended or sample.ending == self.ended)
            and (not self.state or self._in_state(sample))
            and (not self.error or (bool(sample.failures) if self.error == ANY else self.error in sample.failures))
            and (self.least == -math.inf or (sample.score is not None and sample.score >= self.least))
            and (self.most == math.inf or (sample.score is not None and sample.score <= self.most))
        )

    def _in_state(self, sample: Sample) -> bool:
        if self.state.startswith("now:"):
            return not sample.ended and sample.state == self.state.removeprefix("now:")
        return self.state in sample.visits


def _number(text: str | None, default: float) -> float:
    try:
        value = float(text or "")
    except ValueError:
        return default
    return value if math.isfinite(value) else default


@dataclass(slots=True)
class Overview:
    """What a run has come to so far, and what its trajectories can be told apart by."""

    samples: int
    sub_agents: int
    ended: int
    score: float | None
    figures: Mapping[str, float]
    agents: Counter[str]
    now: Counter[str]
    """In which states those are that have not ended."""
    visited: list[str]
    endings: Counter[str]
    errors: Counter[str]

    @classmethod
    def of(cls, everything: Sequence[Sample]) -> Overview:
        """Return that of all trajectories of a run; some 1 us of each."""
        own = [each for each in everything if each.parent_id is None]
        scores = [each.score for each in own if each.score is not None]
        paths = Counter(tuple(each.visits) for each in everything)
        return cls(
            samples=len(own),
            sub_agents=len(everything) - len(own),
            ended=sum(each.ended for each in own),
            score=math.fsum(scores) / len(scores) if scores else None,
            figures={name: math.fsum(each.figures.get(name, 0.0) for each in everything) for name in FIGURES},
            agents=Counter(each.agent for each in everything),
            now=Counter(each.state for each in everything if not each.ended),
            visited=list(dict.fromkeys(state for path in paths for state in path)),
            endings=Counter(each.ending for each in everything),
            errors=Counter(failure for each in everything if each.failures for failure in each.failures),
        )
