# SPDX-License-Identifier: Apache-2.0
"""The process that runs one generated program on one test.

`python -I sandbox.py PROGRAM FUNCTION SECONDS FILE_BYTES NUM_TASKS RESULT_FD STARTED_FD MAY_ESCAPE PATHS`
runs in a folder of its own. With an empty FUNCTION it runs the program, whose input is stdin; else it reads
`[arguments...]` from stdin as JSON, calls the function (see `find`), and writes what this returns to RESULT_FD. It
writes a byte to STARTED_FD when the program is confined (see `confine.py`) and begins; with MAY_ESCAPE=1 the program
also begins where the kernel cannot confine it. Standard library only, and nothing of mrl: one starts per test.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import functools
import importlib
import importlib.util
import json
import math
import os
import resource
import runpy
import signal
import sys
from collections.abc import Callable
from typing import cast

MEMORY_BYTES = 1 << 30
FILE_BYTES = 32 << 20
NUM_OPEN_FILES = 32
# As in NeMo Gym.
MAX_DIGITS = MAX_RECURSION = 50_000
PR_SET_PDEATHSIG = 1

# Modules that solutions of contests take for granted; names of later ones win over earlier ones, and Python's own over
# all.
UNPACKED = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools operator io typing"
).split()
PRELUDE = [*UNPACKED, "fractions", "json", "sys"]


def main() -> None:
    """Runs the program; an exit code other than 0 says that it failed."""
    program, function, seconds, file_bytes, num_tasks, result_fd, started_fd, may_escape, paths = sys.argv[1:]
    builtins.__dict__.update(prelude())
    limit(float(seconds), int(file_bytes), int(num_tasks))
    confine(paths.split(os.pathsep), may_escape=may_escape == "1")
    sys.setrecursionlimit(MAX_RECURSION)
    sys.set_int_max_str_digits(MAX_DIGITS)
    keep_modes(os.getcwd())
    os.write(int(started_fd), b"1")
    os.close(int(started_fd))
    if not function:
        # As in NeMo Gym: what a program has printed counts, whatever exit code it chooses.
        with contextlib.suppress(SystemExit):
            runpy.run_path(program, run_name="__main__")
        return
    arguments = json.load(sys.stdin)
    solution = runpy.run_path(program, run_name="solution")
    returned = find(solution, function)(*arguments)
    with open(int(result_fd), "w", encoding="utf-8") as file:
        json.dump(returned, file, default=plain)


def find(names: dict[str, object], function: str) -> Callable[..., object]:
    """The method of the program's `class Solution`, else its function. A helper or an import may share its name."""
    solution = names.get("Solution")
    if isinstance(solution, type) and hasattr(solution, function):
        return getattr(solution(), function)
    return cast(Callable[..., object], names[function])


def prelude() -> dict[str, object]:
    """Names that a program may use without importing them."""
    modules = {name: importlib.import_module(name) for name in PRELUDE}
    names = {
        name: getattr(modules[name], "__all__", [found for found in vars(modules[name]) if found[0] != "_"])
        for name in UNPACKED
    }
    unpacked = {name: getattr(modules[module], name) for module in UNPACKED for name in names[module]}
    return {name: value for name, value in {**unpacked, **modules}.items() if not hasattr(builtins, name)}


def plain(value: object) -> object:
    """A value of numpy's as Python's own."""
    if not hasattr(value, "tolist"):
        raise TypeError(f"{type(value).__name__} is not JSON")
    return value.tolist()  # pyright: ignore[reportAttributeAccessIssue]


def limit(seconds: float, file_bytes: int, num_tasks: int) -> None:
    """Limits this process's memory, time, files and threads; ends it with its parent; `num_tasks` -1 leaves threads."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for kind, most in {
        resource.RLIMIT_AS: MEMORY_BYTES,
        resource.RLIMIT_CPU: math.ceil(seconds) + 1,
        resource.RLIMIT_FSIZE: min(FILE_BYTES, file_bytes),
        resource.RLIMIT_NOFILE: NUM_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        **({resource.RLIMIT_NPROC: num_tasks} if num_tasks >= 0 else {}),
    }.items():
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def confine(paths: list[str], *, may_escape: bool) -> None:
    """Lets the program only read `paths` and write its folder; exits if the kernel cannot, unless it `may_escape`."""
    # By its path: an isolated interpreter does not find mrl, and this folder has a math.py and a code.py.
    spec = importlib.util.spec_from_file_location("confine", os.path.join(os.path.dirname(__file__), "confine.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        module.confine_program(paths, os.getcwd())
    except module.Unconfined as error:
        if not may_escape:
            sys.exit(str(error))


def keep_modes(folder: str) -> None:
    """Lets `os.chmod` and `os.utime` do nothing in `folder`: the kernel refuses them, and `shutil.copy` ends
    with them.
    """
    os.chmod, os.utime = of_own_files(os.chmod, folder), of_own_files(os.utime, folder)


def of_own_files(call: Callable[..., None], folder: str) -> Callable[..., None]:
    """`call`, which does nothing for files and folders in `folder` that the kernel refuses it."""
    own = os.path.realpath(folder) + os.sep

    @functools.wraps(call)
    def instead(path: str | bytes | os.PathLike[str] | int, *arguments: object, **options: object) -> None:
        try:
            call(path, *arguments, **options)
        except PermissionError:
            if isinstance(path, int) or not (os.path.isfile(path) or os.path.isdir(path)):
                raise
            if not os.path.realpath(os.fsdecode(path)).startswith(own):
                raise

    return instead


if __name__ == "__main__":
    main()
