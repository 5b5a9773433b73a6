"""The embedded models, of under 3 MB each: one that really uses a calculator, and one that really sees.

It lets every example, test and tutorial run offline on a CPU with a policy that samples its own tool calls.
`final` solves nearly every held-back dialogue; `early` is a checkpoint of the same training that solves about half
of them, so that there is something to learn from rewards. `card.json` beside this file holds what was measured;
`benchmarks/train_model.py` makes all of it. `vision` and `vision_early` are the same for a model that zooms in on a
picture and adds the numbers that it sees there; `examples/vision/train.py` makes these. Nothing here imports torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

CHECKPOINTS: Final = ("final", "early", "vision", "vision_early")


def embedded_model(name: str = "final") -> Path:
    """Give the directory of an embedded checkpoint, in the format of `transformers`' `from_pretrained`.

    Args:
        name: one of :data:`CHECKPOINTS`.

    Raises:
        ValueError: There is no checkpoint of that name.
    """
    if name not in CHECKPOINTS:
        raise ValueError(f"embedded model {name!r} does not exist; try one of {', '.join(CHECKPOINTS)}")
    return Path(__file__).parent / name


__all__ = ["CHECKPOINTS", "embedded_model"]
