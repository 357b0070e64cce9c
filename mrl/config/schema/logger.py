# SPDX-License-Identifier: Apache-2.0
"""Section `logger`: destinations of metrics besides the run folder. Keys as in NeMo RL; each service is optional."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mrl.config.fields import AboveZero, Count, Port, Positive, follows


@dataclass
class WandbConfig:
    project: str = "grpo-dev"
    """W&B project."""
    name: str | None = None
    """Name of the run in W&B; null = that of the run folder."""
    entity: str | None = None
    """W&B user or team; null = the default one of the API key."""
    group: str | None = None
    """Group of runs that W&B shows together."""
    tags: list[str] = field(default_factory=list)
    """Tags of the run."""
    notes: str | None = None
    """Description of the run."""
    mode: Literal["online", "offline", "shared", "disabled"] | None = None
    """online, offline (files for `wandb sync`) or disabled; null = WANDB_MODE, else online."""
    id: str | None = None
    """Id of the W&B run to continue; null = a new run's, which every resume of the run folder continues."""


@dataclass
class SwanlabConfig:
    project: str = "grpo-dev"
    """SwanLab project."""
    name: str | None = None
    """Name of the experiment in SwanLab; null = that of the run folder."""
    workspace: str | None = None
    """SwanLab user or organisation; null = the default one of the API key."""
    mode: Literal["online", "cloud", "local", "offline", "disabled"] | None = None
    """online (also called cloud), local, offline (files for `swanlab sync`) or disabled; null = SWANLAB_MODE, else
    online.
    """
    id: str | None = None
    """Id of the SwanLab run to continue; null = a new run's, which every resume of the run folder continues."""


@dataclass
class TensorboardConfig:
    log_dir: str | None = None
    """Folder of the event files; null = `tensorboard` in the attempt's folder of logs."""


@dataclass
class MlflowConfig:
    experiment_name: str = "grpo-dev"
    """MLflow experiment; made if there is none of this name."""
    run_name: str | None = None
    """Name of the run in MLflow; null = that of the run folder."""
    tracking_uri: str | None = None
    """Server (http:, https:), database (sqlite:) or folder (file:); null = MLFLOW_TRACKING_URI, else `mlflow.db` in the
    run folder.
    """
    run_id: str | None = None
    """Id of the MLflow run to continue; null = a new run, which every resume of the run folder continues."""
    artifact_location: str | None = None
    """Folder or URI for the texts of a new experiment; null = `mlflow` in the attempt's folder of logs, or the server's
    choice.
    """


@dataclass
class GpuMonitoringConfig:
    collection_interval: AboveZero = 10.0
    """Seconds between two samples of a node."""
    flush_interval: AboveZero = 10.0
    """Seconds between two deliveries of samples to the loggers."""


@dataclass
class LoggerConfig:
    log_dir: str = follows("checkpointing.checkpoint_dir") + "/logs"
    """Folder of logs; each start of a run gets `exp_001`, `exp_002` and so on below it, with a link in `logs` of the
    run folder if it is elsewhere.
    """
    rollouts: Literal["all", "sample", "none"] = "all"
    """Rollouts of a step that are written as text into the attempt's folder of logs: all, those of its first four
    prompts, or none.
    """
    rollouts_keep_steps: Positive | None = None
    """Keep the texts of this many steps, and remove older ones; null = of all steps."""
    record_steps: Count = 0
    """Record the rollouts of the last this many steps with their logprobs and advantages, for `mrl replay`; 0 = of
    none.
    """
    num_val_samples_to_print: Count = 0
    """Validation rollouts that each validation prints, and gives to the loggers as text: best and worst in
    equal parts.
    """
    wandb_enabled: bool = False
    """Send metrics to Weights & Biases."""
    swanlab_enabled: bool = False
    """Send metrics to SwanLab."""
    tensorboard_enabled: bool = False
    """Write TensorBoard events."""
    mlflow_enabled: bool = False
    """Send metrics to MLflow."""
    own: list[str] = field(default_factory=list)
    """Your own loggers, `package.module:name` of a class each (docs/extend/logger.md)."""
    prometheus_port: Port | None = None
    """Serve the latest metrics for Prometheus at `http://127.0.0.1:PORT/metrics` of the driver's host; null = no
    server.
    """
    monitor_gpus: bool = True
    """Sample processors, memory and GPUs of every node for the loggers (`ray/node.I.*`). Without a logger nothing is
    sampled.
    """
    wandb: WandbConfig = field(default_factory=WandbConfig)
    swanlab: SwanlabConfig = field(default_factory=SwanlabConfig)
    tensorboard: TensorboardConfig = field(default_factory=TensorboardConfig)
    mlflow: MlflowConfig = field(default_factory=MlflowConfig)
    gpu_monitoring: GpuMonitoringConfig = field(default_factory=GpuMonitoringConfig)
