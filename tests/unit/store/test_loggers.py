import logging
import os
import re
import signal
import time
from pathlib import Path

import pytest

from mrl.config.schema.logger import LoggerConfig
from mrl.config.schema.run import RunConfig
from mrl.store.loggers import group
from mrl.store.loggers.group import Loggers, check_loggers, settings_by_logger
from mrl.store.loggers.names import NEMO_RL_NAMES, nemo_rl_names
from mrl.store.loggers.sink import Sample, flat

EVERY = LoggerConfig(wandb_enabled=True, swanlab_enabled=True, tensorboard_enabled=True, mlflow_enabled=True)


def test_nothing_is_switched_on_by_default():
    assert settings_by_logger(LoggerConfig()) == {}
    assert list(settings_by_logger(EVERY)) == ["tensorboard", "wandb", "swanlab", "mlflow"]


def test_a_missing_package_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(group.importlib.util, "find_spec", lambda name: None)
    check_loggers(LoggerConfig())
    with pytest.raises(
        ValueError, match=re.escape("logger.swanlab_enabled=true: the package swanlab is not installed; `pip install 'mrl[")
    ):
        check_loggers(LoggerConfig(swanlab_enabled=True))


def test_loggers_get_the_names_that_users_of_nemo_rl_look_for():
    ours = {
        "time/total": 1.0,
        "time/reward_hidden": 2.0,
        "val/accuracy": 3.0,
        "val/mean_length": 4.0,
        "train/reward": 5.0,
        "refit/seconds": 6.0,
    }
    assert nemo_rl_names(ours) == {
        "timing/train/total_step_time": 1.0,
        "timing/train/reward_hidden": 2.0,
        "validation/accuracy": 3.0,
        "validation/avg_length": 4.0,
        "train/reward": 5.0,
        "refit/seconds": 6.0,
    }
    assert len(set(NEMO_RL_NAMES.values())) == len(NEMO_RL_NAMES)


def test_a_config_by_dotted_keys():
    assert flat({"a": {"b": 1, "c": {}}, "d": [1, 2]}) == {"a.b": 1, "a.c": {}, "d": [1, 2]}


def test_a_sample_reads_well():
    assert Sample("1+1=", "well\n2", "2", 0.5).block() == "Prompt: 1+1=\nRollout:\n    well\n    2\nExpected answer: 2\nReward: 0.5"


def test_a_logger_that_dies_costs_its_records_and_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    loggers = Loggers(RunConfig(logger=LoggerConfig(tensorboard_enabled=True)), run_folder=tmp_path, log_folder=tmp_path, last_step=-1)
    (process,) = loggers._processes
    deadline = time.monotonic() + 60
    while "TensorBoard: " not in caplog.text and time.monotonic() < deadline:
        loggers.log({"train/loss": 1.0}, 1)
        time.sleep(0.02)
    os.kill(process._process.pid, signal.SIGKILL)
    process._process.wait(10)
    for step in range(2, 5):
        loggers.log({"train/loss": 1.0}, step)
    loggers.close()
    assert loggers.num_lost >= 3
    assert caplog.text.count("TensorBoard fails, and the run goes on without it") == 1
    assert f"TensorBoard lacks {loggers.num_lost} records" in caplog.text
