# SPDX-License-Identifier: Apache-2.0
"""Records one rank's work for a trace viewer or for Nsight Systems."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch

from mrl.config.schema.run import ProfilerConfig


class RankProfiler:
    """A rank's profiler: records operations with shapes and verbs as ranges around them, between `start` and `stop`."""

    def __init__(self, config: ProfilerConfig) -> None:
        self._config = config
        self._recording = ExitStack()
        self._profile: torch.profiler.profile | None = None

    def start(self) -> None:
        """Begins to record; with `profiler.tool=nsys`, opens `nsys profile --capture-range=cudaProfilerApi`'s range."""
        if self._config.tool == "nsys":
            torch.cuda.profiler.start()
            self._recording.callback(torch.cuda.profiler.stop)
            self._recording.enter_context(torch.autograd.profiler.emit_nvtx(record_shapes=True))
        else:
            self._profile = self._recording.enter_context(torch.profiler.profile(record_shapes=True))

    def stop(self, path: Path) -> str:
        """Stops recording and writes the trace; returns "", or why it cannot be written."""
        self._recording.close()
        if self._profile is None:
            return ""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            return f"{path}: {error}"
        return ""
