# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.hostile.run_attacks IDENTITY FOLDER`: runs every attack of `attacks.py` in the environment `code`.

Prints one JSON object: verdicts and changes of the outside by `group/name`, honest programs that failed, and what
stayed behind.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mrl.config.schema.env import CodeEnvConfig, EnvConfig
from mrl.envs import confine
from mrl.envs.task import Task
from tests.hostile.attacks import GRADING, GROUPS, PRELUDE, READS, SHARE, programs
from tests.hostile.benign import program as usual_programs
from tests.hostile.calls import NEVER_CALLS
from tests.unit.envs.pools import build_environment
from tests.waiting import HANG_S, SOON_S

NOBODY = 65534
ANSWER_BEGINS = "answer-"
MARK = "untouched"
SLOW = ("processor", "sleep", "stopping itself")
"""Attacks that end with their deadline, which is a short one."""

HONEST = {
    "threads": """
        import threading
        found = []
        workers = [threading.Thread(target=lambda: found.append(1)) for _ in range(20)]
        for worker in workers: worker.start()
        for worker in workers: worker.join()
        won(len(found) == 20)
    """,
    "recursion": """
        import threading
        sys.setrecursionlimit(10**6)
        threading.stack_size(1 << 28)
        def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
        worker = threading.Thread(target=lambda: won(depth(50_000) == 50_000))
        worker.start(); worker.join()
    """,
    "futures": """
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(4) as pool: won(sum(pool.map(abs, range(-9, 1))) == 45)
    """,
    "files": "open('notes', 'w').write('a')\nopen('notes', 'a').write('b')\nwon(open('notes').read() == 'ab')",
    "standard library": """
        import asyncio, dataclasses, decimal, enum, hashlib, importlib, random
        import secrets, statistics, unittest, uuid, zoneinfo, zlib
        won(len(secrets.token_bytes(4)) == 4 and random.random() < 1 and hashlib.sha256(b"").hexdigest()[:4] == "e3b0")
    """,
    "alarm": (
        "signal.signal(signal.SIGALRM, lambda *a: won())\nsignal.setitimer(signal.ITIMER_REAL, 0.01)\nsignal.pause()"
    ),
    "limits": (
        "import resource\nresource.setrlimit(resource.RLIMIT_STACK, resource.getrlimit(resource.RLIMIT_STACK))\nwon()"
    ),
    "standard input by name": "won('victim' in open('/dev/stdin').read())",
    "usual programs": usual_programs("won(failed == [])"),
    "numpy": "import numpy\nwon(float((numpy.ones((64, 64)) @ numpy.ones((64, 64))).sum()) == 64**3)",
}


@dataclass
class Outside:
    """State outside of an attack, which must be unchanged behind it."""

    name: str
    folder: str
    secret: str
    """File with the answer."""
    victim: str
    """File that the attack's user may write."""
    library: str
    """File that stands for mrl's installed source: the attack's user may write it."""
    shared: str
    """File with the answer in the memory of the host."""
    answer: str = ""
    """Output that the program must print; not said to those that are to read it."""
    begins: str = ANSWER_BEGINS
    length: int = 0
    port: int = 0
    unix: str = ""
    datagram: str = ""
    abstract: str = ""
    pid: int = 0
    """A process of the same user."""
    calls: dict[str, int] = field(default_factory=dict)


class Listener:
    """Sockets of every kind on this host, and what reached them."""

    def __init__(self, folder: Path) -> None:
        self.heard: list[bytes] = []
        self.unix, self.datagram, self.abstract = (
            str(folder / "unix"),
            str(folder / "datagram"),
            f"mrl-hostile-{os.getpid()}",
        )
        tcp, udp = socket.socket(), socket.socket(type=socket.SOCK_DGRAM)
        tcp.bind(("127.0.0.1", 0))
        self.port = tcp.getsockname()[1]
        udp.bind(("127.0.0.1", self.port))
        streams = [tcp, socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
        streams[1].bind(self.unix)
        streams[2].bind("\0" + self.abstract)
        datagrams = [udp, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)]
        datagrams[1].bind(self.datagram)
        for stream in streams:
            stream.listen()
            threading.Thread(target=self._accept, args=(stream,), daemon=True).start()
        for datagram in datagrams:
            threading.Thread(target=self._receive, args=(datagram,), daemon=True).start()

    def _accept(self, stream: socket.socket) -> None:
        while True:
            self.heard.append(b"connected: " + stream.accept()[0].recv(999))

    def _receive(self, datagram: socket.socket) -> None:
        while True:
            self.heard.append(datagram.recv(999))


def become(identity: str) -> None:
    """Makes this process the user, with the limits, of `identity`: `self`, `plain user`, or `container`."""
    if identity != "self" and os.geteuid() == 0:
        reveal_python()
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    if identity == "container":
        refused = (
            "unshare",
            "setns",
            "mount",
            "umount2",
            "pivot_root",
            "ptrace",
            "bpf",
            "keyctl",
            "io_uring_setup",
            "userfaultfd",
        )
        confine.install(confine.filter_program(dict.fromkeys(refused, confine.EPERM), confine.ALLOW))
        resource.setrlimit(resource.RLIMIT_NPROC, (256, 256))
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))


def reveal_python() -> None:
    """Lets every user reach the interpreter in this process's mount namespace, if it lies in a closed home folder."""
    home = Path(os.path.realpath(sys.executable))
    closed = [folder for folder in reversed(home.parents) if not folder.stat().st_mode & 0o001]
    if not closed:
        return
    inner = closed[0] / home.relative_to(closed[0]).parts[0]
    libc = ctypes.CDLL(None, use_errno=True)
    # CLONE_NEWNS; MS_REC | MS_PRIVATE; MS_BIND | MS_REC
    done = libc.unshare(0x20000) == 0 and libc.mount(b"none", b"/", None, 0x44000, None) == 0
    fd = os.open(inner, os.O_PATH)
    done = done and libc.mount(b"none", os.fsencode(closed[0]), b"tmpfs", 0, b"mode=755") == 0
    if done:
        inner.mkdir()
        done = libc.mount(f"/proc/self/fd/{fd}".encode(), os.fsencode(inner), None, 0x5000, None) == 0
    if not done:
        sys.exit(f"{closed[0]} is closed to other users, and cannot be mounted over")


def outside_of(name: str, folder: Path, listener: Listener, answer: str, *, is_told: bool) -> Outside:
    """An outside for one attack."""
    folder.mkdir(mode=0o777)
    for file in ("victim", "library"):
        (folder / file).write_text(MARK)
        (folder / file).chmod(0o666)
    (folder / "secret").write_text(answer)
    (folder / "empty").mkdir()
    shared = Path(f"/dev/shm/mrl-hostile-{os.getpid()}-{folder.name}")
    shared.write_text(answer)
    tables = (*confine.TABLES, NEVER_CALLS)
    # An attack calls what this machine lacks by number -1.
    calls = dict.fromkeys((row.split()[0] for table in tables for row in table.split(",")), -1) | confine.call_numbers(
        *tables
    )
    outside = Outside(
        name=name,
        folder=str(folder),
        secret=str(folder / "secret"),
        victim=str(folder / "victim"),
        library=str(folder / "library"),
        shared=str(shared),
        answer=answer if is_told else "",
        length=len(answer),
        port=listener.port,
        unix=listener.unix,
        datagram=listener.datagram,
        abstract=listener.abstract,
        calls=calls,
    )
    return outside


def changes(outside: Outside, process: subprocess.Popen[bytes] | None, listener: Listener) -> list[str]:
    """Changes, by name."""
    folder, victim, found = Path(outside.folder), Path(outside.victim), []
    try:
        state = victim.stat()
        files = {"victim": victim.read_text(), "library": Path(outside.library).read_text()}
    except OSError as error:
        return [str(error)]
    found += [file for file, text in files.items() if text != MARK]
    found += ["times"] if state.st_mtime < 1000 else []
    found += ["mode"] if state.st_mode & 0o777 != 0o666 else []
    found += ["attributes"] if os.listxattr(victim) else []
    found += sorted({entry.name for entry in folder.iterdir()} ^ {"secret", "victim", "library", "empty"})
    found += ["network"] if any(outside.name.encode() in heard for heard in listener.heard) else []
    if process is not None:
        words = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        found += [f"process: {words[0]}"] if words[0] != "S" else []
        found += ["priority"] if words[16] != str(os.getpriority(os.PRIO_PROCESS, 0)) else []
        limits = [resource.prlimit(pid, resource.RLIMIT_CPU) for pid in (process.pid, os.getpid())]
        found += ["limits"] if limits[0] != limits[1] else []
    return found


def run(folder: Path) -> dict[str, object]:
    """Runs honest programs and all attacks; see the head of this file."""
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "tmp")
    Path(tempfile.gettempdir()).mkdir()
    (folder / "outside").mkdir()
    listener = Listener(folder)
    attacks = {f"{group}/{name}": (group, name, text) for group in GROUPS for name, text in programs(group).items()}

    honest = {f"honest/{name}": ("honest", name, PRELUDE + textwrap.dedent(text)) for name, text in HONEST.items()}
    secret = os.environ["HF_TOKEN"]
    tasks: dict[str, Task] = {}
    outsides: dict[str, tuple[Outside, subprocess.Popen[bytes] | None]] = {}
    for index, (key, (group, name, text)) in enumerate((honest | attacks).items()):
        needs_answer = group != READS or "won(" in text[len(PRELUDE) :]
        answer = secret if "environ" in name else f"{ANSWER_BEGINS}{os.urandom(8).hex()}"
        outside = outside_of(
            f"attack-{index:03d}-", folder / "outside" / str(index), listener, answer, is_told=needs_answer
        )
        process = subprocess.Popen(["sleep", "600"]) if "E['pid']" in text or 'E["pid"]' in text else None
        outside.pid = process.pid if process else 0
        outsides[key] = (outside, process)
        tests = {"inputs": [json.dumps(asdict(outside))], "outputs": [answer], "fn_name": ""}
        if group == GRADING and "_exit(0)" in text:
            tests = {"inputs": [""], "outputs": [json.dumps(answer)], "fn_name": "solve"}
            text = text.replace("E = json.loads(input())", "E = {'begins': 'answer-'}")
        tasks[key] = Task((f"```python\n{text}\n```",), row=json.dumps({"unit_tests": tests}))
    verdicts = {}
    for is_slow, seconds in ((False, HANG_S), (True, SOON_S)):
        config = EnvConfig(code=CodeEnvConfig(num_workers=2, unit_test_timeout_s=seconds, timeout_s=2 * HANG_S))
        keys = [key for key in tasks if (key.partition("/")[2] in SLOW and key.startswith(SHARE)) == is_slow]
        with build_environment("code", config) as pool:
            verdicts |= dict(zip(keys, pool.score([tasks[key] for key in keys]), strict=True))
    outcomes = {
        key: {
            "reward": found.reward,
            "status": found.status,
            "said": found.extracted + found.reason,
            "changed": changes(*outsides[key], listener),
        }
        for key, found in verdicts.items()
    }
    for outside, process in outsides.values():
        Path(outside.shared).unlink()
        if process is not None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
    return {
        "outcomes": outcomes,
        "left": os.listdir(tempfile.gettempdir()),
        "processes": children_left(),
        "network": len(listener.heard),
    }


def children_left() -> list[str]:
    """Command lines of this process's children: there is to be none."""
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return path.read_text().split() if path.exists() else []


if __name__ == "__main__":
    become(sys.argv[1])
    sys.stdout.write(json.dumps(run(Path(sys.argv[2]))))
