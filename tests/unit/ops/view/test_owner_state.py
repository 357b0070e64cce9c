# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

from conversion.files.owners import start_of, this_process
from mrl.ops.view.run_data import owner_state
from mrl.store.run_files import OWNER


def test_a_killed_run_of_this_host_is_over_at_once(tmp_path: Path):
    assert owner_state(tmp_path) == "over"
    with subprocess.Popen(["sleep", "600"]) as child:
        owner = replace(this_process(), pid=child.pid, start=start_of(child.pid))
        (tmp_path / OWNER).write_text(json.dumps({"process": asdict(owner), "job": None, "restart": 0}))
        assert owner_state(tmp_path) == "running"
        child.kill()
    assert owner_state(tmp_path) == "over"
    # Of a host that nobody sees from here, and of a file that a power loss has emptied, the time of the file tells.
    for text in (json.dumps({"process": asdict(replace(owner, boot="0" * 32))}), ""):
        (tmp_path / OWNER).write_text(text)
        assert owner_state(tmp_path) == "running"
