# SPDX-License-Identifier: Apache-2.0
"""scripts/ray.sub on many imaginary nodes: the commands it calls are small programs that record how they were called.

Every step runs here, once per node of its list; a Ray node is a process that waits. What launches, joins and ends them
is the real thing.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.sources import ROOT
from tests.waiting import HANG_S, wait_until

JOB_ID = 77
# Of the loopback network, so that all nodes have the same ports.
SUBNET = "127.77.0"

SRUN = r"""#!/usr/bin/env bash
if [[ $1 == --help ]]; then echo "${SRUN_HELP:-}"; exit; fi
echo "$*" >>"$RECORD/srun"
for word; do
    case $word in
        --nodelist=*) IFS=, read -ra nodes <<<"${word#*=}" ;;
        --output=*) log=${word#*=} ;;
        --*) ;;
        *) break ;;
    esac
    shift
done
tasks=() code=0
for k in "${!nodes[@]}"; do
    file=${log:-/dev/stdout}
    if [[ $file =~ ^(.*)%0([0-9])t(.*)$ ]]; then
        file=${BASH_REMATCH[1]}$(printf "%0${BASH_REMATCH[2]}d" "$k")${BASH_REMATCH[3]}
    fi
    SLURMD_NODENAME=${nodes[k]} SLURM_PROCID=$k "$@" >>"$file" 2>&1 &
    tasks+=($!)
done
trap 'kill -TERM "${tasks[@]}" 2>/dev/null' TERM
for _ in "${tasks[@]}"; do wait -n || { code=$?; kill -TERM "${tasks[@]}" 2>/dev/null; }; done
exit "$code"
"""
SCONTROL = r"""#!/usr/bin/env bash
if [[ $* == show\ job* ]]; then echo "JobId=$4 JobState=$SIMULATED_STATE Reason=None"; exit; fi
if [[ $1 == show ]]; then tr ' ' '\n' <<<"$SIMULATED_NODES"; exit; fi
echo "$*" >>"$RECORD/scontrol"
if [[ -n ${SIMULATED_STATE:-} ]]; then exit 1; fi
# A requeued job's script is ended at once.
kill -KILL "$PPID"
"""
SINFO = '#!/usr/bin/env bash\necho "${SIMULATED_GRES:-(null)}"\n'
IP = f"""#!/usr/bin/env bash
echo "2: $5    inet {SUBNET}.$((10#${{SLURMD_NODENAME##*-}}))/16 scope global $5"
"""
RAY = r"""#!/usr/bin/env bash
if [[ $SLURMD_NODENAME == "${SIMULATED_ABSENT:-}" ]]; then exec sleep 600; fi
printf '%s %s\n' "$SLURMD_NODENAME" "$*" >>"$RECORD/ray"
if [[ $* == *--head* ]]; then exec "$PYTHON" -S "$RECORD/listen.py" "$@"; fi
exec sleep 600
"""
LISTEN = r"""import re, signal, socket, sys
words = " ".join(sys.argv)
address = re.search(r"--node-ip-address=(\S+)", words)[1], int(re.search(r"--port=(\d+)", words)[1])
server = socket.create_server(address)
signal.pause()
"""
# The command of the scripts, with the record of Ray's starts in the place of Ray.
# Where a node is absent, time passes once all others are there.
MRL = r"""import itertools, json, os, re, sys, time, types
from mrl.ops import launch
def joined():
    lines = open(os.environ["RECORD"] + "/ray").read().splitlines()
    resources = [json.loads(re.search(r"--resources=(\{.*?\})", line)[1]) for line in lines]
    return [(line.split()[0], found["worker_units"]) for line, found in zip(lines, resources, strict=True)]
sys.modules["mrl.cluster.nodes"] = types.SimpleNamespace(connect=lambda: None, joined_nodes=joined)
ticks = itertools.count(1e9, 60.0)
def monotonic():
    return 0.0 if len(joined()) + 1 < len(os.environ["SIMULATED_NODES"].split()) else next(ticks)
if os.environ.get("SIMULATED_ABSENT"):
    launch.time = types.SimpleNamespace(monotonic=monotonic, sleep=time.sleep)
sys.exit(launch.main(sys.argv[1:]))
"""
PYTHON = r"""#!/usr/bin/env bash
if [[ $1 == -m && $2 == mrl.launch ]]; then shift 2; exec "$PYTHON" "$RECORD/mrl_launch.py" "$@"; fi
"""


@dataclass
class Simulation:
    """A batch script that runs on nodes of no Slurm."""

    folder: Path
    process: subprocess.Popen

    @property
    def output(self) -> str:
        """Output of the batch script."""
        return (self.folder / "job.out").read_text()

    @property
    def logs(self) -> Path:
        return self.folder / f"{JOB_ID}-logs"

    def record(self, command: str) -> list[str]:
        """Calls of a command, a line each."""
        path = self.folder / "record" / command
        return path.read_text().splitlines() if path.exists() else []

    def ray_starts(self) -> dict[str, dict[str, str]]:
        """The options of `ray start` on each node."""
        starts = (line.partition(" ") for line in self.record("ray"))
        return {node: dict(re.findall(r"--([a-z-]+)(?:=(\{.*?\}|\S+))?", words)) for node, _, words in starts}

    def units(self) -> dict[str, int]:
        """Slots of each node."""
        return {node: json.loads(options["resources"])["worker_units"] for node, options in self.ray_starts().items()}

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.output, repr(text), explain=lambda: self.output)

    def end(self) -> int:
        """The exit code of the batch script."""
        return self.process.wait(timeout=HANG_S)


@contextmanager
def simulation(folder: Path, nodes: list[str], **variables: str) -> Iterator[Simulation]:
    """scripts/ray.sub on nodes whose names end in their numbers; it is ended at the end of the `with` block."""
    # Sockets lie in Ray's folder, and their paths have to be short.
    ray_folder = tempfile.TemporaryDirectory(prefix="ray-")
    environment = write_commands(folder, nodes) | {"RAY_TMPDIR": ray_folder.name} | variables
    with (folder / "job.out").open("wb") as output:
        process = subprocess.Popen(
            ["bash", str(ROOT / "scripts" / "ray.sub")],
            env=environment,
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    running = Simulation(folder, process)
    try:
        yield running
    finally:
        # Its own nodes see this file, whether it has written it or not.
        running.logs.mkdir(exist_ok=True)
        (running.logs / "ENDED").touch()
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=HANG_S)
        ray_folder.cleanup()


def write_commands(folder: Path, nodes: list[str]) -> dict[str, str]:
    """The environment of a batch script, and the programs that it will find."""
    programs, record = folder / "venv" / "bin", folder / "record"
    programs.mkdir(parents=True)
    record.mkdir()
    for name, text in {
        "srun": SRUN,
        "scontrol": SCONTROL,
        "sinfo": SINFO,
        "ip": IP,
        "ray": RAY,
        "python": PYTHON,
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (record / "listen.py").write_text(LISTEN)
    (record / "mrl_launch.py").write_text(MRL)
    return {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "HOME": os.environ.get("HOME", "/"),
        "PYTHONPATH": str(ROOT),
        "PYTHON": sys.executable,
        "RECORD": str(record),
        "SIMULATED_NODES": " ".join(nodes),
        "SLURM_JOB_ID": str(JOB_ID),
        "SLURM_JOB_NODELIST": "all",
        "SLURM_JOB_PARTITION": "batch",
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_CPUS_ON_NODE": "128",
        "RAY_INTERFACE": "ib0",
    }
