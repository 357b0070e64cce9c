# SPDX-License-Identifier: Apache-2.0
"""A judge on a node of its own, of a real Ray cluster, answers rewards of a run, also after its engine has died."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from mrl.recipes import tokenizer
from tests.faults.attempts import tiny_inputs
from tests.models import save_model
from tests.sources import ROOT, search_path
from tests.stack.cluster.conftest import ray_nodes
from tests.stack.cluster.test_own_nodes import SIZES
from tests.stack.loop.conftest import SMALL
from tests.waiting import HANG_S, wait_until

PROMPT, NUM_TOKENS, NUM_CHOICES, NUM_ROLLOUTS = [12, 7, 30], 4, len(tokenizer.byte_tokenizer(1280)), 16
REWARD = f"""
import json
from pathlib import Path

from openai import OpenAI
from mrl.envs.endpoints import read_endpoints

ASKED = Path(__file__).with_name("asked.jsonl")


def asks(prompt, response, reference_answer):
    found = read_endpoints()
    client = OpenAI(base_url=found.judges["fair-1"], api_key=found.api_key, max_retries=0)
    (model,) = client.models.list().data
    asked = dict(model=model.id, prompt={PROMPT}, max_tokens={NUM_TOKENS}, temperature=0)
    answer = client.completions.create(**asked, extra_body=dict(return_token_ids=True))
    line = [model.id, answer.choices[0].token_ids, answer.weight_version]
    with ASKED.open("a") as file:
        file.write(json.dumps(line) + "\\n")
    return float(len(response) % 2)
"""


def greedy(folder: Path) -> list[int]:
    """The likeliest tokens after `PROMPT`, of those that the tokenizer has, by transformers."""
    model, tokens = AutoModelForCausalLM.from_pretrained(folder).float().eval(), list(PROMPT)
    for _ in range(NUM_TOKENS):
        with torch.no_grad():
            logits_V = model(torch.tensor([tokens])).logits[0, -1]
        tokens.append(int(logits_V[:NUM_CHOICES].argmax()))
    return tokens[len(PROMPT) :]


@pytest.mark.long("nodes")
def test_rewards_ask_a_judge_on_its_own_node_which_comes_back_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    judge, folder, asked = save_model(tmp_path / "judge", "qwen3_moe"), tmp_path / "run", tmp_path / "asked.jsonl"
    tokenizer.save(judge, model_max_length=1280)
    (tmp_path / "judging.py").write_text(REWARD)
    overrides = [
        *tiny_inputs(),
        *SMALL,
        *SIZES,
        "policy.generation.vllm_cfg.tensor_parallel_size=1",
        "cluster.cpu_units_per_node=1",
        "cluster.num_nodes=2",
        f"judges.fair-1.model_name={judge}",
        "judges.fair-1.max_model_len=64",
        "env.own.functions={asks: 'judging:asks'}",
        "env.own.allow=[network,files]",
        f"env.own.timeout_s={HANG_S}",
        "data.default.env_name=asks",
        "grpo.max_num_steps=2",
        "grpo.val_at_start=false",
        "checkpointing.enabled=false",
        f"checkpointing.checkpoint_dir={folder}",
    ]
    expected = ["fair-1", greedy(judge), 0]

    def answers() -> list[list]:
        return [json.loads(line) for line in asked.read_text().splitlines()] if asked.exists() else []

    def engines() -> list[int]:
        logs = list(folder.glob("logs/exp_*/actors/judge-fair-1-0.log"))
        return [int(pid) for pid in re.findall(r"process (\d+)$", logs[0].read_text(), re.MULTILINE)] if logs else []

    with ray_nodes(tmp_path, monkeypatch, 1, 1), (tmp_path / "said").open("w") as said:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{tmp_path}{os.pathsep}{search_path()}"}
        command = [sys.executable, "-m", "mrl.train", "grpo_tiny.yaml", *overrides]
        run = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=said, stderr=said)

        def kill_after(num_steps: int) -> None:
            """Kills the judge's engine as soon as it has answered rewards of the step after so many."""

            def is_time() -> bool:
                return len(answers()) > num_steps * NUM_ROLLOUTS and len(engines()) > num_steps

            wait_until(lambda: is_time() or run.poll() is not None, "answers of a step")
            if run.poll() is None:
                os.kill(engines()[-1], signal.SIGKILL)

        try:
            kill_after(0)
            kill_after(1)
            ended = run.wait(3 * HANG_S)
        finally:
            run.kill()
    text = (tmp_path / "said").read_text()
    assert ended == 0, text[-6000:]
    assert len(answers()) > NUM_ROLLOUTS and all(answer == expected for answer in answers())
    assert len(engines()) == 3 and "judge:fair-1 0" in text
    assert "is not scored" not in text and "No signal" not in text
