"""Programs that an agent's YAML names: finding them, their environment, and ending them with all they have started.

Invariant: a program sees PATH, a few names that say where and in what language it runs, and what it is given; no other
name of our environment. What it has started ends with it, also what has left its session or its parent.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsm_rollout.errors import ToolError
from fsm_rollout.names.objects import looked_in

# What a program sees of our environment beside PATH.
INHERITED = ("LANG", "LC_ALL", "TZ", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR")
# Stands in the environment of a program and of all that it starts, so that they are found again.
MARK = "FSM_ROLLOUT_PROGRAM"
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{(\w+)\})")


def search_path() -> str:
    """Return PATH with the folder of this interpreter first: what is installed beside it needs no activation."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def words_of(command: Sequence[str]) -> list[str]:
    """Return a command's words: the program's path, and paths for words that name files beside the agent's YAML."""
    first, *rest = (_path_of(word) for word in command)
    return [shutil.which(first, path=search_path()) or first, *rest]


def _path_of(word: str) -> str:
    if not os.path.isabs(word) and not os.path.exists(word) and Path(word).suffix:
        for folder in looked_in():
            if (found := Path(folder) / word).is_file():
                return str(found)
    return word


def scrubbed() -> dict[str, str]:
    """Return what any program may know of our environment."""
    return {"PATH": search_path()} | {name: os.environ[name] for name in INHERITED if name in os.environ}


def from_environment(values: Mapping[str, Any]) -> dict[str, str]:
    """Return settings with each ``$NAME`` read from the environment (or ToolError), so no journal holds a secret."""
    for key, value in values.items():
        for bare, braced in _VARIABLE.findall(str(value)):
            if (bare or braced) not in os.environ:
                raise ToolError(f"{key}: the environment has no ${bare or braced}; set it where the run is started")
    return {key: os.path.expandvars(str(value)) for key, value in values.items()}


def end_family(pid: int, mark: str) -> None:
    """Kill a program that leads a session of its own, and all that it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    for _ in range(100):  # one that is just being started is seen next time
        family = [process for process in _marked(mark) if process != os.getpid()]
        if not family:
            return
        for process in family:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)


def _marked(mark: str) -> Iterator[int]:
    """Yield the processes whose environment has the mark (none where there is no /proc)."""
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*") if sys.platform == "linux" else ():
        with suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):  # that of a dead one is empty
                yield int(entry.name)
