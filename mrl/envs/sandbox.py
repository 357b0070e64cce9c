"""The process in which one generated program meets one test.

`python -I sandbox.py PROGRAM FUNCTION SECONDS RESULT_FD STARTED_FD MAY_ESCAPE PATHS`
runs in a folder of its own. With an empty FUNCTION the program is run, its input on stdin; else `[arguments...]` is read from stdin as
JSON and what the function returns is written to RESULT_FD. A byte to STARTED_FD says that the program is confined (see `confine.py`) and
begins; with MAY_ESCAPE=1 it begins where the kernel cannot confine it too. Standard library only, and nothing of mrl: it starts per test.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib
import importlib.util
import json
import math
import os
import resource
import runpy
import signal
import sys

MEMORY_BYTES = 1 << 30
FILE_BYTES = 32 << 20
NUM_OPEN_FILES = 64
PR_SET_PDEATHSIG = 1

# What solutions of contests take for granted; names of later modules win, and those that Python has anyway are left alone.
PRELUDE = "bisect collections copy datetime fractions functools heapq itertools json math operator random re string sys typing".split()
UNPACKED = "bisect collections functools heapq itertools math typing".split()


def main() -> None:
    """Runs the program and leaves; a return code other than 0 says that it failed."""
    program, function, seconds, result_fd, started_fd, may_escape, paths = sys.argv[1:]
    names = prelude()
    limit(float(seconds))
    confine(paths.split(os.pathsep), may_escape=may_escape == "1")
    os.write(int(started_fd), b"1")
    os.close(int(started_fd))
    if not function:
        runpy.run_path(program, names, "__main__")
        return
    arguments = json.load(sys.stdin)
    solution = runpy.run_path(program, names, "solution")
    found = solution[function] if function in solution else getattr(solution["Solution"](), function)
    returned = found(*arguments)
    with open(int(result_fd), "w", encoding="utf-8") as file:
        json.dump(returned, file)


def prelude() -> dict[str, object]:
    """The names that a program finds."""
    modules = {name: importlib.import_module(name) for name in PRELUDE}
    unpacked = {name: value for module in UNPACKED for name, value in vars(modules[module]).items() if name[0] != "_"}
    return {name: value for name, value in {**unpacked, **modules}.items() if not hasattr(builtins, name)}


def limit(seconds: float) -> None:
    """Limits this process: its life, its memory, time and files."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    cpu_seconds = math.ceil(seconds) + 1
    for kind, most in {
        resource.RLIMIT_AS: MEMORY_BYTES,
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NOFILE: NUM_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }.items():
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def confine(paths: list[str], *, may_escape: bool) -> None:
    """Leaves the program `paths` to read and its folder to write; ends this process where the kernel cannot, unless it `may_escape`."""
    # By its path: an isolated interpreter does not find mrl, and beside this file stand a math.py and a code.py.
    spec = importlib.util.spec_from_file_location("confine", os.path.join(os.path.dirname(__file__), "confine.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        module.confine_program(paths, os.getcwd())
    except module.Unconfined as error:
        if not may_escape:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
