"""Questions of the doctor that a run never asks: the same rollouts from every engine, and the trainer's log-probabilities of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mrl.cluster.engines import EngineGroup
from mrl.cluster.environment import engine_variables, policy_variables
from mrl.cluster.policies import PolicyGroup
from mrl.cluster.verbs import PolicyVerbs
from mrl.config.schema.run import RunConfig
from mrl.data.batch import max_row_tokens
from mrl.data.packing import RowSequence, pack_row, padded_length
from mrl.data.planning import first_fit_decreasing
from mrl.types import Rollout, RolloutRequest

if TYPE_CHECKING:
    from mrl.policy.policy import Policy
    from mrl.rollout.engine import Engine


def sample_everywhere(engines: EngineGroup, requests: Sequence[RolloutRequest], *, deadline_s: float) -> list[list[Rollout]]:
    """Rollouts of the same requests by every engine, in the order of the requests."""
    return engines.apply(_sample, list(requests), deadline_s=deadline_s)


def trainer_logprobs(policies: PolicyGroup, rollouts: Sequence[Rollout], config: RunConfig, *, pad_token_id: int) -> list[np.ndarray]:
    """The trainer's log-probability of every generated token, float32 [L] per rollout, in the rollouts' order."""
    policy = config.policy
    lengths = [padded_length(len(rollout.request.token_ids) + len(rollout.token_ids), policy.sequence_multiple) for rollout in rollouts]
    # Every data-parallel rank computes all rows: a few rollouts are not worth a plan.
    rows = [
        pack_row(
            [RowSequence(i, rollouts[i], 0.0, True) for i in row],
            divisible_by=policy.row_multiple,
            sequence_multiple=policy.sequence_multiple,
            pad_token_id=pad_token_id,
        )
        for row in first_fit_decreasing(lengths, max_row_tokens(policy, "logprob"))
    ]
    answers = policies.call(PolicyVerbs.logprobs_of_rows, rows)
    # Only the ranks of the last pipeline stage know; all of them give the same answer.
    of_rows = next(answer for answer in answers.values() if answer)
    found: dict[int, np.ndarray] = {}
    for row, logprobs_T in zip(rows, of_rows, strict=True):
        bounds = row.cu_seqlens.tolist()
        for index, start, stop in zip(row.sequence_indices, bounds, bounds[1:], strict=False):
            found[index] = logprobs_T[start:stop][row.generated_mask_T[start:stop].bool().numpy()]
    return [found[index] for index in range(len(rollouts))]


def float32_products(policies: PolicyGroup, config: RunConfig) -> str:
    """How a run in float32 multiplies, by library: as float32 (Triton: tf32x3), or as TF32, for which the bounds of float32 do not hold.

    Measured on the policy ranks; Triton does in both kinds of processes what its variable says.
    """
    measured = policies.apply(_float32_products)
    found = {library: " and ".join(sorted({rank[library] for rank in measured})) for library in measured[0]}
    if config.cluster.gpus_per_node:
        policy, engine = config.policy.megatron_cfg.env_vars or {}, config.policy.generation.vllm_cfg.env_vars or {}
        variables = (policy_variables(config, policy), engine_variables(config, engine))
        found["Triton"] = " and ".join(sorted({chosen.get("TRITON_F32_DEFAULT", "TF32") for chosen in variables}))
    return ", ".join(f"{library} {precision}" for library, precision in found.items())


def _float32_products(policy: Policy) -> dict[str, str]:
    from mrl.policy.fusions import float32_products

    return float32_products()


def _sample(engine: Engine, requests: list[RolloutRequest]) -> list[Rollout]:
    engine.add(requests)
    rollouts: dict[str, Rollout] = {}
    while engine.num_unfinished:
        rollouts.update((rollout.request.request_id, rollout) for rollout in engine.step())
    return [rollouts[request.request_id] for request in requests]
