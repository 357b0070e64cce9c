# SPDX-License-Identifier: Apache-2.0
"""Compares the logprobs of trainer and engine for the same tokens and weights."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from mrl.algo.agreement import FLIPPED_SHARE, MAX_MEAN_ERROR, Disagreement, find_disagreement, measure
from mrl.cluster.policies import PolicyGroup
from mrl.cluster.tasks import in_worker
from mrl.cluster.verbs import PolicyVerbs
from mrl.config.schema.run import RunConfig
from mrl.data.batch import max_row_tokens
from mrl.data.packing import pack_row, padded_length
from mrl.data.planning import first_fit_decreasing
from mrl.types import Prompt, Rollout, RolloutInfo, RolloutRequest, SamplingParams, TrainSequence, request_seed

if TYPE_CHECKING:
    from mrl.cluster.session import RolloutSession
    from mrl.rollout.engine import Engine

# Enough for any difference of the models to show, in seconds.
NUM_PROMPTS, MAX_PROMPT_TOKENS, MAX_NEW_TOKENS = 4, 512, 16


async def compare_at_start(session: RolloutSession, prompts: Sequence[Prompt]) -> str:
    """Compares trainer and first engine, which hold equal weights and may sample, on a few tokens; the figures as text.

    One prompt is as long as the run allows: only there windows and scaled positions show. Requests have the ids and
    seeds of epoch 0, and all end before training asks. The refit that follows drops what is cached of them.

    Raises:
        Disagreement: the figures, the limit and the likely causes.
    """
    config, engines = session.config, session.engines
    length = min(MAX_PROMPT_TOKENS, config.policy.generation.vllm_cfg.max_model_len // 2)
    first = [
        replace(prompts[index], token_ids=prompts[index].token_ids[:length])
        for index in range(min(NUM_PROMPTS, len(prompts)))
    ]
    asked = requests(config, [*first, long_prompt(config, prompts, MAX_NEW_TOKENS)], MAX_NEW_TOKENS)
    (rollouts,) = await in_worker(
        engines.apply, sample, asked, deadline_s=config.deadlines.generate_s, only=engines.serving[:1]
    )
    async with session.room(is_needed=True):
        logprobs = await in_worker(trainer_logprobs, session.policies, rollouts, config)
    chooses = session.refit.has_experts and not config.policy.router_replay.enabled
    figures = []
    for part in (slice(len(first)), slice(len(first), None)):
        generated = [rollout.generator_logprobs for rollout in rollouts[part]]
        errors = measure(generated, logprobs[part], flipped_share=FLIPPED_SHARE if chooses else 0.0)
        after = f", after a prompt of {len(asked[-1].token_ids):,} tokens" if part.start else ""
        if problem := find_disagreement(errors, compared_precision(config), chooses=chooses, after=after):
            raise Disagreement(problem)
        figures.append(errors.figures + after)
    return "; ".join(figures)


def compared_precision(config: RunConfig) -> str:
    """The precision that limits how well trainer and engines agree: the coarser of the two."""
    policy = config.policy
    trainer = "fp8" if policy.megatron_cfg.fp8_cfg.enabled else policy.precision
    return max((trainer, policy.generation.vllm_cfg.precision), key=lambda name: MAX_MEAN_ERROR[name])


def long_prompt(config: RunConfig, prompts: Sequence[Prompt], max_new_tokens: int) -> Prompt:
    """A prompt that fills the longest row of the run but for the new tokens: the tokens of all prompts, in turn."""
    policy = config.policy
    longest = min(policy.max_total_sequence_length, policy.generation.vllm_cfg.max_model_len)
    length = max(longest - min(policy.generation.max_new_tokens, max_new_tokens), 1)
    # Not one prompt again and again: what a window hides could be copied from within it.
    tokens = itertools.chain.from_iterable(prompts[index % len(prompts)].token_ids for index in itertools.count())
    return replace(
        prompts[0], prompt_id=f"{prompts[0].prompt_id}, long", token_ids=tuple(itertools.islice(tokens, length))
    )


def requests(config: RunConfig, prompts: Sequence[Prompt], max_new_tokens: int) -> list[RolloutRequest]:
    """The prompts, sampled to the full length, stop tokens or not: the same requests every time."""
    generation = config.policy.generation
    length = min(generation.max_new_tokens, max_new_tokens)
    sampling = SamplingParams(generation.temperature, generation.top_p, generation.top_k, length, stop_token_ids=())
    return [
        RolloutRequest(
            prompt.prompt_id,
            0,
            0,
            request_seed(config.rollouts.seed, 0, prompt.prompt_id, 0),
            prompt.token_ids,
            sampling,
        )
        for prompt in prompts
    ]


def sample(engine: Engine, requests: list[RolloutRequest]) -> list[Rollout]:
    """Rollouts of an engine that has nothing else to do, in the order of the requests. Runs in its process."""
    engine.add(requests)
    rollouts: dict[str, Rollout] = {}
    while engine.num_unfinished:
        rollouts.update((rollout.request.request_id, rollout) for rollout in engine.step())
    return [rollouts[request.request_id] for request in requests]


def trainer_logprobs(policies: PolicyGroup, rollouts: Sequence[Rollout], config: RunConfig) -> list[np.ndarray]:
    """The trainer's log-probability of every generated token, float32 [L] per rollout, in the rollouts' order."""
    policy = config.policy
    lengths = [
        padded_length(len(rollout.request.token_ids) + len(rollout.token_ids), policy.sequence_multiple)
        for rollout in rollouts
    ]
    # Every data-parallel rank computes all rows: a few rollouts are not worth a plan.
    sizes = {
        "divisible_by": policy.row_multiple,
        "sequence_multiple": policy.sequence_multiple,
        "pad_token_id": policies.pad_token_id,
    }
    plan = first_fit_decreasing(lengths, max_row_tokens(policy, "logprob"))
    sequences = [TrainSequence(RolloutInfo.of(rollout, rollout), advantage=0.0, is_valid=True) for rollout in rollouts]
    rows = [pack_row({index: sequences[index] for index in row}, **sizes) for row in plan]
    answers = policies.call(PolicyVerbs.logprobs_of_rows, rows)
    of_rows = next(answer for answer in answers.values() if answer)
    found: dict[int, np.ndarray] = {}
    for row, logprobs_T in zip(rows, of_rows, strict=True):
        bounds = row.cu_seqlens.tolist()
        for index, start, stop in zip(row.sequence_indices, bounds, bounds[1:], strict=False):
            found[index] = logprobs_T[start:stop][row.generated_mask_T[start:stop].bool().numpy()]
    return [found[index] for index in range(len(rollouts))]
