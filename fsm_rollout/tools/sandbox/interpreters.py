"""The code's own process: Python or bash, piece after piece, with what the earlier ones have left.

Invariant: a call's output goes to a file that the guard's limits hold for, and one line of JSON says what came of it.
"""

from __future__ import annotations

import ast
import contextlib
import json
import linecache
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import types
from typing import Any

from fsm_rollout.tools.sandbox.wire import JSONLines


def serve(language: str, requests: int, answers: int, folder: str) -> None:
    """Run what comes, one piece after the other, with what the earlier ones have left."""
    lines = JSONLines(requests)
    run = _Python() if language == "python" else _Bash()
    while (request := lines.next()) is not None:
        descriptor, path = tempfile.mkstemp(prefix=".output", dir=folder)
        os.unlink(path)
        kept = os.dup(1), os.dup(2)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        ended = False
        try:
            ended = run(request["code"], request["trace"])
        except OSError:  # its output has filled what it may fill
            pass
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os.dup2(kept[0], 1)
            os.dup2(kept[1], 2)
            for copy in kept:
                os.close(copy)
        data = os.pread(descriptor, 4 * request["output"], 0)
        os.close(descriptor)
        text = data.decode("utf-8", errors="replace")[: request["output"]]
        answer = {"text": text, "exit": ended, "shell": getattr(run, "pid", None)}
        data = json.dumps(answer).encode() + b"\n"
        while data:
            data = data[os.write(answers, data) :]
        if ended:
            return


class _Python:
    """A session of Python: names stay, and the value of a last expression is printed."""

    def __init__(self) -> None:
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        self._names: dict[str, Any] = vars(module)
        self._number = 0
        sys.argv = [""]
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __call__(self, code: str, trace: str) -> bool:
        """Run code, within a span if there is one; return whether it ends the session."""
        if trace:
            os.environ["TRACEPARENT"] = trace
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1)
        try:
            return self._run(code)
        finally:  # what could not be written is no part of the next call's output
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            sys.stdout = sys.stderr = stream = sys.__stdout__  # type: ignore[assignment]

    def _run(self, code: str) -> bool:
        self._number += 1
        name = f"<code {self._number}>"
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        try:
            tree = ast.parse(code, name)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, name, "exec"), self._names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), name, "eval"), self._names)
                if value is not None:
                    print(repr(value))
        except SystemExit as error:
            if error.code is not None and not isinstance(error.code, int):
                print(error.code, file=sys.stderr)
            return True
        except BaseException as error:  # the code's own; the model reads it
            sys.stdout.flush()
            frames = error.__traceback__
            while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
                frames = frames.tb_next
            traceback.print_exception(type(error), error, frames, limit=20)
        return False


class _Bash:
    """A session of bash: variables and the working directory stay."""

    def __init__(self) -> None:
        self._done, self._tell = os.pipe()
        self._shell = subprocess.Popen(
            ["bash", "--noprofile", "--norc"], stdin=subprocess.PIPE, pass_fds=(self._tell,), bufsize=0
        )
        self.pid = self._shell.pid
        os.close(self._tell)

    def __call__(self, code: str, trace: str) -> bool:
        """Run a script in the shell, within a span if there is one; return whether it has ended the shell."""
        descriptor, path = tempfile.mkstemp(prefix=".code")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(code)
        output, errors = os.dup(1), os.dup(2)
        exported = f"export TRACEPARENT={trace}; " if trace else ""
        line = f"{exported}. {path} </dev/null >/proc/{os.getpid()}/fd/{output} 2>&1; echo $? >&{self._tell}\n"
        assert self._shell.stdin is not None
        self._shell.stdin.write(line.encode())
        status = b""
        while not status.endswith(b"\n") and (piece := os.read(self._done, 100)):
            status += piece
        for copy in (output, errors):
            os.close(copy)
        with contextlib.suppress(OSError):
            os.unlink(path)
        if not status:
            return True
        if status.strip() != b"0":
            os.write(1, f"[exit status {status.decode().strip()}]\n".encode())
        return False
