"""The process in which one generated program meets one test: `python -I sandbox.py PROGRAM FUNCTION SECONDS`, in a folder of its own.

With an empty FUNCTION the program is run, its input on stdin; else `[arguments...]` is read from stdin as JSON and what the function
returns is written to RESULT. Contains accidents: limits of the kernel, no network, no other processes, no file outside the folder is
changed. It is no wall against a program that wants to break out. Standard library only, and nothing of mrl: it starts per test.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib
import json
import math
import os
import resource
import runpy
import signal
import sys

RESULT = "result.json"
MEMORY_BYTES = 1 << 30
FILE_BYTES = 32 << 20
NUM_OPEN_FILES = 64
PR_SET_PDEATHSIG = 1
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000

# What solutions of contests take for granted; names of later modules win, and those that Python has anyway are left alone.
PRELUDE = "bisect collections copy datetime fractions functools heapq itertools json math operator random re string sys typing".split()
UNPACKED = "bisect collections functools heapq itertools math typing".split()

FORBIDDEN = (
    "socket.",
    "subprocess.",
    "os.chmod",
    "os.chown",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.kill",
    "os.link",
    "os.posix_spawn",
    "os.putenv",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.spawn",
    "os.symlink",
    "os.system",
    "os.truncate",
    "shutil.",
)
"""Audit events (docs.python.org/3/library/audit_events.html) that end in an error, by prefix."""
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def main() -> None:
    """Runs the program and leaves; a return code other than 0 says that it failed."""
    program, function, seconds = sys.argv[1:]
    names = prelude()
    contain(float(seconds))
    if not function:
        runpy.run_path(program, names, "__main__")
        return
    arguments = json.load(sys.stdin)
    solution = runpy.run_path(program, names, "solution")
    found = solution[function] if function in solution else getattr(solution["Solution"](), function)
    returned = found(*arguments)
    with open(RESULT, "w", encoding="utf-8") as file:
        json.dump(returned, file)


def prelude() -> dict[str, object]:
    """The names that a program finds."""
    modules = {name: importlib.import_module(name) for name in PRELUDE}
    unpacked = {name: value for module in UNPACKED for name, value in vars(modules[module]).items() if name[0] != "_"}
    return {name: value for name, value in {**unpacked, **modules}.items() if not hasattr(builtins, name)}


def contain(seconds: float) -> None:
    """Limits this process: its life, its memory, time and files, the network, and what it may do to others."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # A network of its own without any device, where the kernel lets ordinary users have one. The audit hook refuses sockets in any case.
    if libc.unshare(CLONE_NEWNET) != 0:
        libc.unshare(CLONE_NEWUSER | CLONE_NEWNET)
    cpu_seconds = math.ceil(seconds) + 1
    for kind, limit in {
        resource.RLIMIT_AS: MEMORY_BYTES,
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NOFILE: NUM_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }.items():
        _, hard = resource.getrlimit(kind)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))
    folder = os.getcwd() + os.sep

    def refuse(event: str, arguments: tuple[object, ...]) -> None:
        if event.startswith(FORBIDDEN):
            raise PermissionError(f"{event} is not allowed here")
        if event == "open" and isinstance(arguments[0], str) and isinstance(arguments[2], int) and arguments[2] & WRITE_FLAGS:
            if not os.path.abspath(arguments[0]).startswith(folder):
                raise PermissionError(f"{arguments[0]} may not be written here")

    sys.addaudithook(refuse)


if __name__ == "__main__":
    main()
