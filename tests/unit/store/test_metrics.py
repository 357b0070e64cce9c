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
        "sink = JsonlLogger(Path(sys.argv[1])); sink.log({'a': 1.0}, 1)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (30, resource.RLIM_INFINITY))\n"
        "for step in (2, 3):\n"
        "    try: sink.log({'a': float(step)}, step)\n"
        "    except OSError: print('full')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "sink.log({'a': 4.0}, 4)\n"
    )
    ended = subprocess.run([sys.executable, str(script), str(path)], capture_output=True, text=True, timeout=HANG_S)
    assert ended.stdout == "full\nfull\n", ended.stderr
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": step, "a": float(step)} for step in (1, 2, 3, 4)
    ]
