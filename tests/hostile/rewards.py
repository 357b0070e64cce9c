# SPDX-License-Identifier: Apache-2.0
"""Reward functions that do what the answer says, as one that is taken over by an answer would: see test_workers.py."""

import contextlib
import ctypes
import fcntl
import os
import shutil
import socket
import sqlite3
import subprocess
import tarfile
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mrl.envs.confine import call_numbers
from tests.hostile.calls import NEVER_CALLS

NEVER = call_numbers(NEVER_CALLS)


def call(number: int, *arguments: int) -> None:
    """Makes a system call; PermissionError: it is refused."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, *map(ctypes.c_long, arguments)) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def use_libraries() -> None:
    """Imports and uses what graders are made of, in a worker that is confined already."""
    import numpy as np
    import pandas as pd
    import sympy
    import tokenizers
    import torch
    from math_verify import parse, verify
    from tokenizers.models import WordLevel

    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile() as nameless:
        folder = Path(name)
        nameless.write(b"x")
        with sqlite3.connect(folder / "base") as base:
            base.execute("create table t (x)")
            base.execute("insert into t values (42)")
        np.save(folder / "array.npy", np.arange(9.0))
        shutil.copy2(folder / "array.npy", folder / "copy.npy")
        shutil.copytree(folder, folder / "tree")
        with tarfile.open(folder / "all.tar", "w") as archive:
            archive.add(folder / "tree", "tree")
        with tarfile.open(folder / "all.tar") as archive:
            archive.extractall(folder / "out", filter="data")
        mapped = np.load(folder / "out" / "tree" / "copy.npy", mmap_mode="r")
        with ThreadPoolExecutor(4) as pool:
            assert sum(pool.map(float, mapped)) == 36.0
    with contextlib.closing(
        sqlite3.connect(f"file:{__file__}?mode=ro", uri=True)
    ) as base:  # a lock of a file elsewhere
        with contextlib.suppress(sqlite3.DatabaseError):
            base.execute("select 1 from sqlite_master")
    assert pd.DataFrame({"x": [1, 2]}).groupby("x").size().sum() == 2
    assert sympy.simplify("x + x - 2*x") == 0 and verify(parse("$42$"), parse("$42.0$"))
    torch.set_num_threads(2)
    assert torch.ones(300, 300).matmul(torch.ones(300, 300)).sum() == 300**3
    assert tokenizers.Tokenizer(WordLevel({"a": 0}, unk_token="a")).encode("a").ids == [0]


def obey(prompt: str, response: str, reference_answer: str) -> float:
    """1.0 if what `response` names was done to `reference_answer`."""
    match response:
        case "connect":
            socket.create_connection(("127.0.0.1", int(reference_answer)), 5).close()
        case "datagram":
            ours, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            ours.sendto(b"x", reference_answer)
        case "packet":  # UDP, which Landlock does not see
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ours:
                ours.sendto(b"x", ("127.0.0.1", int(reference_answer)))
        case "run":
            subprocess.run(["touch", reference_answer], check=True)
        case "fork":
            if os.fork() == 0:
                os._exit(0)
            os.wait()
        case "kill":
            os.kill(int(reference_answer), 0)
        case "memory":
            Path(f"/proc/{os.getppid()}/mem").open("rb").close()
        case "environment":
            Path(f"/proc/{os.getppid()}/environ").read_bytes()
        case "write":
            Path(reference_answer).write_text("x")
        case "delete":
            Path(reference_answer).unlink()
        case "link":
            os.symlink("/", reference_answer)
        case "mode":
            os.chmod(reference_answer, 0o600)
        case "time":
            os.utime(reference_answer, (0, 0))
        case "attribute":
            os.setxattr(reference_answer, "user.x", b"1")
        case "lock":
            with open(reference_answer) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
        case "niceness":
            os.setpriority(os.PRIO_PROCESS, os.getppid(), os.getpriority(os.PRIO_PROCESS, os.getppid()))
        case "affinity":
            os.sched_setaffinity(os.getppid(), os.sched_getaffinity(os.getppid()))
        case "scheduler":
            os.sched_setscheduler(os.getppid(), os.SCHED_OTHER, os.sched_param(0))
        case "semaphores":
            call(NEVER["semget"], 0, 1, 0o600)
        case "shared memory":
            call(NEVER["shmget"], 0, 4096, 0o600)
        case "messages":
            call(NEVER["msgget"], 0, 0o600)
        case "libraries":
            use_libraries()
        case "work":
            import asyncio

            with tempfile.TemporaryDirectory() as folder, open("/dev/null", "w") as nothing:
                (Path(folder) / "file").write_text("x")
                nothing.write(Path(__file__).read_text())
            threads = [threading.Thread(target=sum, args=(range(9),)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            asyncio.run(asyncio.sleep(0))
    return 1.0
