"""What tests share: where the repository's files are."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The repository."""
CONFIGS = ROOT / "configs"


def under_way(stretches: list[tuple[float, float]]) -> float:
    """Return the seconds in which at least one stretch ``(start, end)`` is under way."""
    times = sorted({at for stretch in stretches for at in stretch})
    return sum(
        later - earlier
        for earlier, later in pairwise(times)
        if any(start <= earlier and later <= end for start, end in stretches)
    )
