"""Programs that tests start: forked from a process that has imported what takes long (:mod:`tests.fork_server`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess
from typing import TextIO

from tests.fork_server import ADDRESS, HEAVY, Forked, ForkServer, fork
from tests.kit import ROOT

PATIENCE = 600


def fsm_rollout(*arguments: str | Path, cwd: Path = ROOT) -> CompletedProcess[str]:
    """Run the console script, which looks for no module in its working directory."""
    return program("from fsm_rollout.cli import main; main()", *arguments, cwd=cwd, searched=())


@cache
def fork_server() -> str:
    """Return where the server listens: that of the test run, else one that is started for this process."""
    return os.environ.get(ADDRESS) or ForkServer(HEAVY).address


def program(
    code: str,
    *arguments: str | Path,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    searched: tuple[str, ...] = ("",),
    finalized: bool = False,
) -> CompletedProcess[str]:
    """Run code as ``python -c`` does, to its end.

    Args:
        code: What is run.
        arguments: ``sys.argv`` after its first.
        cwd: The working directory.
        env: Variables beside those of this process.
        searched: Folders that come first on ``sys.path``.
        finalized: Whether the interpreter is finalized as it would be, which takes a second where torch is loaded.
    """
    with (
        started(code, *arguments, cwd=cwd, env=env, searched=searched, finalized=finalized) as (process, *outputs),
        ThreadPoolExecutor(2) as pool,
    ):
        printed = [pool.submit(output.read) for output in outputs]
        try:
            status = process.wait(PATIENCE)
        except TimeoutError:
            process.kill()
            status = process.wait()
        stdout, stderr = (text.result() for text in printed)
    return CompletedProcess([code, *map(str, arguments)], status, stdout, stderr)


@contextmanager
def started(
    code: str,
    *arguments: str | Path,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    searched: tuple[str, ...] = ("",),
    finalized: bool = False,
) -> Iterator[tuple[Forked, TextIO, TextIO]]:
    """Start code as :func:`program` does; yield its process, output and errors. It is killed if it still runs then."""
    (out, stdout), (err, stderr), nothing = os.pipe(), os.pipe(), os.open(os.devnull, os.O_RDONLY)
    with ExitStack() as opened:
        outputs = [opened.enter_context(open(descriptor, encoding="utf-8")) for descriptor in (out, err)]
        streams = (nothing, stdout, stderr)
        try:
            process = fork(
                fork_server(), code, streams, cwd=str(cwd), environment={**os.environ, **(env or {})},
                path=[*searched, *filter(None, sys.path)], argv=["fsm-rollout", *map(str, arguments)],
                finalized=finalized,
            )  # fmt: skip
        finally:
            for descriptor in streams:
                os.close(descriptor)
        try:
            yield process, *outputs
        finally:
            process.kill()
            process.wait()
