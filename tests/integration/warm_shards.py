"""Shards that are processes, forked from one that has imported what they do: each would import for seconds.

All else is as when :class:`ChildProcess` starts a program: a session of its own, environment, exit code. What is
heavier (torch, engines of other kinds) each imports itself.
"""

import os
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from fsm_rollout.concurrency import child_process
from fsm_rollout.scheduler.shard_placement import SHARD
from tests.fork_server import Forked, ForkServer, fork

IMPORTS = (SHARD, "fsm_rollout.engines.scripted.engine", "tests.integration.shard_work")


class WarmShards:
    """Stands in for the module ``subprocess`` where shards are started."""

    DEVNULL = subprocess.DEVNULL

    def __init__(self) -> None:
        self._forks = ForkServer(IMPORTS)

    def Popen(  # noqa: N802
        self, command: Sequence[str], *, pass_fds: Sequence[int], **options: Any
    ) -> Forked | subprocess.Popen[bytes]:
        """Fork a shard, whose connection is its standard input; start whatever else as it would be."""
        entry = command[4]
        if not entry.startswith(SHARD):
            return subprocess.Popen(command, pass_fds=pass_fds, **options)
        code = f"import os\nfrom {child_process.__name__} import main\nmain({entry!r}, 0, os.getppid())"
        return fork(self._forks.address, code, (*pass_fds, 2, 2), session=True, environment=dict(os.environ))

    def close(self) -> None:
        """End the process that forks."""
        self._forks.close()


@pytest.fixture(scope="module", autouse=True)
def warm_shards() -> Iterator[None]:
    """Fork the shards of a module of tests that imports this."""
    warm = WarmShards()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child_process, "subprocess", warm)
        yield
    warm.close()
