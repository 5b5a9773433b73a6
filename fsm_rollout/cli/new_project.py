"""The projects that ``fsm-rollout new`` writes: small, commented, and working as they stand.

Invariant: nothing that exists is overwritten. A project is the files of ``projects/common`` with those of its kind laid
over them; NAME stands for its name in texts and file names.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from fsm_rollout.errors import ConfigError

KINDS = {
    "tools": "calls a tool until it answers",
    "user": "answers, and a user goes on asking",
    "plan-act-verify": "makes a plan, carries it out with tools, and revises its answer until a verifier accepts it",
    "delegate": "calls another agent as a tool",
    "external": "is a loop of your own around OpenAI's client, which runs as it is",
}
"""What each kind's agent does, by the words of ``--from``."""
CALLED = {
    "code.py.txt": "NAME.py",
    "test.py.txt": "test_NAME.py",
    "train.py.txt": "train.py",
    "gitignore.txt": ".gitignore",
}
"""Files that are called otherwise here, where nobody is to run, import or obey them."""


def new_project(name: str, kind: str, folder: Path) -> Path:
    """Write a project into ``folder/name`` and return that.

    Raises:
        ConfigError: a name that no module can have or that one has already; something is there, or cannot be written.
    """
    # 1. The name is that of a module, which nothing else may have.
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        like = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_0123456789") or "my_agent"
        raise ConfigError(f"'{name}' is not a name for an agent; use letters, digits and _, say {like}")
    project = folder / name
    if project.exists():
        raise ConfigError(f"{project} exists already; choose another name, or remove it")
    if find_spec(name) is not None or name in ("train", f"test_{name}"):
        raise ConfigError(f"'{name}' is the name of a Python module already; choose another, say {name}_agent")
    # 2. The files of all kinds, then those of this one.
    home = Path(__file__).with_name("projects")
    try:
        for file in [*sorted((home / "common").iterdir()), *sorted((home / kind).iterdir())]:
            text = file.read_text("utf-8").replace("KIND_DOES", KINDS[kind]).replace("KIND", kind).replace("NAME", name)
            project.mkdir(exist_ok=True)
            (project / CALLED.get(file.name, file.name).replace("NAME", name)).write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(f"{project} cannot be written: {error.strerror}") from None
    return project
