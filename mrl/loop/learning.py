# SPDX-License-Identifier: Apache-2.0
"""A step's learning, in the order of its passes: logprobs, values of PPO's critic, and the updates of both."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from mrl.algo.critic import explained_variance
from mrl.cluster.verbs import PolicyVerbs
from mrl.data.batch import make_batches
from mrl.metrics import metrics_of_passes, metrics_of_updates
from mrl.phases import REFERENCE, ModelName
from mrl.store.rollout_files import RecordedStep, SequenceTensors

if TYPE_CHECKING:
    from mrl.cluster.policies import PolicyGroup
    from mrl.cluster.session import RolloutSession, Session
    from mrl.config.schema.run import RunConfig
    from mrl.types import Batch, PayloadRef

PULL_S = 600.0


@dataclass(frozen=True)
class JudgedStep:
    """A step's sequences as the critic has judged them."""

    batches: Sequence[Batch]
    """Batches of the critic's own updates: the same sequences in the same order."""
    values: Mapping[int, PayloadRef]
    """Values by position in the step; they stay on the ranks of the critic until those of the policy pull them."""


@dataclass(frozen=True)
class Critic:
    """The driver's handle on the critic."""

    config: RunConfig
    session: RolloutSession

    def judge(self, batches: Sequence[Batch]) -> JudgedStep:
        """Makes the critic compute the values of all tokens of a step."""
        group = self.session.models_beside["critic"]
        own = _batches_of("critic", self.config, batches)
        self.session.enter("value")
        group.set_batches(own)
        return JudgedStep(own, group.start_on_tokens("compute_values", own)())

    def learn(self, judged: JudgedStep, batches: Sequence[Batch]) -> dict[str, float]:
        """Makes the policy compute advantages, and the critic learn the resulting returns."""
        group = self.session.models_beside["critic"]
        returns = self.session.policies.start_on_tokens("compute_advantages", batches, judged.values)()
        self.session.enter("train_value")
        group.start_on_tokens("set_returns", judged.batches, returns)()
        indices = range(len(judged.batches))
        updates = [
            group.call(PolicyVerbs.train_step, index)[0] for _ in range(self.config.num_passes) for index in indices
        ]
        last = [
            {name.removeprefix("train/"): value for name, value in update.items()}
            for update in updates[-len(judged.batches) :]
        ]
        learned = metrics_of_passes(updates, len(judged.batches)) | {"train/explained_var": explained_variance(last)}
        advantages = metrics_of_updates(self.session.policies.call(PolicyVerbs.batch_metrics)[0])
        return advantages | {name.replace("train/", "train/critic/", 1): value for name, value in learned.items()}


def _ask_reference(
    reference: PolicyGroup, config: RunConfig, batches: Sequence[Batch]
) -> Callable[[], dict[int, PayloadRef]]:
    """Starts the reference on a step's tokens; it works beside the policy. The answer waits for its logprobs."""
    own = _batches_of(REFERENCE, config, batches)
    reference.set_batches(own)
    return reference.start_on_tokens("compute_reference_logprobs", own)


def _batches_of(model: ModelName, config: RunConfig, batches: Sequence[Batch]) -> list[Batch]:
    return make_batches(list(chain.from_iterable(batch.sequences for batch in batches)), config, model)


def learn(
    session: Session, config: RunConfig, batches: Sequence[Batch], step: int, critic: Critic | None = None
) -> dict[str, float]:
    """Makes the ranks compute logprobs, then take an optimizer step on each batch of `step`; returns the metrics."""
    policies = session.policies
    asked = _ask_reference(session.reference, config, batches) if session.reference is not None else None
    judged = critic.judge(batches) if critic is not None else None
    session.enter("logprob")
    policies.set_batches(batches)
    if config.needs_old_logprobs:
        policies.call(PolicyVerbs.compute_old_logprobs)
    if asked is not None:
        policies.start_on_tokens("set_reference_logprobs", batches, asked())()
    elif config.keeps_reference:
        policies.call(PolicyVerbs.compute_reference_logprobs)
    metrics = metrics_of_updates([batch.metrics for batch in batches])
    if critic is not None and judged is not None:
        metrics |= critic.learn(judged, batches)
    if config.trains_policy(step):
        session.enter("train")
        updates = [
            policies.call(PolicyVerbs.train_step, index)[0]
            for _ in range(config.num_passes)
            for index in range(len(batches))
        ]
        metrics |= metrics_of_passes(updates, len(batches))
    metrics["train/num_logprob_passes"] = float(config.needs_old_logprobs + config.keeps_reference)
    return metrics


def layout_of(config: RunConfig) -> str:
    """The keys that decide in which order a step sums floats."""
    policy = config.policy
    parts = (policy.megatron_cfg, policy.sequence_packing, policy.dynamic_batching)
    parts = (*parts, config.reference) if config.has_reference_apart else parts
    sizes = (config.num_policy_ranks, policy.train_micro_batch_size, policy.logprob_batch_size)
    sections = [dataclasses.asdict(part) for part in parts]
    del sections[0]["env_vars"]  # may hold secrets
    return json.dumps([*sections, *sizes], sort_keys=True, default=str)


def tensors_of(session: Session) -> list[SequenceTensors]:
    """The ranks' tensors of the sequences of each batch of the step."""
    found: list[SequenceTensors] = []
    for rank, batches in session.policies.call(PolicyVerbs.sequence_tensors).items():
        found += [{} for _ in range(len(batches) - len(found))]
        for at, sequences in enumerate(batches):
            found[at] |= {index: (rank, tensors) for index, tensors in sequences.items()}
    return found


def record_step(
    config: RunConfig,
    session: Session,
    step: int,
    batches: Sequence[Batch],
    metrics: Mapping[str, float],
    *,
    problem: str,
) -> RecordedStep:
    """Fetches a step's payloads, and the ranks' tensors before the ranks free those. RuntimeError: one is lost."""
    from mrl.cluster.payload import pull, pull_teacher

    computed, recorded = tensors_of(session), []
    for batch in batches:
        rollouts = pull([sequence.rollout for sequence in batch.sequences], timeout_s=PULL_S)
        teachers = pull_teacher(batch.sequences, timeout_s=PULL_S)
        sequences = [
            dataclasses.replace(
                sequence, rollout=dataclasses.replace(sequence.rollout, payload=rollout, further=()), teacher=teacher
            )
            for sequence, rollout, teacher in zip(batch.sequences, rollouts, teachers, strict=True)
        ]
        recorded.append(dataclasses.replace(batch, sequences=tuple(sequences)))
    return RecordedStep(
        *(step, session.policies.pad_token_id, layout_of(config), tuple(recorded)),
        *(tuple(computed or [{} for _ in batches]), dict(metrics), problem),
    )
