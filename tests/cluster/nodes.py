# SPDX-License-Identifier: Apache-2.0
"""Nodes of a Kubernetes or Lepton job on one host, each in namespaces of its own (network, processes, mounts, name).

Each runs scripts/ray_node.sh, and finds the head by the name that the service of such a job gives it. Needs root and
iproute2.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.slurm import run, start_network, stop_network
from tests.sources import ROOT
from tests.waiting import HANG_S, wait_until

SUBNET = "10.79.0"
BRIDGE = "mrlbr2"
# Folders of which each node has its own.
NODE_LOCAL = ("/dev/shm", "/mnt")


def missing() -> str | None:
    """Requirement that this host lacks; None if nothing."""
    if os.geteuid() != 0:
        return "root, for namespaces"
    return None if shutil.which("ip") else "ip, of the package iproute2"


@dataclass
class Nodes:
    """The nodes of a job, `NAME-0` to `NAME-(num_nodes - 1)` in the domain of its service."""

    folder: Path
    job: str
    service: str
    num_nodes: int
    processes: dict[int, subprocess.Popen] = field(default_factory=dict)

    def start(self, rank: int, variables: Mapping[str, str]) -> None:
        """Starts the container of a node. Its own name is known to nobody, not even to itself."""
        name = f"mrl-p{rank}"
        mounts = "; ".join(f"mount -t tmpfs -o size=8g,mode=1777 tmpfs {path}" for path in NODE_LOCAL)
        inside = f"hostname pod-{rank}; {mounts}; exec bash {ROOT}/scripts/ray_node.sh"
        namespaces = ("unshare", "--uts", "--mount", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {"PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(self.folder), "RAY_TMPDIR": "/mnt"}
        environment |= {name: os.environ[name] for name in ("MRL_CACHE", "OMP_NUM_THREADS") if name in os.environ}
        with self.log_path(rank).open("ab") as output:
            self.processes[rank] = subprocess.Popen(
                # Nothing survives the tests, however they end.
                ("setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", name, *namespaces, "bash", "-c", inside),
                cwd=self.folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env=environment | dict(variables),
            )  # fmt: skip

    def log_path(self, rank: int) -> Path:
        return self.folder / f"node-{rank}.log"

    def log(self, rank: int) -> str:
        """Output of a node."""
        return self.log_path(rank).read_text(errors="replace")

    def explain(self) -> str:
        return "\n".join(f"--- node {rank}\n{self.log(rank)[-3000:]}" for rank in self.processes)

    def end(self, rank: int, *, timeout_s: float = HANG_S) -> int:
        """The exit code of a node."""
        process = self.processes[rank]
        wait_until(lambda: process.poll() is not None, f"end of node {rank}", timeout_s, explain=self.explain)
        return process.returncode

    def signal(self, rank: int, number: signal.Signals, pattern: str) -> None:
        """Signals the processes of a node whose command line matches `pattern`, as the node's own `kill` would."""
        namespace = Path(f"/var/run/netns/mrl-p{rank}").stat().st_ino
        for pid in run("pgrep", "--full", pattern, check=False).split():
            if Path(f"/proc/{pid}/ns/net").stat().st_ino == namespace:
                os.kill(int(pid), number)

    def start_network(self) -> None:
        hosts = "127.0.0.1 localhost\n"
        hosts += "".join(f"{SUBNET}.{rank + 1} {self.job}-{rank}.{self.service}\n" for rank in range(self.num_nodes))
        start_network(BRIDGE, {f"mrl-p{rank}": f"{SUBNET}.{rank + 1}" for rank in range(self.num_nodes)}, hosts)

    def stop(self) -> None:
        """Ends everything."""
        for process in self.processes.values():
            process.kill()
            process.wait(timeout=HANG_S)
        stop_network(BRIDGE, [f"mrl-p{rank}" for rank in range(self.num_nodes)])


@contextmanager
def nodes_of(folder: Path, job: str, service: str, *, num_nodes: int) -> Iterator[Nodes]:
    """The network of a job's nodes inside the `with` block; `start` starts one."""
    nodes = Nodes(folder, job, service, num_nodes)
    try:
        nodes.start_network()
        yield nodes
    finally:
        nodes.stop()
