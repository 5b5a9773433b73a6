"""Programs that tests start: processes of their own, forked from one that has imported what takes long.

Torch and all that a run needs cost six seconds of a core to import; a fork costs next to nothing. What tests look at is
the same: exit statuses, what is printed, signals, files left behind, how the interpreter ends. Only those that test
what is imported, and from where, start a fresh one.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, TextIO

from tests.kit import ROOT

PATIENCE = 600
HEAVY = ["fsm_rollout.cli", "fsm_rollout.jobs.runner", "fsm_rollout.batch.batch", "transformers", "pytest", "tests.kit"]


def fsm_rollout(*arguments: str | Path, cwd: Path = ROOT) -> CompletedProcess[str]:
    """Run the console script, which looks for no module in its working directory."""
    return program("from fsm_rollout.cli import main; main()", *arguments, cwd=cwd, searched=())


def forkserver() -> ForkServerContext:
    """Return what starts processes that have imported what takes long."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(HEAVY)
    return context


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
        env: Variables beside those with which the first program was started.
        searched: Folders that come first on ``sys.path``.
        finalized: Whether the interpreter is finalized as it would be, which takes a second where torch is loaded.
    """
    with (
        started(code, *arguments, cwd=cwd, env=env, searched=searched, finalized=finalized) as (process, *outputs),
        ThreadPoolExecutor(2) as pool,
    ):
        printed = [pool.submit(output.read) for output in outputs]
        process.join(PATIENCE)
        status = process.exitcode
        if status is None:
            process.kill()
        stdout, stderr = (text.result() for text in printed)
    return CompletedProcess([code, *map(str, arguments)], int(status or 0), stdout, stderr)


@contextmanager
def started(
    code: str,
    *arguments: str | Path,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    searched: tuple[str, ...] = ("",),
    finalized: bool = False,
) -> Iterator[tuple[BaseProcess, TextIO, TextIO]]:
    """Start code as :func:`program` does; yield its process, output and errors. It is killed if it still runs then."""
    ours, theirs = zip(os.pipe(), os.pipe(), strict=True)
    with ExitStack() as opened:
        stdout, stderr = (opened.enter_context(open(descriptor, encoding="utf-8")) for descriptor in ours)
        try:
            words = [str(argument) for argument in arguments]
            passed = (code, words, str(cwd), dict(env or {}), searched, finalized, _Outputs(theirs))
            process = forkserver().Process(target=_run, args=passed)
            process.start()
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        try:
            yield process, stdout, stderr
        finally:
            process.kill()
            process.join()
            process.close()


class _Outputs(tuple[int, ...]):
    """Descriptors that are handed to a process when it is started."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _handed, tuple(map(DupFd, self))


def _handed(*descriptors: Any) -> tuple[int, ...]:
    return tuple(descriptor.detach() for descriptor in descriptors)


def _run(
    code: str,
    words: list[str],
    cwd: str,
    env: dict[str, str],
    searched: tuple[str, ...],
    finalized: bool,
    outputs: tuple[int, int],
) -> None:
    for descriptor, output in enumerate(outputs, 1):
        os.dup2(output, descriptor)
        os.close(output)
    os.chdir(cwd)
    os.environ.update(env)
    sys.path[:] = [*searched, *(folder for folder in sys.path if folder)]
    sys.argv = ["fsm-rollout", *words]
    status = 0
    try:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if ended.code is not None and not isinstance(ended.code, int):
            print(ended.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    if finalized:
        ctypes.pythonapi.Py_Exit(status)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)
