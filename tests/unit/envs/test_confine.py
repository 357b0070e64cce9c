# SPDX-License-Identifier: Apache-2.0
"""The numbers of system calls against the kernel's headers, and the filter by a slow machine that runs it."""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

import pytest

from mrl.envs import confine
from tests.hostile.calls import NEVER_CALLS

TABLES = (*confine.TABLES, NEVER_CALLS)
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
ALLOWED, REFUSED, UNKNOWN, NO_DEVICE, KILLED = 0x7FFF0000, 0x00050001, 0x00050026, 0x00050019, 0x80000000


@pytest.mark.skipif(not all(header.exists() for header in HEADERS.values()), reason="no headers of the kernel here")
@pytest.mark.parametrize("machine", HEADERS)
def test_numbers_are_those_of_the_kernels_headers(machine: str, monkeypatch: pytest.MonkeyPatch):
    defined = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[machine].read_text())
    # asm-generic numbers fstatat alike and calls it newfstatat on 64 bits only further down.
    numbers = {name: int(number) for name, number in reversed(defined)} | (
        {"newfstatat": 79} if machine == "aarch64" else {}
    )
    monkeypatch.setattr(confine, "MACHINE", machine)
    ours = confine.call_numbers(*TABLES)
    assert ours == {name: numbers[name] for name in ours}
    missing = {row.split()[0] for table in TABLES for row in table.split(",")} - set(ours)
    assert not missing & set(numbers)


def decide(code: bytes, number: int, *arguments: int, arch: int) -> int:
    """Answer of a seccomp filter: a machine for the six instructions that ours have."""
    data = struct.pack("=IIQ6Q", number, arch, 0, *(*arguments, *(0,) * (6 - len(arguments))))
    instructions = list(struct.iter_unpack("=HBBI", code))
    at = accumulator = 0
    while True:
        kind, if_true, if_false, operand = instructions[at]
        at += 1
        match kind:
            case 0x20:
                (accumulator,) = struct.unpack_from("=I", data, operand)
            case 0x54:
                accumulator &= operand
            case 0x15:
                at += if_true if accumulator == operand else if_false
            case 0x35:
                at += if_true if accumulator >= operand else if_false
            case 0x06:
                return operand
            case other:
                raise AssertionError(f"instruction {other:#x}")


CASES = [
    ("read", (), ALLOWED),
    ("socket", (2, 1), REFUSED),
    ("clone", (0x3D0F00,), ALLOWED),  # what pthread_create asks for
    ("clone", (17,), REFUSED),
    ("clone", (0x3D0F00 | 0x40000000,), REFUSED),  # CLONE_NEWNET
    ("clone3", (), UNKNOWN),
    ("openat", (3, 0, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), ALLOWED),
    ("openat", (3, 0, os.O_RDONLY | os.O_TRUNC), REFUSED),
    ("openat", (3, 0, os.O_RDWR | 0o20000000), REFUSED),
    ("fcntl", (1, 1030), ALLOWED),
    ("fcntl", (1, 8), REFUSED),
    ("ioctl", (1, 0x5401), ALLOWED),
    ("ioctl", (1, 0x5412), NO_DEVICE),
    ("prctl", (15,), ALLOWED),
    ("prctl", (1,), REFUSED),
    ("kill", (os.getpid(),), ALLOWED),
    ("kill", (0,), REFUSED),
    ("kill", (0xFFFFFFFF,), REFUSED),  # -1: everybody
    ("prlimit64", (1,), REFUSED),
    ("socketpair", (1, 1 | os.O_CLOEXEC), ALLOWED),
    ("socketpair", (1, 2), REFUSED),  # datagrams go to others
    ("socketpair", (30, 1), REFUSED),
    ("setpriority", (0, 0), ALLOWED),
    ("setpriority", (0, 1), REFUSED),
    ("setpriority", (2, 0), REFUSED),
    ("renameat2", (), ALLOWED),
]


@pytest.mark.parametrize(("machine", "arch"), [("x86_64", 0xC000003E), ("aarch64", 0xC00000B7)])
def test_the_filter_of_programs(machine: str, arch: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(confine, "MACHINE", machine)
    numbers = confine.call_numbers(*TABLES)
    code = confine.filter_program(confine.program_actions(), confine.EPERM)
    for name, arguments, answer in CASES:
        assert decide(code, numbers[name], *arguments, arch=arch) == answer, (name, arguments)
    assert decide(code, numbers["read"], arch=0x40000003) == KILLED  # the 32-bit entry
    assert decide(code, 0x40000000, arch=arch) == REFUSED  # x32
    assert decide(code, 463, arch=arch) == UNKNOWN


# What it needs of a worker's allowances (None: nothing gives it), a call, and its arguments.
WORKER_CASES = [
    ("", "mmap", ()),
    ("", "memfd_create", ()),
    ("", "fcntl", (3, 6)),
    ("", "ioctl", (3, 0x5401)),
    ("", "ioctl", (3, 0xC0204627)),  # NVIDIA's driver
    ("", "ioctl", (3, 0x30000001)),
    ("", "clone", (0x3D0F00,)),
    ("", "kill", (os.getpid(),)),
    ("", "sched_setaffinity", (0,)),
    ("", "setpriority", (0, 0)),
    ("processes", "clone", (17,)),
    ("processes", "kill", (1,)),
    ("processes", "setpriority", (0, 1)),
    ("processes", "sched_setaffinity", (1,)),
    ("processes", "ioprio_set", (1, 1)),
    ("processes", "prlimit64", (1,)),
    ("processes", "execve", ()),
    ("processes files", "fchmodat", ()),
    ("processes files", "utimensat", ()),
    ("processes files", "setxattr", ()),
    ("processes files", "flock", ()),
    ("files", "inotify_add_watch", ()),
    ("network", "socket", (2, 1)),
    ("network", "connect", ()),
    ("network", "socketpair", (1, 2)),
    (None, "fcntl", (3, 8)),  # F_SETOWN
    (None, "clone", (0x10000000 | 17,)),  # CLONE_NEWUSER
    (None, "ptrace", ()),
    (None, "shmget", ()),
    (None, "mq_open", ()),
    (None, "keyctl", ()),
    (None, "unshare", ()),
    (None, "io_uring_setup", ()),
]
ALLOWANCES = [set(), {"network"}, {"processes"}, {"files"}, {"network", "processes", "files"}]


@pytest.mark.parametrize("allowed", ALLOWANCES, ids=lambda allowed: ",".join(sorted(allowed)) or "none")
@pytest.mark.parametrize(("machine", "arch"), [("x86_64", 0xC000003E), ("aarch64", 0xC00000B7)])
def test_the_filter_of_workers(machine: str, arch: int, allowed: set, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(confine, "MACHINE", machine)
    numbers = confine.call_numbers(*TABLES)
    code = confine.filter_program(confine.worker_actions(allowed), confine.EPERM)
    for needed, name, arguments in WORKER_CASES:
        is_allowed = needed is not None and (not needed or bool(allowed & {*needed.split()}))
        assert decide(code, numbers[name], *arguments, arch=arch) == (ALLOWED if is_allowed else REFUSED), (
            name,
            arguments,
        )
    assert decide(code, numbers["ioctl"], 3, 0x5412, arch=arch) == NO_DEVICE  # TIOCSTI types into a terminal
    assert (decide(code, numbers["ioctl"], 3, 0x40086602, arch=arch) == ALLOWED) == (
        "files" in allowed
    )  # FS_IOC_SETFLAGS


@pytest.mark.parametrize("abi", [0, 2, 3])
def test_a_file_is_not_truncated_where_landlock_does_not_see_it(abi: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(confine, "landlock_abi", lambda: abi)
    numbers, arch = confine.call_numbers(*TABLES), confine.AUDIT_ARCH[confine.MACHINE]
    code = confine.filter_program(confine.worker_actions(set()), confine.EPERM)
    answers = {decide(code, numbers["openat"], 3, 0, os.O_RDONLY | os.O_TRUNC, arch=arch)}
    answers |= {decide(code, numbers[name], arch=arch) for name in ("truncate", "openat2")}
    assert answers == {ALLOWED if abi >= 3 else REFUSED}
    assert decide(code, numbers["openat"], 3, 0, os.O_RDWR | os.O_CREAT | os.O_TRUNC, arch=arch) == ALLOWED


def test_another_machine_confines_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(confine, "MACHINE", "riscv64")
    with pytest.raises(confine.Unconfined, match="riscv64.*x86_64 and aarch64"):
        confine.filter_program({}, confine.ALLOW)
    assert confine.landlock_abi() == 0
