# SPDX-License-Identifier: Apache-2.0
"""The pages of docs/extend, followed literally: one run with everything that they add, and a loop of one's own."""

from __future__ import annotations

import csv
import gzip
import json
import re
import shlex
import statistics
from pathlib import Path

import pytest

from mrl.recipes import tokenizer
from mrl.recipes.tiny import prepare_tiny
from tests import models
from tests.learn.quickstart import PREPARE_TIMEOUT_S, TRAIN_TIMEOUT_S, call
from tests.sources import ROOT
from tests.waiting import HANG_S

EXAMPLES = ROOT / "examples"
IN_ONE_RUN = ("reward", "environment", "estimator", "loss", "processor", "logger")
NUM_STEPS, GROUP = 2, 8
OF_OTHERS = ("tokenize", "queue", "secrets", "conversion", "datasets", "evaluate", "train", "agent")
"""Files that lie beside the user's own, and that no process may import in place of a library."""


def commands(page: str) -> list[list[str]]:
    """The commands of a page, as words."""
    (block,) = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "extend" / f"{page}.md").read_text(), re.DOTALL)
    return [shlex.split(line) for line in block.replace("\\\n", " ").splitlines()]


def overrides_of(page: str) -> list[str]:
    words = commands(page)[-1]
    assert words[:4] == ["python", "-m", "mrl.train", "grpo_tiny.yaml"]
    return words[4:]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a tiny Mistral, which has the family, the rows and all functions of the pages."""
    folder = tmp_path_factory.mktemp("extend")
    for path in EXAMPLES.glob("own_*.py"):
        (folder / path.name).write_text(path.read_text())
    model = models.save_model(folder / "model", "mistral")
    tokenizer.save(model, model_max_length=1280)
    # As the page installs it, but into the run's own folder.
    package = str(EXAMPLES / "own_family")
    assert commands("family")[0] == ["pip", "install", "--no-deps", "./own_family"]
    call(
        folder,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        ".",
        package,
        timeout_s=PREPARE_TIMEOUT_S,
    )
    for name in OF_OTHERS:
        (folder / f"{name}.py").write_text("raise SystemExit(__file__ + ' is the wrong one')")
    (folder / "terms.jsonl").write_text(call(folder, *commands("processor")[1][1:3], timeout_s=HANG_S))
    letters = ",".join("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    overrides = [
        f"policy.model_name={model}",
        "data.validation=null",
        "grpo.val_period=0",
        "grpo.val_at_start=false",
        "grpo.val_at_end=false",
        "checkpointing.enabled=false",
        "checkpointing.checkpoint_dir=run",
        f"grpo.max_num_steps={NUM_STEPS}",
        "grpo.num_prompts_per_step=8",
        f"grpo.num_generations_per_prompt={GROUP}",
        # A random model says a letter soon, and so ends its turn.
        f"policy.generation.stop_strings=[{letters}]",
        "policy.megatron_cfg.expert_model_parallel_size=1",
        "cluster.cpu_units_per_node=2",
        # The mean over rollouts, whose lengths the test does not know.
        "loss_fn.token_level_loss=false",
    ]
    words = [word for page in IN_ONE_RUN for word in overrides_of(page)]
    call(folder, "-m", "mrl.train", "grpo_tiny.yaml", *words, *overrides, timeout_s=TRAIN_TIMEOUT_S)
    return folder / "run"


def dumped(run_folder: Path, step: int) -> list[dict]:
    with gzip.open(run_folder / "logs" / "exp_001" / f"train_data_step{step}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def metrics_of(run_folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


def test_the_family_fits_vllms_loader_and_transformers(run_folder: Path):
    # Refit zero has found every byte as vLLM's loader wrote it, or the run would have ended.
    for row in metrics_of(run_folder):
        assert row["refit/verified_bytes"] > 0 and row["train/mean_abs_dlogp"] < 1e-5


def test_rows_reach_the_reward_and_the_environment(run_folder: Path):
    terms = [json.loads(line)["terms"] for line in (run_folder.parent / "terms.jsonl").read_text().splitlines()]
    assert {row["content"][0] for step in (1, 2) for row in dumped(run_folder, step)} <= {f"{a}+{b}=" for a, b in terms}
    rows = metrics_of(run_folder)
    assert max(row["rollout/second_try/turns"] for row in rows) > 1 and {row["rollout/failed"] for row in rows} == {0}
    assert max(row["rollout/digits_and_sum/reward_digits"] for row in rows) > 0
    talks = [row["conversations"] for row in dumped(run_folder, 1) if row["num_turns"] > 1]
    assert talks and all(
        [said["role"] for said in talk] == ["prompt", "assistant", "environment", "assistant"] for (talk,) in talks
    )
    assert all(talk[0]["content"].count("+") == 1 and ", again: " in talk[2]["content"] for (talk,) in talks)


def test_advantages_are_ranks(run_folder: Path):
    rows = dumped(run_folder, 1)
    for first in range(0, len(rows), GROUP):
        group = rows[first : first + GROUP]
        rewards = sorted(row["rewards"] for row in group)
        for row in group:
            place = statistics.mean(index for index, reward in enumerate(rewards) if reward == row["rewards"])
            assert row["advantages"] == pytest.approx(2 * place / (GROUP - 1) - 1)
    assert len({row["advantages"] for row in rows}) > 2


def test_the_loss_is_the_soft_gate(run_folder: Path):
    # On the policy the ratio is 1, and the gate 2 / tau.
    valid = [row["advantages"] for row in dumped(run_folder, 1) if row["sample_loss_mask"]]
    expected = -statistics.mean(advantage * 2 / (1.0 if advantage > 0 else 1.05) for advantage in valid)
    assert metrics_of(run_folder)[0]["train/loss"] == pytest.approx(expected, rel=1e-4)


def test_the_logger_has_every_step(run_folder: Path):
    with (run_folder / "logs" / "exp_001" / "rewards.csv").open() as file:
        logged = [(int(step), float(reward)) for step, reward in csv.reader(file)]
    assert logged == [(row["step"], row["train/reward"]) for row in metrics_of(run_folder)]
    assert len(logged) == NUM_STEPS


def test_the_loop_of_ones_own_trains_as_mrls_does(tmp_path: Path):
    """The example computes the estimator of grpo_tiny.yaml by hand: step by step both have the same losses and weights.

    So has the loop on the first page, as it is printed there, with a smaller config of that name beside it.
    """
    prepare_tiny(ROOT / "prepared" / "tiny", seed=0)
    (tmp_path / "prepared").symlink_to(ROOT / "prepared")
    (tmp_path / "grpo_tiny.yaml").write_text(
        f"defaults: {ROOT / 'configs' / 'grpo_tiny.yaml'}\ncluster: {{cpu_units_per_node: 2}}\ngrpo: "
        f"{{num_prompts_per_step: 8, num_generations_per_prompt: {GROUP}, max_val_samples: 8, val_period: 0, "
        f"val_at_start: false, val_at_end: false}}\n"
    )
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    printed = call(tmp_path, "-c", block, timeout_s=TRAIN_TIMEOUT_S)
    assert re.search(r"^\d\d\+\d\d= \d+ [01]\.0$", printed, re.MULTILINE) and "{'val/accuracy': " in printed, printed[
        -6000:
    ]
    short = ["grpo.max_num_steps=2"]
    console = call(tmp_path, str(EXAMPLES / "own_loop.py"), *short, timeout_s=TRAIN_TIMEOUT_S)
    assert "accuracy before: 0." in console and "bytes of the engines verified" in console
    assert (tmp_path / "results" / "own_loop" / "step_2" / "policy").is_dir()
    call(
        tmp_path,
        "-m",
        "mrl.train",
        "grpo_tiny.yaml",
        *short,
        "checkpointing.checkpoint_dir=mrls",
        timeout_s=TRAIN_TIMEOUT_S,
    )
    folders = ("results/own_loop", "results/mine", "mrls")
    own, first_page, mrls = ([row for row in metrics_of(tmp_path / name) if "train/loss" in row] for name in folders)
    assert [row["step"] for row in own] == [row["step"] for row in mrls] == [1, 2]
    assert [row["step"] for row in first_page] == [1, 2, 3, 4]
    for name in folders:
        ended = json.loads((tmp_path / name / "logs/exp_001/ended.json").read_text())
        assert (ended["code"], ended["text"]) == (0, "The run is complete")
    for name in ("train/reward", "train/loss", "train/grad_norm", "refit/verified_bytes"):
        for rows in (own, first_page[:2]):
            assert [row[name] for row in rows] == pytest.approx([row[name] for row in mrls], rel=1e-5, abs=1e-8), name


def test_the_agent_trains(tmp_path: Path):
    prepare_tiny(ROOT / "prepared" / "tiny", seed=0)
    (tmp_path / "prepared").symlink_to(ROOT / "prepared")
    (tmp_path / "own_agent.py").write_text((EXAMPLES / "own_agent.py").read_text())
    short = [
        "cluster.cpu_units_per_node=2",
        f"grpo.max_num_steps={NUM_STEPS}",
        "grpo.num_prompts_per_step=8",
        f"grpo.num_generations_per_prompt={GROUP}",
        "grpo.max_val_samples=8",
        "grpo.val_period=0",
        "checkpointing.enabled=false",
        "checkpointing.checkpoint_dir=run",
    ]
    call(tmp_path, "-m", "mrl.train", "grpo_tiny.yaml", *overrides_of("your_agent"), *short, timeout_s=TRAIN_TIMEOUT_S)
    rows = [row for row in metrics_of(tmp_path / "run") if "train/loss" in row]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["rollout/sums/failed"] == row["rollout/dropped_agent_groups"] == 0
        # Those that were wrong at first have gone on from the same tokens: a rollout is one sequence.
        assert 1 <= row["rollout/sums/turns"] <= 2 and row["rollout/sums/sequences"] == 1
        assert row["train/token_mult_prob_error"] <= 1.001
