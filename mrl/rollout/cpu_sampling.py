# SPDX-License-Identifier: Apache-2.0
"""Random draws of vLLM on CPU hosts: a request's tokens depend on its seed alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from mrl.rollout.requests import SEED_STEP


class CountingGenerator(torch.Generator):
    """A seed and a number of draws, which vLLM's model runner can rewind like a CUDA generator: by offset 4 a draw."""

    num_draws = 0

    def get_offset(self) -> int:
        return 4 * self.num_draws

    def set_offset(self, offset: int) -> None:
        self.num_draws = offset // 4


@dataclass
class CountingRequest(CachedRequestState):
    """A request whose generator counts its draws, and which knows what it needs to come back to a batch."""

    num_accepted: int = 1
    """Tokens of its last step that it kept: where its Mamba states lie."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.generator is not None:
            self.generator = CountingGenerator(device="cpu").manual_seed(self.generator.initial_seed())


def draw_tokens(
    sampler: TopKTopPSampler,
    logits: Tensor,
    generators: dict[int, CountingGenerator],
    k: Tensor | None,
    p: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    logits = apply_top_k_top_p(logits, k, p)
    logprobs = None
    if sampler.logprobs_mode == "processed_logprobs":
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
    elif sampler.logprobs_mode == "processed_logits":
        logprobs = logits
    seeds = torch.randint(0, 2**31, (len(logits),))
    if generators:
        drawn = np.array([(one.initial_seed(), one.num_draws) for one in generators.values()], dtype=np.uint64)
        seeds[list(generators)] = gumbel_seeds(drawn[:, 0], drawn[:, 1])
        for generator in generators.values():
            generator.num_draws += 1
    return torch.ops._C.fused_gumbel_argmax(logits.float(), seeds), logprobs


def gumbel_seeds(seeds: np.ndarray, indices: np.ndarray) -> Tensor:
    """The seed of draw `indices` of each request's seed, int64."""
    return torch.from_numpy(splitmix64(seeds, indices) >> np.uint64(33)).long()


def splitmix64(seeds: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Output `indices` of each seed's generator, uint64 (Steele: Fast Splittable Pseudorandom Number Generators)."""
    z = seeds + (indices + np.uint64(1)) * np.uint64(SEED_STEP)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
