# SPDX-License-Identifier: Apache-2.0
"""Self-distillation as its command: the starting model, in a layout of its own, scores rollouts behind a solution."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mrl.recipes.tiny import prepare_tiny
from mrl.store.rollout_files import RecordedStep, read_record
from mrl.types import TeacherTokens
from tests.sources import ROOT
from tests.stack.pipeline.test_pipeline_run import rows, train
from tests.stack.policy.layouts import transformers_model

TINY = ROOT / "prepared" / "tiny"
K = 6


@pytest.mark.long("distillation")
def test_a_teacher_scores_the_students_tokens_behind_its_own_prompt(tmp_path: Path):
    prepare_tiny(TINY, seed=0)
    pairs = [(a, b) for a in (12, 105, 7) for b in (34, 8)]
    # Solutions of several lengths, which are longer than the questions.
    data = [
        {"question": f"{a}+{b}=", "answer": str(a + b), "id": f"{a}+{b}", "solution": f"{a}+{b}={a + b}" * (1 + a % 3)}
        for a, b in pairs
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    (tmp_path / "form.txt").write_text("{hint};{}")
    train(
        tmp_path / "run",
        "cluster.cpu_units_per_node=2",
        f"teacher.model_name={TINY / 'model'}",
        f"data.train.datasets=[{{data_path: {tmp_path / 'rows.jsonl'}}}]",
        "data.train.data_path=null",
        "data.default.teacher_key=solution",
        f"data.default.teacher_prompt_file={tmp_path / 'form.txt'}",
        "distillation.num_prompts_per_step=6",
        "distillation.num_generations_per_prompt=2",
        "distillation.max_num_steps=2",
        f"distillation.topk_logits_k={K}",
        *(f"distillation.{key}" for key in ("val_period=0", "val_at_start=false", "val_at_end=false")),
        "logger.record_steps=2",
        "checkpointing.enabled=false",
        config="distillation_tiny.yaml",
    )
    # The student is the teacher: without the solution it would have nothing to learn in the first step.
    assert rows(tmp_path / "run")[0]["train/kl_forward"] > 1e-4
    model, shown = transformers_model(TINY / "model"), {}
    for row in data:
        shown[row["id"]] = [*f"{row['solution']};{row['question']}".encode()]
    seen = set[str]()
    for step in (1, 2):
        record = read_record(tmp_path / f"run/recorded/step_{step}.mrl", RecordedStep)
        for sequence in record.batches[0].sequences:
            rollout, said = sequence.rollout.pulled, sequence.teacher
            assert isinstance(said, TeacherTokens)
            own = [*rollout.request.token_ids]
            question = [*f"{rollout.request.prompt_id}=".encode()]
            at = next(place for place in range(len(own)) if own[place : place + len(question)] == question)
            # What the chat template writes around the question is around the teacher's, too.
            prompt = [*own[:at], *shown[rollout.request.prompt_id], *own[at + len(question) :]]
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *rollout.token_ids.tolist()]])).logits[0, len(prompt) - 1 : -1]
            best = torch.topk(logits, K, dim=-1).values.numpy()
            np.testing.assert_allclose(said.scores, best, atol=1e-4, rtol=1e-4)
            chosen = logits.gather(1, torch.from_numpy(said.token_ids).long())
            np.testing.assert_allclose(chosen.numpy(), said.scores, atol=1e-4, rtol=1e-4)
            seen.add(rollout.request.prompt_id)
    assert seen == shown.keys()
