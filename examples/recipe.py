"""What the recipes for models of any size share: a config with changes, the engine that samples, and prompts.

Invariant: what decides between a real run and a trial are the config's `model` and `gpus`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from omegaconf import OmegaConf

import fsm_rollout as fr
from fsm_rollout.names.objects import load_object

sys.path.insert(0, str(Path(__file__).resolve().parent / "gsm8k"))


def read_config(arguments: Sequence[str] | None, doc: str | None, default: Path) -> tuple[Any, Path, int | None]:
    """Return a config, the folder that its paths start from, and after how many steps to stop a trial."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("changes", nargs="*", help="another config's file, and changes of it: model=… gpus=…")
    parser.add_argument("--steps", type=int, help="stop after so many steps: a trial")
    asked = parser.parse_args(arguments)
    file = next((Path(change) for change in asked.changes if "=" not in change), default)
    changes = [change for change in asked.changes if "=" in change]
    merged = OmegaConf.merge(OmegaConf.load(file), OmegaConf.from_dotlist(changes))
    return SimpleNamespace(**OmegaConf.to_container(merged)), file.parent, asked.steps  # type: ignore[arg-type]


def engine(model: str, gpus: int, *, in_process: bool = False) -> dict[str, Any]:
    """Return what samples: SGLang on the GPUs that the trainer leaves, or beside it on the only one.

    Without a GPU, or if it is to be ``in_process``, it is a model in the trainer's process.
    """
    if in_process or not gpus:
        place = {"threads": 1, "device": "cuda" if gpus else "cpu"}
        return {"kind": "transformers", "model": model, "max_running": 1024, **place}
    if gpus == 1:
        return {"kind": "sglang", "model": model, "mem_fraction": 0.3}
    return {"kind": "sglang", "model": model, "tp": gpus - 1, "args": {"base_gpu_id": 1}}


def prompts(source: str, folder: Path, limit: int | None = None) -> list[fr.Prompt]:
    """Return the prompts of a file, or of a function that is named ``module:function``."""
    if ":" in source:
        found: list[fr.Prompt] = load_object(source)(limit=limit)
        return found
    return fr.read_prompts(folder / source, limit=limit)
