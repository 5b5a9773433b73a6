"""Repeated sequences, folded: forty times the same two states are said once, with their number.

Invariant: unfolding gives the sequence again, item for item.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

LONGEST = 8  # items of a sequence that is looked for again right behind it


@dataclass(frozen=True, slots=True)
class Block(Generic[T]):
    """Some items, ``times`` in a row."""

    items: tuple[T, ...]
    times: int = 1


def folded_repeats(items: Sequence[T]) -> list[Block[T]]:
    """Return the items as blocks: from the left, what covers most items with the fewest said wins."""
    blocks: list[Block[T]] = []
    at = 0
    while at < len(items):
        size, times = max(
            ((size, _times(items, at, size)) for size in range(1, min(LONGEST, (len(items) - at) // 2) + 1)),
            key=lambda found: (found[0] * (found[1] - 1), -found[0]),
            default=(1, 1),
        )
        if times < 2 or size * times < 4:  # twice the same one is quicker read than folded
            size, times = 1, 1
        blocks.append(Block(tuple(items[at : at + size]), times))
        at += size * times
    return blocks


def _times(items: Sequence[T], at: int, size: int) -> int:
    """Return how often ``items[at : at + size]`` stands there in a row."""
    block, times = items[at : at + size], 1
    while items[at + times * size : at + (times + 1) * size] == block:
        times += 1
    return times
