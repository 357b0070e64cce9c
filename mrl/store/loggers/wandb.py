# SPDX-License-Identifier: Apache-2.0
"""Weights & Biases. Records that it cannot send stay in files for `wandb sync`."""

from __future__ import annotations

from collections.abc import Mapping

import wandb

from mrl.config.schema.logger import LoggerConfig, WandbConfig
from mrl.store.loggers.sink import HOST_STEP, SAMPLES, LoggedRun, Sample, command_has_secret

# A server that has not answered by then gets files instead; the library's own 90 s are for slow networks.
INIT_TIMEOUT_S = 30.0


class WandbSink:
    """One W&B run over all attempts. Its step is the training step, which W&B lets only grow."""

    def __init__(self, config: LoggerConfig, run: LoggedRun) -> None:
        settings = config.wandb
        try:
            self._run = _start(settings, run, settings.mode)
            self.place = self._run.url or self._run.dir
        except (wandb.Error, OSError) as error:
            if settings.mode == "offline":
                raise
            wandb.teardown()
            self._run = _start(settings, run, "offline")
            self.place = f"{self._run.dir}, since W&B cannot be used ({error}); `wandb sync` uploads it later"
        self.run_id = self._run.id
        self._run.define_metric("ray/*", step_metric=HOST_STEP)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step, commit=True)

    def log_host(self, metrics: Mapping[str, float], seconds: int) -> None:
        """Joins the row of the next step: a row of its own would move W&B's step away from the training step."""
        self._run.log({**metrics, HOST_STEP: seconds}, commit=False)

    def log_samples(self, samples: list[Sample], step: int) -> None:
        rows = [[step, sample.prompt, sample.rollout, sample.expected, sample.reward] for sample in samples]
        table = wandb.Table(columns=["step", "prompt", "rollout", "expected", "reward"], data=rows)
        self._run.log({SAMPLES: table}, step=step, commit=False)

    def close(self) -> None:
        """Waits for the upload and ends the library's process: an exit handler would wait for it without a deadline."""
        self._run.finish()
        wandb.teardown()


def _start(settings: WandbConfig, run: LoggedRun, mode: str | None) -> wandb.Run:
    quiet = wandb.Settings(
        init_timeout=INIT_TIMEOUT_S, console="off", silent=True, x_disable_meta=command_has_secret(run.secrets)
    )
    # Without this, a login without a key asks the terminal for one.
    wandb.setup(quiet)
    return wandb.init(
        project=settings.project,
        name=settings.name or run.name,
        entity=settings.entity,
        group=settings.group,
        tags=settings.tags,
        notes=settings.notes,
        id=settings.id or run.known_id or run.new_id,
        resume="allow",
        mode=mode,  # pyright: ignore[reportArgumentType]  # one of its modes, by the type of the key
        dir=run.folder,
        config=run.config,
        allow_val_change=True,
        settings=quiet,
    )
