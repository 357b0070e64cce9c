# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of the same tokens by trainer and engine: what both compute of equal weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from mrl.algo.agreement import FLIPPED_SHARE, MAX_MEAN_ERROR, Disagreement, find_disagreement, measure
from mrl.cluster.policies import PolicyGroup
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


def compare_at_start(session: RolloutSession, prompts: Sequence[Prompt]) -> str:
    """Compares trainer and first engine, which hold equal weights and may sample, on a few tokens; the figures as text.

    Requests have the ids and seeds of epoch 0, and all end before training asks. The refit that follows drops what is cached of them.

    Raises:
        Disagreement: the figures, the limit and the likely causes.
    """
    config, engines = session.config, session.engines
    length = min(MAX_PROMPT_TOKENS, config.policy.generation.vllm_cfg.max_model_len // 2)
    first = [replace(prompts[index], token_ids=prompts[index].token_ids[:length]) for index in range(min(NUM_PROMPTS, len(prompts)))]
    (rollouts,) = engines.apply(sample, requests(config, first, MAX_NEW_TOKENS), deadline_s=config.deadlines.generate_s, only=[0])
    with session.without_cache(session.policies.start_s):
        logprobs = trainer_logprobs(session.policies, rollouts, config)
    chooses = session.refit.has_experts and not config.policy.router_replay.enabled
    errors = measure([rollout.generator_logprobs for rollout in rollouts], logprobs, flipped_share=FLIPPED_SHARE if chooses else 0.0)
    precision = max((config.policy.precision, config.policy.generation.vllm_cfg.precision), key=lambda name: MAX_MEAN_ERROR[name])
    if problem := find_disagreement(errors, precision, chooses=chooses):
        raise Disagreement(problem)
    return errors.figures


def requests(config: RunConfig, prompts: Sequence[Prompt], max_new_tokens: int) -> list[RolloutRequest]:
    """The prompts, sampled to the full length, stop tokens or not: the same requests every time."""
    generation = config.policy.generation
    length = min(generation.max_new_tokens, max_new_tokens)
    sampling = SamplingParams(generation.temperature, generation.top_p, generation.top_k, length, stop_token_ids=())
    return [
        RolloutRequest(prompt.prompt_id, 0, 0, request_seed(config.rollouts.seed, 0, prompt.prompt_id, 0), prompt.token_ids, sampling)
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
    lengths = [padded_length(len(rollout.request.token_ids) + len(rollout.token_ids), policy.sequence_multiple) for rollout in rollouts]
    # Every data-parallel rank computes all rows: a few rollouts are not worth a plan.
    sizes = {"divisible_by": policy.row_multiple, "sequence_multiple": policy.sequence_multiple, "pad_token_id": policies.pad_token_id}
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
