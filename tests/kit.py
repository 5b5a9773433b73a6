"""What tests share."""

from __future__ import annotations

import gc
import importlib.util
import runpy
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    import fsm_rollout as fr

ROOT = Path(__file__).resolve().parent.parent
"""The repository."""
CONFIGS = ROOT / "configs"


def closed_port() -> int:
    """Return a port of this machine at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def script(path: str | Path) -> ModuleType:
    """Import a file, of the repository or anywhere else, that is in no package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def example(path: str) -> dict[str, Any]:
    """Run a script as Python would, and look into its folders no longer: what is in `examples/verl` is not verl."""
    before = [*sys.path]
    sys.path.insert(0, str((ROOT / path).parent))
    try:
        return runpy.run_path(str(ROOT / path))
    finally:
        sys.path[:] = before


@contextmanager
def new_objects() -> Iterator[None]:
    """Have the collector know of new objects alone: a walk through all that a suite has imported takes a second."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def on_screen(view: Any, width: int = 80) -> str:
    """Return what a terminal of so many columns shows of a view."""
    from rich.console import Console

    console = Console(width=width)
    with console.capture() as shown:
        console.print(view)
    return shown.get()


def under_way(stretches: list[tuple[float, float]]) -> float:
    """Return the seconds in which at least one stretch ``(start, end)`` is under way."""
    times = sorted({at for stretch in stretches for at in stretch})
    return sum(
        later - earlier
        for earlier, later in pairwise(times)
        if any(start <= earlier and later <= end for start, end in stretches)
    )


def ratios(model: Any, batch: fr.TrajectoryBatch) -> torch.Tensor:
    """Return what a forward pass without cache makes of each trained token's probability, over what was sampled."""
    import torch

    columns, left = batch.tensordict, batch.tensordict["prompts"].shape[1]
    names = ("input_ids", "attention_mask", "position_ids")
    with torch.no_grad():
        logits = model(**{name: columns[name] for name in names}).logits[:, left - 1 : -1].float()
    logits = batch.masked_logits(logits / columns["temperatures"][..., None])
    logprobs = torch.log_softmax(logits, -1).gather(-1, columns["responses"][..., None])[..., 0]
    return torch.exp(logprobs - columns["rollout_log_probs"])[columns["response_mask"].bool()]
