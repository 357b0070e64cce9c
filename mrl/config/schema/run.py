# SPDX-License-Identifier: Apache-2.0
"""Every config key: one dataclass per YAML section, names as in NeMo RL. The string below a field is its manual.

Here: the whole run, and the sections that are short; the others have a file each. Defaults stand there and nowhere
else. A default written `"${...}"` follows another key and is resolved by `mrl.config.load`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from mrl.config.fields import Count, NotNegative, Port, PortEnd, Positive
from mrl.config.schema.algo import (
    DpoConfig,
    EvalConfig,
    GrpoConfig,
    LossConfig,
    RewardPenaltiesConfig,
    RmConfig,
    SftConfig,
)
from mrl.config.schema.data import DataConfig
from mrl.config.schema.deadlines import DeadlinesConfig
from mrl.config.schema.env import GYM_TURNS, EnvConfig
from mrl.config.schema.generation import EngineLimits
from mrl.config.schema.judges import JudgeConfig
from mrl.config.schema.logger import LoggerConfig
from mrl.config.schema.policy import PolicyConfig, RouterReplayConfig
from mrl.config.schema.ppo import PpoConfig, ValueConfig, ValueLossConfig
from mrl.config.schema.reference import ReferenceConfig
from mrl.config.schema.teachers import DistillationConfig, OnPolicyDistillationConfig
from mrl.phases import REFERENCE, ModelName, is_frozen

# Rollouts of an engine where nobody knows how many a validation has.
SOME_SEQS = 128
# vLLM's own limits on GPUs of 70 GB and more. Longer steps bring a CPU nothing, and take its memory.
MOST_SEQS, MOST_TOKENS, MOST_CPU_TOKENS = 1024, 16384, 4096


@dataclass
class CheckpointingConfig:
    enabled: bool = True
    """Write checkpoints."""
    checkpoint_dir: str = "results/grpo"
    """Folder of the run. A run resumes from the newest complete checkpoint in it."""
    metric_name: str | None = "val:accuracy"
    """Metric that ranks checkpoints: `train:<metric>` or `val:<metric>`; null = newer is better. A checkpoint without
    it is the worst.
    """
    higher_is_better: bool = True
    """Direction of that metric."""
    keep_top_k: Positive | None = 3
    """Number of kept checkpoints of `save_period`, the best ones; null = all. The newest checkpoint is always kept,
    too.
    """
    save_period: Positive = 10
    """Save every this many steps, and at the end."""
    ft_save_period: Positive | None = None
    """Save every this many steps, too, against crashes; null = no further checkpoints. Needs `ft_keep_latest_k`."""
    ft_keep_latest_k: Positive | None = None
    """Keep this many of the newest checkpoints, whatever their metric; null = one."""
    save_optimizer: bool = True
    """Save optimizer state; without it a run cannot resume exactly."""
    keep_rollouts_gb: NotNegative = 16.0
    """Rollouts that a resumed run would else sample again are kept, in a folder of at most so many GB; 0 = none are."""
    keep_unfinished_s: NotNegative = 30.0
    """Seconds between two writes of unfinished rollouts, which a resumed run goes on with; 0 = only whole groups are
    kept."""
    allow_changes: list[Literal["model", "tokenizer", "data", "teacher", "critic", "checkpoints"]] = field(
        default_factory=list
    )
    """Changes with which a run may resume. Data: also their order, which files, split, seed, shuffle and weight decide.
    Checkpoints: the run begins at step 0 if all that it has saved are gone."""
    checkpoint_must_save_by: str | None = None
    """DD:HH:MM:SS after the start of the Slurm job or process: the run saves and ends with exit code 75 before a step
    that would end later; null = never."""

    @property
    def must_save_by_s(self) -> float | None:
        if self.checkpoint_must_save_by is None:
            return None
        days, hours, minutes, seconds = map(int, self.checkpoint_must_save_by.split(":"))
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


@dataclass
class ClusterConfig:
    num_nodes: Positive = 1
    """Hosts."""
    gpus_per_node: Count = 0
    """GPUs of a host; 0 = a run on CPUs; auto = those of the host that loads the config (CUDA_VISIBLE_DEVICES and
    MRL_CPU count).
    """
    master_port_range_low: Port | None = None
    """Policy ranks of several nodes meet at a free port of the first of them, from here to below
    `master_port_range_high`; null = any port. Ranks of one node meet in a file."""
    master_port_range_high: PortEnd | None = None
    """End of that range, not itself in it."""
    bind_to_numa: bool = True
    """Bind policy ranks and engine workers to the CPUs and the memory of their GPU's NUMA node, as far as the host says
    which it is.
    """
    cpu_units_per_node: Positive = 1
    """Policy ranks per host on hosts without GPUs."""

    @property
    def master_ports(self) -> range:
        """The ports at which policy ranks may meet; empty = any."""
        return range(self.master_port_range_low or 0, self.master_port_range_high or 0)

    @property
    def slots_per_node(self) -> int:
        """Slots of a node for policy ranks and engine workers: its GPUs, or `cpu_units_per_node`."""
        return self.gpus_per_node or self.cpu_units_per_node

    @property
    def num_slots(self) -> int:
        """Slots of all nodes. On hosts without GPUs dedicated engines add theirs (`RunConfig.num_slots`)."""
        return self.num_nodes * self.slots_per_node


@dataclass
class ProfilerConfig:
    steps: list[int] = field(default_factory=list)
    """Steps whose train phase (logprob passes and updates) some policy ranks record."""
    ranks: list[int] = field(default_factory=lambda: [0])
    """Policy ranks that record."""
    tool: Literal["torch", "nsys"] = "torch"
    """torch: traces in `profile` of the attempt's logs, for https://ui.perfetto.dev; nsys: NVTX ranges for an
    `nsys profile` that runs the ranks.
    """


@dataclass(frozen=True)
class Facts:
    """Facts that loading a config finds besides its values."""

    secrets: frozenset[str] = frozenset()
    """Secrets that the values hold."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Place where each key was set: file and line, or the command line; inherited files first."""
    teachers: Mapping[str, PolicyConfig] = field(default_factory=dict)
    """Teachers of `on_policy_distillation`, by name: each has the keys of `policy`."""


@dataclass
class RunConfig:
    """A whole run. Code takes the narrowest section it needs."""

    if TYPE_CHECKING:
        facts: Facts = Facts()
    else:
        # No key: an argument, which `dataclasses.replace` hands on, and `asdict`, `repr` and `==` leave out.
        facts: InitVar[Facts] = Facts()

        def __post_init__(self, facts: Facts) -> None:
            self.facts = facts

    algorithm: Literal["grpo", "ppo", "distillation", "sft", "dpo", "rm"] = "grpo"
    """Source from which the policy learns: rewards (grpo; ppo with a critic), a teacher (distillation), conversations
    (sft), or pairs (dpo, and rm for a reward model)."""
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    dpo: DpoConfig = field(default_factory=DpoConfig)
    rm: RmConfig = field(default_factory=RmConfig)
    ppo: PpoConfig = field(default_factory=PpoConfig)
    on_policy_distillation: OnPolicyDistillationConfig | None = None
    loss_fn: LossConfig = field(default_factory=LossConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    value_loss_fn: ValueLossConfig = field(default_factory=ValueLossConfig)
    reward_penalties: RewardPenaltiesConfig = field(default_factory=RewardPenaltiesConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    value: ValueConfig = field(default_factory=ValueConfig)
    teacher: PolicyConfig | None = None
    """The model that the policy learns from in distillation. It has the keys of `policy`; keys that it leaves out,
    except model_name and tokenizer, have that section's value. Parallel sizes may differ."""
    judges: dict[str, JudgeConfig] = field(default_factory=dict)
    """Models that rewards, agents and NeMo Gym's servers ask by name (docs/environments.md)."""
    data: DataConfig = field(default_factory=DataConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    checkpointing: CheckpointingConfig = field(default_factory=CheckpointingConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    deadlines: DeadlinesConfig = field(default_factory=DeadlinesConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)

    @property
    def training(self) -> GrpoConfig | DistillationConfig | SftConfig | DpoConfig | RmConfig:
        return self.grpo if self.algorithm == "ppo" else getattr(self, self.algorithm)

    def model(self, name: ModelName) -> PolicyConfig:
        """The keys of a model that policy ranks hold, in the form of the policy's, with the values of its own."""
        if name == "policy":
            return self.policy
        if name == REFERENCE:
            own = self.reference.beside(self.policy)
        else:
            own = self.value.beside(self.policy) if name == "critic" else self.teachers[name]
        differences: dict[str, Any] = {
            "megatron_cfg": dataclasses.replace(own.megatron_cfg, mtp_num_layers=0),
            "generation": dataclasses.replace(self.policy.generation, temperature=own.generation.temperature),
            "router_replay": RouterReplayConfig(),
            "share_prefixes": own.share_prefixes if name == REFERENCE else False,
        }
        return dataclasses.replace(own, **differences)

    @property
    def models(self) -> dict[ModelName, PolicyConfig]:
        """`model` of each that ranks hold: the policy's first, then the others'."""
        return {name: self.model(name) for name in dict.fromkeys((*self.sections, *self.own_nodes))}

    @property
    def sections(self) -> dict[ModelName, PolicyConfig | ValueConfig]:
        """The section of each model that policy ranks hold: the policy's first, then the others'."""
        return {"policy": self.policy, **self.teachers, **({"critic": self.value} if self.has_critic else {})}

    @property
    def models_beside(self) -> tuple[ModelName, ...]:
        """The models, other than the policy, that policy ranks hold."""
        return tuple(model for model in self.sections if model != "policy" and model not in self.own_nodes)

    @property
    def own_nodes(self) -> dict[ModelName, int]:
        """Number of nodes of each model with nodes of its own: teachers, then the reference."""
        if self.algorithm == "distillation":
            nodes = self.distillation.teacher_nodes
            return {"teacher": nodes} if nodes and self.teacher is not None else {}
        own = {} if self.teaching is None else self.teaching.own_nodes
        apart = {REFERENCE: self.reference.num_nodes} if self.has_reference_apart else {}
        return {f"teacher:{name}": nodes for name, nodes in own.items()} | apart

    @property
    def trained_models(self) -> tuple[ModelName, ...]:
        """The models that the run trains, and its checkpoints hold."""
        return tuple(model for model in self.sections if not is_frozen(model))

    @property
    def teachers(self) -> dict[ModelName, PolicyConfig]:
        """Teacher models, which are not trained."""
        if self.algorithm == "distillation":
            return {} if self.teacher is None else {"teacher": self.teacher}
        if self.teaching is None:
            return {}
        return {f"teacher:{name}": section for name, section in self.facts.teachers.items()}

    @property
    def teaching(self) -> OnPolicyDistillationConfig | None:
        """Returns the section that turns teachers' logprobs into advantages; None if none does."""
        given = self.on_policy_distillation
        return given if given is not None and given.enabled and self.algorithm == "grpo" else None

    @property
    def num_taught_logits(self) -> int:
        """Returns the number of logits that a teacher gives for each generated token; 0 = the token's own logprob."""
        return self.distillation.topk_logits_k if self.algorithm == "distillation" else 0

    def teacher_of(self, name: str) -> ModelName | None:
        """The model teaching rows of an agent's or environment's name; None if such a row needs one and has none."""
        if self.teaching is None:
            return "teacher" if self.algorithm == "distillation" else ""
        teacher = self.teaching.teacher_of(name)
        return None if teacher is None else f"teacher:{teacher}"

    @property
    def frozen_output_bytes(self) -> int:
        """Returns bytes that ranks of their own say of a step's longest rollouts: a float32 number a token of the
        reference, and with an int32 token each of teachers.
        """
        tokens = self.rollouts.num_rollouts_per_step * self.policy.max_total_sequence_length
        of_teachers = 8 * max(1, self.num_taught_logits) if self.teachers else 0
        return tokens * (of_teachers + 4 * self.has_reference_apart)

    @property
    def rollouts(self) -> GrpoConfig:
        """Returns the sampling, judging and validation of prompts, for any algorithm; unset keys have defaults."""
        if self.algorithm != "distillation":
            return self.grpo
        given = self.distillation
        return GrpoConfig(
            num_prompts_per_step=given.num_prompts_per_step,
            num_generations_per_prompt=given.num_generations_per_prompt,
            max_num_steps=given.max_num_steps,
            max_num_epochs=given.max_num_epochs,
            max_rollout_turns=given.max_rollout_turns,
            val_period=given.val_period,
            val_at_start=given.val_at_start,
            val_at_end=given.val_at_end,
            max_val_samples=given.max_val_samples,
            seed=given.seed,
        )

    @property
    def learns_pairs(self) -> bool:
        return self.algorithm in ("dpo", "rm")

    @property
    def keeps_reference(self) -> bool:
        """Tells whether policy ranks keep the starting model, as the loss compares with it."""
        return self.algorithm == "dpo" or (self.has_kl and not self.reference.num_nodes)

    @property
    def has_reference_apart(self) -> bool:
        """Tells whether the starting model, which the loss compares with, has nodes of its own."""
        return self.has_kl and self.reference.num_nodes > 0

    @property
    def has_kl(self) -> bool:
        """Tells whether rollouts are compared with the reference, in the loss or the rewards."""
        return self.algorithm in ("grpo", "ppo") and self.loss_fn.reference_policy_kl_penalty > 0

    @property
    def num_passes(self) -> int:
        """Returns the number of passes over a step's rollouts or examples, each with all its updates."""
        return self.ppo.ppo_epochs if self.has_critic else 1

    def num_scheduled_steps_of(self, model: ModelName) -> int:
        """Number of steps that a model's learning-rate schedule counts: its passes. PPO's policy may begin later."""
        late = self.ppo.policy_training_start_step if self.has_critic and model == "policy" else 0
        return max(1, self.training.max_num_steps - late) * self.num_passes

    def trains_policy(self, step: int) -> bool:
        """Tells whether a step, from 1 on, trains the policy, and not a critic alone."""
        return not self.has_critic or step > self.ppo.policy_training_start_step

    @property
    def has_critic(self) -> bool:
        """Tells whether a second model is trained, which judges the policy's tokens."""
        return self.algorithm == "ppo"

    @property
    def has_engines(self) -> bool:
        """Tells whether the run samples rollouts."""
        return self.algorithm in ("grpo", "ppo", "distillation")

    @property
    def frees_training_memory(self) -> bool:
        """Tells whether the policy's gradients and optimizer leave devices outside train steps; always if shared."""
        shares = self.policy.generation.colocated.enabled or bool(self.models_beside)
        return self.has_engines and (shares or self.policy.offload_optimizer_for_logprob)

    @property
    def mtp_steps(self) -> int:
        """Tokens beyond the next that the policy's MTP layers learn to predict, of those it learns; 0 = not trained."""
        megatron = self.policy.megatron_cfg
        return megatron.mtp_num_layers if megatron.trains_mtp and self.algorithm != "rm" else 0

    def mtp_steps_of(self, model: ModelName) -> int:
        """`mtp_steps` of any model: only the policy trains MTP layers."""
        return self.mtp_steps if model == "policy" else 0

    def frozen_settings(self, model: ModelName = "policy") -> dict[str, object]:
        """Values of the settings that leave weights of a model untrained, by their names in `megatron_cfg`."""
        megatron = self.model(model).megatron_cfg
        return {
            "freeze_moe_router": megatron.freeze_moe_router,
            "freeze_config.modules": list(megatron.freeze_config.modules),
            "mtp_num_layers": self.mtp_steps_of(model),
        }

    @property
    def needs_old_logprobs(self) -> bool:
        """Tells whether a step computes the policy's logprobs before its update."""
        uses_ratios = self.algorithm in ("grpo", "ppo")
        has_ratio = not self.loss_fn.force_on_policy_ratio
        return uses_ratios and (
            has_ratio or self.grpo.seq_logprob_error_threshold is not None or self.teaching is not None
        )

    @property
    def compares_rollouts(self) -> bool:
        """Tells whether advantages compare the rewards of a prompt's rollouts."""
        return not self.has_critic and (self.teaching is None or self.teaching.reward_weight > 0)

    @property
    def num_dedicated_slots(self) -> int:
        """Slots with an engine worker and no policy rank; 0 where engines are colocated, or there are none."""
        generation = self.policy.generation
        if generation.colocated.enabled or not self.has_engines:
            return 0
        if self.cluster.gpus_per_node == 0:
            return generation.num_cpu_engines * generation.num_workers
        resources = generation.colocated.resources
        if self.cluster.num_nodes == 1:
            return resources.gpus_per_node or 0
        return (resources.num_nodes or 0) * self.cluster.gpus_per_node

    @property
    def max_rollout_turns(self) -> int:
        return max(self.rollouts.max_rollout_turns, GYM_TURNS if self.env.should_use_nemo_gym else 1)

    @property
    def num_policy_ranks(self) -> int:
        """Slots with a policy rank: the world size of the trainer."""
        others = self.num_own_slots + (self.num_dedicated_slots if self.cluster.gpus_per_node else 0)
        return self.cluster.num_slots - others

    @property
    def num_own_slots(self) -> int:
        """Slots of models and judges with nodes of their own; they follow the policy's."""
        return sum(self.nodes_of_others.values()) * self.cluster.slots_per_node

    @property
    def nodes_of_others(self) -> dict[str, int]:
        """Nodes that models and judges have to themselves, by who has them."""
        own, of_reference = sum(self.own_nodes.values()), self.own_nodes.get(REFERENCE, 0)
        return {"teachers": own - of_reference, "the reference": of_reference, "judges": self.num_judge_nodes}

    @property
    def num_judge_nodes(self) -> int:
        """Nodes of all judges."""
        return sum(judge.num_nodes for judge in self.judges.values())

    @property
    def evaluation_folder(self) -> str:
        """Folder of an evaluation's results and logs."""
        return self.eval.save_path or f"{self.checkpointing.checkpoint_dir}/evaluations"

    @property
    def num_slots(self) -> int:
        """Slots in all."""
        return self.num_policy_ranks + self.num_own_slots + self.num_dedicated_slots

    @property
    def data_parallel_size(self) -> int:
        """DP: replicas of the policy's dense layers."""
        return self.replicas_of("policy")

    def num_ranks_of(self, model: ModelName) -> int:
        """Ranks that hold a model: those of its own nodes, or the policy's."""
        nodes = self.own_nodes.get(model)
        return self.num_policy_ranks if nodes is None else nodes * self.cluster.slots_per_node

    def replicas_of(self, model: ModelName) -> int:
        """DP of a model: replicas of its dense layers."""
        return self.num_ranks_of(model) // self.model(model).megatron_cfg.model_parallel_size

    @property
    def num_engines(self) -> int:
        if not self.has_engines:
            return 0
        if self.cluster.gpus_per_node == 0:
            return self.policy.generation.num_cpu_engines
        return (self.num_dedicated_slots or self.num_policy_ranks) // self.policy.generation.num_workers

    @property
    def num_rollouts_at_once(self) -> int:
        """Rollouts of training, or of a validation whose number of rows is known, that may be under way together."""
        grpo = self.rollouts
        trained = grpo.num_prompts_under_way * grpo.num_generations_per_prompt
        return max(trained, (grpo.max_val_samples or 0) * grpo.val_num_generations_per_prompt)

    @property
    def engine_limits(self) -> EngineLimits:
        """Limits of an engine, or of each of its groups, as given, else those that its rollouts need.

        `mrl.plan.memory` lowers the latter to what the cache holds.
        """
        vllm = self.policy.generation.vllm_cfg
        grpo = self.rollouts
        num_rows = 1 + self.policy.generation.num_proposed_tokens
        needed = -(-self.num_rollouts_at_once // max(1, self.num_engines * vllm.num_groups))
        if vllm.expose_http_server:
            # All may come as requests of agents, which have a share of the engine.
            needed = math.ceil(needed / vllm.http_server_share)
        if grpo.max_val_samples is None:
            needed = max(needed, SOME_SEQS)
        fitting = MOST_SEQS if vllm.max_num_batched_tokens is None else max(1, vllm.max_num_batched_tokens // num_rows)
        num_seqs = vllm.max_num_seqs or min(needed, MOST_SEQS, fitting)
        most_tokens = MOST_TOKENS if self.cluster.gpus_per_node else MOST_CPU_TOKENS
        num_tokens = vllm.max_num_batched_tokens or max(
            num_seqs * num_rows, min(num_seqs * vllm.max_model_len, most_tokens)
        )
        return EngineLimits(num_seqs, num_tokens)

    @property
    def num_grader_nodes(self) -> int:
        """Nodes without slots that compute rewards; 0 where nodes of slots do, or there are no rewards."""
        return self.env.placement.num_nodes if self.has_engines else 0

    @property
    def nodes_of_engine(self) -> int:
        """Nodes over which the workers of an engine are spread."""
        return min(self.cluster.num_nodes, -(-self.policy.generation.num_workers // self.cluster.slots_per_node))
