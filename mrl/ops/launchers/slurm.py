# SPDX-License-Identifier: Apache-2.0
"""A run as a Slurm job, submitted with scripts/ray.sub."""

from __future__ import annotations

import hashlib
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import mrl

SIGNAL_S = 300
"""Seconds before the limit at which ray.sub has Slurm send the signal to save."""
# The man page of sbatch: minutes[:seconds], hours:minutes:seconds, days-hours[:minutes[:seconds]].
_LIMIT = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_NO_LIMIT = ("UNLIMITED", "INFINITE", "0")


@dataclass(frozen=True)
class SlurmJob:
    """Options of the job; None: the site's default."""

    command: list[str]
    num_nodes: int
    gpus_per_node: int
    slots_per_node: int
    log_folder: Path
    """A folder that all nodes can write: Slurm's own output and the logs of Ray go there."""
    time: str
    job_name: str
    account: str | None = None
    partition: str | None = None
    container: str | None = None
    mounts: str | None = None
    hub_folder: str | None = None
    """HF_HOME of the job; None: that of whoever submits it."""
    is_gres_site: bool = True
    environment: str | None = None
    """Prefix of the Python whose `bin` nodes without a container put on PATH."""


def job_name(run_folder: Path) -> str:
    """The name of all attempts of a run and no other: of jobs of one name, Slurm runs one at a time (`singleton`)."""
    return f"mrl-{run_folder.name}-{hashlib.sha256(str(run_folder).encode()).hexdigest()[:8]}"


def in_seconds(limit: str) -> float | None:
    """Seconds of a time limit as sbatch reads it; None: no limit."""
    if limit.upper() in _NO_LIMIT:
        return None
    if (match := _LIMIT.fullmatch(limit)) is None:
        raise ValueError(f"--time {limit}: no time limit of Slurm; write for example 8:00:00, or 1-12:00:00 for days")
    days, first, second, third = (0 if part is None else int(part) for part in match.groups())
    if match[1] is None and match[4] is None:  # minutes and seconds
        return 60.0 * first + second
    return ((24.0 * days + first) * 60 + second) * 60 + third


def submission(job: SlurmJob) -> tuple[list[str], dict[str, str]]:
    """The command line of `sbatch`, and the environment variables that ray.sub reads."""
    package = Path(mrl.__file__).parent
    installed = package / "scripts/ray.sub"
    script = installed if installed.is_file() else package.parent / "scripts/ray.sub"
    variables = {
        "COMMAND": shlex.join(job.command),
        "GPUS_PER_NODE": str(job.gpus_per_node),
        "UNITS_PER_NODE": str(job.slots_per_node),
        "BASE_LOG_DIR": str(job.log_folder),
        "CONTAINER": job.container,
        "MOUNTS": job.mounts,
        "HF_HOME": job.hub_folder,
        "VENV": job.environment,
    }
    options = {
        "nodes": str(job.num_nodes),
        "job-name": job.job_name,
        "time": job.time,
        "account": job.account,
        "partition": job.partition,
        "output": f"{job.log_folder}/slurm-%j.out",
        "error": f"{job.log_folder}/slurm-%j.out",
    }
    if job.gpus_per_node:
        options |= (
            {"gres": f"gpu:{job.gpus_per_node}"} if job.is_gres_site else {"gpus-per-node": str(job.gpus_per_node)}
        )
    command = ["sbatch", *(f"--{name}={value}" for name, value in options.items() if value is not None), str(script)]
    return command, {name: value for name, value in variables.items() if value is not None}


def render(job: SlurmJob) -> str:
    """A shell script that submits the job."""
    command, variables = submission(job)
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    return "\n".join(
        ["#!/usr/bin/env bash", f"mkdir -p {shlex.quote(str(job.log_folder))}", *exports, shlex.join(command), ""]
    )
