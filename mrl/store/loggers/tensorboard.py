# SPDX-License-Identifier: Apache-2.0
"""TensorBoard event files, written without torch."""

from __future__ import annotations

import io
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.summary.writer.record_writer import RecordWriter

from mrl.config.schema.logger import LoggerConfig
from mrl.store.loggers.sink import CONFIG, SAMPLES, LoggedRun, Sample


class TensorBoardSink:
    """One event file per attempt."""

    def __init__(self, config: LoggerConfig, run: LoggedRun) -> None:
        folder = Path(config.tensorboard.log_dir or Path(run.folder) / "tensorboard")
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{run.new_id}"
        # Its own writer has a thread, which prints a traceback and stays dead where a disk is full for a while.
        self._file = (folder / name).open("xb", buffering=0)
        self.run_id, self.place = run.known_id or run.new_id, str(folder)
        self._write(Event(file_version="brain.Event:2"))
        self._text(CONFIG, "```json\n" + json.dumps(run.config, indent=2) + "\n```", 0)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(Event(summary=Summary(value=values), step=step))

    def log_host(self, metrics: Mapping[str, float], seconds: int) -> None:
        self.log(metrics, seconds)

    def log_samples(self, samples: list[Sample], step: int) -> None:
        self._text(SAMPLES, "\n\n---\n\n".join(f"```\n{sample.block()}\n```" for sample in samples), step)

    def close(self) -> None:
        self._file.close()

    def _text(self, name: str, text: str, step: int) -> None:
        # The same event as tensorboard.plugins.text.summary makes, which needs TensorFlow.
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode(errors="replace")], tensor_shape=shape)
        value = Summary.Value(tag=name, metadata=metadata, tensor=tensor)
        self._write(Event(summary=Summary(value=[value]), step=step))

    def _write(self, event: Event) -> None:
        """Appends a record, or nothing of it: a reader stops at a part of one."""
        event.wall_time = time.time()
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        start, rest = self._file.tell(), record.getbuffer()
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(start)
            self._file.seek(start)
            raise
