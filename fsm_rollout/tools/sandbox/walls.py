"""What confines a session's code: users, a file system and limits of its own.

Invariant: everything is taken away before the first line of the code runs, and nothing can be had again.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Iterable

from fsm_rollout.tools.sandbox import kernel
from fsm_rollout.tools.sandbox.kernel import BIND, NODEV, NOEXEC, NOSUID, RDONLY, REMOUNT, checked, libc, mount
from fsm_rollout.tools.sandbox.system_calls import filter_calls
from fsm_rollout.tools.sandbox.wire import Settings

NOBODY = 65534
PROGRAM = "/program"  # where the folder of an enclosure's program is seen
BEFORE = "/.before"  # where the root that was before is, until it is let go of
OUTPUT = "/dev/shm"  # where a session in namespaces keeps the output of a call


def fork_within(
    work: Callable[[], None], session: socket.socket, others: Iterable[socket.socket], *, namespaces: bool
) -> int:
    """Fork a process for ``work``, the first one of namespaces of its own; return the one to wait for.

    It ends with this process, and does without the ``others``. What goes wrong is told as a line of
    JSON over ``session``.

    Args:
        work: what it does.
        session: stays open in the process that works, and in this one.
        others: sockets.
        namespaces: whether there are any; else it works where this process is.
    """
    entered, has_entered = os.pipe()  # told when the process is in its namespaces
    mapped, users_mapped = os.pipe()  # closed once their users are mapped
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for descriptor in (*(other.fileno() for other in others), entered, users_mapped):
                os.close(descriptor)
            if namespaces:
                checked(libc.unshare, kernel.NAMESPACES)
                os.write(has_entered, b"!")
            libc.prctl(kernel.DIE_WITH_PARENT, signal.SIGKILL)
            os.close(has_entered)
            os.read(mapped, 1)
            os.close(mapped)
            if not namespaces or _is_first(session):
                work()
            status = 0
        except BaseException as error:  # whatever it is, this process ends here; the run hears why
            _tell_failure(session, error)
        finally:
            os._exit(status)
    os.close(has_entered)
    os.close(mapped)
    try:
        if os.read(entered, 1):
            _map_users(pid)
    except OSError as error:
        _tell_failure(session, error)
        os.kill(pid, signal.SIGKILL)
    finally:
        os.close(entered)
        os.close(users_mapped)
    return pid


def _is_first(session: socket.socket) -> bool:
    """Fork the first process of the new process namespace, which this one is not in; return which of them returns.

    The other waits for it, without the session's socket, and ends when it ends.
    """
    pid = os.fork()
    if pid == 0:
        libc.prctl(kernel.DIE_WITH_PARENT, signal.SIGKILL)
        return True
    session.close()
    os.waitpid(pid, 0)
    return False


def _tell_failure(session: socket.socket, error: BaseException) -> None:
    with contextlib.suppress(OSError):
        session.sendall(json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode() + b"\n")


def _map_users(pid: int) -> None:
    """Say who the users of a guard's namespace are: root may have nobody there too, others only themselves."""
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        users, groups = f"0 0 1\n{NOBODY} {NOBODY} 1\n", f"0 0 1\n{NOBODY} {NOBODY} 1\n"
    else:
        users, groups = f"0 {user} 1\n", f"0 {group} 1\n"
        kernel.write(f"/proc/{pid}/setgroups", "deny")
    kernel.write(f"/proc/{pid}/uid_map", users)
    kernel.write(f"/proc/{pid}/gid_map", groups)


def build_root(settings: Settings) -> None:
    """Build a file system of what a program needs to run, to read only, and an empty folder; see nothing else."""
    mount("none", "/", None, kernel.REC | kernel.PRIVATE)
    program, image = (
        os.open(settings[name], os.O_PATH) if settings.get(name) else None for name in ("program", "image")
    )  # they may lie in /tmp
    mount("tmpfs", "/tmp", "tmpfs", NOSUID | NODEV, "size=1m,mode=755")
    root, disk = "/tmp/root", f"size={settings['disk']},nr_inodes=10000,mode=777"
    os.mkdir(root)
    # 1. Programs and libraries: those of an image, under what is written over them. Else the system's: links such as
    #    /bin -> usr/bin stay links.
    if image is not None:
        _lay_over(image, root, disk)
    else:
        mount(root, root, None, BIND)
    for path in (
        ()
        if image is not None
        else ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", *settings["shown"])
    ):
        if os.path.islink(path) and not os.path.lexists(f"{root}{path}"):
            os.makedirs(os.path.dirname(f"{root}{path}"), exist_ok=True)
            os.symlink(os.readlink(path), f"{root}{path}")
        elif os.path.isdir(path) and not os.path.lexists(f"{root}{path}"):
            os.makedirs(f"{root}{path}")
            mount(path, f"{root}{path}", None, BIND | kernel.REC)
            _make_readonly(f"{root}{path}")
    if program is not None:
        _place(f"{root}{PROGRAM}")
        mount(f"/proc/self/fd/{program}", f"{root}{PROGRAM}", None, BIND | kernel.REC)
        _make_readonly(f"{root}{PROGRAM}")
        os.close(program)
    # 2. A few devices, the processes of this session, an empty folder.
    _place(f"{root}/dev")
    if image is not None:  # no file of its own there may lead out of it
        mount("tmpfs", f"{root}/dev", "tmpfs", NOSUID, "size=64k,mode=755")
    for name in ("null", "zero", "random", "urandom"):
        os.close(os.open(f"{root}/dev/{name}", os.O_CREAT | os.O_WRONLY, 0o644))
        mount(f"/dev/{name}", f"{root}/dev/{name}", None, BIND)
    _place(f"{root}/proc")
    mount("proc", f"{root}/proc", "proc", NOSUID | NODEV | NOEXEC)
    with contextlib.suppress(OSError):  # no namespaces within this one
        kernel.write(f"{root}/proc/sys/user/max_user_namespaces", "0")
    _place(f"{root}/tmp")
    mount("tmpfs", f"{root}/tmp", "tmpfs", NOSUID | NODEV, disk)
    _place(f"{root}{OUTPUT}")  # apart, so that a full folder can still be told of
    mount("tmpfs", f"{root}{OUTPUT}", "tmpfs", NOSUID | NODEV, "size=16m,nr_inodes=1000,mode=777")
    # 3. In there; what was before is let go of.
    _place(f"{root}{BEFORE}")
    checked(libc.pivot_root, root.encode(), f"{root}{BEFORE}".encode())
    os.chdir("/")
    checked(libc.umount2, BEFORE.encode(), kernel.DETACH)
    os.rmdir(BEFORE)
    if image is None:
        mount("none", "/", None, REMOUNT | BIND | RDONLY | NOSUID | NODEV)
    os.chdir("/tmp")


def _lay_over(image: int, root: str, disk: str) -> None:
    """Mount an image's files as a root that can be written to; what is written is in memory, and goes with it."""
    above = "/tmp/above"
    os.mkdir(above)
    mount("tmpfs", above, "tmpfs", NOSUID | NODEV, disk)
    for name in ("written", "moved"):
        os.mkdir(f"{above}/{name}")
        os.chmod(f"{above}/{name}", 0o755)
    layers = f"lowerdir=/proc/self/fd/{image},upperdir={above}/written,workdir={above}/moved,userxattr"
    mount("overlay", root, "overlay", NOSUID | NODEV, layers)
    os.close(image)


def _place(path: str) -> None:
    """Make a folder to mount on; a link of an image in its place would lead out of it."""
    if os.path.islink(path):
        os.unlink(path)
    os.makedirs(path, exist_ok=True)


def _make_readonly(path: str) -> None:
    attributes = struct.pack("QQQQ", RDONLY | NOSUID | NODEV, 0, 0, 0)
    try:  # with all that is mounted below; Linux 5.12 and glibc 2.36
        checked(libc.mount_setattr, -100, path.encode(), 0x8000, attributes, ctypes.c_size_t(len(attributes)))
    except (OSError, AttributeError):
        kept = os.statvfs(path).f_flag & (NOSUID | NODEV | NOEXEC | 1024 | 2048)
        mount("none", path, None, REMOUNT | BIND | RDONLY | NOSUID | NODEV | kept)


def confine(settings: Settings, folder: str, keep: tuple[int, ...]) -> None:
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
            checked(libc.capset, header, nothing)
    libc.prctl(kernel.NO_MORE_RIGHTS, 1, 0, 0, 0)
    libc.prctl(kernel.DIE_WITH_PARENT, signal.SIGKILL)
    filter_calls(os.uname().machine, network=not settings["namespaces"])
    os.environ.clear()
    os.environ.update({"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"})
    tempfile.tempdir = None
    sys.path[:] = [path for path in sys.path if path] + settings["packages"]
    libc.prctl(kernel.VISIBLE, 1)  # a process may look at itself, as every other may
