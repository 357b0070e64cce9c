# SPDX-License-Identifier: Apache-2.0
"""Functions on the ranks of distillation tests: losses of random hidden states, steps of a student and its teacher."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from mrl.config.load import load_config
from mrl.config.model import with_value
from mrl.config.schema.algo import LossConfig
from mrl.config.schema.policy import PolicyConfig
from mrl.config.schema.run import Facts, RunConfig
from mrl.config.schema.teachers import OnPolicyDistillationConfig
from mrl.data.packing import PackedRow
from mrl.types import TeacherTokens, TokenSample
from tests.rollouts import pulled
from tests.stack.policy import logprob_ranks, policy_ranks
from tests.stack.ranks import Rank

K = 5


@dataclass(frozen=True)
class Case:
    """A loss, and how it is computed; `chunk_tokens` None = from the logits of the whole row."""

    loss: LossConfig
    of: logprob_ranks.Case


@dataclass(frozen=True)
class Result:
    """The loss with its metrics, this rank's part of the gradients, and the largest logits with their tokens."""

    metrics: dict[str, float]
    grad_hidden: np.ndarray
    grad_weight: np.ndarray
    top_logits: np.ndarray
    top_tokens: np.ndarray
    keeps_inputs: bool
    """True if the columns' logits or hidden states outlive the backward pass, as the loss does in Megatron's
    schedules.
    """


def teacher_inputs(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits and tokens of a teacher that agrees with nobody, and weights of the tokens, some of them 0."""
    generator = torch.Generator().manual_seed(7)
    size = case.of.vocab_size
    tokens = torch.stack([torch.randperm(size, generator=generator)[:K] for _ in range(logprob_ranks.NUM_TOKENS)])
    weights = torch.rand(logprob_ranks.NUM_TOKENS, generator=generator)
    weights[::3] = 0.0
    return torch.randn(logprob_ranks.NUM_TOKENS, K, generator=generator) * 2, tokens, weights / 10


def losses(rank: Rank, cases: list[Case]) -> list[Result]:
    """Losses of every case, on this rank's columns."""
    with rank.gloo():
        return [_loss(rank, case) for case in cases]


def _loss(rank: Rank, case: Case) -> Result:
    import torch.distributed as dist

    from mrl.algo.distillation import distillation_loss, needs_vocabulary
    from mrl.policy.distillation import student_scores, top_logits
    from mrl.policy.logprobs import OutputColumns

    group = dist.group.WORLD
    assert group is not None
    given, (teacher, tokens, weights) = logprob_ranks.inputs(case.of), teacher_inputs(case)
    width = logprob_ranks.NUM_COLUMNS // rank.world_size
    hidden = given.hidden.requires_grad_()
    weight = given.weight[rank.rank * width :][:width].clone().requires_grad_()
    if case.of.chunk_tokens is None:
        columns = OutputColumns(hidden @ weight.t(), None, case.of.distribution(), group, 7)
    else:
        columns = OutputColumns(hidden * 1, weight, case.of.distribution(), group, case.of.chunk_tokens)
    top, inputs = [values.numpy() for values in top_logits(columns, K)], weakref.ref(columns.inputs)
    student = student_scores(columns, tokens, needs_vocabulary=needs_vocabulary(case.loss))
    del columns
    loss, metrics = distillation_loss(student, teacher, weights, case.loss)
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    grads = hidden.grad.float().numpy(), weight.grad.float().numpy()
    return Result(
        {name: float(value) for name, value in metrics.items()}, *grads, *top, keeps_inputs=inputs() is not None
    )


def run_configs(student: Path, teacher: Path, layout: str, teacher_layout: str, *overrides: str) -> RunConfig:
    """The config of a student and a teacher, each in its layout."""
    config = policy_ranks.run_config(student, layout)
    given = load_config("grpo_tiny.yaml", ["algorithm=distillation", "distillation.topk_logits_k=6", *overrides])
    config.algorithm, config.distillation, config.loss_fn = given.algorithm, given.distillation, given.loss_fn
    return with_value(config, "teacher", policy_ranks.run_config(teacher, teacher_layout).policy)


def judging_config(
    student: Path, teachers: dict[str, tuple[Path, str]], layout: str, reward_weight: float
) -> RunConfig:
    """A student's config whose advantages come from these teachers of these folders and layouts, and from rewards."""
    config = policy_ranks.run_config(student, layout)
    names = {name: str(folder) for name, (folder, _) in teachers.items()}
    config.on_policy_distillation = OnPolicyDistillationConfig(
        enabled=True,
        teacher_model_by_agent_name=names,
        use_orm_advantage=reward_weight > 0,
        orm_advantage_weight=reward_weight,
    )
    config.loss_fn = LossConfig(reference_policy_kl_penalty=0.0, disable_ppo_ratio=True)
    config.grpo.adv_estimator.name = "opd"
    return replace(
        config, facts=Facts(teachers={name: policy_ranks.run_config(*place).policy for name, place in teachers.items()})
    )


def rows_of(
    policy: PolicyConfig, dp_rank: int, dp_size: int, taught: dict[int, TeacherTokens], kept: Collection[int]
) -> list[PackedRow]:
    """The rank's rows of the random rollouts, as far as they are kept, with what teachers say of them, if anything."""
    made = {
        index: pulled(rollout, advantage, is_valid, teacher=taught.get(index))
        for index, rollout, advantage, is_valid in policy_ranks.rollouts()
    }
    plan = policy_ranks.plan_of("balanced", dp_size, policy.sequence_multiple)[0][dp_rank]
    return policy_ranks.pack_rows(policy, [[index for index in row if index in kept] for row in plan], made)


@dataclass(frozen=True)
class Distilled:
    """Observations of a rank in a run."""

    taught: dict[int, TeacherTokens]
    """Outputs of the teachers for every sequence, from all ranks."""
    metrics: list[dict[str, float]]
    """Metrics of the student's steps."""
    samples: dict[int, TokenSample]
    """Samples of the first step, for the sequences that this rank reports."""


def distilled(rank: Rank, config: RunConfig, num_steps: int) -> Distilled:
    """Teaches sequence i by teacher i modulo their number, and trains the student on what was said."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from mrl.policy.other_models import teach

    every, names, taught = range(policy_ranks.NUM_SEQUENCES), list(config.teachers), dict[int, TeacherTokens]()
    with policy_ranks.open_models(rank, [(name, config) for name in (*names, "policy")]) as (*teachers, student):
        for place, (name, teacher) in enumerate(zip(names, teachers, strict=True)):
            teacher.make_current()
            dp_size = parallel_state.get_data_parallel_world_size()
            own = rows_of(config.model(name), teacher.dp_rank, dp_size, {}, every[place :: len(names)])
            teacher.enter("teacher")
            teacher.set_batch(own)
            parts: list[dict[int, TeacherTokens]] = [{}] * rank.world_size
            dist.all_gather_object(parts, teach(teacher, config.num_taught_logits))
            found = {index: said for part in parts for index, said in part.items()}
            assert len(found) == sum(map(len, parts)), "two ranks answer for one sequence"
            assert sorted(found) == list(every[place :: len(names)])
            taught |= found
        metrics, samples = [], dict[int, TokenSample]()
        for step in range(num_steps):
            student.enter("logprob")
            student.make_current()
            student.set_batch(
                rows_of(config.policy, student.dp_rank, parallel_state.get_data_parallel_world_size(), taught, every)
            )
            if config.needs_old_logprobs:
                student.compute_old_logprobs()
            student.enter("train")
            metrics.append(student.train_step())
            samples |= student.token_samples(every) if step == 0 else {}
        return Distilled(taught, metrics, samples)
