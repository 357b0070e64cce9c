# SPDX-License-Identifier: Apache-2.0
"""Random draws of vLLM on CPU hosts: a request's tokens depend on its seed alone, also with speculative decoding.

`mrl.rollout.cpu.PATCHES` says what stands in for what in vLLM 0.32, and why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
import vllm._custom_ops as ops
from torch import Tensor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from mrl.rollout.requests import SEED_STEP

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


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


def convolve_proposed(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slots: Tensor,
    num_accepted: Tensor,
    starts: Tensor,
) -> Tensor:
    """The causal convolution of the tokens of each sequence [tokens, channels], from the inputs before them.

    A sequence's state holds the inputs of the last step: the ones before its tokens, and all of its tokens but the
    last, of which `num_accepted` were right. Each token gets a window of its own, as in decoding without proposals: the
    bits are the same.
    """
    width, out = weight.shape[1], torch.empty_like(x)
    for length, chosen in _by_length(starts):
        rows = starts[chosen].long()[:, None] + torch.arange(length)
        offsets = (num_accepted[chosen].long() - 1)[:, None] + torch.arange(width - 1)
        held = conv_state[slots[chosen]]
        before = held.gather(2, offsets[:, None].expand(-1, held.shape[1], -1))
        window = torch.cat([before, x[rows].transpose(1, 2)], dim=-1)
        steps = window.unfold(2, width, 1).permute(0, 2, 1, 3).reshape(-1, window.shape[1], width).contiguous()
        out[rows.reshape(-1)] = F.conv1d(steps, weight.unsqueeze(1), bias, groups=len(weight))[..., 0]
        held[..., : width - 2 + length] = window[..., 1:]
        conv_state[slots[chosen]] = held
    return F.silu(out)


def scan_proposed(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    slots: Tensor,
    num_accepted: Tensor,
    starts: Tensor,
    out: Tensor,
) -> None:
    """Mamba's scan over the tokens of each sequence, one by one, as decoding does; `dt` has its bias and its softplus.

    `slots` [sequences, tokens] take the state after each token. The state before them is the one after the last
    accepted token.
    """
    lengths = starts.diff()
    first = slots.gather(1, (num_accepted.long() - 1).clamp(min=0)[:, None])[:, 0]
    states = state[first].float()
    for place in range(int(lengths.max())):
        chosen = (lengths > place).nonzero()[:, 0]
        rows = starts[chosen].long() + place
        result, held = torch.empty((len(rows), *out.shape[1:]), dtype=out.dtype), states[chosen]
        bounds = torch.arange(len(rows) + 1, dtype=torch.int32)
        inputs = (x[rows], dt[rows].contiguous(), A, B[rows], C[rows], D)
        ops.mamba_chunk_scan_fwd_cpu(result, held, *inputs, None, bounds)
        out[rows], states[chosen] = result, held
        state[slots[chosen, place]] = held.to(state.dtype)


def _by_length(starts: Tensor) -> list[tuple[int, Tensor]]:
    """Sequences by their number of tokens."""
    lengths = starts.diff()
    return [(length, (lengths == length).nonzero()[:, 0]) for length in lengths[lengths > 0].unique().tolist()]


def spread(x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
    """A setting of each request, for each of its tokens, with one value replaced by another."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1)).long()
    return torch.where(x == replace_from, torch.full_like(x, replace_to), x).repeat_interleave(
        counts, output_size=num_tokens
    )


class Returning(Protocol):
    """`mrl.rollout.cpu_sampling.CountingRequest`."""

    num_tokens: int
    num_computed_tokens: int
    num_accepted: int


def note_accepted(original: Callable[..., object]) -> Callable[..., object]:
    """`GPUModelRunner._update_states`, before which each request of the last step learns how many tokens it kept."""

    def update_states(runner: GPUModelRunner, scheduler_output: SchedulerOutput) -> object:
        batch = runner.input_batch
        for row, request_id in enumerate(batch.req_ids):
            cast(Returning, runner.requests[request_id]).num_accepted = int(batch.num_accepted_tokens_cpu[row])
        return original(runner, scheduler_output)

    return update_states


def come_back(original: Callable[..., int]) -> Callable[..., int]:
    """`InputBatch.add_request` for requests that have sampled tokens already.

    What they compute anew counts as prompt to its end. One that a step left out, because others had taken all of its
    tokens, finds the states of its last step where its accepted tokens put them.
    """

    def add_request(batch: InputBatch, request: Returning) -> int:
        row = original(batch, request)
        batch.num_prompt_tokens[row] = request.num_tokens
        if request.num_computed_tokens:
            batch.num_accepted_tokens_cpu[row] = request.num_accepted
        return row

    return add_request


class Counting(Protocol):
    """`mrl.rollout.cpu_sampling.CountingGenerator`."""

    num_draws: int

    def initial_seed(self) -> int: ...


def _counting(metadata: SamplingMetadata) -> dict[int, Counting]:
    """The generators of the requests, by row: `mrl.rollout.cpu` makes them all."""
    return cast("dict[int, Counting]", metadata.generators)


def draw_ahead(original: Callable[..., object]) -> Callable[..., object]:
    """`RejectionSampler.forward` that draws the token behind all proposals with the number of its place in the rollout.

    Its logprob is taken once: vLLM's sampler gives logprobs where it is asked for logits.
    """

    def forward(
        self: RejectionSampler,
        metadata: SpecDecodeMetadata,
        draft_probs: Tensor | None,
        logits: Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> object:
        for row, generator in _counting(sampling_metadata).items():
            generator.num_draws += metadata.num_draft_tokens[row]
        samplers = (self.sampler, self.sampler.topk_topp_sampler)
        modes = [sampler.logprobs_mode for sampler in samplers]
        try:
            if self.is_processed_logprobs_mode:
                # It asks for logits, and takes the logarithm of the softmax itself.
                for sampler in samplers:
                    sampler.logprobs_mode = "processed_logits"
            return original(self, metadata, draft_probs, logits, sampling_metadata)
        finally:
            for sampler, mode in zip(samplers, modes, strict=True):
                sampler.logprobs_mode = mode

    return forward


def sample_targets(gumbel_seeds: Callable[[np.ndarray, np.ndarray], Tensor]) -> Callable[..., Tensor]:
    """`rejection_sample` that draws each token as if nothing were proposed; proposals are right as far as they match.

    Exact in distribution, whatever proposes. As vLLM's proposers on CPU hosts name one token for each place, without
    probabilities, as many are accepted as by rejection sampling. `gumbel_seeds` gives the seeds of draws from requests'
    seeds and the draws' numbers.
    """

    def rejection_sample(
        draft_token_ids: Tensor,
        num_draft_tokens: list[int],
        max_spec_len: int,
        cu_num_draft_tokens: Tensor,
        draft_probs: Tensor | None,
        target_logits: Tensor,
        bonus_token_ids: Tensor,
        sampling_metadata: SamplingMetadata,
        **unused: object,
    ) -> Tensor:
        """Tokens int32 [requests, max_spec_len + 1], filled up with a mark."""
        wanted = target_logits.argmax(dim=-1)
        generators = _counting(sampling_metadata)
        if not sampling_metadata.all_greedy:
            seeds = torch.randint(0, 2**31, (len(target_logits),))
            stop = 0
            for row, count in enumerate(num_draft_tokens):
                start, stop = stop, stop + count
                if row in generators and count:
                    # The draw of the token behind the proposals has been counted.
                    last = generators[row].num_draws - 1
                    indices = np.arange(last - count, last, dtype=np.uint64)
                    seeds[start:stop] = gumbel_seeds(
                        np.full(count, generators[row].initial_seed(), dtype=np.uint64), indices
                    )
            drawn = torch.ops._C.fused_gumbel_argmax(target_logits.float(), seeds).reshape(-1).to(wanted.dtype)
            if sampling_metadata.all_random:
                wanted = drawn
            else:
                is_greedy = (sampling_metadata.temperature == 0).repeat_interleave(torch.tensor(num_draft_tokens))
                wanted = torch.where(is_greedy, wanted, drawn)
        found = torch.full((len(num_draft_tokens), max_spec_len + 1), PLACEHOLDER_TOKEN_ID, dtype=torch.int32)
        stop = 0
        for row, count in enumerate(num_draft_tokens):
            start, stop = stop, stop + count
            is_wrong = wanted[start:stop] != draft_token_ids[start:stop]
            num_right = int(is_wrong.int().argmax()) if is_wrong.any() else count
            found[row, :num_right] = wanted[start : start + num_right]
            found[row, num_right] = bonus_token_ids[row, 0] if num_right == count else wanted[start + num_right]
            if row in generators:
                # Draws of tokens that are not taken are drawn again.
                generators[row].num_draws -= count - num_right
        return found

    return rejection_sample
