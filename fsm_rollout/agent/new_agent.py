"""The agent that ``fsm-rollout new`` writes: small, commented, and one that passes ``check``.

Invariant: nothing that exists is overwritten.
"""

from __future__ import annotations

import re
from pathlib import Path

from fsm_rollout.errors import ConfigError


def new_agent(name: str, folder: Path) -> Path:
    """Write ``folder/name.yaml`` and return its path; ConfigError: a wrong name, or the file is there or cannot be."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ConfigError(f"'{name}' is not a name for an agent; use letters, digits and _, say my_agent")
    path = folder / f"{name}.yaml"
    text = Path(__file__).with_suffix(".yaml").read_text("utf-8").replace("NAME", name)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} exists already; choose another name, or remove it") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    return path
