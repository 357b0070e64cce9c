# SPDX-License-Identifier: Apache-2.0
import json
import subprocess
import sys
from pathlib import Path

from mrl.store.lines import JsonlLogger, drop_later_steps, last_step_in
from tests.waiting import HANG_S


def test_one_object_a_step_and_no_nan_in_json(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlLogger(path)
    sink.log({"train/loss": float("nan"), "train/reward": 0.5}, 1)
    sink.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "train/loss": None, "train/reward": 0.5}
    ]


def test_lines_beyond_the_checkpoint_and_torn_lines_are_dropped(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n{"step": 3, "a": 3}\n{"step": 4, "a"')
    assert drop_later_steps(path, 2)
    sink = JsonlLogger(path)
    sink.log({"a": 9.0}, 3)
    sink.close()
    assert [json.loads(line)["a"] for line in path.read_text().splitlines()] == [1, 2, 9.0]


def test_a_step_without_a_line_is_noticed(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    assert drop_later_steps(path, 2) == set()
    path.write_text('{"step": 1}\n')
    assert drop_later_steps(path, 2) == {1}


def test_the_last_step_of_a_file(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    assert last_step_in(path) == -1
    path.write_text('{"step": 1}\n{"step": 7}\n{"step": 9, "a"')
    assert last_step_in(path) == 7


def test_a_full_disk_costs_no_line_once_there_is_room_again(tmp_path: Path):
    path, script = tmp_path / "metrics.jsonl", tmp_path / "full.py"
    script.write_text(
        "import resource, signal, sys; from pathlib import Path; from mrl.store.lines import JsonlLogger\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "limits = lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))\n"
        "sink = JsonlLogger(Path(sys.argv[1])); sink.log({'a': 1.0}, 1); limits(5000)\n"
        "for step in range(2, 21): sink.log({f'metric/{i}': float(step) for i in range(200)}, step)\n"
        "if len(sys.argv) == 2: limits(resource.RLIM_INFINITY); sink.log({'a': 21.0}, 21)\n"
        "sink.close()\n"
    )
    command = [sys.executable, str(script), str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert ended.returncode == 0 and ended.stderr.count("wait in memory") == 1, ended.stderr
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 22)) and rows[19]["metric/199"] == 20.0
    path.unlink()
    ended = subprocess.run([*command, "still full"], capture_output=True, text=True, timeout=HANG_S)
    assert "File too large; its last 18 lines are lost" in ended.stderr
