# SPDX-License-Identifier: Apache-2.0
"""SwanLab. Records that it cannot send stay in files for `swanlab sync`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import swanlab
from swanlab.exceptions import AuthenticationError

from mrl.config.schema.logger import LoggerConfig, SwanlabConfig
from mrl.store.loggers.sink import SAMPLES, LoggedRun, Sample, command_has_secret


class SwanLabSink:
    """One SwanLab run over all attempts."""

    def __init__(self, config: LoggerConfig, run: LoggedRun) -> None:
        settings = config.swanlab
        folder = Path(run.folder) / "swanlab"
        folder.mkdir(exist_ok=True)
        try:
            self._run = _start(settings, run, folder, settings.mode)
            self.place = str(folder)
        # RuntimeError without a key; the errors of its HTTP library are OSErrors.
        except (RuntimeError, OSError, AuthenticationError) as error:
            if settings.mode not in (None, "online", "cloud"):
                raise
            self._run = _start(settings, run, folder, "offline")
            self.place = f"{folder}, since SwanLab cannot be used ({error}); `swanlab sync` uploads it later"
        self.run_id = self._run.id

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_host(self, metrics: Mapping[str, float], seconds: int) -> None:
        self.log(metrics, seconds)

    def log_samples(self, samples: list[Sample], step: int) -> None:
        self._run.log({SAMPLES: [swanlab.Text(sample.block()) for sample in samples]}, step=step)

    def close(self) -> None:
        self._run.finish()


def _start(settings: SwanlabConfig, run: LoggedRun, folder: Path, mode: str | None) -> swanlab.Run:
    return swanlab.init(
        project=settings.project,
        name=settings.name or run.name,
        workspace=settings.workspace,
        mode=mode,
        log_dir=str(folder),
        id=settings.id or run.known_id or run.new_id,
        resume="allow",
        config=run.config,
        settings=swanlab.Settings(
            interactive=False,
            probe=swanlab.Settings.Probe(monitor=False, runtime=not command_has_secret(run.secrets)),
            # The run's own output may quote rows and secrets.
            terminal=swanlab.Settings.Terminal(proxy_type="none"),
        ),
    )
