# SPDX-License-Identifier: Apache-2.0
"""`python -m mrl.doctor --refit` on real policies and engines: it passes where all is well, and names what is not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from conversion.boxes import Slot
from conversion.families.common import Family
from mrl.ops.doctor import command as doctor
from mrl.ops.doctor import refit
from mrl.types import Rollout
from tests import models
from tests.rollouts import request
from tests.sources import ROOT
from tests.stack.loop.conftest import write_inputs
from tests.waiting import HANG_S
from tests.wrong_rule import ATTENTION_LAYER, WRONG_FAMILY

TIMEOUT_S = 3 * HANG_S
WRONG_EVERYWHERE = """
from conversion.families.common import Family

right = Family.vllm_layout


def wrong(family, *arguments):
    from tests.wrong_rule import WRONG_FAMILY

    return right(WRONG_FAMILY, *arguments)


Family.vllm_layout = wrong
"""
REPLAY = "policy.router_replay.enabled=true"


def log_folder_of(printed: str) -> Path:
    (folder,) = re.findall(r"^Logs of the processes: (\S+)", printed, re.MULTILINE)
    return Path(folder)


@pytest.mark.long("async")
def test_two_engines_at_another_tp_than_the_policy_are_well_with_router_replay_too(tmp_path: Path):
    layout = [
        "cluster.cpu_units_per_node=2",
        "policy.generation.vllm_cfg.tensor_parallel_size=1",
        "policy.generation.num_cpu_engines=2",
    ]
    command = [
        sys.executable,
        "-m",
        "mrl.doctor",
        "grpo_tiny.yaml",
        "--refit",
        *write_inputs(tmp_path),
        *layout,
        REPLAY,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    for line in (
        r"start +ok +2 policy ranks, 2 colocated engines, up to \d+ rollouts at once in steps of up to [\d,]+ tokens"
        r"; products of float32: torch float32",
        r"refit zero +ok +[\d,]{7,} bytes verified, [\d,]+ bytes of padding, [\d.]+ s with verification, [\d.]+ GB/s",
        r"refit +ok +[\d,]{7,} bytes verified, .*",
        r"new weights +ok +\d{3} tensors, all changed",
        r"logprobs engine 0 +ok +512 tokens, max \|dlogp\| \d.*e-0\d, mean .*, token_mult_prob_error 1\.0000.*",
        (
            r"logprobs engine 0, replayed +ok +512 tokens, max \|dlogp\| \d.*e-0\d, mean .*, token_mult_prob_error "
            r"1\.0000.*"
        ),
        r"logprobs engine 1, replayed +ok +512 tokens, .*",
        r"logprobs engine 1 +ok +512 tokens, .*",
    ):
        assert re.search(f"^{line}$", ended.stdout, re.MULTILINE), (line, ended.stdout)
    assert not (tmp_path / "run").exists() and not log_folder_of(ended.stdout).exists()


def test_a_wrong_rule_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    # As many key heads as query heads: exchanged, they have each other's shapes.
    inputs = write_inputs(tmp_path)
    multi_head = models.save_nemotron_h(
        tmp_path / "multi_head", num_key_value_heads=models.TINY_NEMOTRON_H["num_attention_heads"]
    )
    overrides = [
        *inputs,
        f"policy.tokenizer.name={tmp_path / 'model'}",
        f"policy.model_name={multi_head}",
        "cluster.cpu_units_per_node=2",
    ]
    # Every process computes the schedule, and takes keys for queries. Those that Ray starts read sitecustomize.py
    # first.
    (tmp_path / "sitecustomize.py").write_text(WRONG_EVERYWHERE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    right = Family.vllm_layout
    monkeypatch.setattr(Family, "vllm_layout", lambda family, *arguments: right(WRONG_FAMILY, *arguments))
    assert doctor.main(["grpo_tiny.yaml", "--refit", *overrides]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"^start +ok ", printed, re.MULTILINE)
    slot = f"model.layers.{ATTENTION_LAYER}.mixer.qkv_proj.weight"
    assert re.search(
        rf"^refit zero +FAILED +refit zero changed 1 of \d+ tensors .* {re.escape(slot)}$", printed, re.MULTILINE
    )
    assert "What to do about refit zero: " in printed
    assert "logprobs" not in printed
    log_folder = log_folder_of(printed)
    assert (log_folder / "engine-0.log").is_file()
    shutil.rmtree(log_folder)


def test_bad_input_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert (
        doctor.main(["grpo_tiny.yaml", "--refit", *write_inputs(tmp_path), "policy.generation.num_cpu_engines=9"]) == 2
    )
    assert "policy.generation.num_cpu_engines=9" in capsys.readouterr().out


def rollout_with(generator_logprobs: list[float]) -> Rollout:
    logprobs = np.array(generator_logprobs, dtype=np.float32)
    return Rollout(request([1, 2]), 1, np.zeros(len(logprobs), dtype=np.int32), logprobs, "length")


@pytest.mark.parametrize(
    ("error", "num_off", "precision", "is_ok"),
    [
        (9e-6, 200, "float32", True),
        (2e-5, 2, "float32", True),  # a router that flipped at 1 % of the tokens
        (2e-5, 3, "float32", False),
        (0.5, 1, "float32", False),
        (0.09, 200, "bfloat16", True),
        (0.11, 200, "bfloat16", False),
        (0.24, 200, "fp8", True),
        (0.25, 200, "fp8", False),
        (float("nan"), 1, "float32", False),
        (float("nan"), 1, "bfloat16", False),
        (-float("inf"), 2, "float32", True),  # ruled out by top-k or top-p
        (-float("inf"), 2, "bfloat16", True),
        (-float("inf"), 3, "bfloat16", False),
    ],
)
def test_limits_of_logprob_differences(error: float, num_off: int, precision: str, is_ok: bool):
    generator = [-1.0] * 200
    trainer = np.array([-1.0 + error] * num_off + generator[num_off:], dtype=np.float32)
    halves = [rollout_with(generator[:70]), rollout_with(generator[70:])]
    finding = refit.compare(
        halves, [trainer[:70], trainer[70:]], precision, refit.MAX_MULT_PROB_ERROR, subject="engine 0"
    )
    assert finding.is_ok == is_ok, finding


def test_a_tensor_that_kept_its_values_is_named():
    first, second = Slot("first"), Slot("second")
    assert refit.changed_tensors({0: [{first: 1, second: 2}]}, {0: [{first: 3, second: 4}]}) == "2 tensors, all changed"
    with pytest.raises(RuntimeError, match="did not change: second$"):
        refit.changed_tensors({0: [{first: 1, second: 2}]}, {0: [{first: 3, second: 2}]})
