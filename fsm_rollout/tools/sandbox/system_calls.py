"""The system calls that sandboxed code may not make: the one place with their numbers, for each machine.

Invariant: what no computation needs is refused, whatever else protects. On a machine that is not in the table nothing
is filtered, and :class:`fsm_rollout.tools.sandbox.session.Protection` says so.
"""

from __future__ import annotations

import ctypes
import struct

from fsm_rollout.tools.sandbox.kernel import FILTER, NAMESPACES, checked, libc

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # what the kernel calls the machine that a call is made for
# Their numbers for these machines, in that order; None where there is no such call. memfd_create and shmget give memory
# that no limit sees. A test compares them with the kernel's headers.
DENIED: dict[str, tuple[int | None, int | None]] = {
    "ptrace": (101, 117), "pivot_root": (155, 41), "chroot": (161, 51), "acct": (163, 89), "settimeofday": (164, 170),
    "mount": (165, 40), "umount2": (166, 39), "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142),
    "iopl": (172, None), "ioperm": (173, None), "init_module": (175, 105), "delete_module": (176, 106),
    "quotactl": (179, 60), "kexec_load": (246, 104), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "unshare": (272, 97), "perf_event_open": (298, 241), "fanotify_init": (300, 262),
    "open_by_handle_at": (304, 265), "setns": (308, 268), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "kcmp": (312, 272), "finit_module": (313, 273), "memfd_create": (319, 279),
    "kexec_file_load": (320, 294), "bpf": (321, 280), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "pidfd_open": (434, 434), "process_madvise": (440, 440), "mount_setattr": (442, 442), "shmget": (29, 194),
}  # fmt: skip
CLONE, CLONE3, SOCKET = (56, 220), (435, 435), (41, 198)
_NEWCGROUP = 0x2000000
_X32, _LOCAL = 0x40000000, 1  # where the calls of another kind begin; sockets that lead to no other machine


def filters(machine: str) -> bool:
    """Say whether the calls of a machine are known."""
    return machine in MACHINES


def filter_calls(machine: str, *, network: bool) -> None:
    """Have the kernel refuse system calls that no computation needs; with ``network``, also other machines."""
    if filters(machine):
        code = b"".join(struct.pack("HBBI", *instruction) for instruction in program(machine, network=network))
        buffer = ctypes.create_string_buffer(code, len(code))
        packed = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
        checked(libc.prctl, FILTER, 2, ctypes.create_string_buffer(packed, len(packed)), 0, 0)


def program(machine: str, *, network: bool) -> list[tuple[int, int, int, int]]:
    """Return the filter as the kernel runs it: what to do, steps to go on if it holds and if not, with which value."""
    at = list(MACHINES).index(machine)
    load, equal, at_least, any_bit, end = 0x20, 0x15, 0x35, 0x45, 0x06
    denied, missing, allowed, killed = 0x00050001, 0x00050026, 0x7FFF0000, 0x80000000
    steps = [
        (load, 0, 0, 4), (equal, 1, 0, MACHINES[machine]), (end, 0, 0, killed), (load, 0, 0, 0),
        (at_least, 0, 1, _X32), (end, 0, 0, denied), (equal, 0, 1, CLONE3[at]), (end, 0, 0, missing),
    ]  # fmt: skip
    for numbers in DENIED.values():
        if (number := numbers[at]) is not None:
            steps += [(equal, 0, 1, number), (end, 0, 0, denied)]
    steps += [(equal, 0, 3, CLONE[at]), (load, 0, 0, 16), (any_bit, 0, 1, NAMESPACES | _NEWCGROUP), (end, 0, 0, denied)]
    steps += [(load, 0, 0, 0)]
    if network:
        steps += [(equal, 0, 3, SOCKET[at]), (load, 0, 0, 16), (equal, 1, 0, _LOCAL), (end, 0, 0, denied)]
    return [*steps, (end, 0, 0, allowed)]
