# SPDX-License-Identifier: Apache-2.0
"""TensorBoard's event files where a disk is full for a while, as TensorBoard's own reader finds them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from tests.sources import ROOT
from tests.waiting import HANG_S

# Of a record beyond the limit the kernel writes a part, as on a full disk.
SCRIPT = """
import resource, sys
from pathlib import Path
from mrl.config.schema.logger import LoggerConfig
from mrl.store.loggers.sink import LoggedRun
from mrl.store.loggers.tensorboard import TensorBoardSink

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

sink = TensorBoardSink(LoggerConfig(), LoggedRun(sys.argv[1], sys.argv[1], None, {}))
sink.log({"train/loss": 0.5}, 1)
(file,) = Path(sink.place).iterdir()
limit(file.stat().st_size + 10)
for step in (2, 3):
    try:
        sink.log({"train/loss": 0.5}, step)
    except OSError as error:
        print(error)
limit(resource.RLIM_INFINITY)
sink.log({"train/loss": 0.5}, 4)
sink.close()
"""


def test_a_full_disk_costs_its_steps_and_no_traceback(tmp_path: Path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "[Errno 27] File too large\n" * 2
    (file,) = (tmp_path / "tensorboard").glob("events.out.tfevents.*")
    events = list(EventFileLoader(str(file)).Load())
    assert events[0].file_version == "brain.Event:2"
    assert [event.step for event in events for value in event.summary.value if value.tag == "train/loss"] == [1, 4]
