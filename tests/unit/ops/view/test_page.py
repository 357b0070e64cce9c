# SPDX-License-Identifier: Apache-2.0
import json
import os
import re
from pathlib import Path

import pytest

from mrl.ops.view.page import page, write_report
from mrl.ops.view.run_data import MAX_POINTS, about_lines, progress_lines, run_data, series_of
from mrl.store.evaluations import scores_by_environment, write_results
from mrl.store.run_files import State
from mrl.types import Prompt, RolloutGroup, RolloutInfo, Verdict
from tests.reading import read_page
from tests.unit.ops.view.runs import make_long_run, make_run, rollout, row, write_dump, write_metrics


def test_the_page_holds_what_the_files_say(tmp_path: Path):
    folder = make_run(tmp_path / "run", num_steps=5)
    (folder / "step_4").mkdir()
    (folder / "step_4/COMPLETE").write_text("")
    write_report(folder / "report.html", state="running")
    (run,) = read_page((folder / "report.html").read_text())["runs"]
    assert run["series"]["step"] == [0, 1, 2, 3, 4, 5] and run["series"]["val/accuracy"] == [0.25, *[None] * 5]
    progress = dict(run["progress"])
    assert progress["step"] == "5 of 50" and progress["last checkpoint"] == "step 4"
    assert re.fullmatch(r"about 0:01:30, until \d{4}-\d\d-\d\d \d\d:\d\d \S+", progress["time left"])
    assert (
        run["files"] == ["config.yaml", "metrics.jsonl", "logs/exp_001/", "logs/exp_001/actors/"]
        and dict(run["about"])["seed"] == "7"
    )
    assert progress["held-out accuracy"] == "0.250 at step 0" and dict(run["about"])["model"] == "tiny"
    assert run["health"] == {"level": "ok", "reason": "No problems found."}
    assert [row["content"][1] for row in run["rollouts"]["train_data_step5"]] == [
        f"answer {index} of step 5" for index in range(8)
    ]


def test_what_models_write_cannot_leave_the_data_block(tmp_path: Path):
    folder = make_run(tmp_path / "run", num_steps=1)
    write_dump(folder, 1, [rollout(0, "</script><script>alert(1)</script><img src=https://example.com/x>")])
    write_report(folder / "report.html")
    text = (folder / "report.html").read_text()
    assert (
        "alert(1)" not in text
        and text.count("<script") == 2
        and not re.findall(r"(?:src|href)\s*=", text.partition("<script>")[0])
    )
    assert "alert(1)" in json.dumps(read_page(text))


def test_a_name_of_a_run_is_escaped(tmp_path: Path):
    folder = make_run(tmp_path / "<b>run")
    assert "<title>&lt;b&gt;run</title>" in page([run_data(folder)])


def test_a_folder_without_a_step_has_a_page(tmp_path: Path):
    run = run_data(tmp_path)
    assert run["health"] == {"level": "ok", "reason": "No step has finished yet."} and run["series"] == {"step": []}


def test_an_advisory_makes_the_health(tmp_path: Path):
    folder = make_run(tmp_path / "run")
    write_metrics(folder, [row(1, train__kl_penalty=0.7)])
    assert run_data(folder)["health"] == {
        "level": "look",
        "reason": "Kl = 0.7 (above 0.5): the policy runs away from the reference.",
    }


def test_a_run_that_learns_nothing_or_masks_rollouts_is_not_well(tmp_path: Path):
    folder = make_run(tmp_path / "run")
    write_metrics(folder, [row(1, train__num_steps_without_signal=1)])
    assert "taught nothing" in str(run_data(folder)["health"])
    counts = {"num_rollouts": 32, "failed": 16, "error": 15, "timeout": 1}
    of_step = {f"rollout__own__{name}": count for name, count in counts.items()}
    write_metrics(folder, [row(1, **of_step), row(2, **of_step, rollout__math__num_rollouts=64)])
    for number, reason in ((1, "old"), (2, "ValueError: no sum, at own.py:3")):
        attempt = folder / f"logs/exp_00{number}"
        attempt.mkdir(parents=True, exist_ok=True)
        (attempt / "config.yaml").touch()
        (attempt / "masked.json").write_text(json.dumps({"error": reason}))
    data = run_data(folder)
    assert "('masked: error', 'ValueError: no sum, at own.py:3')" in str(data["progress"])
    assert "Masked share of the worst environment, own = 0.5" in str(data["health"])
    assert "('masked', '32 of 128 rollouts (25.0%): timeout 2, error 30')" in str(data["progress"])


def test_what_changed_between_attempts_is_told_with_the_step_from_which_it_holds(tmp_path: Path):
    folder = make_run(tmp_path / "run")
    config = (folder / "config.yaml").read_text()
    for number, rate in ((1, "0.001"), (2, "0.001"), (3, "0.01"), (10, "0.02")):
        attempt = folder / f"logs/exp_{number:03d}"
        attempt.mkdir(parents=True, exist_ok=True)
        (attempt / "config.yaml").write_text(config.replace("0.001", rate))
    write_metrics(
        folder, [row(1, logger__attempt=1.0), row(2, logger__attempt=2.0), row(3, logger__attempt=3.0), row(4)]
    )
    key = "policy.megatron_cfg.optimizer.lr"
    assert run_data(folder)["attempts"] == [
        {"name": "attempt 3", "step": 3, "changes": [f"{key}: 0.001 -> 0.01"]},
        {"name": "attempt 10", "step": None, "changes": [f"{key}: 0.01 -> 0.02"]},
    ]


def test_a_few_masked_rollouts_are_said_too(tmp_path: Path):
    folder = make_run(tmp_path / "run")
    write_metrics(
        folder, [row(1, rollout__own__num_rollouts=64, rollout__own__failed=1, rollout__own__error=1), row(2)]
    )
    reason = "Masked, and not trained on: 1 of 64 rollouts (1.6%): error 1."
    assert run_data(folder)["health"] == {"level": "look", "reason": reason}


def test_the_time_left_is_told_by_the_attempt_that_runs(tmp_path: Path):
    folder = make_run(tmp_path / "run", num_steps=5)
    attempt = folder / "logs/exp_002"
    attempt.mkdir()
    (attempt / "config.yaml").write_text((folder / "config.yaml").read_text())
    os.utime(folder / "metrics.jsonl", (1, 1))
    rows = [row(step) for step in range(6)]
    config = {"algorithm": "grpo", "grpo": {"max_num_steps": 50}}
    assert dict(progress_lines(rows, config, folder, "running"))["time left"].startswith("known after the first step")
    os.utime(folder / "metrics.jsonl")
    assert dict(progress_lines(rows, config, folder, "running"))["time left"].startswith("about 0:01:30")


def test_a_step_that_ran_again_shows_its_newer_rollouts(tmp_path: Path):
    folder = make_run(tmp_path / "run")
    write_dump(folder, 3, [rollout(0, "again")], attempt=2)
    rollouts = run_data(folder)["rollouts"]
    assert isinstance(rollouts, dict) and [row["content"][1] for row in rollouts["train_data_step3"]] == ["again"]


def test_a_torn_dump_gives_its_whole_lines(tmp_path: Path):
    folder = make_run(tmp_path / "run", num_steps=1)
    path = folder / "logs/exp_001/train_data_step1.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-12])
    rollouts = run_data(folder)["rollouts"]
    assert isinstance(rollouts, dict) and isinstance(rollouts["train_data_step1"], list)


def test_the_page_of_a_thousand_long_steps_is_small(tmp_path: Path):
    folder = make_long_run(tmp_path / "run")
    write_report(folder / "report.html")
    assert (folder / "report.html").stat().st_size < 8e6


def test_the_memory_that_the_plan_predicts_stands_beside_what_ranks_held(tmp_path: Path):
    folder = make_run(tmp_path / "run")
    (folder / "about.json").write_text(json.dumps({"mrl": "1.0", "plan": {"train": 5 * 10**9, "refit": 10**9}}))
    run = run_data(folder)
    assert run["memory"] == [
        {
            "phase": "train",
            "predicted_bytes": 5 * 10**9,
            "host_bytes": 10**9,
            "gpu_peak_bytes": 10**9,
            "gpu_used_bytes": 4 * 10**9,
        },
        {"phase": "refit", "predicted_bytes": 10**9},
        {"phase": "generate", "predicted_bytes": None, "engine_host_bytes": 3 * 10**9, "gpu_used_bytes": 10**9},
    ]
    assert isinstance(run["about"], list) and run["about"][-1] == ("mrl", "1.0")


def test_a_long_series_is_thinned_and_keeps_validations():
    rows = [row(step) | ({"val/accuracy": 0.5} if step % 1000 == 1 else {}) for step in range(1, 3 * MAX_POINTS + 1)]
    series = series_of(rows)
    assert MAX_POINTS <= len(series["step"]) <= MAX_POINTS + 6 and series["step"][-1] == 3 * MAX_POINTS
    assert sum(value is not None for value in series["val/accuracy"]) == 6


def test_checkpoints_are_counted_by_their_manifests(tmp_path: Path):
    folder = make_run(tmp_path / "run")
    for step, size in ((20, 1000), (3, 10)):
        (folder / f"step_{step}").mkdir()
        (folder / f"step_{step}/COMPLETE").write_text("")
        (folder / f"step_{step}/manifest.json").write_text(json.dumps({"a": {"bytes": size}, "b": {"bytes": 5}}))
    (folder / "step_30").mkdir()
    assert run_data(folder)["checkpoints"] == [
        {"step": 3, "files": 2, "bytes": 15},
        {"step": 20, "files": 2, "bytes": 1005},
    ]


def test_an_evaluation_has_its_scores_and_its_answers(tmp_path: Path):
    verdicts = tuple(Verdict(reward, True, "ok", "", f"answer {reward:g}") for reward in (1.0, 0.0))
    rollouts = tuple(RolloutInfo(f"0/a/{index}", "a", index, 1, 3, 5, "stop", None) for index in range(2))
    group = RolloutGroup(Prompt("a", (1,), "question", "1", "math"), rollouts, verdicts)
    scores = scores_by_environment([group], k=2)
    write_results(tmp_path / "evaluations/step_9.json", described={"metric": "pass@2"}, scores=scores, groups=[group])
    for folder in (tmp_path, tmp_path / "evaluations"):
        run = run_data(folder)
        assert run["evaluations"] == [{"name": "step_9", "metric": "pass@2", "scores": scores}]
        assert run["dumps"] == [{"name": "step_9", "step": "step_9", "split": "evaluation"}]
        shown = run["rollouts"]
        assert isinstance(shown, dict) and [row["content"][1] for row in shown["step_9"]] == ["answer 1", "answer 0"]


@pytest.mark.parametrize(
    ("nodes", "gpus", "hosts"),
    [(1, 0, "1 node, no GPU"), (1, 1, "1 node, 1 GPU"), (2, 8, "2 nodes, 8 GPUs each"), (2, 0, "2 nodes, no GPU")],
)
def test_the_page_names_hosts_in_words(nodes: int, gpus: int, hosts: str):
    assert dict(about_lines({"cluster": {"num_nodes": nodes, "gpus_per_node": gpus}}, {}))["hosts"] == hosts


def test_a_run_at_its_last_step_is_finished(tmp_path: Path):
    folder = make_run(tmp_path / "run", num_steps=3)
    config = {"algorithm": "grpo", "grpo": {"max_num_steps": 3}}
    cases: list[tuple[float, State]] = [(3, "over"), (2, "over"), (2, "running")]
    states = [dict(progress_lines([{"step": step}], config, folder, state))["state"] for step, state in cases]
    assert states == ["finished", "ended", "running"]
