# SPDX-License-Identifier: Apache-2.0
"""A logger that writes one CSV file of rewards for each attempt of a run."""

from collections.abc import Mapping
from pathlib import Path

from mrl.api import LoggedRun, Sink
from mrl.config.schema.logger import LoggerConfig


class CsvLogger(Sink):
    def __init__(self, config: LoggerConfig, run: LoggedRun) -> None:
        self.place = str(Path(run.folder) / "rewards.csv")
        self._file = open(self.place, "w")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if "train/reward" in metrics:
            self._file.write(f"{step},{metrics['train/reward']!r}\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()
