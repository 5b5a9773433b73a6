"""How a run with a target meets its long tail: which groups are open at a time, and which of them make a batch.

A few trajectories take many times as long as most. A batch that waits for them leaves servers idle; one that does not
is made of what was quick, and trains on that.

Invariant: a policy says *when* something is begun or delivered, and never what: with an engine whose answers do not
depend on time, each trajectory is the same under all of them.

===========  ==========================================================================================================
``sync``     opens as many groups as the batch takes, and waits for all of them
``carry``    opens ``over_sample`` times as many; the first to end are the batch, the others go on in the next run
``paced``    opens the groups of the next ``max_staleness`` batches, too, and delivers them in the order in which they
             were opened. One that is slow is passed by later ones, but only as far as it can still be delivered before
             it is too old: so none becomes too old, and what is trained is as long as what was begun
``longest``  beside one of these: a group's first sample is its probe, and the others begin with the longest probe's
===========  ==========================================================================================================
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from operator import attrgetter
from typing import Annotated

from pydantic import AfterValidator

from fsm_rollout.errors import ConfigError, did_you_mean
from fsm_rollout.scheduler.group import Group

# Samples among which the longest probe's is looked for; beyond that, looking costs more than it gains.
CHOICE = 1024


class Tail:
    """``carry``, which the others change.

    Args:
        staleness: the run's ``max_staleness``.
        probes: whether a group's first sample says when its others begin (``longest``).
    """

    orders = False
    """Whether a batch takes groups in another order than that in which they are done."""

    def __init__(self, staleness: int | None = None, *, probes: bool = False) -> None:
        self.staleness, self.probes = staleness, probes

    def most_groups(self, target: int, over_sample: float) -> int:
        """Return how many groups may be open, done or delivered in a run with a target."""
        return math.ceil(target * over_sample)

    def ready(self, done: Iterable[Group], not_done: Iterable[Group], target: int, lacks: int, now: int) -> list[Group]:
        """Return the groups that a batch may take now, in the order in which it takes them.

        Args:
            done: the groups to choose from, in the order in which they were done.
            not_done: groups that were opened, or are resumed, and are not done.
            target: how many groups are a batch.
            lacks: how many this one still lacks.
            now: the version of the weights; it changes after each batch.
        """
        return list(done)

    def next_sample(self, samples: deque[tuple[Group, int]]) -> tuple[Group, int]:
        """Take out the sample to begin next: probes first, then those whose group has said most so far."""
        best, most = 0, -1
        for at, (group, sample) in enumerate(samples):
            if sample == 0 and not group.trajectories:
                best = at
                break
            if (longest := max([t.response_tokens for t in group.trajectories], default=0)) > most:
                best, most = at, longest
        found = samples[best]
        del samples[best]
        return found


class Sync(Tail):
    """``sync``."""

    def most_groups(self, target: int, over_sample: float) -> int:
        """Return the target."""
        return target


class Paced(Tail):
    """``paced``. Without a bound on staleness, as many groups are open as ``over_sample`` says."""

    orders = True

    def most_groups(self, target: int, over_sample: float) -> int:
        """Return those of this batch, and of as many more as may be late."""
        return super().most_groups(target, over_sample if self.staleness is None else 1 + self.staleness)

    def ready(self, done: Iterable[Group], not_done: Iterable[Group], target: int, lacks: int, now: int) -> list[Group]:
        """Return those before which no other has to go, the oldest first.

        What was opened at version v is to be in the batch of version v + staleness at the latest (without a bound, in
        the next one). As many younger ones may pass it as that leaves room for, beside all that are as old.
        """
        found, done = list[Group](), sorted(done, key=attrgetter("version", "place"))
        takes_room = Counter(group.version for group in (*filter(attrgetter("counts"), done), *not_done))
        spare, old = dict[int, int](), 0
        for version in sorted(takes_room):
            old += takes_room[version]
            spare[version] = lacks + target * max(0, version + (self.staleness or 0) - now) - old
        for group in done:
            older = [version for version in spare if version < group.version]
            if any(spare[version] <= 0 for version in older):
                break
            for version in older:
                spare[version] -= group.counts
            found.append(group)
        return found


POLICIES: dict[str, type[Tail]] = {"carry": Tail, "sync": Sync, "paced": Paced}
LONGEST = "longest"


def tail_of(words: str, staleness: int | None = None) -> Tail:
    """Return a policy by its name: ``paced``, ``longest``, ``paced+longest``; ConfigError: there is no such."""
    names, known = words.split("+"), [*POLICIES, LONGEST]
    for name in names:
        if name not in known:
            raise ConfigError(f"tail: there is no policy '{name}'{did_you_mean(name, known)}")
    batches = [name for name in names if name != LONGEST]
    if len(batches) > 1 or len(names) > len(set(names)):
        raise ConfigError(f"tail: {words!r} names two policies for one thing; give one of {', '.join(POLICIES)}")
    return POLICIES[(batches or ["carry"])[0]](staleness, probes=LONGEST in names)


def _named(words: str) -> str:
    """Return the words that name a policy; ValueError: they name none."""
    try:
        tail_of(words)
    except ConfigError as error:
        raise ValueError(str(error).removeprefix("tail: ")) from None
    return words


TailName = Annotated[str, AfterValidator(_named)]
