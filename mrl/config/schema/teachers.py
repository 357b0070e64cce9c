# SPDX-License-Identifier: Apache-2.0
"""Sections `distillation` and `on_policy_distillation`, and the places of teachers. See `mrl.config.schema.run`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mrl.config.fields import Count, NotNegative, Positive


@dataclass
class DistillationConfig:
    """Learning from a teacher's distribution at tokens that the policy (student) draws. Rewards are only measured."""

    num_prompts_per_step: Positive = 128
    """Prompts per step."""
    num_generations_per_prompt: Positive = 1
    """Rollouts of each prompt."""
    max_rollout_turns: Positive = 1
    """Most turns of a rollout, if its environment answers."""
    max_num_steps: Positive = 1000
    """The run ends after this many steps in all, those before a resume included."""
    max_num_epochs: Positive = 10
    """The run ends after this many passes over the training prompts."""
    val_period: Count = 20
    """Validate every this many steps; 0 = never."""
    val_at_start: bool = False
    """Validate before the first update (step 0)."""
    val_at_end: bool = False
    """Validate after the last step."""
    max_val_samples: Positive | None = 512
    """Validation prompts used, the first ones of the file; null = all."""
    topk_logits_k: Positive = 64
    """Tokens that the teacher holds likeliest at each position: its distribution is that of these alone. At most the
    vocabulary.
    """
    teacher_nodes: Count = 0
    """Nodes of `cluster.num_nodes` that the teacher has to itself, and where it keeps its weights; 0 = it works on the
    policy's GPUs, between rollouts and update.
    """
    seed: Count = 42
    """Seed of the run: data order and sampling. Config and seed fix the run bit for bit on CPU."""


@dataclass
class TeacherPlacesConfig:
    """Layouts of teachers, and whether they have nodes of their own."""

    enabled: bool = False
    """Each teacher has `num_nodes` nodes of `cluster.num_nodes` to itself, and keeps its weights there; all work at the
    same time. false: one after another, on the policy's GPUs.
    """
    default_teacher_cfg: dict[str, Any] = field(default_factory=dict)
    """Keys of `policy.megatron_cfg`, `precision`, and `micro_batch_size` for `policy.logprob_batch_size`. Parallel
    sizes are 1 by default, other keys the policy's. `num_nodes`, 1 by default, and `gpus_per_node`, all of a node,
    count with `enabled`.
    """
    teacher_overrides: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    """Name of a teacher -> keys that it has in place of the defaults."""


@dataclass
class OnPolicyDistillationConfig:
    """Teachers judge the tokens that the policy drew (arXiv:2601.02780): with grpo.adv_estimator.name=opd, the
    advantage of a token is log(teacher's probability / policy's), and, as far as orm_advantage_weight says, that of its
    rollout's reward."""

    enabled: bool = False
    """Rows have teachers, and advantages come from them."""
    teacher_model_by_agent_name: dict[str, str] = field(default_factory=dict)
    """Name -> model, a folder or an id. A row's name is its `agent_ref.name`, or without one its environment's."""
    default_teacher_alias: str | None = None
    """One of these names, for rows whose own is not among them; null = they are errors."""
    strict_agent_name_match: bool = False
    """Such rows are errors, whatever default_teacher_alias says."""
    deduplicate_shared_teacher_checkpoints: bool = True
    """Names of one model share a copy of it. false: each has its own, which need have no other layout."""
    use_orm_advantage: bool = False
    """The reward counts, too."""
    orm_advantage_weight: NotNegative = 0.0
    """Weight of the advantage of the rollout's reward in its group, against 1 for the teacher's; with
    use_orm_advantage.
    """
    non_colocated_teachers: TeacherPlacesConfig | None = None

    @property
    def reward_weight(self) -> float:
        return self.orm_advantage_weight if self.use_orm_advantage else 0.0

    def teacher_of(self, name: str) -> str | None:
        """The name under which the teacher of a row of this name is held; None if it has none."""
        known = self.teacher_model_by_agent_name
        if name not in known:
            if self.strict_agent_name_match or self.default_teacher_alias not in known:
                return None
            name = self.default_teacher_alias
        if not self.deduplicate_shared_teacher_checkpoints:
            return name
        return next(other for other, model in known.items() if model == known[name])

    @property
    def teachers(self) -> tuple[str, ...]:
        """Names under which teachers are held."""
        return tuple(name for name in self.teacher_model_by_agent_name if self.teacher_of(name) == name)

    def place_of(self, name: str) -> dict[str, object]:
        """The keys of the place of a teacher of this name."""
        places = self.non_colocated_teachers
        if places is None:
            return {}
        own = places.teacher_overrides.get(name) or {}
        return {**places.default_teacher_cfg, **own}

    @property
    def own_nodes(self) -> dict[str, int]:
        """Number of nodes that each teacher has to itself; {} if teachers work on the policy's."""
        places, default = self.non_colocated_teachers, 1
        if not self.enabled or places is None or not places.enabled:
            return {}
        found = {name: self.place_of(name).get("num_nodes", default) for name in self.teachers}
        return {name: number if isinstance(number, int) else default for name, number in found.items()}
