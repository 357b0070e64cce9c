# SPDX-License-Identifier: Apache-2.0
"""The interface of a logger service. Each service has a file in this folder; `SINKS` names them."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from mrl.config.secrets import has_secret

SINKS = {
    "tensorboard": ("TensorBoard", "mrl.store.loggers.tensorboard:TensorBoardSink"),
    "wandb": ("W&B", "mrl.store.loggers.wandb:WandbSink"),
    "swanlab": ("SwanLab", "mrl.store.loggers.swanlab:SwanLabSink"),
    "mlflow": ("MLflow", "mrl.store.loggers.mlflow:MlflowSink"),
    "prometheus_client": ("Prometheus", "mrl.store.loggers.prometheus:PrometheusSink"),
}
"""Title and class of every logger, by the name of its package and of its section. The class takes a `LoggerConfig` and
a `LoggedRun`.
"""

HOST_STEP = "ray/ray_step"
"""The x axis of host metrics, as NeMo RL names it: seconds since the first start of the run."""
SAMPLES = "validation/samples"
CONFIG = "config"


@dataclass(frozen=True)
class LoggedRun:
    """Facts of the run that a service may record."""

    folder: str
    """Folder of this attempt, for the service's own files."""
    run_folder: str
    """Folder of the run, the same in all attempts."""
    known_id: str | None
    config: dict[str, object]
    """The resolved config, without secrets."""
    secrets: frozenset[str] = frozenset()
    """Secrets of the config, which the service must not get."""
    new_id: str = field(default_factory=lambda: secrets.token_hex(4))
    """An id for a run that has none."""

    @property
    def name(self) -> str:
        """Name of the run folder, for runs that the config does not name."""
        return Path(self.run_folder).name


@dataclass(frozen=True)
class Sample:
    prompt: str
    rollout: str
    expected: str
    reward: float

    def block(self) -> str:
        """The sample for a console or a text panel."""
        parts = {
            "Prompt": self.prompt,
            "Rollout": self.rollout,
            "Expected answer": self.expected,
            "Reward": f"{self.reward:g}",
        }
        lines = []
        for title, text in parts.items():
            lines += (
                [f"{title}:", *("    " + line for line in text.splitlines())] if "\n" in text else [f"{title}: {text}"]
            )
        return "\n".join(lines)


class Sink(Protocol):
    """One service, open. It may raise what it likes: the caller counts that as a lost record."""

    run_id: str = ""
    """The id under which the next attempt continues."""
    place: str = ""
    """Address or folder where users find the metrics, for the console."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Records metrics of a training step; on disk, or on its way, when this returns."""

    def log_host(self, metrics: Mapping[str, float], seconds: int) -> None:
        """Records metrics of the hosts, `seconds` after the first start of the run."""

    def log_samples(self, samples: list[Sample], step: int) -> None:
        """Records validation rollouts as text."""

    def close(self) -> None:
        """Sends the remaining records and ends the run at the service."""


def flat(config: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """The values of a nested config by dotted key; lists stay whole."""
    found: dict[str, object] = {}
    for name, value in config.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}": value}
    return found


def command_has_secret(config_secrets: frozenset[str]) -> bool:
    """True if this process's command line holds a secret, as a config override may: services must not record it."""
    return has_secret(sys.argv, config_secrets)
