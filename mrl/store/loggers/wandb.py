"""Weights & Biases. What it cannot send stays in files for `wandb sync`."""

from __future__ import annotations

from collections.abc import Mapping

import wandb

from mrl.store.loggers.sink import HOST_STEP, SAMPLES, Opening, Sample

# A server that has not answered by then gets files instead; the library's own 90 s are for slow networks.
INIT_TIMEOUT_S = 30.0


class WandbSink:
    """One W&B run over all attempts. Its step is the training step, which W&B lets only grow."""

    def __init__(self, opening: Opening) -> None:
        mode = opening.text("mode")
        try:
            self._run = _start(opening, mode)
            self.place = self._run.url or self._run.dir
        except (wandb.Error, OSError) as error:
            if mode == "offline":
                raise
            wandb.teardown()
            self._run = _start(opening, "offline")
            self.place = f"{self._run.dir}, since W&B cannot be used ({error}); `wandb sync` uploads it later"
        self.run_id = self._run.id
        self._run.define_metric("ray/*", step_metric=HOST_STEP)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One row of history, sent at once."""
        self._run.log(dict(metrics), step=step, commit=True)

    def log_host(self, metrics: Mapping[str, float], seconds: int) -> None:
        """Joins the row of the next step: a row of its own would move W&B's step away from the training step."""
        self._run.log({**metrics, HOST_STEP: seconds}, commit=False)

    def log_samples(self, samples: list[Sample], step: int) -> None:
        """A table per validation, in the row of `step`."""
        rows = [[step, sample.prompt, sample.rollout, sample.expected, sample.reward] for sample in samples]
        self._run.log(
            {SAMPLES: wandb.Table(columns=["step", "prompt", "rollout", "expected", "reward"], data=rows)}, step=step, commit=False
        )

    def close(self) -> None:
        """Waits for the upload."""
        self._run.finish()


def _start(opening: Opening, mode: str | None) -> wandb.Run:
    names = ("project", "name", "entity", "group", "tags", "notes")
    chosen = {name: opening.settings[name] for name in names if opening.settings[name] is not None}
    return wandb.init(
        **chosen,  # pyright: ignore[reportArgumentType]  # the types of the section
        id=opening.run_id,
        resume="allow",
        mode=mode,  # pyright: ignore[reportArgumentType]  # one of its modes, by the type of the key
        dir=opening.folder,
        config=opening.config,
        allow_val_change=True,
        # The process has no terminal, and its output is not the run's.
        settings=wandb.Settings(init_timeout=INIT_TIMEOUT_S, console="off", silent=True),
    )
