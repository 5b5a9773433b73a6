"""Data sets of the Hugging Face hub, and all else that ``datasets.load_dataset`` reads, as prompts.

Invariant: rows are taken as they are; which of their columns a prompt's fields are is said by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsm_rollout.errors import ConfigError
from fsm_rollout.trajectory.prompt import Prompt, as_prompts


def prompts(
    path: str,
    name: str | None = None,
    split: str = "train",
    revision: str | None = None,
    limit: int | None = None,
    options: Mapping[str, Any] | None = None,
    **columns: str,
) -> list[Prompt]:
    """Return the rows of a data set as prompts, at most ``limit`` of them.

    Args:
        path: its name on the hub, a folder, or a builder of ``datasets`` (``json``, ``parquet``).
        name: of its configurations.
        split: which part of it.
        revision: a branch, tag or commit of the hub's.
        limit: how many rows.
        options: further arguments of ``load_dataset`` (``data_files``, ``streaming``).
        columns: of a prompt's fields, which column they are: ``messages="question"``.

    Raises:
        ConfigError: ``datasets`` is not installed, or cannot load it; or rows of it are no prompts.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ConfigError(f"data sets need the package `datasets` (pip install datasets): {error}") from error
    try:
        table = load_dataset(path, name, split=split, revision=revision, **(options or {}))
    except Exception as error:  # of a network, a hub, a file
        fetch = f"`hf download --repo-type dataset {path}` where there is a network"
        raise ConfigError(
            f"data set '{path}': {type(error).__name__}: {error}; to have it in the cache: {fetch}"
        ) from error
    return as_prompts(table, limit, columns=columns)
