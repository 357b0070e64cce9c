# SPDX-License-Identifier: Apache-2.0
"""Loggers with real libraries and no network: what they get is there, a resume continues, and no run waits for them."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from mrl.config.schema.logger import LoggerConfig, MlflowConfig, SwanlabConfig, TensorboardConfig, WandbConfig
from mrl.config.schema.run import CheckpointingConfig, RunConfig
from mrl.store.loggers import group
from mrl.store.loggers.group import Loggers
from mrl.store.loggers.sink import Sample
from tests.waiting import HANG_S

SECRET = "canary-of-the-environment"


def config(folder: Path, **loggers: object) -> RunConfig:
    settings = LoggerConfig(
        log_dir=str(folder / "logs"),
        wandb=WandbConfig(project="apples", name="first", mode="offline"),
        swanlab=SwanlabConfig(project="apples", name="first", mode="offline"),
        tensorboard=TensorboardConfig(),
        mlflow=MlflowConfig(experiment_name="apples"),
    )
    for name, value in loggers.items():
        setattr(settings, name, value)
    return RunConfig(checkpointing=CheckpointingConfig(checkpoint_dir=str(folder)), logger=settings)


def attempt(config: RunConfig, number: int, *, last_step: int) -> Loggers:
    folder = Path(config.checkpointing.checkpoint_dir)
    log_folder = folder / f"exp_{number:03d}"
    log_folder.mkdir()
    return Loggers(config, run_folder=folder, log_folder=log_folder, last_step=last_step)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was ended after step 2 and resumed from step 1, with every logger on."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MY_DATABASE_PASSWORD", SECRET)
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        # Services may record the command line of the process.
        patch.setattr(sys, "argv", ["train.py", f"logger.wandb.notes={SECRET}"])
        # MLflow makes a new database in five seconds, and in minutes on a busy host.
        patch.setattr(group, "CLOSE_TIMEOUT_S", 200.0)
        every = config(folder, wandb_enabled=True, swanlab_enabled=True, tensorboard_enabled=True, mlflow_enabled=True)
        every.policy.model_name = f"/models/{SECRET}"
        for number, last_step, steps in ((1, -1, (0, 1, 2)), (2, 2, (2, 3))):
            loggers = attempt(every, number, last_step=last_step)
            for step in steps:
                loggers.log_samples([Sample("1+1=", f"two\nof step {step}", "2", 1.0)], step)
                loggers.log({"train/loss": 10.0 + step, "time/total": 0.5, "val/mean_length": float("nan")}, step)
            loggers.log_host({"node.0.mem_gb": 3.0}, time.time())
            loggers.close()
            assert loggers.num_lost == 0
    return folder


def test_tensorboard_has_every_step_of_each_attempt(folder: Path):
    for number, steps in ((1, [0, 1, 2]), (2, [2, 3])):
        (file,) = (folder / f"exp_{number:03d}" / "tensorboard").glob("events.out.tfevents.*")
        values = [
            (value.tag, event.step, value)
            for event in EventFileLoader(str(file)).Load()
            for value in event.summary.value
        ]
        losses = [(step, value.tensor.float_val[0]) for tag, step, value in values if tag == "train/loss"]
        assert losses == [(step, 10.0 + step) for step in steps]
        assert {"timing/train/total_step_time", "validation/avg_length", "ray/node.0.mem_gb"} <= {
            tag for tag, _, _ in values
        }
        texts = [value.tensor.string_val[0].decode() for tag, _, value in values if tag == "validation/samples"]
        # Texts of a step that a former attempt has logged are there already.
        assert len(texts) == {1: 3, 2: 1}[number] and "Rollout:\n    two\n    of step" in texts[0]


def test_mlflow_continues_the_same_run_and_takes_no_step_twice(folder: Path):
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("apples")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == folder.name and run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in history] == [(step, 10.0 + step) for step in range(4)]
    assert len(client.get_metric_history(run.info.run_id, "ray/node.0.mem_gb")) == 2
    assert run.data.params["grpo.num_prompts_per_step"] == str(RunConfig().grpo.num_prompts_per_step)
    assert len(list(folder.rglob("validation/samples/step_*.txt"))) == 4


@pytest.mark.parametrize(("pattern", "names"), [("run-*.wandb", ["train/loss"]), ("run-*.swanlab", ["train/loss"])])
def test_the_files_of_both_attempts_are_of_one_run(folder: Path, pattern: str, names: list[str]):
    files = sorted(folder.rglob(pattern))
    assert len(files) == 2 and len({file.name for file in files}) == 1
    for file in files:
        data = file.read_bytes()
        for name in ("apples", "ray/node.0.mem_gb", "timing/train/total_step_time", "validation/samples", *names):
            assert name.encode() in data, name


def test_no_secret_reaches_a_service(folder: Path):
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def test_a_server_that_never_answers_costs_records_and_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", str(round(HANG_S)))
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.create_server(("127.0.0.1", 0)) as server:
        uri = f"http://user:{SECRET}@127.0.0.1:{server.getsockname()[1]}"
        loggers = attempt(config(tmp_path, mlflow_enabled=True, mlflow=MlflowConfig(tracking_uri=uri)), 1, last_step=-1)
        for step in range(5):
            loggers.log({"train/loss": 1.0}, step)
        # Nobody has waited for an answer: one that does not come would be an error.
        assert loggers.num_lost == 0 and "MLflow fails" not in caplog.text
    loggers.close()
    assert loggers.num_lost == 5
    (failure, lost) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert (
        failure.startswith("MLflow fails, and the run goes on without it: MlflowException:") and SECRET not in failure
    )
    assert lost == "Records lost by MLflow, which metrics.jsonl is apart from: 5"


def test_without_a_key_wandb_and_swanlab_keep_files_to_be_sent_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    for name in ("WANDB_API_KEY", "SWANLAB_API_KEY", "WANDB_MODE", "SWANLAB_MODE"):
        monkeypatch.delenv(name, raising=False)
    # Keys are kept in the home folder too.
    monkeypatch.setenv("HOME", str(tmp_path))
    caplog.set_level("INFO")
    online = config(tmp_path, wandb_enabled=True, wandb=WandbConfig(), swanlab_enabled=True, swanlab=SwanlabConfig())
    loggers = attempt(online, 1, last_step=-1)
    loggers.log({"train/loss": 1.0}, 0)
    loggers.close()
    assert loggers.num_lost == 0
    assert "`wandb sync` uploads it later" in caplog.text and "`swanlab sync` uploads it later" in caplog.text
    for pattern in ("run-*.wandb", "run-*.swanlab"):
        (file,) = tmp_path.rglob(pattern)
        assert b"train/loss" in file.read_bytes()
