# SPDX-License-Identifier: Apache-2.0
"""The loggers of a run that are switched on, NeMo RL's names of what they get, and what the run folder remembers between attempts."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from conversion.files.durable import read_whole, write_atomic
from mrl.config.schema.logger import LoggerConfig
from mrl.config.schema.run import RunConfig
from mrl.config.secrets import redact
from mrl.store.loggers.sink import SINKS, LoggedRun, Sample
from mrl.store.loggers.thread import SinkThread

logger = logging.getLogger(__name__)

MEMORY = "loggers.json"
# Services refuse or cut longer texts: the samples of a validation share this.
MAX_SAMPLE_CHARACTERS = 40_000
HOST_PREFIX = "ray/"
TAKE_STEPS_AGAIN = ("tensorboard", "prometheus_client")
# All loggers together may take this long at the end of a run: enough for one that still waits for its server to turn to files.
CLOSE_TIMEOUT_S = 60.0

NEMO_RL_NAMES = {
    "time/total": "timing/train/total_step_time",
    "time/generation": "timing/train/generation",
    "time/reward": "timing/train/reward_calculation",
    "time/teacher": "timing/train/teacher_logprob_inference",
    "time/train": "timing/train/policy_training",
    "time/refit": "timing/train/prepare_for_generation/total",
    "time/checkpoint": "timing/train/checkpointing",
    "time/validation": "timing/validation/total_validation_time",
    "val/mean_length": "validation/avg_length",
    "train/mtp_grad_norm": "train/mtp/grad_norm",
    "train/teacher_gap/mean": "train/on_policy_distillation/teacher_student_logprob_gap_mean",
    "rollout/mean_length": "train/mean_gen_tokens_per_sample",
    "rollout/max_length": "train/max_gen_tokens_per_sample",
    "rollout/mean_prompt_length": "train/mean_prompt_length",
    "rollout/truncated_fraction": "train/truncation_rate",
    "rollout/spec_acceptance_rate": "train/vllm/spec_acceptance_rate",
    "rollout/spec_acceptance_length": "train/vllm/spec_acceptance_length",
}
"""`time/train` holds the logprob passes too, which NeMo RL times apart."""

PREFIXES = {"time/": "timing/train/", "val/": "validation/", "train/mtp_": "train/mtp/mtp_"}
"""For metrics that the table above does not name."""

PERCENTAGES = re.compile(r"train/mtp/mtp_\d+_acceptance_rate")
"""What NeMo RL logs in percent, by its names; ours are shares."""


def nemo_rl_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics under NeMo RL's names and in its units, so that its dashboards go on working; other metrics keep ours."""
    named = {}
    for name, value in metrics.items():
        prefix = next((ours for ours in PREFIXES if name.startswith(ours)), "")
        theirs = NEMO_RL_NAMES.get(name, PREFIXES.get(prefix, "") + name.removeprefix(prefix))
        named[theirs] = value * 100 if PERCENTAGES.fullmatch(theirs) else value
    return named


@dataclass
class Memory:
    """The file `loggers.json`: what a resumed run has to know."""

    started_at: float
    """When the first attempt began, seconds since 1970: host metrics count from there."""
    last_step: int = -1
    """The last step that any attempt has logged. Services cannot take a step back, so none gets a step again."""
    run_ids: dict[str, str] = field(default_factory=dict)
    """The id of the run at each service, by logger."""


class Loggers:
    """The loggers that are switched on. No method waits for a service, except `close`."""

    def __init__(self, config: RunConfig, *, run_folder: Path, log_folder: Path, last_step: int) -> None:
        """`last_step` is the last step of which the run folder has metrics, those after the newest checkpoint included; -1 if none."""
        self._file = run_folder / MEMORY
        self._lock = threading.Lock()
        is_resumed = self._file.exists()
        self._memory = Memory(**json.loads(read_whole(self._file))) if is_resumed else Memory(time.time())
        self._memory.last_step = max(self._memory.last_step, last_step)
        plain = redact(asdict(config), config.secrets)
        assert isinstance(plain, dict)
        if names := switched_on(config.logger):
            self._save()
        self._threads = [
            SinkThread(
                name,
                config.logger,
                LoggedRun(str(log_folder), str(run_folder), self._memory.run_ids.get(name), plain, config.secrets),
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
                thread.put(lambda sink: sink.log(named, step))

    def log_host(self, metrics: Mapping[str, float], sampled_at: float) -> None:
        """Records metrics of the hosts, sampled at a time in seconds since 1970. Any thread may call it."""
        named = {HOST_PREFIX + name: value for name, value in metrics.items()}
        for thread in self._threads:
            thread.put(lambda sink: sink.log_host(named, int(sampled_at - self._memory.started_at)))

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Records rollouts as text, each cut to its share of `MAX_SAMPLE_CHARACTERS`."""
        if samples and step > self._memory.last_step:
            limit = MAX_SAMPLE_CHARACTERS // len(samples) // 2
            short = [Sample(sample.prompt[:limit], sample.rollout[:limit], sample.expected[:limit], sample.reward) for sample in samples]
            for thread in self._threads:
                thread.put(lambda sink: sink.log_samples(short, step))

    def close(self) -> None:
        """Sends what is queued, and ends all loggers within `CLOSE_TIMEOUT_S`."""
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


def switched_on(config: LoggerConfig) -> list[str]:
    flags = {"tensorboard": config.tensorboard_enabled, "wandb": config.wandb_enabled}
    flags |= {"swanlab": config.swanlab_enabled, "mlflow": config.mlflow_enabled, "prometheus_client": config.prometheus_port is not None}
    return [*(name for name, is_on in flags.items() if is_on), *config.own]


def check_loggers(config: LoggerConfig) -> None:
    """Raises ValueError with key, package and command if the library of a logger that is switched on is missing."""
    for name in switched_on(config):
        if name in SINKS and importlib.util.find_spec(name) is None:
            raise ValueError(
                f"logger.{name}_enabled=true: the package {name} is not installed; "
                f"`pip install 'mrl[loggers]'`, or logger.{name}_enabled=false"
            )
