"""All loggers of a run that are switched on, and what the run folder remembers of them from attempt to attempt."""

from __future__ import annotations

import importlib.util
import json
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from conversion.files.durable import write_atomic
from mrl.config.redact import redact
from mrl.config.schema.logger import LoggerConfig
from mrl.config.schema.run import RunConfig
from mrl.store.loggers.names import nemo_rl_names
from mrl.store.loggers.process import LoggerProcess, close_all
from mrl.store.loggers.sink import Opening, Sample

logger = logging.getLogger(__name__)

MEMORY = "loggers.json"
TITLES = {"tensorboard": "TensorBoard", "wandb": "W&B", "swanlab": "SwanLab", "mlflow": "MLflow"}
# A record is one packet of a socket (about 200 kB by default): texts share what it holds, in characters of up to four bytes.
MAX_SAMPLE_CHARACTERS = 40_000
HOST_PREFIX = "ray/"


@dataclass
class Memory:
    """What a resumed run has to know."""

    started_at: float
    """When the first attempt began, seconds since 1970: host metrics count from there."""
    last_step: int = -1
    """The last step that any attempt has logged. Services cannot take a step back, so none gets a step again."""
    run_ids: dict[str, str] = field(default_factory=dict)
    """The id of the run at each service, by logger."""


class Loggers:
    """The loggers that are switched on, each in a process of its own. Nothing here waits, except `close`."""

    def __init__(self, config: RunConfig, *, run_folder: Path, log_folder: Path, last_step: int) -> None:
        """`last_step` is the last step of which the run folder has metrics, those after the newest checkpoint included; -1 if none."""
        self._file = run_folder / MEMORY
        self._memory = _remembered(self._file)
        self._memory.last_step = max(self._memory.last_step, last_step)
        plain = redact(asdict(config))
        assert isinstance(plain, dict)
        self._processes: list[LoggerProcess] = []
        for name, settings in settings_by_logger(config.logger).items():
            given = settings.get("id") or settings.get("run_id")
            known = given or self._memory.run_ids.get(name)
            opening = Opening(
                settings, str(log_folder), str(run_folder), str(known or secrets.token_hex(4)), is_resumed=known is not None, config=plain
            )
            process = LoggerProcess(name, TITLES[name], on_open=lambda run_id, name=name: self._remember(name, run_id))
            process.send({"open": asdict(opening)})
            self._processes.append(process)
        self._save()

    @property
    def is_empty(self) -> bool:
        """Whether none is switched on."""
        return not self._processes

    @property
    def num_lost(self) -> int:
        """Records that a logger has not taken, over all loggers."""
        return sum(process.num_lost for process in self._processes)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Records one step's metrics under NeMo RL's names, unless a former attempt has logged that step."""
        for process in self._processes:
            if process.name == "tensorboard" or step > self._memory.last_step:
                process.send({"metrics": nemo_rl_names(metrics), "step": step})

    def log_host(self, metrics: Mapping[str, float], sampled_at: float) -> None:
        """Records what the hosts were at, at a time in seconds since 1970. Any thread may call it."""
        named = {HOST_PREFIX + name: value for name, value in metrics.items()}
        self._send({"metrics": named, "seconds": int(sampled_at - self._memory.started_at)})

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Records rollouts as text, each cut to its share of a record."""
        if samples and step > self._memory.last_step:
            limit = MAX_SAMPLE_CHARACTERS // len(samples) // 2
            short = [Sample(sample.prompt[:limit], sample.rollout[:limit], sample.expected[:limit], sample.reward) for sample in samples]
            self._send({"samples": [asdict(sample) for sample in short], "step": step})

    def close(self) -> None:
        """Sends what is left, within a bounded time."""
        close_all(self._processes)

    def _send(self, record: Mapping[str, object]) -> None:
        for process in self._processes:
            process.send(record)

    def _remember(self, name: str, run_id: str) -> None:
        self._memory.run_ids[name] = run_id
        self._save()

    def _save(self) -> None:
        if not self._processes:
            return
        try:
            write_atomic(self._file, json.dumps(asdict(self._memory), indent=1))
        except OSError as error:
            logger.warning("%s cannot be written (%s): after a restart the loggers begin new runs", self._file, error)


def _remembered(path: Path) -> Memory:
    if not path.exists():
        return Memory(started_at=time.time())
    return Memory(**json.loads(path.read_text(encoding="utf-8")))


def settings_by_logger(config: LoggerConfig) -> dict[str, dict[str, object]]:
    """The section of every logger that is switched on, by its name."""
    found: dict[str, dict[str, object]] = {}
    if config.tensorboard_enabled:
        found["tensorboard"] = {"log_dir": config.tensorboard.log_dir}
    if config.wandb_enabled:
        wandb = config.wandb
        found["wandb"] = {"project": wandb.project, "name": wandb.name, "entity": wandb.entity, "group": wandb.group}
        found["wandb"] |= {"tags": wandb.tags, "notes": wandb.notes, "mode": wandb.mode, "id": wandb.id}
    if config.swanlab_enabled:
        swanlab = config.swanlab
        found["swanlab"] = {"project": swanlab.project, "name": swanlab.name, "workspace": swanlab.workspace}
        found["swanlab"] |= {"mode": swanlab.mode, "id": swanlab.id}
    if config.mlflow_enabled:
        mlflow = config.mlflow
        found["mlflow"] = {"experiment_name": mlflow.experiment_name, "run_name": mlflow.run_name, "tracking_uri": mlflow.tracking_uri}
        found["mlflow"] |= {"run_id": mlflow.run_id, "artifact_location": mlflow.artifact_location}
    return found


def check_loggers(config: LoggerConfig) -> None:
    """Returns if the library of every logger that is switched on is installed.

    Raises:
        ValueError: naming the key, the package and the command.
    """
    for name in settings_by_logger(config):
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"logger.{name}_enabled=true: the package {name} is not installed; "
                f"`pip install 'mrl[loggers]'`, or logger.{name}_enabled=false"
            )
