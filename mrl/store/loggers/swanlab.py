"""SwanLab. What it cannot send stays in files for `swanlab sync`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import swanlab
from swanlab.exceptions import AuthenticationError

from mrl.store.loggers.sink import SAMPLES, Opening, Sample


class SwanLabSink:
    """One SwanLab run over all attempts."""

    def __init__(self, opening: Opening) -> None:
        mode = opening.text("mode")
        folder = Path(opening.folder) / "swanlab"
        folder.mkdir(exist_ok=True)
        try:
            self._run = _start(opening, folder, mode)
            self.place = str(folder)
        # RuntimeError without a key; the errors of its HTTP library are OSErrors.
        except (RuntimeError, OSError, AuthenticationError) as error:
            if mode not in (None, "online", "cloud"):
                raise
            self._run = _start(opening, folder, "offline")
            self.place = f"{folder}, since SwanLab cannot be used ({error}); `swanlab sync` uploads it later"
        self.run_id = self._run.id

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One point per metric."""
        self._run.log(dict(metrics), step=step)

    def log_host(self, metrics: Mapping[str, float], seconds: int) -> None:
        """One point per metric; SwanLab gives every metric its own axis."""
        self.log(metrics, seconds)

    def log_samples(self, samples: list[Sample], step: int) -> None:
        """One text per sample."""
        self._run.log({SAMPLES: [swanlab.Text(sample.block()) for sample in samples]}, step=step)

    def close(self) -> None:
        """Waits for the upload."""
        self._run.finish()


def _start(opening: Opening, folder: Path, mode: str | None) -> swanlab.Run:
    return swanlab.init(
        project=opening.text("project"),
        name=opening.text("name"),
        workspace=opening.text("workspace"),
        mode=mode,
        log_dir=str(folder),
        id=opening.run_id,
        resume="allow",
        config=opening.config,
        # Nothing may ask the terminal, and the hosts are sampled by us.
        settings=swanlab.Settings(interactive=False, probe=swanlab.Settings.Probe(monitor=False)),
    )
