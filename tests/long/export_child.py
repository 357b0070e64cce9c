# SPDX-License-Identifier: Apache-2.0
"""Process of a test: vLLM samples from a model folder, transformers scores the tokens. Prints the mean difference."""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM

from mrl.config.load import load_config
from mrl.rollout.engine import Engine
from mrl.types import RolloutRequest, SamplingParams
from tests import models

NUM_TOKENS = 24


def main(folder: str, precision: str) -> None:
    overrides = [
        f"policy.model_name={folder}",
        f"policy.precision={precision}",
        "policy.generation.vllm_cfg.max_model_len=512",
    ]
    overrides += ["policy.generation.vllm_cfg.tensor_parallel_size=1"]
    engine = Engine(folder, load_config("grpo_tiny.yaml", overrides).policy.generation, seed=0, worker_timeout_s=300.0)
    engine.set_weight_version(1)
    prompt = tuple(int(token) for token in torch.randint(0, 256, (60,), generator=torch.Generator().manual_seed(0)))
    engine.add([RolloutRequest("a", 0, 0, 1, prompt, SamplingParams(1.0, 1.0, None, NUM_TOKENS, ()))])
    rollouts = []
    while engine.num_unfinished:
        rollouts += engine.step()
    model = models.unclamp_dt(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
    ids = torch.tensor([[*prompt, *map(int, rollouts[0].token_ids)]])
    with torch.no_grad():
        logprobs = (
            model(ids).logits.log_softmax(-1)[0, -NUM_TOKENS - 1 : -1].gather(1, ids[0, -NUM_TOKENS:, None])[:, 0]
        )
    difference = (logprobs - torch.as_tensor(rollouts[0].generator_logprobs)).abs()
    print(f"difference {difference.mean():.3g} {difference.median():.3g}", flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
