"""The processes in which sandboxed code runs: a nursery, and for each session a guard with the code's own process.

Invariant: whoever ends first takes the rest along. The nursery ends when the pipe to the run is closed, however the run
ended; a guard ends with the nursery (the kernel sees to it) or when its session is closed; and with a guard, which is
the first process of a process namespace, ends all that its code has started. The guard runs no code of a session: it
passes calls on, watches what they use, and kills what exceeds the limits.

This file is run by itself (``python -I -S jail.py FD``), with nothing of this package and nothing of the environment.
The run sends one descriptor per session over the Unix socket FD, with the session's settings as JSON. Over that
descriptor go lines of JSON: ``{"code": …}`` to the session, ``{"text": …, "ended": …}`` back.

The nursery forks, so a session costs milliseconds and shares its memory with the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

TICK = 0.05  # seconds between two looks at what running code uses
NOBODY = 65534
OUTPUT = "/dev/shm"  # where a session in namespaces keeps the output of a call
MOST_BYTES = 8 << 20  # of one line, either way
_PAGE = resource.getpagesize()
_HERTZ = os.sysconf("SC_CLK_TCK")

_libc = ctypes.CDLL(None, use_errno=True)
_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_NAMESPACES = _NEWNS | _NEWUTS | _NEWIPC | _NEWUSER | _NEWPID | _NEWNET
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_CALLS = {"x86_64": {"clone": 56, "mount_setattr": 442, "pivot_root": 155, "capset": 126}}
# ptrace, pivot_root, chroot, acct, settimeofday, mount, umount2, swapon/off, reboot, sethostname, iopl, ioperm,
# modules, quotactl, kexec, keys, unshare, perf, fanotify, open_by_handle_at, setns, process_vm_*, kcmp, finit_module,
# memfd_create (memory that no limit sees), kexec_file, bpf, userfaultfd, io_uring, the new mount calls, pidfd_open,
# process_madvise, mount_setattr.
_DENIED = {
    "x86_64": (
        101, 155, 161, 163, 164, 165, 166, 167, 168, 169, 172, 173, 175, 176, 179, 246, 248, 249, 250, 272, 298, 300,
        304, 308, 310, 311, 312, 313, 319, 320, 321, 323, 425, 426, 427, 428, 429, 430, 431, 432, 433, 434, 440, 442,
    )
}  # fmt: skip
_CLONE, _CLONE3, _SOCKET, _SHMGET = 56, 435, 41, 29


Settings = dict[str, Any]  # those of a session, as the run has sent them


class _Failed(OSError):
    """A call of the C library failed."""


def _call(function: Callable[..., int], *arguments: object) -> int:
    result = function(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise _Failed(number, os.strerror(number))
    return result


def _syscall(name: str, *arguments: object) -> int:
    number = _CALLS.get(os.uname().machine, {}).get(name)
    if number is None:
        raise _Failed(38, f"the system call number of {name} is not known for {os.uname().machine}")
    return _call(
        _libc.syscall, ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments)
    )


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, data)]
    _call(_libc.mount, encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])


# -- the nursery --------------------------------------------------------------------------------------------------


def nursery(control: socket.socket) -> None:
    """Fork a guard for each descriptor that comes, until the pipe to the run is closed."""
    guards: dict[int, str] = {}
    _libc.prctl(36, 1)  # what a guard leaves behind without namespaces comes here
    while True:
        readable, _, _ = select.select([control], [], [], 1.0)
        if readable:
            data, descriptors, _, _ = socket.recv_fds(control, 65536, 1)
            if not data:
                break
            settings = json.loads(data)
            folder = "" if settings["namespaces"] else tempfile.mkdtemp(prefix="sandbox-", dir=settings["folder"])
            pid = _fork_guard(settings, descriptors[0], control, folder)
            guards[pid] = folder
            os.close(descriptors[0])
        _reap(guards)
    for pid in guards:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in _descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for folder in guards.values():
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def _reap(guards: dict[int, str]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) > 0:
            if folder := guards.pop(pid, ""):
                shutil.rmtree(folder, ignore_errors=True)


def _fork_guard(settings: Settings, descriptor: int, control: socket.socket, folder: str) -> int:
    """Fork a guard, into namespaces of its own where ``settings`` say so; return its process id."""
    mapped, users_mapped = os.pipe()  # closed once the users are mapped
    pid = _syscall("clone", _NAMESPACES | signal.SIGCHLD, 0, 0, 0, 0) if settings["namespaces"] else os.fork()
    if pid == 0:
        status = 1
        try:
            control.close()
            os.close(users_mapped)
            _libc.prctl(1, signal.SIGKILL)  # ends with the nursery
            os.read(mapped, 1)
            os.close(mapped)
            _guard(settings, socket.socket(fileno=descriptor), folder)
            status = 0
        except BaseException as error:  # whatever it is, this process ends here; the run hears why
            with contextlib.suppress(OSError):
                os.write(descriptor, json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        finally:
            os._exit(status)
    os.close(mapped)
    try:
        if settings["namespaces"]:
            _map_users(pid)
    finally:
        os.close(users_mapped)
    return pid


def _map_users(pid: int) -> None:
    """Say who the users of a guard's namespace are: root may have nobody there too, others only themselves."""
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        users, groups = f"0 0 1\n{NOBODY} {NOBODY} 1\n", f"0 0 1\n{NOBODY} {NOBODY} 1\n"
    else:
        users, groups = f"0 {user} 1\n", f"0 {group} 1\n"
        _write(f"/proc/{pid}/setgroups", "deny")
    _write(f"/proc/{pid}/uid_map", users)
    _write(f"/proc/{pid}/gid_map", groups)


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


# -- the guard ----------------------------------------------------------------------------------------------------


def _guard(settings: Settings, run: socket.socket, folder: str) -> None:
    """Serve one session: pass calls on, watch them, and begin the code's process anew when it has ended."""
    # 1. Where it is: a file system of its own, or a folder of its own.
    if settings["namespaces"]:
        _build_root(settings)
        folder = "/tmp"
    else:
        _libc.prctl(36, 1)  # what leaves its parent comes here, where it is found
        os.setsid()
    process: _Process | None = None
    lines = _Lines(run)
    run.sendall(b'{"ready": true}\n')
    # 2. Calls, one after the other.
    while (request := lines.next()) is not None:
        if process is None:
            process = _Process(settings, folder)
        text, ended = process.call(request["code"], settings, run)
        if ended is not None:
            process.kill()
            process = None
        _kill_others(process.pid if process is not None else None, process.shell if process is not None else None)
        answer = {"text": text[: settings["output"]], "cut": len(text) > settings["output"], "ended": ended}
        run.sendall(json.dumps(answer).encode() + b"\n")
    if process is not None:
        process.kill()
    _kill_others(None, None)


class _Lines:
    """Lines of JSON from a socket or a pipe; ``None`` at its end."""

    def __init__(self, source: socket.socket | int) -> None:
        self._source = source
        self._data = b""

    def next(self, until: float | None = None, tick: Callable[[], None] | None = None) -> Any:
        """Return the next one; TimeoutError when ``until`` has come, and ``tick`` is called while it is waited for."""
        while b"\n" not in self._data:
            if until is not None and time.monotonic() > until:
                raise TimeoutError
            if until is not None:
                readable, _, _ = select.select([self._source], [], [], TICK)
                if not readable:
                    if tick is not None:
                        tick()
                    continue
            piece = (
                self._source.recv(65536) if isinstance(self._source, socket.socket) else os.read(self._source, 65536)
            )
            if not piece:
                return None
            self._data += piece
            if len(self._data) > MOST_BYTES:
                raise ValueError("the line is too long")
        line, _, self._data = self._data.partition(b"\n")
        return json.loads(line)


class _Exceeded(Exception):
    """Running code uses more than it may."""


class _Process:
    """The process of a session's code."""

    def __init__(self, settings: Settings, folder: str) -> None:
        request, self._requests = os.pipe()
        answers, answer = os.pipe()
        self.shell: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self._requests)
                os.close(answers)
                _confine(settings, folder, keep=(request, answer))
                _serve(settings["language"], request, answer, OUTPUT if settings["namespaces"] else folder)
            finally:
                os._exit(1)
        os.close(request)
        os.close(answer)
        self._answers = answers
        self._lines = _Lines(answers)

    def call(self, code: str, settings: Settings, run: socket.socket) -> tuple[str, str | None]:
        """Have code run; return its output, and why the session ended with it, if it did.

        When ``run`` is closed, the connection to who asked, nobody waits for the output, and the code is ended.
        """
        used = _use(self.pid)[1]
        until = time.monotonic() + settings["seconds"]

        def watch() -> None:
            if select.select([run], [], [], 0)[0] and not run.recv(1, socket.MSG_PEEK):
                raise _Exceeded("exit")
            memory, cpu, processes = _use(self.pid)
            if memory > settings["memory"]:
                raise _Exceeded("memory")
            if cpu - used > settings["cpu_seconds"]:
                raise _Exceeded("cpu time")
            if processes > settings["processes"]:
                raise _Exceeded("processes")

        try:
            data = json.dumps({"code": code, "output": settings["output"] + 1}).encode() + b"\n"
            while data:  # a pipe that is not read is full after 64 kB
                _, writable, _ = select.select([], [self._requests], [], max(0.0, until - time.monotonic()))
                if not writable:
                    raise TimeoutError
                data = data[os.write(self._requests, data[:4096]) :]
            answer = self._lines.next(until, watch)
        except TimeoutError:
            return "", "time"
        except _Exceeded as error:
            return "", str(error)
        except (ValueError, OSError):
            return "", "broken"
        if not isinstance(answer, dict) or not isinstance(answer.get("text"), str):
            return "", "exit"
        shell = answer.get("shell") if settings["language"] == "bash" else None
        self.shell = shell if isinstance(shell, int) else None
        return answer["text"], "exit" if answer.get("exit") else None

    def kill(self) -> None:
        """End it, and all that it has started."""
        _kill_others(None, None)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        for descriptor in (self._requests, self._answers):
            os.close(descriptor)


def _others() -> list[int]:
    """Return the processes of this guard's session."""
    if os.getpid() == 1:
        with contextlib.suppress(OSError):
            return [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != 1]
        return []
    return list(_descendants(os.getpid()))


def _descendants(root: int) -> Iterator[int]:
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
                parents.setdefault(int(file.read().rpartition(b")")[2].split()[1]), []).append(int(name))
    waiting = list(parents.get(root, ()))
    while waiting:
        pid = waiting.pop()
        yield pid
        waiting += parents.get(pid, ())


def _kill_others(code: int | None, shell: int | None) -> None:
    """Kill all processes of the session but the code's own: between calls, nothing computes."""
    for _ in range(100):  # what forks while it is killed is killed in the next round
        if code is None and os.getpid() == 1:
            with contextlib.suppress(OSError):
                os.kill(-1, signal.SIGKILL)
        strays = [pid for pid in _others() if pid not in (code, shell)]
        for pid in strays:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) > 0:
                pass
        if not strays:
            return
        time.sleep(0.001)


def _use(code: int) -> tuple[int, float, int]:
    """Return the memory in bytes, the CPU time in seconds and the number of a session's processes."""
    memory, ticks, count = 0, 0, 0
    for pid in {*_others(), code}:
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            memory += int(fields[21]) * _PAGE
            ticks += sum(map(int, fields[11:15] if pid == code else fields[11:13]))
            count += 1
    return memory, ticks / _HERTZ, count


# -- what confines the code ---------------------------------------------------------------------------------------


def _build_root(settings: Settings) -> None:
    """Build a file system of what a program needs to run, to read only, and an empty folder; see nothing else."""
    _mount("none", "/", None, _REC | _PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    root = "/tmp/root"
    os.mkdir(root)
    _mount(root, root, None, _BIND)
    # 1. Programs and libraries. Links such as /bin -> usr/bin stay links.
    for path in ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", *settings["shown"]):
        if os.path.islink(path):
            os.symlink(os.readlink(path), f"{root}{path}")
        elif os.path.isdir(path) and not os.path.lexists(f"{root}{path}"):
            os.makedirs(f"{root}{path}")
            _mount(path, f"{root}{path}", None, _BIND | _REC)
            _make_readonly(f"{root}{path}")
    # 2. A few devices, the processes of this session, an empty folder.
    os.mkdir(f"{root}/dev")
    for name in ("null", "zero", "random", "urandom"):
        os.close(os.open(f"{root}/dev/{name}", os.O_CREAT | os.O_WRONLY, 0o644))
        _mount(f"/dev/{name}", f"{root}/dev/{name}", None, _BIND)
    os.mkdir(f"{root}/proc")
    _mount("proc", f"{root}/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    with contextlib.suppress(OSError):  # no namespaces within this one
        _write(f"{root}/proc/sys/user/max_user_namespaces", "0")
    os.mkdir(f"{root}/tmp")
    disk = f"size={settings['disk']},nr_inodes=10000,mode=777"
    _mount("tmpfs", f"{root}/tmp", "tmpfs", _NOSUID | _NODEV, disk)
    os.mkdir(f"{root}{OUTPUT}")  # apart, so that a full folder can still be told of
    _mount("tmpfs", f"{root}{OUTPUT}", "tmpfs", _NOSUID | _NODEV, "size=16m,nr_inodes=1000,mode=777")
    # 3. In there; what was before is let go of.
    os.mkdir(f"{root}/old")
    _syscall("pivot_root", f"{root}".encode(), f"{root}/old".encode())
    os.chdir("/")
    _call(_libc.umount2, b"/old", 2)
    os.rmdir("/old")
    _mount("none", "/", None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)
    os.chdir("/tmp")


def _make_readonly(path: str) -> None:
    attributes = struct.pack("QQQQ", _RDONLY | _NOSUID | _NODEV, 0, 0, 0)
    try:  # with all that is mounted below; Linux 5.12
        _syscall("mount_setattr", -100, path.encode(), 0x8000, attributes, len(attributes))
    except OSError:
        kept = os.statvfs(path).f_flag & (_NOSUID | _NODEV | _NOEXEC | 1024 | 2048)
        _mount("none", path, None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV | kept)


def _confine(settings: Settings, folder: str, keep: tuple[int, ...]) -> None:
    """Give up, for good, all that this process could reach beyond its folder."""
    # 1. Nothing of the nursery's or the guard's is open.
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in keep:
            with contextlib.suppress(OSError):
                os.close(int(name))
    # 2. Limits that the kernel holds for each process.
    limits = {
        resource.RLIMIT_AS: settings["memory"] + (256 << 20),  # addresses that are not memory
        resource.RLIMIT_FSIZE: settings["disk"],
        resource.RLIMIT_NOFILE: 128,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    if settings["namespaces"] and tuple(map(int, os.uname().release.split(".")[:2])) >= (5, 14):
        limits[resource.RLIMIT_NPROC] = settings["processes"]  # counted in this namespace; before, over all of a user's
    for kind, most in limits.items():
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead
    # 3. Nobody, without rights, for good.
    os.setsid()
    os.chdir(folder)
    os.umask(0o077)
    if settings["namespaces"]:
        if settings["root"]:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        header, nothing = struct.pack("Ii", 0x20080522, 0), bytes(24)
        with contextlib.suppress(OSError):
            _syscall("capset", header, nothing)
    _libc.prctl(38, 1, 0, 0, 0)  # no new privileges
    _libc.prctl(1, signal.SIGKILL)
    _filter_calls(network=not settings["namespaces"])
    os.environ.clear()
    os.environ.update({"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"})
    tempfile.tempdir = None
    sys.path[:] = [path for path in sys.path if path] + settings["packages"]
    _libc.prctl(4, 1)  # a process may look at itself, as every other may


def _filter_calls(*, network: bool) -> None:
    """Have the kernel refuse system calls that no computation needs; with ``network``, also other machines."""
    machine = os.uname().machine
    if machine not in _DENIED:
        return
    load, equal, at_least, any_bit, end = 0x20, 0x15, 0x35, 0x45, 0x06
    denied, missing, allowed, killed = 0x00050001, 0x00050026, 0x7FFF0000, 0x80000000
    program: list[tuple[int, int, int, int]] = [
        (load, 0, 0, 4), (equal, 1, 0, 0xC000003E), (end, 0, 0, killed), (load, 0, 0, 0),
        (at_least, 0, 1, 0x40000000), (end, 0, 0, denied), (equal, 0, 1, _CLONE3), (end, 0, 0, missing),
    ]  # fmt: skip
    for number in (*_DENIED[machine], _SHMGET):
        program += [(equal, 0, 1, number), (end, 0, 0, denied)]
    program += [(equal, 0, 3, _CLONE), (load, 0, 0, 16), (any_bit, 0, 1, _NAMESPACES | 0x2000000), (end, 0, 0, denied)]
    program += [(load, 0, 0, 0)]
    if network:
        program += [(equal, 0, 4, _SOCKET), (load, 0, 0, 16), (equal, 1, 0, 1), (end, 0, 0, denied), (load, 0, 0, 0)]
    program.append((end, 0, 0, allowed))
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    packed = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(buffer))
    _call(_libc.prctl, 22, 2, ctypes.create_string_buffer(packed, len(packed)), 0, 0)


# -- the code's process -------------------------------------------------------------------------------------------


def _serve(language: str, requests: int, answers: int, folder: str) -> None:
    """Run what comes, one piece after the other, with what the earlier ones have left."""
    lines = _Lines(requests)
    run = _Python() if language == "python" else _Bash()
    while (request := lines.next()) is not None:
        descriptor, path = tempfile.mkstemp(prefix=".output", dir=folder)
        os.unlink(path)
        kept = os.dup(1), os.dup(2)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        ended = False
        try:
            ended = run(request["code"])
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
        import ast
        import linecache
        import traceback
        import types

        self._ast, self._linecache, self._traceback = ast, linecache, traceback
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        self._names: dict[str, Any] = vars(module)
        self._number = 0
        sys.argv = [""]
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __call__(self, code: str) -> bool:
        """Run code; return whether it ends the session."""
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
        self._linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        ast = self._ast
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
            self._traceback.print_exception(type(error), error, frames, limit=20)
        return False


class _Bash:
    """A session of bash: variables and the working directory stay."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        import subprocess

        done, self._tell = os.pipe()
        self._done = done
        self._shell = subprocess.Popen(
            ["bash", "--noprofile", "--norc"], stdin=subprocess.PIPE, pass_fds=(self._tell,), bufsize=0
        )
        self.pid = self._shell.pid
        os.close(self._tell)

    def __call__(self, code: str) -> bool:
        """Run a script in the shell; return whether it has ended the shell."""
        descriptor, path = tempfile.mkstemp(prefix=".code")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(code)
        output, errors = os.dup(1), os.dup(2)
        line = f". {path} </dev/null >/proc/{os.getpid()}/fd/{output} 2>&1; echo $? >&{self._tell}\n"
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


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the run's; it closes the pipe
    signal.signal(signal.SIGTERM, _end)
    nursery(socket.socket(fileno=int(sys.argv[1])))
