"""The calls that a sandbox refuses have the kernel's own numbers, and the filter does with each what the table says."""

import re
from pathlib import Path

import pytest

from fsm_rollout.tools.sandbox import kernel
from fsm_rollout.tools.sandbox.system_calls import CLONE, CLONE3, DENIED, MACHINES, SOCKET, program

HEADERS = {
    "x86_64": ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "linux-libc-dev"),
    "aarch64": ("/usr/aarch64-linux-gnu/include/asm-generic/unistd.h", "linux-libc-dev-arm64-cross"),
}
REFUSED, MISSING, ALLOWED, KILLED = 0x00050001, 0x00050026, 0x7FFF0000, 0x80000000
BOTH = pytest.mark.parametrize("machine", MACHINES)


@BOTH
def test_the_numbers_are_the_kernels(machine: str) -> None:
    header, package = Path(HEADERS[machine][0]), HEADERS[machine][1]
    if not header.is_file():
        pytest.skip(f"the kernel's headers for {machine} are not here (Debian: {package})")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text("utf-8"))
    kernels = {name: int(number) for name, number in found}
    ours = DENIED | {"clone": CLONE, "clone3": CLONE3, "socket": SOCKET}
    at = list(MACHINES).index(machine)
    assert {name: numbers[at] for name, numbers in ours.items()} == {name: kernels.get(name) for name in ours}


def test_the_flags_are_the_kernels() -> None:
    headers = [Path("/usr/include/linux") / f"{name}.h" for name in ("mount", "sched", "prctl")]
    if not all(header.is_file() for header in headers):
        pytest.skip("the kernel's headers are not here (Debian: linux-libc-dev)")
    text = "".join(header.read_text("utf-8") for header in headers)
    found = re.findall(r"#\s*define (\w+)\s+(?:\(1<<(\d+)\)|(0x[\da-f]+|\d+)\b)", text)
    kernels = {name: 1 << int(bit) if bit else int(number, 0) for name, bit, number in found}
    mounts = ("RDONLY", "NOSUID", "NODEV", "NOEXEC", "REMOUNT", "BIND", "REC", "PRIVATE")
    assert [getattr(kernel, name) for name in mounts] == [kernels[f"MS_{name}"] for name in mounts]
    assert sum(kernels[f"CLONE_NEW{name}"] for name in ("NS", "UTS", "IPC", "USER", "PID", "NET")) == kernel.NAMESPACES
    processes = {
        "DIE_WITH_PARENT": "SET_PDEATHSIG", "VISIBLE": "SET_DUMPABLE", "ADOPT": "SET_CHILD_SUBREAPER",
        "FILTER": "SET_SECCOMP", "NO_MORE_RIGHTS": "SET_NO_NEW_PRIVS",
    }  # fmt: skip
    assert {name: getattr(kernel, name) for name in processes} == {
        name: kernels[f"PR_{theirs}"] for name, theirs in processes.items()
    }


def verdict(machine: str, number: int, argument: int = 0, *, network: bool = True, called_as: int | None = None) -> int:
    """Return what the filter says of a call: its steps are followed as the kernel follows them."""
    data = {0: number, 4: MACHINES[machine] if called_as is None else called_as, 16: argument}
    steps, place, value = program(machine, network=network), 0, 0
    while True:
        code, if_so, if_not, operand = steps[place]
        place += 1
        match code:
            case 0x20:
                value = data[operand]
            case 0x06:
                return operand
            case _:
                holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[code]
                place += if_so if holds else if_not


@BOTH
def test_the_filter_refuses_what_the_table_names_and_nothing_else(machine: str) -> None:
    at = list(MACHINES).index(machine)
    refused = {numbers[at] for numbers in DENIED.values()} - {None}
    for number in range(500):
        special = {CLONE3[at]: MISSING, SOCKET[at]: REFUSED}
        expected = special.get(number, REFUSED if number in refused else ALLOWED)
        assert verdict(machine, number) == expected, number
    assert verdict(machine, SOCKET[at], network=False) == ALLOWED
    assert verdict(machine, SOCKET[at], 1) == ALLOWED, "a socket of this machine's files"
    assert verdict(machine, CLONE[at], 17) == ALLOWED, "a process"
    assert verdict(machine, CLONE[at], 17 | 0x10000000) == REFUSED, "one with users of its own"
    assert verdict(machine, 0, called_as=0x40000003) == KILLED, "a call of another machine's"
