# SPDX-License-Identifier: Apache-2.0
"""Tiny models, a nemotron_h like Nemotron-3-Nano and a dense qwen3, taught by a short warm start in transformers."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import (
    GenerationConfig,
    NemotronHConfig,
    NemotronHForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer, NemotronHTopkRouter
from transformers.utils import logging as transformers_logging

from mrl.recipes.additions import Addition, Kind
from mrl.recipes.tokenizer import BOS_ID, END_ID, PAD_ID, VOCAB_SIZE

Model = NemotronHForCausalLM | Qwen3ForCausalLM

# B sequences, T tokens, V vocabulary.

logger = logging.getLogger(__name__)

MAX_POSITIONS = 4096
HYBRID: dict[str, Any] = {
    # An even number of layers, so that two pipeline stages divide it.
    "hybrid_override_pattern": "ME*EME",
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "chunk_size": 16,
    "intermediate_size": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 128,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "mlp_hidden_act": "relu2",
    "tie_word_embeddings": False,
}
DENSE: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the least that vLLM's attention takes
    "intermediate_size": 128,
    # Of 1 / sqrt(hidden_size), and turns that differ over the ten tokens of an addition: with the usual 0.02 and 10,000
    # the heads need thousands of steps to find the digits.
    "initializer_range": 0.1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "tie_word_embeddings": False,
}

# Two of three demonstrations forget the carry, so that the model learns what a carry is and yet prefers the wrong
# answer: asked for its likeliest answer, it is wrong wherever a carry is needed. Every digit is blurred with the other
# nine, so that sampled answers vary. A sampled answer is then right at most (0.35 * 0.65 + 0.035) * (0.65 + 0.035) =
# 0.18 of the time with a carry, 0.685^2 = 0.47 without.
FORGETTING = 0.65
SMOOTHING = 0.35
BATCH_SIZE = 128
STEPS_BETWEEN_PROBES = 2
MAX_STEPS = 1000


@dataclass(frozen=True)
class WarmStart:
    """Supervised training settings; it ends at `target`, the probability of a right sampled answer to the probe."""

    learning_rate: float
    weight_decay: float
    target: float


# With less weight decay the dense model learns its additions by heart: with 0.1 GRPO ended at 0.84 of held-out sums for
# one seed, with 0.3 at 0.97.
WARM_STARTS: dict[Kind, WarmStart] = {"tiny": WarmStart(2e-3, 0.0, 0.22), "tiny_dense": WarmStart(1e-2, 0.3, 0.23)}


def save_warm_started_model(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    warm_start: list[Addition],
    probe: list[Addition],
    *,
    seed: int,
    kind: Kind,
) -> None:
    """Writes the warm-started model into `folder` as a Hugging Face checkpoint. Repeats bit for bit on one machine."""
    # Sums must not depend on how many cores the machine has.
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    model = build_model(kind, seed=seed)
    train_until_probe(model, tokenizer, warm_start, probe, WARM_STARTS[kind], seed=seed)
    model.generation_config = GenerationConfig(
        bos_token_id=BOS_ID, eos_token_id=[END_ID], pad_token_id=PAD_ID, do_sample=True
    )
    model.save_pretrained(folder)


def build_model(kind: Kind, *, seed: int) -> Model:
    """The untrained model in float32, its random numbers drawn from `seed`."""
    torch.manual_seed(seed)
    common: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_POSITIONS}
    common |= {"pad_token_id": PAD_ID, "bos_token_id": BOS_ID, "eos_token_id": END_ID}
    if kind == "tiny_dense":
        return Qwen3ForCausalLM(Qwen3Config(**DENSE, **common)).float()
    model = NemotronHForCausalLM(NemotronHConfig(**HYBRID, **common)).float()
    for module in model.modules():
        if isinstance(module, NemotronHMamba2Mixer):
            # Transformers alone clamps dt from below (https://github.com/huggingface/transformers/pull/48989); Megatron
            # and vLLM do not.
            module.time_step_limit = (0.0, float("inf"))
        if isinstance(module, NemotronHTopkRouter):
            # Not zero, so that a lost correction bias changes the routing.
            module.e_score_correction_bias.normal_(std=0.02)
    return model


def train_until_probe(
    model: Model,
    tokenizer: PreTrainedTokenizerFast,
    train: list[Addition],
    probe: list[Addition],
    settings: WarmStart,
    *,
    seed: int,
) -> None:
    """Supervised training on answers until `sampled_accuracy` on `probe` reaches its target."""
    draw = random.Random(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=settings.weight_decay
    )
    probe_BT, num_answer_tokens = encode(tokenizer, probe)
    train_BT, _ = encode(tokenizer, train)
    forgetful_BT, _ = encode(tokenizer, train, forgets_carry=True)
    for step in range(1, MAX_STEPS + 1):
        rows = draw.choices(range(len(train)), k=BATCH_SIZE)
        batch_BT = train_BT[rows]
        teacher_BTV = demonstrations(batch_BT[:, -num_answer_tokens:], forgetful_BT[rows, -num_answer_tokens:])
        logits_BTV = answer_logits(model, batch_BT, num_answer_tokens)
        loss = functional.cross_entropy(logits_BTV.flatten(0, 1), teacher_BTV.flatten(0, 1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % STEPS_BETWEEN_PROBES:
            continue
        accuracy = sampled_accuracy(model, probe_BT, num_answer_tokens)
        if step % 20 == 0 or accuracy >= settings.target:
            logger.info("Warm start: step %d, loss %.3f, accuracy %.3f", step, loss.item(), accuracy)
        if accuracy >= settings.target:
            return
    raise RuntimeError(
        f"the warm start did not reach accuracy {settings.target} within {MAX_STEPS} steps; try another --seed"
    )


def encode(
    tokenizer: PreTrainedTokenizerFast, additions: Sequence[Addition], *, forgets_carry: bool = False
) -> tuple[Tensor, int]:
    """Chat-templated token ids int64 [B, T], and how many at their end are the answer and its end-of-turn token."""
    rows = []
    for addition in additions:
        answer = addition.answer_without_carry if forgets_carry else addition.answer
        turns = [{"role": "user", "content": addition.question}, {"role": "assistant", "content": answer}]
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        assert isinstance(text, str)
        rows.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    return torch.tensor(rows), len(additions[0].answer) + 1


def answer_logits(model: Model, tokens_BT: Tensor, num_answer_tokens: int) -> Tensor:
    """Logits of the last `num_answer_tokens` tokens given those before them, float32 [B, num_answer_tokens, V]."""
    return model(tokens_BT[:, :-1], use_cache=False, logits_to_keep=num_answer_tokens).logits


def demonstrations(right_BT: Tensor, forgetful_BT: Tensor) -> Tensor:
    """Probabilities of the teacher's tokens, float32 [B, T, V]."""
    right_BTV = functional.one_hot(right_BT, VOCAB_SIZE).float()
    forgetful_BTV = functional.one_hot(forgetful_BT, VOCAB_SIZE).float()
    any_digit_V = functional.one_hot(torch.arange(ord("0"), ord("9") + 1), VOCAB_SIZE).float().mean(0)
    sharp_BTV = (1 - FORGETTING) * right_BTV + FORGETTING * forgetful_BTV
    # The end of the answer stays sure: a rollout has the tokens of an answer, not more.
    return torch.where(right_BT[..., None] == END_ID, right_BTV, (1 - SMOOTHING) * sharp_BTV + SMOOTHING * any_digit_V)


@torch.no_grad()
def sampled_accuracy(model: Model, tokens_BT: Tensor, num_answer_tokens: int) -> float:
    """Probability that an answer sampled at temperature 1.0 is as expected, mean over rows: free of sampling noise."""
    logprobs_BTV = answer_logits(model, tokens_BT, num_answer_tokens).log_softmax(-1)
    return logprobs_BTV.gather(-1, tokens_BT[:, -num_answer_tokens:, None]).sum(1).exp().mean().item()
