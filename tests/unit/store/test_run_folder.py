import json
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.config.schema.data import DataConfig, TrainDataConfig
from mrl.config.schema.policy import PolicyConfig, TokenizerConfig
from mrl.config.schema.run import CheckpointingConfig, LoggerConfig, RunConfig
from mrl.store.run_folder import RunFolder


def config(folder: Path) -> RunConfig:
    return RunConfig(
        policy=PolicyConfig(model_name=str(folder / "model"), tokenizer=TokenizerConfig(name=str(folder / "model"))),
        data=DataConfig(train=TrainDataConfig(data_path="train.jsonl")),
        checkpointing=CheckpointingConfig(checkpoint_dir=str(folder / "run")),
        logger=LoggerConfig(log_dir=str(folder / "run" / "logs")),
    )


def test_log_folders_count_up(tmp_path: Path):
    for name in ("exp_001", "exp_002"):
        folder = RunFolder(config(tmp_path))
        folder.open()
        with folder:
            assert folder.log_folder.name == name


def test_a_folder_has_one_owner_at_a_time(tmp_path: Path):
    script = (
        "import sys, time; from pathlib import Path; from tests.unit.store.test_run_folder import config, RunFolder\n"
        "folder = RunFolder(config(Path(sys.argv[1]))); folder.open(); print('open', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None and other.stdout.readline() == "open\n"
        with pytest.raises(ValueError, match=rf"in use by process {other.pid} "):
            RunFolder(config(tmp_path)).open()
    finally:
        other.kill()
        other.wait(timeout=10)
    RunFolder(config(tmp_path)).open()


def test_files_that_cannot_be_written_are_counted_and_end_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = RunFolder(config(tmp_path))
    folder.open()
    with folder:
        assert folder.newest_checkpoint() is None
        # Root may write anywhere, but nobody writes to a folder as to a file.
        for name in ("samples.jsonl", "report.html.tmp", "report.html"):
            (folder.path / name).unlink(missing_ok=True)
            (folder.path / name).mkdir()
        for step in (1, 2):
            folder.log_samples(step, "train", [])
            folder.log_metrics(step, {"train/loss": 1.0})
    rows = [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"step": 1, "train/loss": 1.0, "logger/lost": 1.0}, {"step": 2, "train/loss": 1.0, "logger/lost": 3.0}]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [warning.split(" cannot")[0] for warning in warnings] == ["samples.jsonl", "report.html"]
