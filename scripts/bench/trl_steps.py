# SPDX-License-Identifier: Apache-2.0
"""Step seconds of TRL GRPOTrainer on grpo_tiny.yaml's model, prompts, rewards; vs_trl.py runs it in TRL's environment.

Usage: python trl_steps.py PREPARED ROLLOUTS NEW_TOKENS STEPS SETTINGS OUT

PREPARED is the folder of `python -m mrl.prepare tiny`; OUT gets a JSON list.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

GENERATIONS, LEARNING_RATE = 16, 1e-3


def main() -> None:
    """Trains STEPS steps of ROLLOUTS rollouts of NEW_TOKENS tokens, 16 to a prompt."""
    # Only TRL's environment has these.
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    prepared, settings, out = Path(sys.argv[1]), sys.argv[5], Path(sys.argv[6])
    rollouts, new_tokens, steps = map(int, sys.argv[2:5])
    batches = {
        "TRL's defaults": dict(gradient_accumulation_steps=rollouts // 8),
        "one batch": dict(per_device_train_batch_size=rollouts, gradient_checkpointing=False),
    }
    rows = [json.loads(line) for line in (prepared / "data" / "train.jsonl").read_text().splitlines()]
    data = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in rows]
    )
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            ends.append(time.monotonic())

    def is_right(completions: list[list[dict[str, str]]], answer: list[str], **_: object) -> list[float]:
        return [
            float(completion[0]["content"].strip() == right)
            for completion, right in zip(completions, answer, strict=True)
        ]

    config = GRPOConfig(
        output_dir=str(out.with_suffix(".trl")),
        num_generations=GENERATIONS,
        max_completion_length=new_tokens,
        generation_kwargs={"min_new_tokens": new_tokens},
        max_steps=steps,
        learning_rate=LEARNING_RATE,
        beta=0.0,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **batches[settings],
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(prepared / "model", dtype="float32"),
        reward_funcs=is_right,
        args=config,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(prepared / "model"),
        callbacks=[Clock()],
    )
    started = time.monotonic()
    trainer.train()
    out.write_text(json.dumps([end - begin for begin, end in zip([started, *ends[:-1]], ends, strict=True)]))


if __name__ == "__main__":
    main()
