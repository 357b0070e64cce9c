# SPDX-License-Identifier: Apache-2.0
"""Ray's daemons: a table of their needs of a host, and their last words."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import mrl
from mrl.envs.spawn import free_threads
from mrl.kernels import find_muon_fault

if TYPE_CHECKING:
    from mrl.config.schema.run import RunConfig

MIB = 2**20
# Weights never travel through the object store and payloads are a few bytes a token, so a small store is enough on a
# laptop. What a teacher says of a step's rollouts comes on top.
OBJECT_STORE_BYTES = 256 * MIB
CONNECT_TIMEOUT_S = 5.0
# Measured on 2 cores: the driver, Ray and one rank have 279 threads; with fewer than 260 a rank cannot be built.
THREADS, THREADS_PER_SLOT = 180, 85
LOGS = ("gcs_server", "raylet", "dashboard_agent", "runtime_env_agent")
MAX_LOG_BYTES, MAX_WORDS, MAX_LINE = MIB, 3, 200
_FAILURE = re.compile(r"^\[.*? [EFC] \d+ \d+\] (.*)")


@dataclass(frozen=True)
class Obstacle:
    """One reason why Ray's daemons, or the processes that they start, would die or hang on this host."""

    found: str
    reason: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.found}: {self.reason}; {self.way_out}"


@dataclass(frozen=True)
class Need:
    """The least of a limit of the operating system under which a run starts."""

    option: str
    """Its letter in `ulimit`."""
    name: str
    """Its name in /etc/security/limits.conf."""
    kind: int
    unit: int
    """Bytes, or things, of 1 in `ulimit`."""
    least: int
    reason: str


@dataclass(frozen=True)
class Harm:
    """Values of an environment variable that the processes of a run do not survive."""

    variable: str
    is_harmful: Callable[[str], bool]
    reason: str
    way_out: str


def needs(store_bytes: int, *, on_gpus: bool) -> tuple[Need, ...]:
    """The limits that a start looks at, besides that of processes.

    On 2 cores with one rank half of each is too little. Small `-s`, `-l`, `-i`, `-q` and `-x` do no harm.
    """
    files = f"Ray's object store is one file of {store_bytes // MIB} MiB in /dev/shm, and checkpoints are files, too"
    memory = "CUDA reserves addresses for the memory of all GPUs" if on_gpus else "a policy rank maps as much and more"
    data, mapped = (resource.RLIM_INFINITY,) * 2 if on_gpus else (1536 * MIB, 3584 * MIB)
    return (
        Need("f", "fsize", resource.RLIMIT_FSIZE, 1024, store_bytes + MIB, files),
        Need(
            "n",
            "nofile",
            resource.RLIMIT_NOFILE,
            1,
            128,
            "Ray's daemons and Gloo keep that many files and sockets open",
        ),
        Need("v", "as", resource.RLIMIT_AS, 1024, mapped, memory),
        Need("d", "data", resource.RLIMIT_DATA, 1024, data, memory),
        Need("t", "cpu", resource.RLIMIT_CPU, 1, 3600, "the system ends each process that has computed for so long"),
    )


HARMS = (
    Harm(
        "PYTHONWARNINGS",
        # Python takes `error` and its beginnings as the action of an entry.
        lambda text: any(action and "error".startswith(action) for action in _actions(text)),
        "a warning of any library ends Ray's agents and the run's processes",
        "unset it, or write `default` for `error`",
    ),
    Harm(
        "PYTHONOPTIMIZE",
        lambda text: text.strip().isdigit() and int(text) > 1,
        "it drops docstrings, which Ray's agents need to start",
        "unset it",
    ),
    Harm(
        "PYTHONDEVMODE",
        lambda _: True,
        "runs under Python's debug checks hang now and then",
        "unset it",
    ),
    Harm("PYTHONTRACEMALLOC", lambda _: True, "Python's traces of memory slow every start past its limits", "unset it"),
    Harm(
        "PYTHONINSPECT",
        lambda _: True,
        "Python opens a prompt where a process should end, which loses its exit code",
        "unset it",
    ),
    *(
        Harm(name, is_harmful, "Ray would start as part of another cluster or job, and fail or wait", "unset it")
        for name, is_harmful in (
            # `ray job submit` sets it, too; without an environment of the job, Ray starts.
            ("RAY_JOB_CONFIG_JSON_ENV_VAR", lambda text: re.match(r'\{"runtime_env": \{\}[,}]', text) is None),
            ("RAY_OVERRIDE_RESOURCES", bool),
        )
    ),
    Harm(
        "RAY_USE_TLS",
        # Ray takes no other text for true.
        lambda text: text.lower() in ("1", "true") and not os.environ.get("RAY_TLS_SERVER_CERT"),
        "Ray waits for ever for a certificate",
        "unset it, or set RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY and RAY_TLS_CA_CERT",
    ),
)
"""Variables that Python or Ray reads in every process of a run. Others were tried, and do no harm."""


SHARED = "/dev/shm"
CPU_ENGINES = "lscpu"
PROGRAMS = {
    "bash": "Ray starts each process of a run by",
    CPU_ENGINES: "an engine without GPUs reads the host's cores by",
}
"""Programs that a start looks for in PATH. Tried: a run on CPUs needs no others."""


def find_obstacles(
    *,
    num_slots: int = 1,
    store_bytes: int = OBJECT_STORE_BYTES,
    on_gpus: bool = False,
    has_engines: bool = True,
) -> list[Obstacle]:
    """Everything on this host that keeps Ray's daemons, or a run of so many slots, from starting."""
    found = [obstacle for need in needs(store_bytes, on_gpus=on_gpus) if (obstacle := _too_low(need))]
    for harm in HARMS:
        if (text := os.environ.get(harm.variable)) and harm.is_harmful(text):
            found.append(Obstacle(f"{harm.variable}={text}", harm.reason, harm.way_out))
    free, wanted = free_threads()[0], THREADS + THREADS_PER_SLOT * num_slots
    if free is not None and free < wanted:
        reason = f"the driver, Ray and {num_slots} slot{'s' * (num_slots > 1)} take {wanted:,} and more"
        way_out = (
            "raise it, or end other processes of this user or container; docker run --pids-limit, a pod's "
            "limit of processes"
        )
        found.append(Obstacle(f"limit of processes (ulimit -u, pids.max) leaves {free:,} threads", reason, way_out))
    for program, does in PROGRAMS.items():
        if shutil.which(program) is None and (program != CPU_ENGINES or (has_engines and not on_gpus)):
            reason = f"{does} {program}, which is in none of these folders"
            way_out = f"add that of {program}, mostly /usr/bin:/bin, or install it"
            found.append(Obstacle(f"PATH={os.environ.get('PATH', '')}", reason, way_out))
    if error := _memory_error():
        reason, way_out = "Ray and the run's processes share memory there", "mount it for this user to write"
        found.append(Obstacle(f"{SHARED} takes no file ({error})", reason, f"{way_out}: mount -o remount,rw {SHARED}"))
    if error := _loopback_error():
        way_out = "as root: ip link set lo up; else start the container or namespace with a loopback interface"
        found.append(
            Obstacle(f"127.0.0.1 does not answer ({error})", "Ray's processes talk to each other there", way_out)
        )
    return found


NO_ADDRESS = (
    "RAY_ADDRESS is not set: several nodes are a Ray cluster, which scripts/ray.sub or python -m mrl.launch starts"
)


def obstacles_of(config: RunConfig) -> list[str]:
    """The obstacles to a run of this host alone, one line each; the nodes of a cluster have started Ray already."""
    wants_muon = any(config.sections[model].megatron_cfg.optimizer.is_muon for model in config.trained_models)
    fault = find_muon_fault() if wants_muon else ""
    lacks = [f"megatron_cfg.optimizer.optimizer=muon: {fault}"] if fault else []
    if config.cluster.num_nodes > 1:
        return lacks
    store_bytes, on_gpus = OBJECT_STORE_BYTES + config.frozen_output_bytes, config.cluster.gpus_per_node > 0
    return lacks + [
        str(found)
        for found in find_obstacles(
            num_slots=config.num_slots,
            store_bytes=store_bytes,
            on_gpus=on_gpus,
            has_engines=config.has_engines,
        )
    ]


def _too_low(need: Need) -> Obstacle | None:
    soft, hard = resource.getrlimit(need.kind)
    # Ray raises its soft limit of files to the hard one; the other soft limits stay.
    limit = hard if need.kind == resource.RLIMIT_NOFILE else soft
    if limit == resource.RLIM_INFINITY or need.least != resource.RLIM_INFINITY and limit >= need.least:
        return None
    least = "unlimited" if need.least == resource.RLIM_INFINITY else str(-(-need.least // need.unit))
    way_out = (
        f"ulimit -{need.option} {least}, or {need.name} in /etc/security/limits.conf, or of the service that "
        "starts the job"
    )
    return Obstacle(f"ulimit -{need.option} is {limit // need.unit}, and {least} is needed", need.reason, way_out)


def _actions(text: str) -> list[str]:
    return [entry.partition(":")[0].strip() for entry in text.split(",")]


def _memory_error() -> str:
    try:
        with tempfile.TemporaryFile(dir=SHARED):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _loopback_error() -> str:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return str(error)
    return ""


def settings_of_ray() -> str:
    """Variables of Ray that this process was started with, for a message about a failed start, or ""."""
    words = Path("/proc/self/environ").read_bytes().decode(errors="replace").split("\0")
    names = [word.partition("=")[0] for word in words if word.startswith("RAY_")]
    names = [name for name in names if name not in mrl.NO_USAGE_STATISTICS]
    return f"this shell sets {', '.join(names)}, which Ray reads; unset them; " if names else ""


def last_words(folder: Path, earlier: Collection[int] = ()) -> str:
    """The last errors in the logs of Ray's daemons, and the signals that ended them, for a message; "" if there are
    none.

    `folder` is the one that Ray was told to use, `earlier` are processes that have ended before, which count as silent.
    """
    said = dict[str, str]()
    for path in sorted(path for log in LOGS for path in (folder / "session_latest" / "logs").glob(f"{log}.*")):
        with suppress(OSError):
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - MAX_LOG_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
            if line := _last_error(lines):
                said.setdefault(line, path.name)
    words = [f"{name}: {line}" for line, name in said.items()]
    ended = [line for pid, line in ended_children().items() if pid not in earlier]
    return "; ".join([*ended, *words][:MAX_WORDS])


def _last_error(lines: list[str]) -> str:
    starts = [place for place, line in enumerate(lines) if line.endswith("Traceback (most recent call last):")]
    raised = [line for line in lines[starts[-1] + 1 :] if line.strip() and not line[0].isspace()] if starts else []
    logged = [found[1] for line in lines if (found := _FAILURE.match(line))]
    return next(iter([*raised[:1], *logged[-1:]]), "").strip()[:MAX_LINE]


def ended_children() -> dict[int, str]:
    """Children of this process that a signal has ended, and nobody has asked for; see proc(5)."""
    found = dict[int, str]()
    for path in Path("/proc/self/task").glob("*/children"):
        for pid in path.read_text(encoding="ascii").split():
            with suppress(OSError, ValueError):  # it is gone, or a signal without a name
                head, _, rest = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
                fields = rest.split()
                if fields[0] == "Z" and (number := int(fields[-1]) & 0x7F):
                    found[int(pid)] = f"{head.partition('(')[2]} was ended by {signal.Signals(number).name}"
    return found
