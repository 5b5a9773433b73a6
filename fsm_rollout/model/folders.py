"""Which local folder a model's name stands for, also one that a journal names, and its tokenizer.

Invariant: nothing here imports torch or asks a hub.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsm_rollout.agent.graph import POLICY
from fsm_rollout.errors import EngineError, did_you_mean
from fsm_rollout.model import CHECKPOINTS, embedded_model
from fsm_rollout.trajectory.journal import metadata

EMBEDDED = "embedded"
PLAIN = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Two names of one class in transformers 5."""


def model_folder(model: str | Path, base: str | Path = ".") -> Path:
    """Return the folder that ``model`` names: ``embedded``, ``embedded:early``, or a path (relative to ``base``).

    Raises:
        EngineError: there is no such checkpoint or folder, or it holds no model.
    """
    name, _, checkpoint = str(model).partition(":")
    if name == EMBEDDED:
        checkpoint = checkpoint or CHECKPOINTS[0]
        if checkpoint not in CHECKPOINTS:
            raise EngineError(
                f"embedded checkpoint '{checkpoint}' does not exist{did_you_mean(checkpoint, CHECKPOINTS)}"
            )
        folder = embedded_model(checkpoint)
    else:
        folder = Path(base) / Path(model).expanduser()
    if not folder.is_dir():
        raise EngineError(
            f"model '{model}': there is no folder '{folder}'; give the path of a downloaded model (nothing is "
            f"downloaded here), or '{EMBEDDED}'"
        )
    if not (folder / "config.json").is_file():
        raise EngineError(f"model '{model}': '{folder}' has no config.json; give a folder that save_pretrained wrote")
    return folder


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a model folder.

    Raises:
        EngineError: transformers cannot load it.
    """
    try:
        if _is_plain(folder):
            from transformers import PreTrainedTokenizerFast  # a second and more sooner than what follows

            return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        from transformers import AutoTokenizer  # imports every kind of model there is, and torch's compiler

        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever a broken file makes transformers or tokenizers raise
        raise EngineError(f"the tokenizer in '{folder}' cannot be loaded: {type(error).__name__}: {error}") from error


def stop_tokens(*candidates: int | Sequence[int] | None) -> frozenset[int]:
    """Return the stop tokens of the first candidate that names any: configs have one id there, or several."""
    for eos in candidates:
        if eos is not None:
            return frozenset({int(eos)}) if isinstance(eos, int) else frozenset(map(int, eos))
    return frozenset()


def _is_plain(folder: Path) -> bool:
    """Say whether the folder asks for the class that every fast tokenizer without code of its own has."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    except (OSError, ValueError):  # for transformers to judge
        return False
    return isinstance(config, dict) and config.get("tokenizer_class") in PLAIN and "auto_map" not in config


def recorded_engine(run: Mapping[str, Any], engine: str) -> tuple[Mapping[str, Any], Path]:
    """Return how a run's journal describes one of its engines, and the folder to which paths there are relative.

    ``run`` is the journal's metadata (``Rollout.description``). An engine that was a replay is described by the journal
    that it replayed.

    Raises:
        EngineError: the journal does not describe that engine.
        JournalError: the engine was a replay of a journal that can no longer be read.
    """
    engines = run.get("engines") or {}
    base = Path(str(run.get("base") or "."))
    if engine not in engines:
        raise EngineError(f"its journal says nothing of an engine '{engine}'{did_you_mean(engine, engines)}")
    facts = engines[engine]
    if facts.get("kind") != "replay":
        return facts, base
    replayed = base / facts["run"]
    journal = replayed if replayed.is_file() else replayed / "journal.sqlite"
    return recorded_engine(metadata(journal), facts.get("engine", POLICY))


def tokenizer_folder(facts: Mapping[str, Any], base: Path) -> Path:
    """Return the folder with the tokenizer of an engine that a journal describes (see :func:`recorded_engine`).

    Raises:
        EngineError: the folder is not on this machine.
    """
    return model_folder(facts.get("tokenizer") or facts.get("model") or EMBEDDED, base)
