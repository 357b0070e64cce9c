# SPDX-License-Identifier: Apache-2.0
"""Every config key: one dataclass per YAML section, names as in NeMo RL. The string below a field is its manual.

Here: the whole run, and the sections that are short; the others have a file each. Defaults stand there and nowhere else.
A default written `"${...}"` follows another key and is resolved by `mrl.config.load`.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Any, Literal, get_type_hints

from mrl.config.fields import AboveZero, Count, Port, PortEnd, Positive
from mrl.config.schema.algo import DpoConfig, EvalConfig, GrpoConfig, LossConfig, RewardPenaltiesConfig, RmConfig, SftConfig
from mrl.config.schema.data import DataConfig
from mrl.config.schema.env import GYM_TURNS, EnvConfig
from mrl.config.schema.logger import LoggerConfig
from mrl.config.schema.policy import PolicyConfig


@dataclass
class CheckpointingConfig:
    enabled: bool = True
    """Write checkpoints."""
    checkpoint_dir: str = "results/grpo"
    """Folder of the run. A run resumes from the newest complete checkpoint in it."""
    metric_name: str | None = "val:accuracy"
    """Ranks checkpoints: `train:<metric>` or `val:<metric>`; null = the newer, the better. One without the metric is the worst."""
    higher_is_better: bool = True
    """Direction of that metric."""
    keep_top_k: Positive | None = 3
    """How many of the checkpoints of `save_period` are kept, the best ones; null = all. The newest checkpoint is always kept, too."""
    save_period: Positive = 10
    """Save every this many steps, and at the end."""
    ft_save_period: Positive | None = None
    """Save every this many steps, too, against crashes; null = no further checkpoints. Needs `ft_keep_latest_k`."""
    ft_keep_latest_k: Positive | None = None
    """Keep this many of the newest checkpoints, whatever their metric; null = one."""
    save_optimizer: bool = True
    """Save optimizer state; without it a run cannot resume exactly."""
    allow_changes: list[Literal["model", "tokenizer", "data"]] = field(default_factory=list)
    """A run resumes although these are others than before. Data: also their order, which files, split, seed and shuffle decide."""
    checkpoint_must_save_by: str | None = None
    """DD:HH:MM:SS after the start of the Slurm job or process: the run saves and ends before a step that would end later; null = never."""

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
    """GPUs of a host; 0 = hosts without GPUs."""
    master_port_range_low: Port | None = None
    """Policy ranks meet at a free port of the first of them, from here to below `master_port_range_high`; null = any port."""
    master_port_range_high: PortEnd | None = None
    """End of that range, not itself in it."""
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
class DeadlinesConfig:
    start_s: AboveZero | None = None
    """Seconds until all processes hold their weights; null = by the size of the weights: `--check` prints it."""
    generate_s: AboveZero = 600.0
    """Seconds without a finished rollout after which generation has failed."""
    reward_s: AboveZero = 120.0
    """Seconds, beyond the longest `env.NAME.timeout_s`, in which no worker begins or ends a rollout: then rewards have failed.

    Rollouts that wait for a worker are waited for; the metric `rollout/reward_wait_s` says how long.
    """
    train_s: AboveZero | None = None
    """Seconds for one logprob pass or train step; null = by model, tokens and GPUs: `--check` prints it."""
    refit_s: AboveZero = 300.0
    """Seconds for one refit."""
    checkpoint_s: AboveZero | None = None
    """Seconds to save, to check or to load a checkpoint; null = by its size and the nodes: `--check` prints it."""


@dataclass
class ProfilerConfig:
    steps: list[int] = field(default_factory=list)
    """Steps whose train phase (logprob passes and updates) some policy ranks record."""
    ranks: list[int] = field(default_factory=lambda: [0])
    """Policy ranks that record."""
    tool: Literal["torch", "nsys"] = "torch"
    """torch: traces in `exp_NNN/profile`, for https://ui.perfetto.dev; nsys: NVTX ranges for an `nsys profile` that runs the ranks."""


@dataclass
class RunConfig:
    """A whole run. Code takes the narrowest section it needs."""

    secrets = frozenset[str]()
    """Secrets that the values hold; no key. `load_config` sets it; `with_value` keeps it, and `dataclasses.replace` does not."""
    origins = dict[str, str]()
    """Where each key was set, if anywhere: file and line, or the command line; inherited files first. No key; `load_config` sets it."""
    algorithm: Literal["grpo", "sft", "dpo", "rm"] = "grpo"
    """How the policy learns: from rollouts and rewards (grpo), conversations (sft), or pairs, as a policy (dpo) or reward model (rm)."""
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    dpo: DpoConfig = field(default_factory=DpoConfig)
    rm: RmConfig = field(default_factory=RmConfig)
    loss_fn: LossConfig = field(default_factory=LossConfig)
    reward_penalties: RewardPenaltiesConfig = field(default_factory=RewardPenaltiesConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    data: DataConfig = field(default_factory=DataConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    checkpointing: CheckpointingConfig = field(default_factory=CheckpointingConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    deadlines: DeadlinesConfig = field(default_factory=DeadlinesConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)

    @property
    def training(self) -> GrpoConfig | SftConfig | DpoConfig | RmConfig:
        return getattr(self, self.algorithm)

    @property
    def learns_pairs(self) -> bool:
        return self.algorithm in ("dpo", "rm")

    @property
    def keeps_reference(self) -> bool:
        """Whether the loss compares with the starting model."""
        return self.algorithm == "dpo" or (self.algorithm == "grpo" and self.loss_fn.reference_policy_kl_penalty > 0)

    @property
    def has_engines(self) -> bool:
        """Whether the run samples rollouts."""
        return self.algorithm == "grpo"

    @property
    def frees_training_memory(self) -> bool:
        """Whether gradients and optimizer leave the devices outside of train steps: always where engines share them."""
        return self.has_engines and (self.policy.generation.colocated.enabled or self.policy.offload_optimizer_for_logprob)

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether a step computes the policy's logprobs before its update."""
        return self.has_engines and (not self.loss_fn.force_on_policy_ratio or self.grpo.seq_logprob_error_threshold is not None)

    @property
    def num_dedicated_slots(self) -> int:
        """Slots with an engine worker and no policy rank; 0 where engines are colocated, or there are none."""
        generation = self.policy.generation
        if generation.colocated.enabled or not self.has_engines:
            return 0
        if self.cluster.gpus_per_node == 0:
            return generation.num_cpu_engines * generation.vllm_cfg.tensor_parallel_size
        resources = generation.colocated.resources
        if self.cluster.num_nodes == 1:
            return resources.gpus_per_node or 0
        return (resources.num_nodes or 0) * self.cluster.gpus_per_node

    @property
    def max_rollout_turns(self) -> int:
        return max(self.grpo.max_rollout_turns, GYM_TURNS if self.env.should_use_nemo_gym else 1)

    @property
    def num_policy_ranks(self) -> int:
        """Slots with a policy rank: the world size of the trainer."""
        return self.cluster.num_slots - (self.num_dedicated_slots if self.cluster.gpus_per_node else 0)

    @property
    def num_slots(self) -> int:
        """Slots in all."""
        return self.num_policy_ranks + self.num_dedicated_slots

    @property
    def data_parallel_size(self) -> int:
        """DP: replicas of the dense layers."""
        return self.num_policy_ranks // self.policy.megatron_cfg.model_parallel_size

    @property
    def num_engines(self) -> int:
        if not self.has_engines:
            return 0
        if self.cluster.gpus_per_node == 0:
            return self.policy.generation.num_cpu_engines
        return (self.num_dedicated_slots or self.num_policy_ranks) // self.policy.generation.vllm_cfg.tensor_parallel_size


def section_of(hint: object) -> type | None:
    """The section class of a field's type, through `| None`; None for a plain value."""
    candidates = getattr(hint, "__args__", (hint,))
    return next((kind for kind in candidates if isinstance(kind, type) and dataclasses.is_dataclass(kind)), None)


@functools.cache
def fields_of(section: type) -> dict[str, Any]:
    """The fields of a section and their types, with the ranges in `Annotated`."""
    return get_type_hints(section, include_extras=True)


def _keys(section: type, prefix: str = "") -> dict[str, tuple[str, str]]:
    keys: dict[str, tuple[str, str]] = {}
    for name, hint in fields_of(section).items():
        inner = section_of(hint)
        keys |= _keys(inner, f"{prefix}{name}.") if inner else {f"{prefix}{name}": (section.__name__, name)}
    return keys


KEYS: dict[str, tuple[str, str]] = _keys(RunConfig)
"""Every dotted key with its section class and field."""
