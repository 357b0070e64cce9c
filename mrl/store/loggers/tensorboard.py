# SPDX-License-Identifier: Apache-2.0
"""TensorBoard event files, written without torch."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from mrl.config.schema.logger import LoggerConfig
from mrl.store.loggers.sink import CONFIG, SAMPLES, LoggedRun, Sample


class TensorBoardSink:
    """One event file per attempt."""

    def __init__(self, config: LoggerConfig, run: LoggedRun) -> None:
        folder = config.tensorboard.log_dir or str(Path(run.folder) / "tensorboard")
        self._writer = EventFileWriter(folder)
        self.run_id, self.place = run.known_id or run.new_id, folder
        self._text(CONFIG, "```json\n" + json.dumps(run.config, indent=2) + "\n```", 0)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(Summary(value=values), step)

    def log_host(self, metrics: Mapping[str, float], seconds: int) -> None:
        self.log(metrics, seconds)

    def log_samples(self, samples: list[Sample], step: int) -> None:
        self._text(SAMPLES, "\n\n---\n\n".join(f"```\n{sample.block()}\n```" for sample in samples), step)

    def close(self) -> None:
        self._writer.close()

    def _text(self, name: str, text: str, step: int) -> None:
        # The same event as tensorboard.plugins.text.summary makes, which needs TensorFlow.
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode(errors="replace")], tensor_shape=shape)
        self._write(Summary(value=[Summary.Value(tag=name, metadata=metadata, tensor=tensor)]), step)

    def _write(self, summary: Summary, step: int) -> None:
        self._writer.add_event(Event(summary=summary, step=step, wall_time=time.time()))
        self._writer.flush()
