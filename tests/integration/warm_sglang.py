"""SGLang's server, forked from a process that has imported SGLang: a start of its own imports for 8 s of a core.

All else is as when :class:`ServerProcess` starts a program: standard input and output, environment, session, exit code.
One test still starts the program (the documentation's page on SGLang). The process has imported nothing else before, as
transformers looks but once for the stand-ins that SGLang needs on a CPU.
"""

import os
import subprocess
from collections.abc import Iterator, Mapping
from typing import IO, Any

import pytest

from fsm_rollout.engines.sglang import process
from fsm_rollout.engines.sglang.process import ServerProcess
from tests.fork_server import Forked, ForkServer, fork


class WarmSGLang:
    """Stands in for the module ``subprocess`` where the server is started."""

    PIPE, STDOUT = subprocess.PIPE, subprocess.STDOUT

    def __init__(self) -> None:
        self._forks = ForkServer(["tests.integration.sglang_imports"])

    def Popen(self, command: list[str], *, env: Mapping[str, str], stdout: IO[bytes], **_: Any) -> Forked:  # noqa: N802
        """Fork a server; ``command`` is what would have been started."""
        assert command[1:] == ["-m", process.__name__]
        (reads, stdin), log = os.pipe(), stdout.fileno()
        code = f"from {process.__name__} import main; main()"
        server = fork(self._forks.address, code, (reads, log, log), environment=env, session=True)
        os.close(reads)
        server.stdin = open(stdin, "wb")  # noqa: SIM115  # closed by whoever ends the server
        return server

    def close(self) -> None:
        """End the process that forks; servers end with their standard input."""
        self._forks.close()


@pytest.fixture(scope="session")
def imported() -> Iterator[WarmSGLang]:
    """One process that has imported SGLang, for all modules whose servers are warm."""
    warm_sglang = WarmSGLang()
    yield warm_sglang
    warm_sglang.close()


@pytest.fixture(scope="module")
def warm(imported: WarmSGLang) -> Iterator[None]:
    """All servers of a module are forked from it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "subprocess", imported)
        yield


@pytest.fixture
def with_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that start now have SGLang's defaults where ours are easier: the harder case for exact tokens."""
    monkeypatch.setattr(process, "ServerProcess", as_others_start_it)


def as_others_start_it(own: dict[str, Any], threads: int) -> ServerProcess:
    """Start one with a tokenizer of its own, that repeats its whole answer in each output."""
    defaults = {"skip_tokenizer_init": False, "incremental_streaming_output": False}
    return ServerProcess({**own, **defaults}, threads)
