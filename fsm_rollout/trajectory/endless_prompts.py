"""Prompts for a training loop: the same ones again and again, each epoch in another order.

Invariant: every epoch has every prompt once, and the order follows from the seed alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from random import Random
from typing import TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)


def endless_prompts(prompts: Iterable[T], *, seed: int = 0, epochs: int = 1000) -> Iterator[T]:
    """Return an iterator over shuffled ``prompts``, ``epochs`` times: what ``target_groups`` takes from, step by step.

    Make it once, and give it to every ``rollout.run(prompts, n=8, target_groups=16)``: each step goes on where the one
    before stopped. ``epochs`` bounds it, so that a group filter which keeps nothing comes to an end; the end is logged,
    and the last run returns fewer groups than it was asked for.

    Raises:
        ValueError: there is no prompt, or ``epochs`` is less than 1.
    """
    epoch = list(prompts)
    if not epoch:
        raise ValueError("there is no prompt to repeat; look at what was read")
    if epochs < 1:
        raise ValueError(f"epochs must be at least 1, got {epochs}")
    return _epochs(epoch, Random(seed), epochs)


def _epochs(epoch: list[T], rng: Random, epochs: int) -> Iterator[T]:
    for _ in range(epochs):
        rng.shuffle(epoch)
        yield from epoch
    logger.warning("all %d prompts were used %d times; give more epochs", len(epoch), epochs)
