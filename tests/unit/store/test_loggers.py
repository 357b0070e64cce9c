# SPDX-License-Identifier: Apache-2.0
"""Loggers without their libraries: names, ids, and sinks that fail or hang."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mrl.config.load import load_config
from mrl.config.schema.logger import LoggerConfig
from mrl.config.schema.run import RunConfig
from mrl.description import ROWS
from mrl.metrics import METRICS, nemo_rl_names
from mrl.store.loggers import group, thread
from mrl.store.loggers.group import Loggers, check_loggers, switched_on
from mrl.store.loggers.sink import SINKS, LoggedRun, Sample, command_has_secret, flat
from mrl.store.loggers.thread import MAX_RECORDS, THREAD_PREFIX
from tests.sources import ROOT
from tests.waiting import HANG_S, wait_until

EVERY = LoggerConfig(
    wandb_enabled=True, swanlab_enabled=True, tensorboard_enabled=True, mlflow_enabled=True, prometheus_port=9400
)


def test_a_check_tells_that_there_is_no_key_for_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))

    def logs(*settings: str) -> str:
        return ROWS["logs"](load_config("grpo_tiny.yaml", ["logger.wandb_enabled=true", *settings]))

    assert logs().endswith("wandb (no key of it here: in files, which `wandb sync` uploads)")
    assert logs("logger.wandb.mode=offline").endswith(", wandb")
    (tmp_path / ".netrc").touch()
    assert logs().endswith(", wandb")


def test_nothing_is_switched_on_by_default():
    assert switched_on(LoggerConfig()) == []
    assert switched_on(EVERY) == list(SINKS)


def test_a_missing_package_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(group.importlib.util, "find_spec", lambda name: None)
    check_loggers(LoggerConfig())
    with pytest.raises(
        ValueError,
        match=re.escape("logger.swanlab_enabled=true: the package swanlab is not installed; `pip install 'mrl["),
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
        "train/mtp_1_loss": 7.0,
        "train/mtp_12_acceptance_rate": 0.25,
        "train/mtp_grad_norm": 9.0,
        "rollout/spec_acceptance_rate": 0.5,
    }
    assert nemo_rl_names(ours) == {
        "timing/train/total_step_time": 1.0,
        "timing/train/reward_hidden": 2.0,
        "validation/accuracy": 3.0,
        "validation/avg_length": 4.0,
        "train/reward": 5.0,
        "refit/seconds": 6.0,
        "train/mtp/mtp_1_loss": 7.0,
        "train/mtp/mtp_12_acceptance_rate": 25.0,
        "train/mtp/grad_norm": 9.0,
        "train/vllm/spec_acceptance_rate": 0.5,
    }
    theirs = [shown.nemo_rl for shown in METRICS.values() if shown.nemo_rl]
    assert len(set(theirs)) == len(theirs)


def test_a_config_by_dotted_keys():
    assert flat({"a": {"b": 1, "c": {}}, "d": [1, 2]}) == {"a.b": 1, "a.c": {}, "d": [1, 2]}


def test_a_sample_reads_well():
    assert (
        Sample("1+1=", "well\n2", "2", 0.5).block()
        == "Prompt: 1+1=\nRollout:\n    well\n    2\nExpected answer: 2\nReward: 0.5"
    )


class FakeSink:
    """A sink whose records the test sees; `fault` runs before each of its verbs, with the verb's name."""

    fault: ClassVar[Callable[[str], object]]
    taken: ClassVar[list[int]]
    runs: ClassVar[list[LoggedRun]]

    def __init__(self, config: LoggerConfig, run: LoggedRun) -> None:
        FakeSink.runs.append(run)
        FakeSink.fault("open")
        self.run_id, self.place = run.known_id or "first", "nowhere"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        FakeSink.fault("log")
        FakeSink.taken.append(step)

    def log_host(self, metrics: Mapping[str, float], seconds: int) -> None: ...

    def log_samples(self, samples: list[Sample], step: int) -> None: ...

    def close(self) -> None:
        FakeSink.fault("close")


@pytest.fixture
def fake_sink(monkeypatch: pytest.MonkeyPatch) -> type[FakeSink]:
    monkeypatch.setitem(SINKS, "tensorboard", ("TensorBoard", f"{__name__}:FakeSink"))
    FakeSink.taken, FakeSink.runs, FakeSink.fault = [], [], staticmethod(lambda verb: None)
    return FakeSink


def open_loggers(folder: Path) -> Loggers:
    config = RunConfig(logger=LoggerConfig(tensorboard_enabled=True))
    return Loggers(config, run_folder=folder, log_folder=folder, last_step=-1)


def test_a_resumed_run_is_known_by_its_id(tmp_path: Path, fake_sink: type[FakeSink]):
    for _ in range(2):
        loggers = open_loggers(tmp_path)
        loggers.log({"train/loss": 1.0}, 1)
        loggers.close()
    assert [run.known_id for run in fake_sink.runs] == [None, "first"] and fake_sink.taken == [1, 1]
    assert loggers.num_lost == 0


def test_a_logger_that_fails_costs_its_records_and_one_warning(
    tmp_path: Path, fake_sink: type[FakeSink], caplog: pytest.LogCaptureFixture
):
    def fail(verb: str) -> None:
        if verb != "open" and fake_sink.taken:
            raise SystemExit("http://user:hunter2@host is gone")

    fake_sink.fault = staticmethod(fail)
    loggers = open_loggers(tmp_path)
    for step in range(4):
        loggers.log({"train/loss": 1.0}, step)
    loggers.close()
    assert fake_sink.taken == [0] and loggers.num_lost == 3
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2 and "hunter2" not in caplog.text
    assert warnings[0].startswith("TensorBoard fails, and the run goes on without it: SystemExit:")
    assert warnings[1].startswith("Records lost by TensorBoard, which metrics.jsonl is apart from: 3")


def test_a_logger_that_hangs_costs_its_records_and_no_time(
    tmp_path: Path, fake_sink: type[FakeSink], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(group, "CLOSE_TIMEOUT_S", 0.2)
    released = threading.Event()
    fake_sink.fault = staticmethod(lambda verb: None if verb == "open" else released.wait())
    loggers = open_loggers(tmp_path)
    for step in range(MAX_RECORDS + 7):
        loggers.log({"train/loss": 1.0}, step)
    assert loggers.num_lost == 7
    # Ends, although the logger never does.
    loggers.close()
    assert loggers.num_lost == MAX_RECORDS + 7
    released.set()
    for left in threading.enumerate():
        if left.name.startswith(THREAD_PREFIX):
            left.join(HANG_S)
    assert caplog.text.count("TensorBoard fails, and the run goes on without it: it does not keep up") == 1


def test_a_service_that_was_away_is_asked_again(
    tmp_path: Path, fake_sink: type[FakeSink], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(thread, "REOPEN_INTERVAL_S", 0.0)

    def fail_once(verb: str) -> None:
        if verb == "open" and len(fake_sink.runs) == 1:
            raise OSError("away")

    fake_sink.fault = staticmethod(fail_once)
    loggers = open_loggers(tmp_path)
    loggers.log({"train/loss": 1.0}, 1)
    loggers.close()
    assert fake_sink.taken == [1] and loggers.num_lost == 0 and len(fake_sink.runs) == 2


def test_a_library_cannot_keep_hooks_on_errors_and_exits(
    tmp_path: Path, fake_sink: type[FakeSink], monkeypatch: pytest.MonkeyPatch
):
    before = sys.excepthook, sys.exit
    for name in ("excepthook", "exit"):
        monkeypatch.setattr(sys, name, getattr(sys, name))

    def hook(verb: str) -> None:
        sys.excepthook = sys.exit = lambda *_: None

    fake_sink.fault = staticmethod(hook)
    open_loggers(tmp_path).close()
    assert (sys.excepthook, sys.exit) == before


HANGING = """
import sys, threading, time
from pathlib import Path
from mrl.config.load import load_config
from mrl.config.schema.logger import LoggerConfig
from mrl.config.schema.run import RunConfig
from mrl.store.loggers import group
from mrl.store.loggers.sink import SINKS
from mrl.store.loggers.thread import exit_with

class Hanging:
    def __init__(self, config, run):
        threading.Thread(target=time.sleep, args=(600,)).start()
        time.sleep(600)

def main():
    sys.modules["hanging"] = sys.modules["__main__"]
    SINKS["tensorboard"] = ("TensorBoard", "hanging:Hanging")
    group.CLOSE_TIMEOUT_S = 0.5
    folder = Path(sys.argv[1])
    config = RunConfig(logger=LoggerConfig(tensorboard_enabled=True))
    group.Loggers(config, run_folder=folder, log_folder=folder, last_step=-1).close()
    print("the last line")
    if len(sys.argv) > 2:
        raise OSError("no space")
    return 75

exit_with(main)
"""


@pytest.mark.parametrize(("arguments", "code", "error"), [([], 75, ""), (["fail"], 1, "OSError: no space")])
def test_a_process_ends_while_a_logger_hangs(tmp_path: Path, arguments: list[str], code: int, error: str):
    command = [sys.executable, "-c", HANGING, str(tmp_path), *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert (ended.returncode, ended.stdout) == (code, "the last line\n") and error in ended.stderr


def test_a_full_disk_takes_the_log_and_not_the_run():
    script = (
        "import logging; from mrl.config.secrets import start_logging; from mrl.store.console import rollout_progress\n"
        "from mrl.store.loggers.thread import exit_with\n"
        "def main():\n    start_logging('text'); logging.info('x')\n    with rollout_progress(3) as bar: "
        "bar.update(3)\n    return 75\nexit_with(main)"
    )
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, stdout=full, stderr=full, timeout=HANG_S)
    assert ended.returncode == 75


def test_a_command_line_with_a_secret_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_API_KEY", "canary-of-the-environment")
    monkeypatch.setattr(sys, "argv", ["train.py", "grpo_tiny.yaml"])
    assert not command_has_secret(frozenset())
    monkeypatch.setattr(sys, "argv", ["train.py", "--config-name", "grpo", "results/run 7", "--lr=1e-5", "Qwen3-8B"])
    assert not command_has_secret(frozenset())
    monkeypatch.setattr(sys, "argv", ["train.py", "env.judge.header=canary-of-the-environment"])
    assert command_has_secret(frozenset())
    assert command_has_secret(frozenset({"judge.header"}))


def test_prometheus_reads_the_latest_metrics_from_this_host_alone(tmp_path: Path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    loggers = Loggers(
        RunConfig(logger=LoggerConfig(prometheus_port=port)), run_folder=tmp_path, log_folder=tmp_path, last_step=9
    )
    # A resume takes steps again: the page has the present ones.
    for step in (7, 8):
        loggers.log({"train/loss": step / 2, "time/total": 1.5}, step)
    loggers.log_host({"node.0.gpu.1.util": 50.0}, 1.0)
    expected = {
        "mrl_train_loss": 4.0,
        "mrl_timing_train_total_step_time": 1.5,
        "mrl_step": 8.0,
        "mrl_ray_node_0_gpu_1_util": 50.0,
    }
    wait_until(lambda: scrape(port) == expected, "page of the newest step", explain=lambda: scrape(port))
    listening = [
        line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "0A"
    ]
    assert [address for address in listening if address.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]
    loggers.close()
    assert loggers.num_lost == 0 and scrape(port) == {}


def scrape(port: int) -> dict[str, float]:
    """The samples of the page, as Prometheus' own parser reads them; empty if nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=HANG_S) as answer:
            text = answer.read().decode()
    except OSError:
        return {}
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}
