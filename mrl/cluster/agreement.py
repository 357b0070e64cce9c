# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of the same tokens by trainer and engine: what both compute of equal weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from mrl.cluster.policies import PolicyGroup
from mrl.cluster.verbs import PolicyVerbs
from mrl.config.schema.run import RunConfig
from mrl.data.batch import max_row_tokens
from mrl.data.packing import RowSequence, pack_row, padded_length
from mrl.data.planning import first_fit_decreasing
from mrl.types import Prompt, Rollout, RolloutRequest, SamplingParams, request_seed

if TYPE_CHECKING:
    from mrl.cluster.session import RolloutSession
    from mrl.rollout.engine import Engine

# Enough for any difference of the models to show, in seconds.
NUM_PROMPTS, MAX_PROMPT_TOKENS, MAX_NEW_TOKENS = 4, 512, 16
MAX_MEAN_ERROR: Mapping[str, float] = {"float32": 0.01, "bfloat16": 0.05}
"""By precision. Rounding gives 1e-6 in float32, 5e-4 in TF32, 0.02 in bfloat16; other positions or other weights give more."""
MAX_MEAN_ERROR_OF_EXPERTS: Mapping[str, float] = {"float32": 0.01, "bfloat16": 0.1}
FLIPPED_SHARE = 0.1
"""Where scores of experts are nearly equal, rounding makes the two sides choose others for a few tokens, which then differ by nats: this
share of the tokens, those that differ most, does not count."""


class Disagreement(RuntimeError):
    """Trainer and engine compute different models of equal weights."""


@dataclass(frozen=True)
class Errors:
    """How far the log-probabilities of tokens differ."""

    num_tokens: int
    mean: float
    largest: float
    num_ruled_out: int
    """Tokens that the trainer's top-k or top-p rules out, whatever the others say."""


def compare_at_start(session: RolloutSession, prompts: Sequence[Prompt], *, pad_token_id: int) -> str:
    """Compares trainer and first engine, which hold equal weights and may sample, on a few tokens; the figures as text.

    Requests have ids and seeds of their own, and the refit that follows drops what the engine has cached of them.

    Raises:
        Disagreement: the figures, the limit and the likely causes.
    """
    config, engines = session.config, session.engines
    length = min(MAX_PROMPT_TOKENS, config.policy.generation.vllm_cfg.max_model_len // 2)
    first = [replace(prompts[index], token_ids=prompts[index].token_ids[:length]) for index in range(min(NUM_PROMPTS, len(prompts)))]
    (rollouts,) = engines.apply(sample, requests(config, first, MAX_NEW_TOKENS), deadline_s=config.deadlines.generate_s, only=[0])
    with session.without_cache(session.policies.start_s):
        logprobs = trainer_logprobs(session.policies, rollouts, config, pad_token_id=pad_token_id)
    chooses = session.refit.has_experts and not config.policy.router_replay.enabled
    errors = measure(rollouts, logprobs, flipped_share=FLIPPED_SHARE if chooses else 0.0)
    precision = max((config.policy.precision, config.policy.generation.vllm_cfg.precision), key=lambda name: MAX_MEAN_ERROR[name])
    limit = (MAX_MEAN_ERROR_OF_EXPERTS if chooses else MAX_MEAN_ERROR)[precision]
    figures = f"over {errors.num_tokens} tokens logprobs differ by {errors.mean:.2g} on average, by {errors.largest:.2g} at most"
    # NaN must not pass, so the claim is written as what has to hold.
    if not (errors.mean <= limit and 2 * errors.num_ruled_out <= errors.num_tokens):
        raise Disagreement(
            f"trainer and engine compute different models of the same weights: {figures}; in {precision} at most {limit} on average is "
            f"rounding ({errors.num_ruled_out} tokens are ruled out by the trainer's top-k or top-p). Likely causes: config.json says "
            "something twice that the two read differently (positions, tied embeddings), or policy.generation.vllm_kwargs, env_vars or "
            "policy.megatron_cfg.model_overrides change one side alone. python -m mrl.doctor CONFIG --refit examines both; "
            "policy.generation.compare_at_start=false starts without this check"
        )
    return f"{figures} (limit {limit})"


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


def trainer_logprobs(policies: PolicyGroup, rollouts: Sequence[Rollout], config: RunConfig, *, pad_token_id: int) -> list[np.ndarray]:
    """The trainer's log-probability of every generated token, float32 [L] per rollout, in the rollouts' order."""
    policy = config.policy
    lengths = [padded_length(len(rollout.request.token_ids) + len(rollout.token_ids), policy.sequence_multiple) for rollout in rollouts]
    # Every data-parallel rank computes all rows: a few rollouts are not worth a plan.
    sizes = {"divisible_by": policy.row_multiple, "sequence_multiple": policy.sequence_multiple, "pad_token_id": pad_token_id}
    plan = first_fit_decreasing(lengths, max_row_tokens(policy, "logprob"))
    rows = [pack_row([RowSequence(i, rollouts[i], 0.0, True) for i in row], **sizes) for row in plan]
    answers = policies.call(PolicyVerbs.logprobs_of_rows, rows)
    # Only the ranks of the last pipeline stage know; all of them give the same answer.
    of_rows = next(answer for answer in answers.values() if answer)
    found: dict[int, np.ndarray] = {}
    for row, logprobs_T in zip(rows, of_rows, strict=True):
        bounds = row.cu_seqlens.tolist()
        for index, start, stop in zip(row.sequence_indices, bounds, bounds[1:], strict=False):
            found[index] = logprobs_T[start:stop][row.generated_mask_T[start:stop].bool().numpy()]
    return [found[index] for index in range(len(rollouts))]


def measure(rollouts: Sequence[Rollout], logprobs: Sequence[np.ndarray], *, flipped_share: float) -> Errors:
    """How far the trainer's logprobs are from the generator's; the mean without the `flipped_share` of the tokens that differ most."""
    error_T = np.abs(np.concatenate(list(logprobs)) - np.concatenate([rollout.generator_logprobs for rollout in rollouts]))
    drawn_T = np.sort(error_T[~np.isinf(error_T)])
    num_ruled_out = len(error_T) - len(drawn_T)
    if not len(drawn_T) or np.isnan(drawn_T[-1]):
        return Errors(len(error_T), float("nan"), float("nan"), num_ruled_out)
    counted_T = drawn_T[: len(drawn_T) - int(flipped_share * len(drawn_T))]
    return Errors(len(error_T), float(counted_T.mean()), float(drawn_T[-1]), num_ruled_out)
