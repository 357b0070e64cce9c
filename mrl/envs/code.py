# SPDX-License-Identifier: Apache-2.0
"""Programs: the last code block of the text must pass all tests of the row. Runs in `mrl.envs.child`."""

from __future__ import annotations

import builtins
import errno
import functools
import itertools
import json
import logging
import os
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from decimal import Decimal, DecimalException
from pathlib import Path
from typing import IO, TYPE_CHECKING

from mrl.envs import sandbox, spawn
from mrl.envs.scratch import scratch_folder
from mrl.envs.task import Environment, Outcome, RowFault, Score, Task, field_of

if TYPE_CHECKING:
    from mrl.config.schema.env import EnvConfig

logger = logging.getLogger(__name__)

UNCONFINED = "unconfined"
"""Flag of a program that ran where the kernel could not confine it."""
# Extra seconds of a child beyond the limit of its program; after them it is the child that hangs.
GRACE_S = 10.0

# How often a running program's files and threads are counted: between two looks a disk takes a few hundred MB more.
LOOK_S = 0.05
MAX_FILES = 64
MAX_TRIES, WAIT_S, MAX_RETRY_S = 3, 2.0, 0.5 * GRACE_S
# Bytes that a program may print beyond four times the expected text: white space, more digits.
SPARE_OUTPUT_BYTES = 1 << 20
STDERR_TAIL_BYTES = 4096
# Differences of decimals that count as rounding: numpy's, and so NeMo Gym's.
RELATIVE, ABSOLUTE = Decimal("1e-5"), Decimal("1e-8")

UNREADABLE = "its folder cannot be read"

PROBE_TIMEOUT_S = 30.0
PROBE = """
import os, socket
path = input()
for attempt in (lambda: open(path), lambda: open(path, "a"), os.fork, socket.socket):
    try:
        attempt()
        print("escaped")
    except OSError:
        pass
"""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Variables of a program: numpy would take memory for a thread on each core, and wait for ever at the limit."""


def environment(config: EnvConfig) -> Environment:
    """Declares `code`; RuntimeError: this host cannot confine programs, and `env.code.allow_unconfined` is off."""
    section = config.code
    lack = probe()
    if lack and not section.allow_unconfined:
        raise RuntimeError(
            f"the environment code does not start: {lack}. Use another host or container (python -m mrl.doctor "
            "says what holds), or set env.code.allow_unconfined=true, with which programs of the model may read "
            "and change what this user may"
        )
    if lack:
        logger.warning(
            "env.code.allow_unconfined=true: programs of the model may read and change what this user may: %s", lack
        )
    options = {"test_timeout_s": section.unit_test_timeout_s, "timeout_s": section.timeout_s, "may_escape": bool(lack)}
    return Environment(
        "mrl.envs.code:make",
        options,
        timeout_s=section.timeout_s + GRACE_S,
        row_fields=("verifier_metadata.unit_tests", "unit_tests"),
        allowances=("processes",),
        blames_text=True,
    )


def make(test_timeout_s: float, timeout_s: float, may_escape: bool) -> Score:
    """The reward function; a test may take `test_timeout_s`, all tests of a program `timeout_s`."""
    return functools.partial(score, test_timeout_s=test_timeout_s, timeout_s=timeout_s, may_escape=may_escape)


def score(task: Task, *, test_timeout_s: float, timeout_s: float, may_escape: bool = False) -> Outcome:
    """1 if the program passes every test, else 0; the first failed test ends it. `extracted` says what happened.

    The tests are under `verifier_metadata.unit_tests` or `unit_tests`. A program that runs out of its time has failed.
    RuntimeError: the program cannot be confined, and may not escape.
    """
    # Unlike `task.fields`: programs get the tests as they are.
    fields: dict[str, object] = json.loads(task.row)
    metadata = fields.get("verifier_metadata")
    tests: dict[str, object] = field_of(metadata if isinstance(metadata, dict) else fields, "unit_tests", dict)
    inputs: list[object] = field_of(tests, "inputs", list)
    outputs: list[object] = field_of(tests, "outputs", list)
    if len(inputs) != len(outputs) or not inputs or not all(isinstance(text, str) for text in inputs + outputs):
        raise RowFault(
            f"unit_tests must have texts, as many inputs as outputs, at least one; not {len(inputs)} and {len(outputs)}"
        )
    function = str(tests.get("fn_name") or "")
    program = last_code_block(task.reply)
    if program is None or not program.strip():
        return Outcome(0.0, extracted="no code block")
    flags = (UNCONFINED,) if may_escape else ()
    end = time.monotonic() + timeout_s
    for index, (given, expected) in enumerate(zip(inputs, outputs, strict=True)):
        seconds = min(test_timeout_s, end - time.monotonic())
        reason = "no time left"
        if seconds > 0:
            reason = run_test(program, str(given), str(expected), function, seconds, may_escape=may_escape)
        if reason is not None:
            return Outcome(0.0, extracted=f"test {index + 1} of {len(inputs)}: {reason}", flags=flags)
    return Outcome(1.0, extracted=f"passed {len(inputs)} tests", flags=flags)


def last_code_block(text: str) -> str | None:
    """The lines between the last two lines with ```; None if none. As in NeMo Gym, a fence in later prose counts."""
    lines = text.split("\n")
    fences = [index for index, line in enumerate(lines) if "```" in line]
    return None if len(fences) < 2 else "".join(f"{line}\n" for line in lines[fences[-2] + 1 : fences[-1]])


@contextmanager
def _long_numbers() -> Iterator[None]:
    """Reads and prints integers as long as programs may in the `with` block, and as Python by itself after it."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(sandbox.MAX_DIGITS)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(before)


@_long_numbers()
def run_test(
    program: str, given: str, expected: str, function: str, seconds: float, *, may_escape: bool = False
) -> str | None:
    """Reason why the program fails the test; None if it passes. `function` as for `mrl.envs.sandbox`.

    `given` is stdin, or one JSON value per line, the arguments; `expected` is stdout, or the returned value as JSON.
    """
    try:
        stdin_text = (
            given if not function else json.dumps([json.loads(line) for line in given.splitlines() if line.strip()])
        )
        right = json.loads(expected) if function else None
    except (ValueError, RecursionError) as error:
        raise RowFault(f"a test of {function} is not JSON: {error}") from error
    started = time.monotonic()
    for _ in range(MAX_TRIES):
        try:
            reason, is_starved = _try_test(
                program, stdin_text, expected, right, function, seconds, may_escape=may_escape
            )
            if not is_starved:
                return reason
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EAGAIN):
                raise
        if time.monotonic() - started > MAX_RETRY_S:
            break
        give_up = time.monotonic() + WAIT_S
        while spawn.is_scarce() and time.monotonic() < give_up:
            time.sleep(LOOK_S)
    raise OSError(
        errno.ENOSPC,
        (
            f"programs fail because {tempfile.gettempdir()} is full, or the limit of processes is reached; free it, "
            "raise it, or set TMPDIR"
        ),
    )


def _try_test(
    program: str, stdin_text: str, expected: str, right: object, function: str, seconds: float, *, may_escape: bool
) -> tuple[str | None, bool]:
    """Runs one test; returns why the program fails (None: it passes), and whether other processes may be the cause."""
    share = spawn.share()
    with scratch_folder() as folder:
        (folder / "program.py").write_text(program, encoding="utf-8", errors="replace")
        (folder / "stdin").write_text(stdin_text, encoding="utf-8")
        # Output goes to files, whose size the kernel limits; a pipe would fill this process's memory. They are read
        # through these descriptors: a program may put a link, a FIFO or a folder in the place of a name.
        with (
            (folder / "stdin").open() as stdin,
            (folder / "stdout").open("w+b") as stdout,
            (folder / "stderr").open("w+b") as stderr,
            (folder / "result.json").open("w+b") as result,
        ):
            reason, is_starved = _run(
                folder, function, seconds, share, (stdin, stdout, stderr, result), may_escape=may_escape
            )
            if reason is not None:
                return reason, is_starved
            file, most = result if function else stdout, 4 * len(expected) + SPARE_OUTPUT_BYTES
            try:
                file.seek(0)
                data = file.read(most + 1)
            except OSError:  # the program has changed how the file is read
                return "more output than a right answer has", False
    reason = _compare(data, most, expected, right, function)
    return reason, is_starved and reason is not None


def _compare(data: bytes, most: int, expected: str, right: object, function: str) -> str | None:
    if len(data) > most:
        return "more output than a right answer has"
    printed = data.decode(errors="replace")
    if not function:
        return None if same_output(printed, expected) else "wrong output"
    try:
        return None if same_value(json.loads(printed), right) else "wrong result"
    except (ValueError, RecursionError):
        return "no result"


def _run(
    folder: Path,
    function: str,
    seconds: float,
    share: spawn.Share,
    files: Sequence[IO[str] | IO[bytes]],
    *,
    may_escape: bool,
) -> tuple[str | None, bool]:
    """Runs the program in `folder`; returns why it failed (None: exit code 0), and whether the host was full."""
    stdin, stdout, stderr, result = files
    started, starting = os.pipe()
    limits = [str(seconds), str(share.num_bytes), str(share.num_tasks)]
    arguments = [
        str(folder / "program.py"),
        function,
        *limits,
        str(result.fileno()),
        str(starting),
        str(int(may_escape)),
    ]
    with os.fdopen(started, "rb") as has_started:
        try:
            process = spawn.start(
                lambda: subprocess.Popen(
                    [sys.executable, "-I", sandbox.__file__, *arguments, os.pathsep.join(python_files())],
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    cwd=folder,
                    env={"TMPDIR": str(folder), **ONE_THREAD},
                    pass_fds=[result.fileno(), starting],
                )
            )
        finally:
            os.close(starting)
        with process:
            reason, is_starved = _watch(process, folder, time.monotonic() + seconds, seconds, share)
            process.kill()
        if reason is None and process.returncode == 0:
            excessive = excess(folder, share.num_bytes)
            return excessive, is_starved and excessive is None
        if reason is not None:
            return reason, is_starved
        last_words = ""
        with suppress(OSError):
            tail = os.pread(
                stderr.fileno(), STDERR_TAIL_BYTES, max(0, os.fstat(stderr.fileno()).st_size - STDERR_TAIL_BYTES)
            )
            last_words = tail.decode(errors="replace").strip().rpartition("\n")[2]
        if not has_started.read(1):
            raise RuntimeError(f"the program cannot be confined: {last_words}")
    name = last_words.partition(":")[0]
    kind = getattr(builtins, name, None)
    # Only names of Python's own exceptions: nothing else that a program says may reach people, samples or the report.
    is_known = isinstance(kind, type) and issubclass(kind, BaseException)
    return f"exit code {process.returncode}{f', {name}' if is_known else ''}", is_starved


def _watch(
    process: subprocess.Popen[bytes], folder: Path, end: float, seconds: float, share: spawn.Share
) -> tuple[str | None, bool]:
    """Waits for the program; returns why it must be killed (None: it ended), and whether the host was full."""
    is_starved = False
    while (left := end - time.monotonic()) > 0:
        with suppress(subprocess.TimeoutExpired):
            process.wait(min(LOOK_S, left))
            return None, is_starved or spawn.is_scarce()
        is_starved |= spawn.is_scarce()
        with suppress(FileNotFoundError):  # it has just ended
            if reason := excess(folder, share.num_bytes, process.pid):
                return reason, False
            if len(os.listdir(f"/proc/{process.pid}/task")) > share.num_threads:
                return f"more than {share.num_threads} threads", False
    return f"no answer within {seconds:.3g} s", is_starved


def excess(folder: Path, max_bytes: int, pid: int | None = None) -> str | None:
    """Reason why a program's files are too large, deleted ones that it keeps open included; None if they are not."""
    num_files = num_bytes = 0
    folders = [folder]
    while folders:
        try:
            for entry in itertools.islice(os.scandir(folders.pop()), MAX_FILES + 1):
                found = entry.stat(follow_symlinks=False)
                num_files, num_bytes = num_files + 1, num_bytes + found.st_blocks * 512
                if stat.S_ISDIR(found.st_mode):
                    if found.st_mode & stat.S_IRWXU != stat.S_IRWXU:
                        return UNREADABLE
                    folders.append(Path(entry.path))
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                continue  # the program has just removed it
            return UNREADABLE  # no right to read it, or a path that is too long
        if num_files > MAX_FILES:
            break
    if pid is not None:
        with suppress(PermissionError):
            for descriptor in os.scandir(f"/proc/{pid}/fd"):
                with suppress(FileNotFoundError):
                    found = os.stat(descriptor.path)
                    num_bytes += found.st_blocks * 512 if found.st_nlink == 0 and stat.S_ISREG(found.st_mode) else 0
    if num_files > MAX_FILES or num_bytes > max_bytes:
        return f"more than {MAX_FILES} files or {max_bytes >> 20} MiB"
    return None


def probe() -> str:
    """Tries on this host what programs may not: read, write, fork, connect. Returns missing safeguards; "" if none."""
    with tempfile.NamedTemporaryFile("w", prefix="mrl-probe-") as secret:
        try:
            reason = run_test(PROBE, secret.name, "", "", PROBE_TIMEOUT_S)
        except RuntimeError as error:
            return str(error)
    return "" if reason is None else f"a program reads, writes, forks or opens a socket where it must not ({reason})"


@functools.cache
def python_files() -> tuple[str, ...]:
    """Files and folders from which Python and the packages of this environment load; no checkout, no home folder."""
    paths = {path for name, path in sysconfig.get_paths().items() if "lib" in name}
    paths |= {os.path.join(prefix, name) for prefix in (sys.base_prefix, sys.prefix) for name in ("lib", "lib64")}
    paths |= {"/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache", "/etc/localtime"}
    return tuple(sorted({*map(os.path.realpath, paths), "/dev/null", "/dev/urandom"}))


def same_output(printed: str, expected: str) -> bool:
    """True if two outputs have equal lines, apart from outer white space; their numbers compare as by `same_value`."""
    ours, theirs = ([line.strip() for line in text.strip().split("\n")] for text in (printed, expected))
    return len(ours) == len(theirs) and all(
        a == b or _same_numbers(a.split(), b.split()) for a, b in zip(ours, theirs, strict=True)
    )


def _same_numbers(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    return len(ours) == len(theirs) and all(map(_same_number, ours, theirs))


def same_value(ours: object, right: object) -> bool:
    """Equality, of lists and objects by part. Decimals may vary by numpy's tolerance, as in NeMo Gym; integers may not.

    Either number may be text. A whole number is a decimal where neither side writes it as an integer: 1e20.
    """
    if isinstance(ours, list) and isinstance(right, list):
        return len(ours) == len(right) and all(map(same_value, ours, right))
    if isinstance(ours, dict) and isinstance(right, dict):
        return ours.keys() == right.keys() and all(same_value(value, right[key]) for key, value in ours.items())
    return ours == right or _same_number(ours, right)


def _same_number(ours: object, right: object) -> bool:
    if not isinstance(ours, str | float | int) or not isinstance(right, str | float | int):
        return False
    try:
        one, other = (Decimal(value if isinstance(value, int) else str(value)) for value in (ours, right))
        is_integer = any(isinstance(value, int) or str(value).lstrip("+-").isdecimal() for value in (ours, right))
        if one == other or (is_integer and all(number == number.to_integral_value() for number in (one, other))):
            return one == other
        return abs(one - other) <= ABSOLUTE + RELATIVE * abs(other)
    except DecimalException:  # no numbers, NaNs, or beyond Decimal's range
        return False
