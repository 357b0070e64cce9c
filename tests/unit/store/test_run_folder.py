# SPDX-License-Identifier: Apache-2.0
import json
import multiprocessing
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest

from conversion.files.limits import within
from mrl.config.load import load_config
from mrl.config.schema.data import DataConfig, TrainDataConfig
from mrl.config.schema.policy import PolicyConfig, TokenizerConfig
from mrl.config.schema.run import CheckpointingConfig, LoggerConfig, RunConfig
from mrl.loop.main import end_at_once
from mrl.ops.view.dumps import list_dumps
from mrl.recipes.tokenizer import byte_tokenizer
from mrl.signals import ENDED_AT_ONCE, LISTENER
from mrl.store.checkpoints import Checkpoint, CheckpointStore, check_models
from mrl.store.ledger import replay
from mrl.store.ownership import FolderLost
from mrl.store.run_files import ENDED, attempts_of
from mrl.store.run_folder import RunFolder
from mrl.types import RunState
from tests.reading import read_page
from tests.sources import ROOT
from tests.waiting import HANG_S


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


def test_runs_that_share_a_folder_of_logs_keep_theirs_apart(tmp_path: Path):
    from tests.unit.store.test_samples import group_of

    runs, place = [], tmp_path / "here"
    for name in ("one", "two"):
        settings = config(place / name)
        settings.logger.log_dir, settings.logger.rollouts_keep_steps = str(place / "shared"), 1
        runs.append(RunFolder(settings))
    assert runs[0].log_folder == runs[1].log_folder, "both have seen that nobody has the first number"
    group = group_of("a", 1.0)
    for run in runs:
        run.open()
        run.note_attempt()
        run.log_samples(5, "train", [group])
        run.finish_texts()
    runs[1].log_samples(6, "train", [group])
    for run in runs:
        run.finish_texts()
        run.give_back()
    assert [run.log_folder for run in runs] == [place / "shared/exp_001", place / "shared/exp_002"]
    # The readers of the run folder see its own attempts, also where all of this was moved.
    moved = place.rename(tmp_path / "there")
    dumps = [
        [(dump.step, dump.path.resolve().parent.name) for dump in list_dumps(moved / name / "run")]
        for name in ("one", "two")
    ]
    assert dumps == [[(5, "exp_001")], [(6, "exp_002")]]
    assert [path.name for name in ("one", "two") for path in attempts_of(moved / name / "run")] == [
        "exp_001",
        "exp_002",
    ]


def test_nobody_else_reads_rollouts(tmp_path: Path):
    folder = RunFolder(config(tmp_path))
    folder.open()
    with folder:
        assert [path.stat().st_mode & 0o777 for path in (folder.path, folder.log_folder)] == [0o700, 0o700]
    folder.path.chmod(0o750)  # whoever shares it
    with (again := RunFolder(config(tmp_path))):
        again.open()
        assert again.path.stat().st_mode & 0o777 == 0o750


def test_a_folder_has_one_owner_at_a_time(tmp_path: Path):
    context = multiprocessing.get_context("fork")
    is_open = context.Event()

    def hold() -> None:
        folder = RunFolder(config(tmp_path))
        folder.open()
        is_open.set()
        Event().wait()

    other = context.Process(target=hold)
    other.start()
    try:
        assert is_open.wait(HANG_S)
        with pytest.raises(ValueError, match=rf"in use by process {other.pid} "):
            RunFolder(config(tmp_path)).open()
    finally:
        other.kill()
        other.join(HANG_S)
    RunFolder(config(tmp_path)).open()


def test_a_run_does_not_resume_from_checkpoints_that_lack_one_of_its_models(tmp_path: Path):
    step, identity = tmp_path / "run/step_20", {"model": {}, "tokenizer": {}, "data": {}}
    saved = CheckpointStore(tmp_path / "run", CheckpointingConfig(checkpoint_dir=str(tmp_path / "run")))
    saved.commit(saved.begin(RunState(step=20)), {})
    ppo = replace(config(tmp_path), algorithm="ppo")
    ppo.checkpointing.allow_changes = ["critic"]
    with pytest.raises(
        ValueError, match=f"checkpoint_dir={tmp_path}/run: {step} holds no critic, and a run of algorithm=ppo"
    ) as caught:
        RunFolder(ppo, {**identity, "critic": {"config.json": "1"}}).open()
    assert "choose another folder" in str(caught.value)
    # It has been given back, and of GRPO the same folder has all.
    folder = RunFolder(config(tmp_path), identity)
    folder.open()
    with folder:
        saved.commit(saved.begin(RunState(step=20), ppo.trained_models), {})
    RunFolder(ppo, {**identity, "critic": {"config.json": "1"}}).open()


OPTIMIZER = "policy.megatron_cfg.optimizer"
FREEZE, THAW = "policy.megatron_cfg.freeze_config.modules", ["policy.megatron_cfg.freeze_moe_router=false"]


def frozen(freeze_moe_router: bool | None = True, modules: Sequence[str] = ()) -> dict:
    settings = {"freeze_moe_router": freeze_moe_router, "freeze_config.modules": list(modules), "mtp_num_layers": 0}
    return {"optimizer": {"use_distributed_optimizer": True, "frozen": settings}}


ADAPTED = ["policy.megatron_cfg.peft.enabled=true", "policy.megatron_cfg.peft.dim=4"]


@pytest.mark.parametrize(
    ("saved_with", "settings", "refused"),
    [
        ({"model": {}}, [], None),
        ({"model": {}, "optimizer": {}}, ["policy.megatron_cfg.optimizer.use_distributed_optimizer=false"], None),
        ({"model": {}}, ADAPTED, "peft was not enabled, and is {'dim': 4, 'alpha': 32.0}"),
        ({"peft": {"dim": 4, "alpha": 32, "layers": []}}, ADAPTED, None),
        (
            {"peft": {"dim": 8, "alpha": 32, "layers": []}},
            ADAPTED,
            "peft was {'dim': 8, 'alpha': 32}, and is {'dim': 4, 'alpha': 32.0}",
        ),
        ({"peft": {"dim": 4, "alpha": 32, "layers": []}}, [], "peft was {'dim': 4, 'alpha': 32}, and is not enabled"),
        (
            {"optimizer": {"use_distributed_optimizer": False}},
            [],
            "optimizer.use_distributed_optimizer was False, and is True",
        ),
        ({"optimizer": {"optimizer": "muon"}}, [], "optimizer.optimizer was muon, and is adam"),
        (frozen(), [f"{OPTIMIZER}.optimizer=muon"], "optimizer.optimizer was adam, and is muon"),
        (frozen(), [*THAW, f"{FREEZE}=['*.up_proj.weight']"], "freeze_moe_router was True, and is False"),
        (
            frozen(freeze_moe_router=False),
            ["policy.megatron_cfg.freeze_moe_router=true"],
            None,
        ),  # what was trained may rest
        (frozen(freeze_moe_router=None), THAW, None),  # not known of older checkpoints
        ({**frozen(), "peft": {"dim": 4, "alpha": 32}}, [*ADAPTED, *THAW], None),  # adapters alone are trained
        (frozen(False, ["*.norm.weight"]), [], "freeze_config.modules was ['*.norm.weight'], and is []"),
        (frozen(False, ["backbone.layers.2.*"]), [f"{FREEZE}=['backbone.layers.*']"], None),
        (None, ADAPTED, None),  # not written, or damaged: the ranks say more
    ],
)
def test_a_run_does_not_resume_with_weights_of_another_form(
    tmp_path: Path, saved_with: dict | None, settings: list[str], refused: str | None
):
    run = load_config("grpo_tiny.yaml", [*settings, f"checkpointing.checkpoint_dir={tmp_path}/run"])
    store = CheckpointStore(tmp_path / "run", run.checkpointing)
    pending = store.begin(RunState(step=20))
    weights = pending.weights_of("policy") / "iter_0000000"
    weights.mkdir(parents=True)
    (weights / "run_config.yaml").write_text("{" if saved_with is None else json.dumps(saved_with))
    store.commit(pending, {})
    if refused is None:
        check_models(Checkpoint(20, tmp_path / "run/step_20"), run)
        return
    with pytest.raises(ValueError, match=re.escape(f"policy.megatron_cfg: {refused}: ") + f".*{tmp_path}/run/step_20"):
        check_models(Checkpoint(20, tmp_path / "run/step_20"), run)


def test_a_checkpoint_has_the_tokenizer_and_no_weights_of_any_format(tmp_path: Path):
    from transformers import AutoTokenizer

    model, settings = tmp_path / "model", config(tmp_path)
    tokenizer = byte_tokenizer(64)
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "TOOLS {{ messages }}"}
    tokenizer.save_pretrained(model)
    further = (
        "generation_config.json config.json modeling_own.py tokenization_own.py spiece.model qwen.tiktoken merges.txt"
    ).split()
    weights = """model.safetensors model.safetensors.index.json model-q8_0.gguf ggml-model-f16 tf_model.h5
        flax_model.msgpack rust_model.ot
        consolidated.00.pth original/consolidated.pth pytorch_model.bin model.onnx model.ckpt model.npz
        model.pdparams optimizer.pt"""
    for name in (*further, *weights.split()):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text("{}")
    saved = CheckpointStore(tmp_path / "run", settings.checkpointing)
    checkpoint = saved.begin(RunState(step=1))
    RunFolder(settings).copy_tokenizer(checkpoint)
    copied = checkpoint.folder / "policy/tokenizer"
    names = {str(path.relative_to(copied)) for path in copied.rglob("*") if path.is_file()}
    assert names == {str(path.relative_to(model)) for path in model.rglob("*") if path.is_file()} - set(weights.split())
    for name in further:
        (model / name).unlink()
        (copied / name).unlink()
    assert (
        AutoTokenizer.from_pretrained(copied).chat_template
        == AutoTokenizer.from_pretrained(model).chat_template
        == tokenizer.chat_template
    )


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
            folder.log_metrics(step, {"val/loss": 1.0})
    rows = [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < row.pop("time/logging") < 60 for row in rows)
    assert rows == [{"step": 1, "val/loss": 1.0, "logger/lost": 1.0}, {"step": 2, "val/loss": 1.0, "logger/lost": 3.0}]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [warning.split(" cannot")[0] for warning in warnings] == ["samples.jsonl", "report.html"]


def test_the_report_is_rendered_after_validations_and_checkpoints_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("mrl.store.run_folder.MAX_REPORT_SHARE", float("inf"))
    folder = RunFolder(config(tmp_path))
    folder.open()
    page = folder.path / "report.html"
    with folder:
        folder.newest_checkpoint()
        for step, (metrics, is_rendered) in enumerate(
            [({}, False), ({"val/accuracy": 0.5}, True), ({"time/checkpoint": 1.0}, True), ({}, False)]
        ):
            page.unlink(missing_ok=True)
            folder.log_metrics(step, {"train/reward": 0.5, **metrics})
            assert page.exists() == is_rendered
    (run,) = read_page(page.read_text())["runs"]
    assert run["series"]["step"] == [0, 1, 2, 3] and ["state", "ended"] in run["progress"]


def test_the_page_of_a_run_that_is_left_at_once_does_not_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = RunFolder(config(tmp_path))
    folder.open()
    folder.newest_checkpoint()
    folder.log_metrics(0, {"val/accuracy": 0.5})
    states = [["state", "running"], ["state", "ended, code 130"]]
    page = folder.path / "report.html"
    assert states[0] in read_page(page.read_text())["runs"][0]["progress"]
    monkeypatch.setattr(LISTENER, "left", (ENDED_AT_ONCE, "a second Ctrl-C"))
    end_at_once(folder)
    assert states[1] in read_page(page.read_text())["runs"][0]["progress"]
    page.write_text("of another process, which goes on with the run")
    end_at_once(folder)
    assert page.read_text().startswith("of another process")
    folder.give_back()


def test_reports_take_a_percent_of_the_run_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    taken: list[float] = []
    now = iter(range(10_000))
    # A clock that ticks once a look: a report takes a second, and the next one comes after a hundred.
    monkeypatch.setattr("mrl.store.run_folder.time", SimpleNamespace(monotonic=lambda: float(next(now))))
    monkeypatch.setattr("mrl.store.run_folder.write_report", lambda *_, **__: taken.append(float(next(now))))
    folder = RunFolder(config(tmp_path))
    for _ in range(1000):
        folder._render_report("running")
    gaps = [later - earlier for earlier, later in zip(taken, taken[1:], strict=False)]
    assert len(gaps) > 3 and min(gaps) >= 100
    num_taken = len(taken)
    folder._render_report("over")
    assert len(taken) == num_taken + 1


def test_a_step_does_not_wait_until_its_texts_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    may_write = Event()
    written: list[int] = []

    def write(folder: Path, step: int, *_: object) -> None:
        assert may_write.wait(HANG_S)
        written.append(step)

    monkeypatch.setattr("mrl.store.run_folder.write_step_data", write)
    folder = RunFolder(config(tmp_path))
    folder.open()
    with folder:
        folder.newest_checkpoint()
        folder.log_samples(1, "train", [])
        folder.log_metrics(1, {"loss": 1.0})
        assert written == []
        may_write.set()
        folder.log_samples(2, "train", [])
        assert 1 in written
    assert written == [1, 2]


def test_an_attempt_that_lost_the_folder_renders_no_report(tmp_path: Path):
    folder = RunFolder(config(tmp_path))
    folder.open()
    with pytest.raises(FolderLost), folder:
        folder.newest_checkpoint()
        raise FolderLost
    assert not (folder.path / "report.html").exists()


FULL = """
import logging, resource, sys
from pathlib import Path
import mrl.store.run_folder
from mrl.store.run_folder import RunFolder
from tests.unit.store.test_run_folder import config
from tests.unit.store.test_samples import group_of
logging.basicConfig(stream=sys.stdout, format="%(message)s")
mrl.store.run_folder.MAX_REPORT_SHARE = float("inf")
folder = RunFolder(config(Path(sys.argv[1])))
folder.open()
with folder:
    folder.newest_checkpoint()
    for step in range(1, 7):
        # Between these steps no file may get a byte.
        most = 0 if 2 <= step <= 4 else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        folder.ledger.take(step, [(0, f"p:{step}")])
        folder.ledger.train(step, [(0, f"p:{step}")])
        folder.log_samples(step, "train", [group_of("a", 1.0)])
        folder.log_metrics(step, {"val/accuracy": 1.0})
"""


def test_a_full_disk_costs_texts_and_nothing_that_a_resume_needs(tmp_path: Path):
    """Python ignores SIGXFSZ, so that a write beyond the limit fails as on a full disk."""
    ended = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S
    )
    assert ended.returncode == 0, ended.stderr
    said = [line.split(" cannot be written")[0].removeprefix(f"{tmp_path}/run/") for line in ended.stdout.splitlines()]
    texts, spans = "the files *_data_stepN.jsonl.gz", "logs/exp_001/actors/driver.trace.json"
    # A thread writes spans now and then, perhaps not between these steps.
    assert sorted({*said} - {spans}) == sorted(["ledger.jsonl", "samples.jsonl", texts, "metrics.jsonl", "report.html"])
    run = tmp_path / "run"
    assert sorted(replay(run / "ledger.jsonl").trained) == [1, 2, 3, 4, 5, 6]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6] and rows[-1]["logger/lost"] == 9
    assert sorted(path.name for path in (run / "logs/exp_001").glob("*.gz")) == [
        f"train_data_step{step}.jsonl.gz" for step in (1, 5, 6)
    ]
    # No part of a file is left.
    assert not [path for path in run.iterdir() if path.name.startswith(".")]


def test_what_earlier_steps_have_measured(tmp_path: Path):
    folder = RunFolder(config(tmp_path))
    folder.open()
    assert folder.measured("time/total", num_steps=2) is None
    times = [{"time/total": 9.0, "time/start": 40.0}, {"time/total": 2.0}, {"time/total": 4.0}]
    (folder.path / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, **row}) + "\n" for step, row in enumerate(times)) + '{"st'
    )
    assert (folder.measured("time/total", num_steps=2), folder.measured("time/start", num_steps=1)) == (3.0, 40.0)


def test_an_export_gets_what_the_model_s_folder_says_of_sampling(tmp_path: Path):
    """Covers a tokenizer from a folder of its own, with a template of its own."""
    model, tokenizer = tmp_path / "model", tmp_path / "tokenizer"
    (tokenizer / "additional_chat_templates").mkdir(parents=True)
    model.mkdir()
    for path in (
        tokenizer / "tokenizer.json",
        tokenizer / "additional_chat_templates/tool_use.jinja",
        tokenizer / "generation_config.json",
    ):
        path.write_text("of the tokenizer's folder")
    for name in ("generation_config.json", "modeling_x.py", "tokenizer.json", "config.json"):
        (model / name).write_text("of the model's folder")
    run = config(tmp_path)
    run.policy.tokenizer.name = str(tokenizer)
    checkpoint = Checkpoint(1, tmp_path / "run/step_1")
    RunFolder(run).copy_tokenizer(checkpoint)
    folder = checkpoint.weights_of("policy").parent / "tokenizer"
    found = {
        path.relative_to(folder).as_posix(): path.read_text().split()[2] for path in folder.rglob("*") if path.is_file()
    }
    assert found == {
        "tokenizer.json": "tokenizer's",
        "additional_chat_templates/tool_use.jinja": "tokenizer's",
        "generation_config.json": "model's",
        "modeling_x.py": "model's",
    }


def test_the_end_is_written_though_a_call_elsewhere_does_not_return(tmp_path: Path):
    """Ray's start may hang; the folder answers."""
    folder = RunFolder(config(tmp_path))
    folder.open()
    is_over = Event()
    try:
        with pytest.raises(TimeoutError):
            within(0.01, "a start", is_over.wait)
        folder.note_end(1, "Ray does not start")
        folder.note_end(130, "a second Ctrl-C, of a later run in this process")
        assert json.loads((folder.log_folder / ENDED).read_text())["code"] == 1
    finally:
        is_over.set()
        folder.give_back()
