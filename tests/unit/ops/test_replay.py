# SPDX-License-Identifier: Apache-2.0
"""Steps that were made again, compared with their record: what differs is named by step, rollout, key and token."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.ops import replay
from mrl.ops.replay import config_of, differences, lay_out, main, records_of
from mrl.store.rollout_files import RecordedStep, read_record, write_record
from tests.faults.attempts import tiny_inputs
from tests.sources import ROOT
from tests.stack.ahead.conftest import AHEAD

ROLLOUT = {
    "prompt_id": "train:3",
    "content": ["1+1=", "2"],
    "rewards": 1.0,
    "token_ids": [5, 6, 7],
    "generation_logprobs": [0.0, -0.5, -0.25],
}


def record(
    folder: Path, *, loss: float = 0.5, time: float = 1.0, rollouts: tuple[dict, ...] = (ROLLOUT, ROLLOUT)
) -> Path:
    logs = folder / "logs/exp_001"
    logs.mkdir(parents=True)
    rows = [
        {"step": step, "train/loss": loss * step, "time/total": time, "rollout/reward_wait_s": time} for step in (1, 2)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with gzip.open(logs / "train_data_step2.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rollouts)
    return folder


def test_what_differs_is_named(tmp_path: Path):
    recorded, steps = record(tmp_path / "a"), range(1, 3)
    assert list(differences(recorded, record(tmp_path / "b", time=9.0), steps)) == []
    changed = ROLLOUT | {"token_ids": [5, 9, 7]}
    assert list(differences(recorded, record(tmp_path / "c", rollouts=(ROLLOUT, changed)), steps)) == [
        "step 2, rollout 1 of prompt train:3: token_ids[1] was [6] and is [9]"
    ]
    assert list(
        differences(recorded, record(tmp_path / "d", rollouts=(ROLLOUT | {"rewards": 0.0},), loss=0.25), steps)
    ) == [
        "step 1: train/loss was 0.5 and is 0.25",
        "step 2: rollouts recorded 2, made 1",
        "step 2, rollout 0 of prompt train:3: rewards was 1.0 and is 0.0",
        "step 2: train/loss was 1.0 and is 0.5",
    ]


def test_the_config_is_that_of_the_attempt_that_made_the_step(tmp_path: Path):
    run = record(tmp_path / "a")
    for folder in (run, run / "logs/exp_001"):
        (folder / "config.yaml").touch()
    assert config_of(run, 2) == run / "logs/exp_001/config.yaml" and config_of(run, 1) == run / "config.yaml"


@pytest.mark.parametrize(
    ("step", "config", "reason"),
    [
        (3, "", "has no step 3; it has 1, 2 ... 2"),
        (2, "{algorithm: grpo, grpo: {async_grpo: {enabled: true}}}", "missing: step_1.mrl, step_2.mrl"),
    ],
)
def test_what_cannot_be_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], step: int, config: str, reason: str
):
    run = record(tmp_path / "a")
    (run / "config.yaml").write_text(config)
    with pytest.raises(SystemExit) as caught:
        main([str(run), "--step", str(step), "cluster.cpu_units_per_node=2"])
    assert caught.value.code == 2 and reason in capsys.readouterr().err


def test_records_without_a_critic_or_pairs_are_not_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Their steps are made again as a whole, which with lag they cannot be."""
    run = record(tmp_path / "a")
    (run / "recorded").mkdir()
    for step in (1, 2):
        (run / f"recorded/step_{step}.mrl").touch()
    monkeypatch.setattr(replay, "replay_training", lambda *_: 7)
    monkeypatch.setattr(replay, "run_command", lambda *_: 8)
    for algorithm, lag, ways in (
        ("grpo", True, (7, 2)),
        ("grpo", False, (7, 8)),
        ("ppo", True, (2, 2)),
        ("dpo", False, (8, 8)),
    ):
        (run / "config.yaml").write_text(json.dumps({"algorithm": algorithm, "grpo": {"async_grpo": {"enabled": lag}}}))
        for words, way in zip(([], ["--sample"]), ways, strict=True):
            try:
                code = main([str(run), "--step", "2", *words])
            except SystemExit as ended:
                code = ended.code
                assert "without --sample; missing: none" in capsys.readouterr().err
            assert code == way, (algorithm, lag, words)


def test_a_step_that_ended_its_run_has_a_record_and_is_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = record(tmp_path / "a")
    (run / "recorded").mkdir()
    (run / "recorded/not_finite_step_3.mrl").touch()
    assert [path.name for path in records_of(run, range(2, 4), {1, 2})] == ["step_2.mrl", "not_finite_step_3.mrl"]
    # A later attempt has made the step, and another one has recorded it.
    assert [path.name for path in records_of(run, range(2, 4), {1, 2, 3})] == ["step_2.mrl", "step_3.mrl"]
    (run / "recorded/step_2.mrl").touch()
    assert [path.name for path in records_of(run, range(2, 3), {1})] == ["step_2.mrl"]
    for step, reason in (
        (3, "config.yaml is missing: nothing says how the step was made"),
        (4, "has no step 4; it has 1, 2 ... 2"),
    ):
        with pytest.raises(SystemExit) as caught:
            main([str(run), "--step", str(step)])
        assert caught.value.code == 2 and reason in capsys.readouterr().err


def test_nothing_is_removed_but_what_a_replay_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run, other = record(tmp_path / "a"), record(tmp_path / "b")
    for into in (other, run, tmp_path):
        with pytest.raises(SystemExit) as caught:
            main([str(run), "--step", "2", "--into", str(into)])
        assert caught.value.code == 2 and "no replay has made it" in capsys.readouterr().err
    assert (run / "metrics.jsonl").exists() and (other / "metrics.jsonl").exists()
    for _ in range(2):
        lay_out(run / "replay", run, None)
    assert [path.name for path in (run / "replay").iterdir()] == ["made_by_replay"]


@pytest.mark.long("replay")
def test_the_training_of_recorded_steps_is_made_again_with_lag_and_at_another_layout(tmp_path: Path):
    run = tmp_path / "run"
    settings = [
        *AHEAD,
        *tiny_inputs(),
        "grpo.max_num_steps=5",
        "checkpointing.save_period=2",
        "checkpointing.metric_name=null",
    ]
    settings = [word for word in settings if word != "checkpointing.enabled=false"]

    def command(*words: str) -> tuple[int, str]:
        done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    code, said = command(
        "mrl.train", "grpo_tiny.yaml", *settings, "logger.record_steps=3", f"checkpointing.checkpoint_dir={run}"
    )
    assert code == 0, said[-4000:]
    assert sorted(path.name for path in (run / "recorded").iterdir()) == ["step_3.mrl", "step_4.mrl", "step_5.mrl"]
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    code, said = command("mrl.replay", str(run), "--step", "4")
    assert code == 0 and "Equal: the training of steps 3 to 4" in said and "bit for bit" in said, said[-4000:]
    code, said = command("mrl.replay", str(run), "--step", "4", "cluster.cpu_units_per_node=2")
    assert code == 0 and "within 0.0001, as the layout is another" in said, said[-4000:]
    assert {path: path.read_bytes() for path in before} == before
    code, said = command("mrl.replay", str(run), "--step", "2")
    assert code == 2 and "without --sample; missing: step_1.mrl, step_2.mrl" in said, said[-4000:]
    record = read_record(run / "recorded/step_4.mrl", RecordedStep)
    changed = record.batches[0].sequences[3].rollout
    changed.pulled.token_ids[1] ^= 1
    write_record(run / "recorded/step_4.mrl", record)
    code, said = command("mrl.replay", str(run), "--step", "4")
    at = changed.prompt_length
    assert code == 1 and f"step 4, update 0, rank 0, rollout {changed.request_id}: old_logprobs[{at}] was" in said, (
        said[-4000:]
    )
    content = (run / "recorded/step_4.mrl").read_bytes()
    (run / "recorded/step_4.mrl").write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    code, said = command("mrl.replay", str(run), "--step", "4")
    assert code == 2 and "step_4.mrl is damaged: its bytes differ from its checksum" in said, said[-4000:]


@pytest.mark.long("replay")
def test_a_step_of_a_run_is_made_again_and_a_changed_byte_is_found(tmp_path: Path):
    run = tmp_path / "run"
    settings = [*tiny_inputs(), "grpo.max_num_steps=5", "checkpointing.save_period=2", "checkpointing.metric_name=null"]

    def command(*words: str) -> tuple[int, str]:
        done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    code, said = command("mrl.train", "grpo_tiny.yaml", *settings, f"checkpointing.checkpoint_dir={run}")
    assert code == 0, said[-4000:]
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    code, said = command("mrl.replay", str(run), "--step", "4")
    assert code == 0 and f"Equal: steps 3 to 4 of {run}, made again from step_2" in said, said[-4000:]
    assert {path: path.read_bytes() for path in before} == before
    dump = next(run.glob("logs/*/train_data_step4.jsonl.gz"))
    lines = gzip.decompress(before[dump]).decode().splitlines()
    changed = json.loads(lines[0])
    changed["token_ids"][2] += 1
    dump.write_bytes(gzip.compress("\n".join([json.dumps(changed), *lines[1:]]).encode()))
    code, said = command("mrl.replay", str(run), "--step", "4")
    assert code == 1 and f"step 4, rollout 0 of prompt {changed['prompt_id']}: token_ids[2] was" in said, said[-4000:]
