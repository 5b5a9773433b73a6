"""The embedded model: a transformer of under 3 MB that really uses a calculator, shipped with the package.

It lets every example, test and tutorial run offline on a CPU with a policy that samples its own tool calls.
`final` solves nearly every held-back dialogue; `early` is a checkpoint of the same training that solves about half
of them, so that there is something to learn from rewards. `card.json` beside this file holds what was measured;
`benchmarks/train_model.py` makes all of it. Nothing here imports torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

CHECKPOINTS: Final = ("final", "early")


def embedded_model(name: str = "final") -> Path:
    """Give the directory of an embedded checkpoint, in the format of `transformers`' `from_pretrained`.

    Args:
        name: `final` or `early`.

    Raises:
        ValueError: There is no checkpoint of that name.
    """
    if name not in CHECKPOINTS:
        raise ValueError(f"embedded model {name!r} does not exist; try one of {', '.join(CHECKPOINTS)}")
    return Path(__file__).parent / name


__all__ = ["CHECKPOINTS", "embedded_model"]
