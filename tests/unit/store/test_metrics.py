# SPDX-License-Identifier: Apache-2.0
import json
import subprocess
import sys
from pathlib import Path

from mrl.store.report import write_report
from mrl.store.run_folder import JsonlLogger, drop_later_steps, last_step_in


def test_one_object_a_step_and_no_nan_in_json(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlLogger(path)
    sink.log({"train/loss": float("nan"), "train/reward": 0.5}, 1)
    sink.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"step": 1, "train/loss": None, "train/reward": 0.5}]


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
    assert not drop_later_steps(path, 2)
    path.write_text('{"step": 1}\n')
    assert not drop_later_steps(path, 2)


def test_the_last_step_of_a_file(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    assert last_step_in(path) == -1
    path.write_text('{"step": 1}\n{"step": 7}\n{"step": 9, "a"')
    assert last_step_in(path) == 7


def test_a_full_disk_costs_no_line_once_there_is_room_again(tmp_path: Path):
    path, script = tmp_path / "metrics.jsonl", tmp_path / "full.py"
    script.write_text(
        "import resource, signal, sys; from pathlib import Path; from mrl.store.run_folder import JsonlLogger\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "sink = JsonlLogger(Path(sys.argv[1])); sink.log({'a': 1.0}, 1)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (30, resource.RLIM_INFINITY))\n"
        "for step in (2, 3):\n"
        "    try: sink.log({'a': float(step)}, step)\n"
        "    except OSError: print('full')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "sink.log({'a': 4.0}, 4)\n"
    )
    ended = subprocess.run([sys.executable, str(script), str(path)], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "full\nfull\n", ended.stderr
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"step": step, "a": float(step)} for step in (1, 2, 3, 4)]


def test_the_report_is_self_contained_and_escapes_what_models_write(tmp_path: Path):
    metrics = [{"step": step, "train/reward": step / 10, "val/accuracy": step / 10, "time/train": 1.0} for step in range(5)]
    sample = {"step": 1, "split": "train", "prompt": "1+1=", "text": "<script>x</script>", "extracted": "2", "expected": "2"}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    (tmp_path / "samples.jsonl").write_text(json.dumps(sample | {"reward": 0.0, "status": "timeout"}) + "\n")
    page_file = tmp_path / "report.html"
    write_report(page_file, metrics_file=tmp_path / "metrics.jsonl", samples_file=tmp_path / "samples.jsonl", title="run")
    page = page_file.read_text()
    assert "<script" not in page and "http" not in page and "masked (timeout)" in page
    assert "Held-out accuracy 0.000 at step 0, 0.400 at step 4" in page
    assert page.count("<polyline") == 2


def test_the_report_of_a_run_without_rollouts_shows_its_losses(tmp_path: Path):
    rows = [{"step": 0, "val/validation-default_loss": 0.693}]
    rows += [{"step": step, "train/loss": 1.0 / step, "train/accuracy": 0.5, "train/rewards_margin_mean": 0.1} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = tmp_path / "report.html"
    write_report(page, metrics_file=tmp_path / "metrics.jsonl", samples_file=tmp_path / "samples.jsonl", title="run")
    text = page.read_text()
    assert "Held-out loss 0.693 at step 0, 0.693 at step 0." in text
    assert "Preferred answers that win" in text and "Refit" not in text and "rollout" not in text.partition("Samples")[0]
