# SPDX-License-Identifier: Apache-2.0
"""The loggers that a run has switched on, and their state in the run folder between attempts."""

from __future__ import annotations

import importlib.util
import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from conversion.files.durable import put_aside, read_whole, write_atomic
from conversion.files.reading import parse_json
from mrl.config.schema.logger import LoggerConfig
from mrl.config.schema.run import RunConfig
from mrl.config.secrets import redact
from mrl.metrics import nemo_rl_names
from mrl.store.loggers.sink import SINKS, LoggedRun, Sample
from mrl.store.loggers.thread import SinkThread

logger = logging.getLogger(__name__)

MEMORY = "loggers.json"
# Services refuse or cut longer texts: the samples of a validation share this.
MAX_SAMPLE_CHARACTERS = 40_000
HOST_PREFIX = "ray/"
TAKE_STEPS_AGAIN = ("tensorboard", "prometheus_client")
CLOSE_TIMEOUT_S = 60.0


@dataclass
class Memory:
    """Contents of `loggers.json`, by which a resumed run continues its runs at the services."""

    started_at: float
    last_step: int = -1
    """The last step that any attempt has logged. Services cannot take a step back, so none gets a step again."""
    run_ids: dict[str, str] = field(default_factory=dict)


class Loggers:
    """The loggers that are switched on. No method waits for a service, except `close`."""

    def __init__(self, config: RunConfig, *, run_folder: Path, log_folder: Path, last_step: int) -> None:
        """`last_step` is the last step with metrics in the run folder, also after the newest checkpoint; -1 if none."""
        self._file = run_folder / MEMORY
        self._lock = threading.Lock()
        self._memory = _memory_in(self._file) if self._file.exists() else Memory(time.time())
        self._memory.last_step = max(self._memory.last_step, last_step)
        plain = redact(asdict(config), config.facts.secrets)
        assert isinstance(plain, dict)
        if names := switched_on(config.logger):
            self._save()
        self._threads = [
            SinkThread(
                name,
                config.logger,
                LoggedRun(
                    str(log_folder), str(run_folder), self._memory.run_ids.get(name), plain, config.facts.secrets
                ),
                on_open=lambda run_id, name=name: self._remember(name, run_id),
            )
            for name in names
        ]

    @property
    def is_empty(self) -> bool:
        return not self._threads

    @property
    def num_lost(self) -> int:
        """Records that a logger has not taken, over all loggers."""
        return sum(thread.num_lost for thread in self._threads)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Records one step's metrics under NeMo RL's names, unless a former attempt has logged that step."""
        named = nemo_rl_names(metrics)
        for thread in self._threads:
            if thread.name in TAKE_STEPS_AGAIN or step > self._memory.last_step:
                thread.put(lambda sink: sink.log(metrics=named, step=step))

    def log_host(self, metrics: Mapping[str, float], sampled_at: float) -> None:
        """Records metrics of the hosts, sampled at a time in seconds since 1970. Any thread may call it."""
        named = {HOST_PREFIX + name: value for name, value in metrics.items()}
        for thread in self._threads:
            thread.put(lambda sink: sink.log_host(metrics=named, seconds=int(sampled_at - self._memory.started_at)))

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Records rollouts as text, each cut to its share of `MAX_SAMPLE_CHARACTERS`."""
        if samples and step > self._memory.last_step:
            limit = MAX_SAMPLE_CHARACTERS // len(samples) // 2
            short = [
                Sample(sample.prompt[:limit], sample.rollout[:limit], sample.expected[:limit], sample.reward)
                for sample in samples
            ]
            for thread in self._threads:
                thread.put(lambda sink: sink.log_samples(samples=short, step=step))

    def close(self) -> None:
        """Sends queued records, and ends all loggers within `CLOSE_TIMEOUT_S`."""
        for thread in self._threads:
            thread.hang_up()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.wait(deadline)

    def _remember(self, name: str, run_id: str) -> None:
        with self._lock:
            self._memory.run_ids[name] = run_id
            self._save()

    def _save(self) -> None:
        try:
            write_atomic(self._file, json.dumps(asdict(self._memory), indent=1))
        except OSError as error:
            logger.warning("%s cannot be written (%s): after a restart the loggers begin new runs", self._file, error)


def _memory_in(file: Path) -> Memory:
    try:
        found = parse_json(read_whole(file))
        if isinstance(found, dict) and isinstance(found["started_at"], float) and type(found["last_step"]) is int:
            return Memory(found["started_at"], found["last_step"], dict(found["run_ids"]))
        raise ValueError("it is of another form")
    except (ValueError, KeyError, TypeError) as error:
        aside = put_aside(file, "damaged_").name
        logger.warning("%s is damaged (%s), and set aside as %s: the loggers begin new runs", file, error, aside)
        return Memory(time.time())


def switched_on(config: LoggerConfig) -> list[str]:
    flags = {"tensorboard": config.tensorboard_enabled, "wandb": config.wandb_enabled}
    flags |= {
        "swanlab": config.swanlab_enabled,
        "mlflow": config.mlflow_enabled,
        "prometheus_client": config.prometheus_port is not None,
    }
    return [*(name for name, is_on in flags.items() if is_on), *config.own]


def check_loggers(config: LoggerConfig) -> None:
    """Raises ValueError with key, package and command if the library of a logger that is switched on is missing."""
    for name in switched_on(config):
        if name in SINKS and importlib.util.find_spec(name) is None:
            raise ValueError(
                f"logger.{name}_enabled=true: the package {name} is not installed; "
                f"`pip install 'mrl[loggers]'`, or logger.{name}_enabled=false"
            )
