# SPDX-License-Identifier: Apache-2.0
"""`python scripts/evaluate_export.py MODEL DATA.jsonl`: accuracy of a model in plain transformers.

One answer a problem sampled at temperature 1.0, and the likeliest (greedy) one.
"""

import argparse
import itertools
import json
import re
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", help="Hugging Face folder, such as `python -m mrl.convert mcore-to-hf` writes")
parser.add_argument("data", help='JSONL with rows {"question", "answer"}')
parser.add_argument("--max-new-tokens", type=int, default=16)
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()

torch.manual_seed(options.seed)
tokenizer = AutoTokenizer.from_pretrained(options.model)
model: Any = AutoModelForCausalLM.from_pretrained(options.model).eval()
for module in model.modules():
    if hasattr(module, "time_step_limit"):
        module.time_step_limit = (
            0.0,
            float("inf"),
        )  # transformers alone clamps dt from below; Megatron and vLLM do not
rows = [json.loads(line) for line in open(options.data, encoding="utf-8")]
for number, row in enumerate(rows, start=1):
    if lacking := {"question", "answer"} - row.keys():
        parser.error(
            f"{options.data}:{number} has no {' and no '.join(sorted(lacking))}. This script reads questions and "
            "answers; `python -m mrl.evaluate RUN_FOLDER` reads the run's own columns, and judges by its rewards"
        )
    turns = [{"role": "user", "content": row["question"]}]
    row["ids"] = tokenizer(
        tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True), add_special_tokens=False
    ).input_ids
ways: dict[str, dict[str, Any]] = {
    "sampled": {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0},
    "greedy": {"do_sample": False},
}
num_right = dict.fromkeys(ways, 0)
# Batches of equal length, because padding would run through the Mamba layers' state.
for _, batch in itertools.groupby(sorted(rows, key=lambda row: len(row["ids"])), key=lambda row: len(row["ids"])):
    batch = list(batch)
    prompts = torch.tensor([row["ids"] for row in batch])
    for way, settings in ways.items():
        answers = model.generate(prompts, max_new_tokens=options.max_new_tokens, **settings)[:, prompts.shape[1] :]
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        num_right[way] += sum(
            re.findall(r"-?\d+", text)[-1:] == [row["answer"]] for row, text in zip(batch, texts, strict=True)
        )
shares = ", ".join(f"{num_right[way] / len(rows):.4f} {way}" for way in ways)
print(f"accuracy {shares}, over {len(rows)} problems")
