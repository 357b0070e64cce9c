# SPDX-License-Identifier: Apache-2.0
"""A real multi-node Slurm on a host: slurmctld, a slurmd per node in own namespaces (network, processes, mounts, name).

Every node has an address, a name, a process table, a /dev/shm and a local disk (/mnt) that no other node sees; the rest
of the file system is shared. Killing a node's first process is a loss of power, taking its link down a partition. Needs
root, and Debian's packages.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.waiting import HANG_S, wait_until

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge", "iproute2")
SUBNET = "10.77.0"
BRIDGE = "mrlbr0"
CONTROLLER = f"{SUBNET}.254"
CONTROLLER_PORT = 17900
NODE_PORT = 17000
# Slurm waits for credentials to expire before it starts a requeued job again.
CREDENTIAL_S = 5
# Folders of which each node has its own.
NODE_LOCAL = ("/dev/shm", "/mnt")

CONF = """\
ClusterName=mrlbox
SlurmctldHost={host}({controller})
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={run}/munge.socket,cred_expire={credential_s}
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
GresTypes=gpu
ReturnToService=2
JobRequeue=1
KillWait=10
BatchStartTimeout=10
SlurmdTimeout=15
SlurmctldTimeout=30
InactiveLimit=0
MinJobAge=600
UnkillableStepTimeout=120
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
StateSaveLocation={folder}/state
SlurmctldPidFile={run}/slurmctld.pid
SlurmdPidFile={run}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
SlurmctldLogFile={log}/slurmctld.log
SlurmdLogFile={log}/slurmd.%n.log
SlurmctldDebug=info
SlurmdDebug=info
PartitionName=batch Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_s} \
MaxTime=INFINITE State=UP
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
"""
# Seconds between the signal of a preemption and its end.
GRACE_S = 60


def missing() -> str | None:
    """Requirement of Slurm that this host lacks; None if nothing."""
    if os.geteuid() != 0:
        return "root, for namespaces"
    return next(
        (
            f"{name}, of the packages {' '.join(PACKAGES)}"
            for name in ("slurmctld", "slurmd", "sbatch", "munged", "ip")
            if not shutil.which(name)
        ),
        None,
    )


def can_install() -> bool:
    """True when this host may install what it lacks."""
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def run(*words: str, check: bool = True, timeout_s: float = HANG_S) -> str:
    """Output of a command."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s)
    assert not check or done.returncode == 0, f"{' '.join(words)}: {done.stderr or done.stdout}"
    return done.stdout


@dataclass
class SlurmBox:
    """A running Slurm, and the jobs that are submitted to it."""

    folder: Path
    num_nodes: int = 4
    num_gpus: int = 0
    """GPUs of every node, as Slurm sees it."""
    processes: dict[str, subprocess.Popen] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [f"mrl-n{k}" for k in range(1, self.num_nodes + 1)]

    @property
    def environment(self) -> dict[str, str]:
        """For sbatch, squeue and so on."""
        return os.environ | {"SLURM_CONF": str(self.folder / "etc" / "slurm.conf")}

    def slurm(
        self,
        *words: str,
        check: bool = True,
        timeout_s: float = HANG_S,
        variables: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> str:
        """Output of a command of Slurm, run in a folder."""
        environment = self.environment | dict(variables or {})
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=timeout_s, env=environment, cwd=folder or self.folder
        )
        assert not check or done.returncode == 0, f"{' '.join(words)}: {done.stderr or done.stdout}"
        return done.stdout

    def start(self) -> None:
        """Brings everything up."""
        for name in ("etc", "run", "log", "state"):
            (self.folder / name).mkdir(parents=True)
        self._write_conf()
        self._start_network()
        munge = [
            f"--{name}={self.folder}/run/munge.{end}"
            for name, end in (("socket", "socket"), ("pid-file", "pid"), ("seed-file", "seed"))
        ]
        key = self.folder / "etc" / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self._spawn(
            "munged",
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--log-file={self.folder}/log/munged.log",
            *munge,
        )
        wait_until((self.folder / "run" / "munge.socket").exists, "munge")
        self._spawn("slurmctld", "slurmctld", "-D", "-i")
        for name in self.names:
            self.power_on(name)
        wait_until(lambda: self.idle_nodes() == set(self.names), "idle nodes", explain=self.explain)

    def stop(self) -> None:
        """Ends everything, jobs included."""
        for process in reversed(self.processes.values()):
            process.kill()
            process.wait(timeout=HANG_S)
        stop_network(BRIDGE, self.names)

    def power_on(self, name: str) -> None:
        """Starts a node."""
        (self.folder / f"spool.{name}").mkdir(exist_ok=True)
        mounts = "; ".join(
            f"mkdir -p {path}; mount -t tmpfs -o size=4g,mode=1777 tmpfs {path}"
            for path in ("/sys/fs/cgroup", *NODE_LOCAL)
        )
        # The shell stays: as the first process of the node it reaps those whose parents are gone, which Slurm would
        # wait for.
        inside = f"hostname {name}; {mounts}; slurmd -D -N {name}; exit"
        namespaces = ("unshare", "--uts", "--mount", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc")
        self._spawn(name, "ip", "netns", "exec", name, *namespaces, "bash", "-c", inside)

    def power_off(self, name: str) -> None:
        """All processes of a node are gone at once."""
        process = self.processes.pop(name)
        process.kill()
        process.wait(timeout=HANG_S)

    def link(self, name: str, state: str) -> None:
        """Takes a node's network "down", or "up" again."""
        run("ip", "link", "set", f"v{name}", state)

    def idle_nodes(self) -> set[str]:
        return set(self.slurm("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N", check=False).split())

    def submit(self, script: Path, folder: Path, *options: str, **variables: str) -> int:
        """The id of a job that is submitted from this folder."""
        return int(
            self.slurm(
                "sbatch", "--parsable", "--export=ALL", *options, str(script), variables=variables, folder=folder
            ).split(";")[0]
        )

    def job(self, job_id: int) -> dict[str, str]:
        """Facts that Slurm knows of a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self.slurm("scontrol", "show", "job", "-o", str(job_id), check=False)))

    def explain(self) -> str:
        """The end of every log."""
        parts = [self.slurm("sinfo", "--Node", "--long", check=False), self.slurm("squeue", "--all", check=False)]
        for path in sorted(self.folder.rglob("*.log")) + sorted(self.folder.rglob("*.out")):
            parts.append(f"--- {path}\n{path.read_text(errors='replace')[-1500:]}")
        return "\n".join(parts)

    def _spawn(self, name: str, *words: str) -> None:
        with (self.folder / "log" / f"{name}.out").open("ab") as output:
            self.processes[name] = subprocess.Popen(
                # Nothing survives the tests, however they end.
                ("setpriv", "--pdeathsig", "KILL", *words),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self.environment,
                start_new_session=True,
            )

    def _write_conf(self) -> None:
        etc = self.folder / "etc"
        host = run("hostname", "--short").strip()
        text = CONF.format(
            host=host, controller=CONTROLLER, controller_port=CONTROLLER_PORT, folder=self.folder,
            run=self.folder / "run",
            log=self.folder / "log", credential_s=CREDENTIAL_S, grace_s=GRACE_S,
        )  # fmt: skip
        gres = f" Gres=gpu:{self.num_gpus}" if self.num_gpus else ""
        for k, name in enumerate(self.names, start=1):
            text += (
                f"NodeName={name} NodeHostname={name} NodeAddr={SUBNET}.{k} Port={NODE_PORT} CPUs=8 Boards=1 "
                f"SocketsPerBoard=1 CoresPerSocket=8 ThreadsPerCore=1 RealMemory=1000{gres} State=UNKNOWN\n"
            )
        # Nodes first: partitions name them.
        lines = text.splitlines()
        (etc / "slurm.conf").write_text(
            "\n".join(sorted(lines, key=lambda line: line.startswith("PartitionName"))) + "\n"
        )
        (etc / "cgroup.conf").write_text("CgroupAutomount=no\nCgroupPlugin=cgroup/v1\n")
        if self.num_gpus:
            (self.folder / "dev").mkdir()
            for k in range(self.num_gpus):
                # Slurm counts a device only if there is a file of it.
                os.mknod(self.folder / "dev" / f"nvidia{k}", 0o20666, os.makedev(1, 3))
            names = ",".join(self.names)
            (etc / "gres.conf").write_text(
                f"NodeName={names} Name=gpu File={self.folder}/dev/nvidia[0-{self.num_gpus - 1}]\n"
            )

    def _start_network(self) -> None:
        addresses = {name: f"{SUBNET}.{k}" for k, name in enumerate(self.names, start=1)}
        hosts = Path("/etc/hosts").read_text() + f"{CONTROLLER} {run('hostname', '--short').strip()}\n"
        hosts += "".join(f"{address} {name}\n" for name, address in addresses.items())
        start_network(BRIDGE, addresses, hosts, gateway=CONTROLLER)


def start_network(bridge: str, addresses: Mapping[str, str], hosts: str, *, gateway: str | None = None) -> None:
    """Makes a network namespace per name, whose `eth0` has the address, joined by a bridge, which may be their gateway.

    `hosts` is what they have as /etc/hosts; nobody else answers for names.
    """
    stop_network(bridge, addresses)
    run("ip", "link", "add", bridge, "type", "bridge")
    if gateway is not None:
        run("ip", "address", "add", f"{gateway}/24", "dev", bridge)
    run("ip", "link", "set", bridge, "up")
    for name, address in addresses.items():
        run("ip", "netns", "add", name)
        run("ip", "link", "add", f"v{name}", "type", "veth", "peer", "name", "eth0", "netns", name)
        run("ip", "link", "set", f"v{name}", "master", bridge, "up")
        run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            run("ip", "-n", name, "link", "set", device, "up")
        if gateway is not None:
            run("ip", "-n", name, "route", "add", "default", "via", gateway)
        files = Path("/etc/netns") / name
        files.mkdir(parents=True, exist_ok=True)
        (files / "hosts").write_text(hosts)
        # Otherwise every lookup waits for a name server that cannot be reached.
        (files / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")


def stop_network(bridge: str, names: Iterable[str]) -> None:
    """Removes what `start_network` has made, or a part of it."""
    for name in names:
        # Deleting a namespace leaves its link for a moment, in the way of the next one.
        run("ip", "link", "delete", f"v{name}", check=False)
        run("ip", "netns", "delete", name, check=False)
        shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)
    run("ip", "link", "delete", bridge, check=False)


@contextmanager
def slurm_box(folder: Path, *, num_nodes: int = 4, num_gpus: int = 0) -> Iterator[SlurmBox]:
    """A Slurm inside the `with` block."""
    box = SlurmBox(folder, num_nodes, num_gpus)
    try:
        box.start()
        yield box
    finally:
        box.stop()


def signal_job(box: SlurmBox, job_id: int, number: signal.Signals) -> None:
    """Signals the batch script of a job, as Slurm does before the time limit."""
    box.slurm("scancel", f"--signal={number.name.removeprefix('SIG')}", "--batch", str(job_id))
