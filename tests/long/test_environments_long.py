# SPDX-License-Identifier: Apache-2.0
"""A mixed run: rows of every built-in environment and of a user's function in one batch, in the real loop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrl.config.schema.env import BUILT_IN
from mrl.loop.main import main
from mrl.train import train
from tests.stack.loop.conftest import SMALL, write_inputs

pytestmark = [pytest.mark.long("environments"), pytest.mark.timeout(900)]

OWN = """
import os, time

def moody(prompt, response, reference_answer):
    mood = sum(response.encode()) % 7
    if mood == 0:
        os._exit(3)
    if mood == 1:
        time.sleep(60)
    if mood == 2:
        return float("nan")
    if mood == 3:
        bytearray(1 << 40)
    return {"length": len(response) / 100, "mood": mood / 7}

def chatty(turns):
    return {"reward": float(len(turns)), "observation": "go on"}
"""
ROWS: dict[str, dict[str, object]] = {
    "math": {"answer": "3"},
    "mcqa": {"expected_answer": "B", "options": [{"A": "one"}, {"B": "two"}]},
    "code": {"verifier_metadata": {"unit_tests": {"inputs": ["1"], "outputs": ["1"]}}},
    "instruction_following": {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
    "structured_outputs": {"schema_str": json.dumps({"type": "object", "properties": {"a": {"type": "string"}}})},
    "workplace_assistant": {
        "ground_truth": [{"name": "email_send_email", "arguments": '{"recipient": "a@b", "subject": "b", "body": "c"}'}]
    },
    "moody": {"answer": "x"},
    "chatty": {"answer": "x"},
}
NUM_STEPS = 3


def test_rows_of_all_environments_are_trained_on_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Modules of the folder in which a run starts are found in all of its processes.
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # as `python -m` does
    (tmp_path / "moody_rewards.py").write_text(OWN)
    inputs = write_inputs(tmp_path)
    assert set(BUILT_IN) < set(ROWS)
    rows = [{"question": f"{name} {i}?", "env_name": name, **fields} for i in range(4) for name, fields in ROWS.items()]
    for name in ("train", "validation"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [
        *inputs,
        *SMALL,
        f"grpo.num_prompts_per_step={len(ROWS)}",
        f"grpo.max_num_steps={NUM_STEPS}",
        "grpo.max_rollout_turns=3",
        "data.shuffle=false",
        "policy.generation.stop_strings=[e,t,a,o,i,n,s,h,r]",
        "++env.own.functions.moody=moody_rewards:moody",
        "++env.own.functions.chatty=moody_rewards:chatty",
        "env.own.timeout_s=2.0",
        "env.own.num_workers=2",
    ]
    assert main(train, ["grpo_tiny.yaml", *overrides]) == 0
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in metrics if row["step"] > 0]
    assert len(steps) == NUM_STEPS
    for step in steps:
        for name in ROWS:
            assert step[f"rollout/{name}/num_rollouts"] == 4, name
        # Of these none may fail.
        assert [name for name in BUILT_IN if step[f"rollout/{name}/failed"]] == []
        assert step["rollout/failed"] == step["rollout/moody/failed"]
        assert step["train/token_mult_prob_error"] <= 1.001
    total = {
        kind: sum(step.get(f"rollout/moody/{kind}", 0.0) for step in steps)
        for kind in ("failed", "crash", "timeout", "error")
    }
    assert total["failed"] == total["crash"] + total["timeout"] + total["error"] > 0
    assert max(step["rollout/chatty/turns"] for step in steps) > 1.0
