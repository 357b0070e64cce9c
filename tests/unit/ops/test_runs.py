# SPDX-License-Identifier: Apache-2.0
"""The list of runs, the story of one, and the difference of two, from run folders as attempts have left them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrl.ops.runs import main
from mrl.store.ledger import Ledger


def run(folder: Path, *learning_rates: float, losses: tuple[float, ...], accuracy: float) -> Path:
    """A run of an attempt for each learning rate."""
    for number, lr in enumerate(learning_rates, start=1):
        text = (
            "algorithm: grpo\ncheckpointing: {metric_name: 'val:loss', higher_is_better: false}\n"
            f"grpo: {{max_num_steps: 3}}\npolicy: {{model_name: m, megatron_cfg: {{optimizer: "
            f"{{lr: {lr}}}}}}}\n"
        )
        for place in (folder, folder / f"logs/exp_{number:03d}"):
            place.mkdir(parents=True, exist_ok=True)
            (place / "config.yaml").write_text(text)
    rows = [{"step": 0, "val/accuracy": 0.25}]
    rows += [
        {"step": step, "train/loss": loss, "time/total": step * accuracy, "rollout/reward_wait_s": accuracy}
        for step, loss in enumerate(losses, start=1)
    ]
    rows[-1]["val/accuracy"] = accuracy
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def said(capsys: pytest.CaptureFixture[str], *words: str | Path) -> list[str]:
    assert main([str(word) for word in words]) == 0
    return capsys.readouterr().out.splitlines()


def test_runs_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run(tmp_path / "a", 0.001, losses=(2.0, 1.5, 1.0), accuracy=0.5)
    run(tmp_path / "b", 0.001, 0.002, losses=(2.0,), accuracy=0.75)
    (tmp_path / "no_run").mkdir()
    head, *lines = said(capsys, tmp_path)
    assert head.split() == ["run", "state", "step", "algorithm", "model", "attempts", "result", "changed"]
    first, second = (" ".join(line.split()) for line in sorted(lines))
    assert first.startswith(f"{tmp_path / 'a'} finished 3 of 3 grpo m 1 val/accuracy 0.25 -> 0.5 2")
    assert second.startswith(f"{tmp_path / 'b'} ended 1 of 3 grpo m 2 val/accuracy 0.25 -> 0.75 2")
    found = json.loads("\n".join(said(capsys, tmp_path, "--json")))
    assert [one.pop("seconds_since_metrics") >= 0 for one in found] == [True, True]
    shared = {"max_num_steps": 3, "last_checkpoint": None}
    assert sorted(found, key=lambda one: one["run"]) == [
        {"run": str(tmp_path / "a"), "state": "finished", "step": 3, "attempts": 1, **shared},
        {"run": str(tmp_path / "b"), "state": "ended", "step": 1, "attempts": 2, **shared},
    ]


@pytest.mark.parametrize(
    ("code", "num_steps", "state"),
    [
        (0, 3, "finished"),
        (1, 3, "ended, code 1"),
        (75, 3, "ended, code 75"),
        (0, 2, "finished"),
        (2, 1, "ended, code 2"),
    ],
)
def test_only_a_run_that_ended_well_is_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: int, num_steps: int, state: str
):
    folder = run(tmp_path / "a", 0.001, 0.002, losses=(2.0, 1.5, 1.0)[:num_steps], accuracy=0.5)
    (folder / "logs/exp_001/ended.json").write_text('{"code": 75}')
    (folder / "logs/exp_002/ended.json").write_text(json.dumps({"code": code}))
    (line,) = said(capsys, tmp_path)[1:]
    shown = next(line for line in said(capsys, "show", folder) if line.startswith("state "))
    assert f" {state}  " in line and shown.split(maxsplit=1) == ["state", state]


def test_a_mean_of_other_rewards_than_0_and_1_is_called_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = run(tmp_path / "a", 0.001, losses=(2.0, 1.5, 1.0), accuracy=0.5)
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text().replace('"val/accuracy": 0.5', '"val/accuracy": 0.5, "val/reward": 0.5'))
    (line,) = said(capsys, tmp_path)[1:]
    assert "val/reward 0.5" in line and "accuracy" not in line
    shown = "\n".join(said(capsys, "show", folder))
    assert "held-out reward" in shown and "held-out accuracy" not in shown


def test_the_story_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = run(tmp_path / "a", 0.001, 0.002, losses=(2.0, 1.5), accuracy=0.5)
    ledger = Ledger(folder / "ledger.jsonl")
    for step in (1, 2, 3):
        ledger.take(step, [(0, f"p:{step}")])
        ledger.train(step, [(0, f"p:{step}")])
    ledger.take(4, [(0, "p:4"), (0, "p:5")])
    ledger.roll_back(2)
    (folder / "logs/exp_002/ended.json").write_text('{"code": 75, "text": "Ended before the last step"}')
    for number, digest in ((1, "a"), (2, "b")):
        code = {"code": {"mine:score": digest, "mine:other": "c"}}
        (folder / f"logs/exp_{number:03d}/about.json").write_text(json.dumps(code))
    for step, accuracy in ((1, 0.5), (2, 0.25)):
        checkpoint = folder / f"step_{step}"
        checkpoint.mkdir()
        (checkpoint / "COMPLETE").touch()
        (checkpoint / "manifest.json").write_text('{"weights": {"bytes": 3145728}}')
        (checkpoint / "training_info.json").write_text(json.dumps({"step": step, "metrics": {"val/loss": accuracy}}))
    lines = said(capsys, "show", folder)
    ends = [line.partition("; ")[2] for line in lines if line.startswith("attempt ")]
    assert ends == [
        "ended without a word: killed, or its host was lost",
        "ended with exit code 75: Ended before the last step",
    ]
    assert "learning rate 0.002" in [" ".join(line.split()) for line in lines]
    second = next(index for index, line in enumerate(lines) if line.startswith("attempt 2: started "))
    assert lines[second + 1] == "  policy.megatron_cfg.optimizer.lr: 0.001 -> 0.002"
    assert lines[second + 2] == "  mine:score: its code has changed"
    assert sum("code has changed" in line for line in lines) == 1
    assert "rolled back: to step 2; made again: step 3; prompts asked again: 2" in lines
    assert lines[-1] == "checkpoints: step 1 (3.0 MiB, val/loss 0.5), step 2 (3.0 MiB, val/loss 0.25, best)"


def test_the_story_ends_with_the_advice_that_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = run(tmp_path / "one", 1e-6, losses=(0.5,), accuracy=0.5)
    row = {"step": 1, "train/kl_penalty": 0.7}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert said(capsys, "show", folder)[-1].startswith("[Look] step 1: kl = 0.7 (above 0.5)")


def test_two_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    one = run(tmp_path / "a", 0.001, losses=(2.0, 1.5, 1.0), accuracy=0.5)
    lines = said(capsys, "compare", one, run(tmp_path / "b", 0.002, losses=(2.0, 1.25), accuracy=0.75))
    assert "policy.megatron_cfg.optimizer.lr: 0.001 -> 0.002" in lines
    # Times differ at each step.
    assert "the metrics part at step 2: train/loss" in lines
    table = [line.split("  ") for line in lines]
    assert ["metric (first -> last)", "A, 4 steps", "B, 3 steps"] in [
        [cell.strip() for cell in row if cell.strip()] for row in table
    ]
    assert ["train/loss", "2 -> 1", "2 -> 1.25"] in [[cell.strip() for cell in row if cell.strip()] for row in table]
    equal = said(capsys, "compare", one, run(tmp_path / "c", 0.001, losses=(2.0, 1.5, 1.0), accuracy=0.5))
    assert "the configs are equal" in equal and "equal metrics in all common steps (4)" in equal


@pytest.mark.parametrize("words", [["show", "{}"], ["compare", "{}", "{}"], ["{}"], ["show"]])
def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]):
    with pytest.raises(SystemExit) as caught:
        main([word.format(tmp_path) for word in words])
    assert caught.value.code == 2 and ("no run" in (error := capsys.readouterr().err) or "required" in error)


def test_the_name_of_a_run_in_results_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    run(Path("results/mine"), 1e-3, losses=(1.0,), accuracy=0.5)
    assert main(["show", "mine"]) == 0 and "attempt" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["show", "yours"])
    assert "no folder yours; runs in results: mine" in capsys.readouterr().err
    with pytest.raises(SystemExit):  # not a list without it
        main(["delete", "mine"])
    assert "no folder delete; runs in results: mine" in capsys.readouterr().err


def test_runs_that_cannot_be_read_are_in_the_way_of_no_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    odd = run(tmp_path / "odd", 0.001, losses=(2.0, 1.5), accuracy=0.5)
    with (odd / "metrics.jsonl").open("a") as file:
        file.write(
            '{"step": 3, "train/loss": NaN}\n{"step": "x"}\n{"step": 1e400}\n{"step": 4, "train/loss": '
            '"abc"}\n{"step": 5, "train'
        )
    (odd / "ledger.jsonl").write_bytes(b"\xff\xdd")
    (odd / "logs/exp_001/config.yaml").write_bytes(b"\xff\xdd")
    (odd / "logs/exp_x").mkdir()
    blocked = run(tmp_path / "blocked", 0.001, losses=(2.0,), accuracy=0.5)
    (blocked / "metrics.jsonl").unlink()
    (blocked / "metrics.jsonl").mkdir()
    _, first, second = said(capsys, tmp_path)
    assert " ".join(first.split()).startswith(f"{odd} finished 4 of 3 grpo m 1 val/accuracy 0.25 -> 0.5 2")
    assert second.startswith(f"{blocked} cannot be read: {blocked}/metrics.jsonl is a folder")
    assert "rolled back: the ledger is damaged from here on" in said(capsys, "show", odd)
    assert any("common steps (5)" in line for line in said(capsys, "compare", odd, odd))
    with pytest.raises(SystemExit) as caught:
        main(["show", str(blocked)])
    assert caught.value.code == 2 and "metrics.jsonl is a folder" in capsys.readouterr().err
