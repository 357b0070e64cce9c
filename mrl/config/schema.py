"""Every config key: one dataclass per YAML section, names as in NeMo RL. The string below a field is its manual.

Defaults stand here and nowhere else. A default written `"${...}"` follows another key and is resolved by `mrl.config.load`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, get_type_hints

from mrl.config.trace import traced

Precision = Literal["float32", "bfloat16"]


def _follows(expression: str) -> Any:
    """A default taken from other keys, in OmegaConf's syntax. Any: the text stands in for the field's own type until it is resolved."""
    return "${" + expression + "}"


def _required() -> Any:
    """OmegaConf's mark for a key that has no default."""
    return "???"


@traced
@dataclass
class AsyncGrpoConfig:
    enabled: bool = False
    """Generate with weights that may be older than the ones being trained. Not supported yet: must be false."""
    max_trajectory_age_steps: int = 1
    """How many steps old a rollout may be when it is trained on; used only if `enabled`."""

    @property
    def max_lag_steps(self) -> int:
        """Steps by which generation may run ahead; 0 is synchronous."""
        return self.max_trajectory_age_steps if self.enabled else 0


@traced
@dataclass
class GrpoConfig:
    num_prompts_per_step: int = 32
    """Prompts per step."""
    num_generations_per_prompt: int = 16
    """Rollouts of each prompt: the group whose members are compared with each other. At least 2."""
    max_num_steps: int = 1_000_000
    """The run ends after this many steps in all, those before a resume included."""
    max_num_epochs: int = 1
    """The run ends after this many passes over the training prompts."""
    max_rollout_turns: int = 1
    """Turns of a rollout. Only 1 is supported."""
    normalize_rewards: bool = True
    """Divide advantages by the standard deviation of the group's rewards."""
    use_leave_one_out_baseline: bool = True
    """Baseline of a rollout: mean reward of the others of its group; false: of the whole group."""
    val_period: int = 10
    """Validate every this many steps; 0 = never."""
    val_at_start: bool = False
    """Validate before the first update (step 0)."""
    val_at_end: bool = False
    """Validate after the last step."""
    max_val_samples: int | None = 256
    """Validation prompts used, the first ones of the file; null = all."""
    seed: int = 42
    """Seed of the run: data order, sampling, dropout-free training. Config and seed fix the run bit for bit on CPU."""
    async_grpo: AsyncGrpoConfig = field(default_factory=AsyncGrpoConfig)

    @property
    def num_rollouts_per_step(self) -> int:
        """Rollouts per step, all prompts together."""
        return self.num_prompts_per_step * self.num_generations_per_prompt


@traced
@dataclass
class LossConfig:
    reference_policy_kl_penalty: float = 0.01
    """Weight of the KL term to the frozen starting model; 0 = no reference model is kept."""
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL (http://joschu.net/blog/kl-approx.html)."""
    kl_input_clamp_value: float | None = 20.0
    """Log-ratios of the KL term are clamped to +- this before exp; null = not clamped."""
    kl_output_clamp_value: float | None = 10.0
    """KL per token is clamped to +- this; null = not clamped."""
    ratio_clip_min: float = 0.2
    """The policy ratio is clipped below at 1 - this."""
    ratio_clip_max: float = 0.2
    """The policy ratio is clipped above at 1 + this."""
    use_importance_sampling_correction: bool = False
    """Weight each token by exp(old_logprobs - generator_logprobs), to correct for differences between trainer and generator."""
    truncated_importance_sampling_ratio: float | None = None
    """Upper bound of that weight; null = no bound."""
    token_level_loss: bool = True
    """Mean over the valid tokens of the global batch; false: mean over sequences of each sequence's token mean."""


@traced
@dataclass
class TokenizerConfig:
    name: str = _follows("policy.model_name")
    """Folder of the tokenizer."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Passed to `apply_chat_template`; null = nothing."""


@traced
@dataclass
class SequencePackingConfig:
    enabled: bool = True
    """Pack sequences into rows. Packed rows are the only batch format: must be true."""
    train_mb_tokens: int = _follows("mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}")
    """Tokens of a packed row in training."""
    logprob_mb_tokens: int = _follows("mul:${policy.max_total_sequence_length}, ${policy.logprob_batch_size}")
    """Tokens of a packed row in logprob passes."""
    algorithm: Literal["first_fit_decreasing"] = "first_fit_decreasing"
    """How sequences are assigned to rows."""
    sequence_length_round: int = 64
    """Row lengths are rounded up to a multiple of this, which bounds the number of different shapes."""


@traced
@dataclass
class OptimizerConfig:
    optimizer: Literal["adam"] = "adam"
    """Megatron's optimizer."""
    lr: float = 5.0e-6
    """Peak learning rate."""
    min_lr: float = 5.0e-7
    """Learning rate at the end of the decay."""
    weight_decay: float = 0.01
    """AdamW's decay."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.999
    """Decay of the second moment."""
    adam_eps: float = 1.0e-8
    """Added to the root of the second moment."""
    use_distributed_optimizer: bool = True
    """Shard optimizer state over data-parallel ranks."""
    clip_grad: float = _follows("policy.max_grad_norm")
    """Global gradient norm above which gradients are scaled down; 0 = never."""
    params_dtype: Precision = "float32"
    """Type of the optimizer's main parameters."""
    bf16: bool = False
    """Weights and activations in bfloat16; must agree with `policy.precision`."""
    fp16: bool = False
    """Weights and activations in float16. Not supported: must be false."""


@traced
@dataclass
class SchedulerConfig:
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = "constant"
    """Shape of the decay from `lr` to `min_lr`."""
    lr_decay_iters: int | None = None
    """Steps until `min_lr`; null = grpo.max_num_steps."""
    lr_warmup_iters: int = 0
    """Steps of linear warmup."""
    lr_warmup_init: float = 0.0
    """Learning rate at the start of the warmup."""
    start_weight_decay: float = _follows("policy.megatron_cfg.optimizer.weight_decay")
    """Weight decay at the first step."""
    end_weight_decay: float = _follows("policy.megatron_cfg.optimizer.weight_decay")
    """Weight decay at the last step."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape between the two."""


@traced
@dataclass
class DdpConfig:
    grad_reduce_in_fp32: bool = True
    """Accumulate and reduce gradients in float32."""
    overlap_grad_reduce: bool = True
    """Reduce gradients during the backward pass."""
    overlap_param_gather: bool = True
    """Gather updated parameters during the next forward pass; needs `use_distributed_optimizer`."""


@traced
@dataclass
class MegatronConfig:
    enabled: bool = True
    """Train with Megatron-Core, the only backend: must be true."""
    tensor_model_parallel_size: int = 1
    """TP: ranks that share each layer's matrices."""
    pipeline_model_parallel_size: int = 1
    """PP: stages of consecutive layers."""
    context_parallel_size: int = 1
    """CP: ranks that share each sequence. Only 1 is supported."""
    expert_model_parallel_size: int = 1
    """EP: ranks over which the experts of a layer are spread."""
    expert_tensor_parallel_size: int = 1
    """ETP: ranks that share each expert's matrices."""
    num_layers_in_first_pipeline_stage: int | None = None
    """Layers of the first stage; null = as many as the others."""
    num_layers_in_last_pipeline_stage: int | None = None
    """Layers of the last stage; null = as many as the others."""
    sequence_parallel: bool = False
    """Shard activations between the TP regions along the sequence. Required for mixture-of-experts models with TP > 1."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    freeze_moe_router: bool = True
    """Do not train the routers' weights."""
    moe_router_dtype: Literal["fp32", "fp64"] = "fp64"
    """Type in which routing scores are computed."""
    moe_router_load_balancing_type: Literal["none"] = "none"
    """Auxiliary balancing loss."""
    moe_router_bias_update_rate: float = 0.0
    """Step of the expert-bias update after each train step; 0 = biases stay."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = "alltoall"
    """How tokens travel to their experts."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    distributed_data_parallel_config: DdpConfig = field(default_factory=DdpConfig)

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one replica of the dense layers: TP x PP x CP."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size


@traced
@dataclass
class ColocatedConfig:
    enabled: bool = True
    """Engines share the policy ranks' units. Must be true."""


@traced
@dataclass
class VllmConfig:
    tensor_parallel_size: int = 1
    """TP of an engine, within one node."""
    pipeline_parallel_size: int = 1
    """Must be 1."""
    expert_parallel_size: int = 1
    """1 = experts are cut like other matrices; tensor_parallel_size = whole experts are spread over the engine."""
    precision: Precision = _follows("policy.precision")
    """Type of the engine's weights."""
    gpu_memory_utilization: float = 0.6
    """Share of a GPU's memory that the engine may use; hosts without GPUs use `kv_cache_memory_mib`."""
    kv_cache_memory_mib: int = 64
    """KV cache of an engine on a host without GPUs, in MiB."""
    max_model_len: int = _follows("policy.max_total_sequence_length")
    """Longest prompt plus rollout, in tokens."""
    max_num_seqs: int = 128
    """Rollouts that an engine samples at the same time."""
    max_num_batched_tokens: int = 4096
    """Tokens of one engine step."""
    enforce_eager: bool = False
    """No CUDA graphs. Must be true on hosts without GPUs."""
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    """How an engine gets its first weights; the first refit must find or leave them right in any case."""


@traced
@dataclass
class GenerationConfig:
    backend: Literal["vllm"] = "vllm"
    """The generator."""
    max_new_tokens: int = 256
    """Longest rollout in tokens, the stop token included."""
    temperature: float = 1.0
    """Sampling temperature, above 0."""
    top_p: float = 1.0
    """Nucleus sampling. Only 1.0 is supported, because logprobs of the trainer are over the whole vocabulary."""
    top_k: int | None = None
    """Keep the k likeliest tokens. Only null is supported, for the same reason."""
    stop_token_ids: list[int] | None = None
    """Tokens that end a rollout; null = the model's end-of-sequence tokens."""
    num_cpu_engines: int = 1
    """Engines on hosts without GPUs, over all nodes. With GPUs it follows from the cluster and the engine's TP."""
    colocated: ColocatedConfig = field(default_factory=ColocatedConfig)
    vllm_cfg: VllmConfig = field(default_factory=VllmConfig)
    vllm_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further engine arguments, passed to vLLM by name."""


@traced
@dataclass
class PolicyConfig:
    model_name: str = _required()
    """Folder of the starting model in Hugging Face format."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    train_global_batch_size: int = _follows("mul:${grpo.num_prompts_per_step}, ${grpo.num_generations_per_prompt}")
    """Sequences per optimizer step. Must equal the rollouts per step."""
    train_micro_batch_size: int = 1
    """Longest sequences that fit into a packed row in training."""
    logprob_batch_size: int = _follows("policy.train_micro_batch_size")
    """Longest sequences that fit into a packed row in logprob passes."""
    max_total_sequence_length: int = 512
    """Longest prompt plus rollout, in tokens."""
    make_sequence_length_divisible_by: int = _follows("policy.megatron_cfg.tensor_model_parallel_size")
    """Packed rows are padded to a multiple of this; sequence parallelism needs a multiple of TP."""
    precision: Precision = "float32"
    """Type of weights and activations."""
    max_grad_norm: float = 1.0
    """Global gradient norm above which gradients are scaled down; 0 = never."""
    refit_buffer_size_gb: float = 0.25
    """Exchange buffer of a unit during a refit, in GB (10^9 bytes). Smaller = more rounds."""
    sequence_packing: SequencePackingConfig = field(default_factory=SequencePackingConfig)
    megatron_cfg: MegatronConfig = field(default_factory=MegatronConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)


@traced
@dataclass
class DataDefaultConfig:
    processor: str = "math_data_processor"
    """How a row becomes a prompt."""
    env_name: str = "math"
    """The environment that scores rollouts of rows that name none."""
    prompt_file: str | None = None
    """Text file with `{}` in place of the question; null = the question alone."""
    system_prompt_file: str | None = None
    """Text file with the system message; null = none."""


@traced
@dataclass
class TrainDataConfig:
    data_path: str = _required()
    """JSONL file of training rows."""


@traced
@dataclass
class ValidationDataConfig:
    data_path: str = _required()
    """JSONL file of validation rows."""


@traced
@dataclass
class DataConfig:
    max_input_seq_length: int | None = None
    """Longest prompt in tokens; null = what the context leaves beside `max_new_tokens`."""
    shuffle: bool = True
    """Shuffle training rows in each epoch, by the run's seed."""
    default: DataDefaultConfig = field(default_factory=DataDefaultConfig)
    train: TrainDataConfig = field(default_factory=TrainDataConfig)
    validation: ValidationDataConfig | None = None
    """null = no validation."""


@traced
@dataclass
class MathEnvConfig:
    num_workers: int = 1
    """Child processes that score rollouts."""
    math_verify_impl: Literal["hf_math_verify"] = "hf_math_verify"
    """How an answer is compared with the expected one."""
    timeout_s: float = 2.0
    """Seconds for one rollout; then its child is killed and the rollout is masked."""


@traced
@dataclass
class EnvConfig:
    math: MathEnvConfig = field(default_factory=MathEnvConfig)


@traced
@dataclass
class CheckpointingConfig:
    enabled: bool = True
    """Write checkpoints."""
    checkpoint_dir: str = "results/grpo"
    """Folder of the run. A run resumes from the newest complete checkpoint in it."""
    metric_name: str = "val:accuracy"
    """What ranks checkpoints: `train:<metric>` or `val:<metric>`."""
    higher_is_better: bool = True
    """Direction of that metric."""
    keep_top_k: int = 3
    """Checkpoints kept: the best by that metric, and always the newest."""
    save_period: int = 10
    """Save every this many steps, and at the end."""
    save_optimizer: bool = True
    """Save optimizer state; without it a run cannot resume exactly."""
    checkpoint_must_save_by: str | None = None
    """DD:HH:MM:SS after the start of the process, when the run saves and ends; null = never."""

    @property
    def must_save_by_s(self) -> float | None:
        """`checkpoint_must_save_by` in seconds."""
        if self.checkpoint_must_save_by is None:
            return None
        days, hours, minutes, seconds = (int(part) for part in self.checkpoint_must_save_by.split(":"))
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


@traced
@dataclass
class LoggerConfig:
    log_dir: str = _follows("checkpointing.checkpoint_dir") + "/logs"
    """Folder of TensorBoard logs; each start of a run gets `exp_NNN` below it."""
    tensorboard_enabled: bool = False
    """Write TensorBoard events."""


@traced
@dataclass
class ClusterConfig:
    num_nodes: int = 1
    """Hosts."""
    gpus_per_node: int = 0
    """GPUs of a host; 0 = hosts without GPUs."""
    cpu_units_per_node: int = 1
    """Policy ranks per host on hosts without GPUs."""

    @property
    def units_per_node(self) -> int:
        """Worker units of a node: its GPUs, or its policy ranks where there are none."""
        return self.gpus_per_node or self.cpu_units_per_node

    @property
    def num_units(self) -> int:
        """Worker units in all, which is the number of policy ranks."""
        return self.num_nodes * self.units_per_node


@traced
@dataclass
class DeadlinesConfig:
    start_s: float = 300.0
    """Seconds for all processes to start and hold their weights."""
    generate_s: float = 600.0
    """Seconds without a finished rollout after which generation has failed."""
    reward_s: float = 120.0
    """Seconds for the rewards still missing when the last rollout of a step is done."""
    train_s: float = 600.0
    """Seconds for one logprob pass or train step."""
    refit_s: float = 300.0
    """Seconds for one refit."""
    checkpoint_s: float = 600.0
    """Seconds to save or load a checkpoint."""


@traced
@dataclass
class RunConfig:
    """A whole run. Code takes the narrowest section it needs."""

    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    loss_fn: LossConfig = field(default_factory=LossConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    data: DataConfig = field(default_factory=DataConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    checkpointing: CheckpointingConfig = field(default_factory=CheckpointingConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    deadlines: DeadlinesConfig = field(default_factory=DeadlinesConfig)

    @property
    def data_parallel_size(self) -> int:
        """DP: replicas of the dense layers."""
        return self.cluster.num_units // self.policy.megatron_cfg.model_parallel_size

    @property
    def num_engines(self) -> int:
        """Engines in all."""
        if self.cluster.gpus_per_node == 0:
            return self.policy.generation.num_cpu_engines
        return self.cluster.num_units // self.policy.generation.vllm_cfg.tensor_parallel_size


def section_of(hint: object) -> type | None:
    """The section class of a field's type, through `| None`; None for a plain value."""
    candidates = getattr(hint, "__args__", (hint,))
    return next((kind for kind in candidates if isinstance(kind, type) and dataclasses.is_dataclass(kind)), None)


def _keys(section: type, prefix: str = "") -> dict[str, tuple[str, str]]:
    keys: dict[str, tuple[str, str]] = {}
    for name, hint in get_type_hints(section).items():
        inner = section_of(hint)
        keys |= _keys(inner, f"{prefix}{name}.") if inner else {f"{prefix}{name}": (section.__name__, name)}
    return keys


KEYS: dict[str, tuple[str, str]] = _keys(RunConfig)
"""Every dotted key with its section class and field."""
