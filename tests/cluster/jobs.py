# SPDX-License-Identifier: Apache-2.0
"""Jobs of scripts/ray.sub on nodes without GPUs, with the real training command on a tiny model."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from mrl.recipes.tiny import prepare_tiny
from tests.cluster.slurm import SlurmBox
from tests.sources import ROOT
from tests.stack.loop.conftest import SMALL
from tests.waiting import HANG_S, wait_until

JOB_TIMEOUT_S = 2 * HANG_S

SETTINGS = [
    *SMALL,
    "cluster.num_nodes=4",
    "cluster.cpu_units_per_node=1",
    "policy.generation.num_cpu_engines=2",
    "policy.megatron_cfg.tensor_model_parallel_size=2",
    "checkpointing.save_period=1",
    "checkpointing.keep_top_k=20",
    "grpo.val_at_start=false",
    "logger.tensorboard_enabled=false",
    # A host under load must not turn a slow verdict into a masked rollout, which would change the run.
    "env.math.timeout_s=600",
]


@dataclass(frozen=True)
class Job:
    """A submitted job, and where it was submitted from."""

    box: SlurmBox
    job_id: int
    folder: Path
    run_folder: Path

    @property
    def output(self) -> str:
        """Output that Slurm wrote for it, of all starts."""
        path = self.folder / f"slurm-{self.job_id}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def logs(self, restart: int = 0) -> Path:
        """Folder of the logs of one start."""
        return self.folder / f"{self.job_id}{f'-{restart}' if restart else ''}-logs"

    @property
    def num_starts(self) -> int:
        """Number of times that Slurm or `scripts/ray.sub` started the job: each start has a folder of logs."""
        return len(list(self.folder.glob(f"{self.job_id}*-logs")))

    def log(self, name: str, restart: int = 0) -> str:
        path = self.logs(restart) / name
        return path.read_text(errors="replace") if path.exists() else ""

    def explain(self) -> str:
        logs = sorted(path for path in self.folder.glob("*-logs/*.log"))
        return self.output[-4000:] + "".join(
            f"\n--- {path}\n{path.read_text(errors='replace')[-2500:]}" for path in logs
        )

    def wait_for(
        self, text: str, name: str = "ray-driver.log", restart: int = 0, *, timeout_s: float = JOB_TIMEOUT_S
    ) -> None:
        """Waits until a log says this."""
        wait_until(lambda: text in self.log(name, restart), f"{text!r} in {name}", timeout_s, explain=self.explain)

    def wait_for_resumption(self, *, timeout_s: float = JOB_TIMEOUT_S) -> None:
        """Waits until a later start, whichever, goes on from a checkpoint."""

        def has_resumed() -> bool:
            logs = self.folder.glob(f"{self.job_id}-*-logs/ray-driver.log")
            return any("Resuming from" in path.read_text(errors="replace") for path in logs)

        wait_until(has_resumed, "resumption", timeout_s, explain=self.explain)

    def end(self, *, timeout_s: float = JOB_TIMEOUT_S) -> str:
        """State in which it ended."""
        states = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
        wait_until(
            lambda: self.box.job(self.job_id).get("JobState") in states,
            "end of the job",
            timeout_s,
            explain=self.explain,
        )
        return self.box.job(self.job_id)["JobState"]


def training(inputs: list[str], run_folder: Path, *, steps: int) -> str:
    """The command that trains."""
    overrides = [*inputs, *SETTINGS, f"checkpointing.checkpoint_dir={run_folder}", f"grpo.max_num_steps={steps}"]
    return " ".join([f"python -m mrl.train {ROOT / 'configs' / 'grpo_tiny.yaml'}", *overrides])


def model_and_data() -> list[str]:
    """Overrides that point a config at the warm-started model: rewards that differ in a group give steps gradients."""
    folder = ROOT / "prepared" / "tiny"
    prepare_tiny(folder, seed=0)
    return [
        f"policy.model_name={folder / 'model'}",
        f"data.train.data_path={folder / 'data' / 'train.jsonl'}",
        f"data.validation.data_path={folder / 'data' / 'validation.jsonl'}",
    ]


def submit(box: SlurmBox, folder: Path, command: str, *options: str, run_folder: Path, **variables: str) -> Job:
    """Submits scripts/ray.sub from `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    given = {
        "COMMAND": command,
        "VENV": str(Path(sys.executable).parent.parent),
        "PYTHONPATH": str(ROOT),
        "GPUS_PER_NODE": "0",
        # The engines' devices and the rewards have places of their own.
        "CPUS_PER_WORKER": "4",
        "RAY_TMPDIR": "/mnt",
        "JOIN_TIMEOUT_S": "400",
        "OBJECT_STORE_BYTES": "200000000",
        "OMP_NUM_THREADS": "1",
        "MRL_CACHE": os.environ["MRL_CACHE"],
    }
    job_id = box.submit(
        ROOT / "scripts" / "ray.sub", folder, "--nodes=4", "--time=30:00", *options, **given | variables
    )
    return Job(box, job_id, folder, run_folder)
