# SPDX-License-Identifier: Apache-2.0
"""Likely mistakes that no rule forbids: a run starts with them, after a warning."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from conversion.texts import listed
from mrl.config.errors import COMMAND_LINE, NotKnown, Problem, Problems, spell, value_at
from mrl.config.model import read_model
from mrl.config.passthrough import LAYOUT_ARGUMENTS
from mrl.config.rules.algorithms import doubt_hooks
from mrl.config.rules.training import doubt_rows
from mrl.config.schema.megatron import MegatronConfig
from mrl.config.schema.run import RunConfig
from mrl.config.texts import counted

COMMON_GPU_BYTES = 80e9
MAX_GPUS_PER_NODE = 16
_ENGINE = "policy.generation.vllm_cfg"
_KWARGS, _IN_ORDER = "policy.generation.vllm_kwargs", LAYOUT_ARGUMENTS["moe_backend"]
_OPTIMIZER = "policy.megatron_cfg.optimizer"
_CORRECT = (
    "set loss_fn.use_importance_sampling_correction=true, or watch train/gen_kl_error, which says how far apart they "
    "are"
)

OF_BIASES = ("moe_router_enable_expert_bias", "moe_router_bias_update_rate")
OF_EXPERTS = (
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_router_bias_update_rate",
    "moe_token_dispatcher_type",
)


def _is_idle(config: RunConfig, name: str) -> bool:
    colocated = config.policy.generation.colocated
    return config.has_engines and colocated.enabled and getattr(colocated.resources, name) is not None


DOUBTS: dict[str, tuple[Callable[[RunConfig], bool], str]] = {
    f"{_OPTIMIZER}.lr": (
        lambda config: config.policy.megatron_cfg.optimizer.lr > 0.01,
        "a step moves every parameter by about as much, which destroys a trained model; "
        "policies learn with 1e-7 to 1e-5, tiny models with 1e-3",
    ),
    f"{_OPTIMIZER}.weight_decay": (
        lambda config: config.policy.megatron_cfg.optimizer.weight_decay > 1,
        "it pulls the weights to 0 faster than they learn; 0 to 0.1 is usual",
    ),
    "loss_fn.reference_policy_kl_penalty": (
        lambda config: config.has_engines and config.loss_fn.reference_policy_kl_penalty > 1,
        "the penalty outweighs rewards of 0 to 1, and the policy stays where it is; 0 to 0.1 is usual",
    ),
    "policy.generation.temperature": (
        lambda config: config.has_engines and not 0.1 <= config.policy.generation.temperature <= 2,
        "near 0 the rollouts of a group are alike and teach nothing, far above 1 they are noise; "
        "0.6 to 1.2 is usual; validation has policy.generation.val_temperature",
    ),
    "policy.generation.top_k": (
        lambda config: config.has_engines and config.policy.generation.top_k == 1,
        (
            "the rollouts of a group are alike, and teach nothing; leave it out; validation has "
            "policy.generation.val_top_k"
        ),
    ),
    f"{_KWARGS}.moe_backend": (
        lambda config: (
            config.has_engines and config.policy.generation.vllm_kwargs.get("moe_backend", _IN_ORDER) != _IN_ORDER
        ),
        (
            f"without effect: engines take {_IN_ORDER}, as other kernels keep experts in an order in which no refit "
            "writes, and vLLM's choice for MXFP8; leave it out"
        ),
    ),
    f"{_ENGINE}.precision": (
        lambda config: (
            config.has_engines
            and config.policy.generation.vllm_cfg.is_fp8
            and not config.loss_fn.use_importance_sampling_correction
        ),
        "engines sample from weights rounded to FP8, and the trainer has others; " + _CORRECT,
    ),
    "policy.megatron_cfg.fp8_cfg.fp8_recipe": (
        lambda config: (
            config.has_engines
            and config.policy.megatron_cfg.fp8_cfg.enabled
            and not config.loss_fn.use_importance_sampling_correction
        ),
        "the trainer rounds what it multiplies to FP8, and the engines otherwise or not at all; " + _CORRECT,
    ),
    "loss_fn.use_importance_sampling_correction": (
        lambda config: (
            config.has_engines
            and config.rollouts.max_lag_steps == 1
            and not config.loss_fn.use_importance_sampling_correction
        ),
        "rollouts of one step before are trained as if the present weights had drawn them; "
        "set it to true, or watch train/gen_kl_error, which says how far apart the two are",
    ),
    "grpo.max_num_epochs": (
        lambda config: (
            config.has_engines and bool(config.data.difficulty_pools) and config.rollouts.max_num_epochs == 1
        ),
        "data.difficulty_pools has no effect in the first epoch, when no prompt has a reward yet; raise it",
    ),
    "policy.generation.max_new_tokens": (
        lambda config: config.has_engines and config.policy.generation.max_new_tokens < 4,
        "few answers are so short; raise it",
    ),
    "ppo.policy_training_start_step": (
        lambda config: config.has_critic and config.ppo.policy_training_start_step >= config.grpo.max_num_steps,
        "the run ends before the policy is trained: only the critic learns; "
        "it is below ppo.max_num_steps, except where a critic is made for a later run",
    ),
    "distillation.topk_logits_k": (
        lambda config: config.num_taught_logits == 1 and not config.loss_fn.zero_outside_topk,
        "of one token both distributions are 1, so that the loss is 0 and nothing is learned; "
        "raise it, 64 is usual, or set loss_fn.zero_outside_topk=true",
    ),
    "checkpointing.save_period": (
        lambda config: (
            config.checkpointing.enabled
            and (config.checkpointing.metric_name or "").startswith("val:")
            and config.training.val_period > 0
            and config.checkpointing.save_period % config.training.val_period != 0
        ),
        "checkpoints of steps without a validation have no checkpointing.metric_name, and rank last; make it a "
        "multiple of val_period",
    ),
    "checkpointing.keep_unfinished_s": (
        lambda config: (
            config.has_engines
            and not config.checkpointing.keep_rollouts_gb
            and "checkpointing.keep_unfinished_s" in config.facts.origins
            and config.checkpointing.keep_unfinished_s > 0
        ),
        "without effect: checkpointing.keep_rollouts_gb=0 keeps no rollouts, and no unfinished ones; raise that, or "
        "leave this out",
    ),
    "policy.megatron_cfg.moe_flex_dispatcher_backend": (
        lambda config: config.policy.megatron_cfg.uses_hybridep,
        "HybridEP is passed on to Megatron as its sources say, but no run on GPUs has shown it; "
        "compare the loss of the first steps with moe_token_dispatcher_type=alltoall",
    ),
    "policy.megatron_cfg.moe_router_dtype": (
        lambda config: (
            config.policy.megatron_cfg.moe_token_dispatcher_type == "flex"
            and config.policy.megatron_cfg.moe_router_dtype == "fp64"
        ),
        "DeepEP and HybridEP carry experts' weights in float32: Megatron rounds them on the way; fp32 costs less",
    ),
    "cluster.gpus_per_node": (
        lambda config: config.cluster.gpus_per_node > MAX_GPUS_PER_NODE,
        f"hosts have at most {MAX_GPUS_PER_NODE} GPUs; give the GPUs of one host, and cluster.num_nodes",
    ),
    **{
        f"policy.generation.colocated.resources.{name}": (
            lambda config, name=name: _is_idle(config, name),
            "it has no effect: engines share the policy's GPUs (policy.generation.colocated.enabled=true); "
            "leave it out, or set that to false",
        )
        for name in ("gpus_per_node", "num_nodes")
    },
}
"""Key -> whether its value is doubtful; why, and what is usual."""


_SWITCHES: dict[str, tuple[str, object]] = {
    **{
        f"{section}.": (f"{section}.enabled", False)
        for section in (
            *("grpo.reward_scaling", "grpo.reward_shaping", "on_policy_distillation", "policy.dynamic_batching"),
            *("policy.megatron_cfg.fp8_cfg", "policy.megatron_cfg.peft"),
        )
    },
    **{f"logger.{name}.": (f"logger.{name}_enabled", False) for name in ("mlflow", "swanlab", "tensorboard", "wandb")},
    f"{_OPTIMIZER}.muon_": (f"{_OPTIMIZER}.optimizer", "adam"),
}
"""Beginning of keys -> the key, and its value, with which nothing reads them."""


def find_doubts(config: RunConfig) -> list[str]:
    """Warns about every value that is probably a slip. Skips unknown values."""
    problems = Problems(config, config.facts.origins)
    for key, (is_doubtful, text) in DOUBTS.items():
        with suppress(NotKnown):
            if is_doubtful(config):
                rule, _, way_out = text.partition("; ")
                problems.add(key, rule, way_out)
    with suppress(NotKnown):
        doubt_hooks(config, problems)
        problems.extend(find_short_rows(config))
    with suppress(NotKnown):
        _check_switched_off(config, problems)
    with suppress(NotKnown):
        _check_place(config, problems)
    with suppress(NotKnown, ValueError):
        _check_memory(config, problems)
    with suppress(NotKnown, ValueError):
        _check_experts(config, problems)
    return list(map(str, problems.merged))


def _check_switched_off(config: RunConfig, problems: Problems) -> None:
    """Warns about values of the command line that nothing reads, since their section is switched off."""
    for key, origin in config.facts.origins.items():
        start = next((start for start in _SWITCHES if key.startswith(start)), None)
        if start is None or not origin.startswith(COMMAND_LINE):
            continue
        switch, off = _SWITCHES[start]
        if key != switch and value_at(config, switch) == off:
            problems.add(key, f"it has no effect: {switch}={spell(off)}", "change that, or leave this out")


def find_short_rows(config: RunConfig) -> list[Problem]:
    """Warns about rows, of any model, that the longest sequence does not fit; `mrl.plan` says it, too."""
    found = list[Problem]()
    for model in config.sections:
        doubt_rows(config, inner := Problems(config, config.facts.origins, model))
        said = {(doubt.id, doubt.value) for doubt in found}
        found += [doubt for doubt in inner.merged if (doubt.id, doubt.value) not in said]
    return found


def _check_place(config: RunConfig, problems: Problems) -> None:
    """Warns if the run folder is a new one, and the folder of other runs."""
    folder = Path(config.checkpointing.checkpoint_dir)
    runs = [path.parent.name for path in folder.glob("*/metrics.jsonl")]
    if runs and not (folder / "config.yaml").exists():
        rule = f"the folder of other runs ({listed(sorted(runs), 3)}), beside which this one would write its files"
        problems.add("checkpointing.checkpoint_dir", rule, "name a folder in it")


def _check_experts(config: RunConfig, problems: Problems) -> None:
    """Warns about keys of experts, or of their biases, on a model without. ValueError: the model is not known."""
    model, megatron, default = read_model(Path(config.policy.model_name)), config.policy.megatron_cfg, MegatronConfig()
    missing, keys = (
        ("experts", OF_EXPERTS)
        if not model.experts
        else ("biases of experts", () if model.has_expert_bias else OF_BIASES)
    )
    if given := [name for name in keys if getattr(megatron, name) not in (getattr(default, name), False)]:
        rule = f"the model has no {missing}, so these have no effect: {', '.join(given)}"
        problems.add(f"policy.megatron_cfg.{given[0]}", rule, "leave them out")


def _check_memory(config: RunConfig, problems: Problems) -> None:
    """Warns if weights, gradients and optimizer do not fit into common GPUs. ValueError: the model is not known."""
    megatron, ranks = config.policy.megatron_cfg, config.num_policy_ranks
    if config.cluster.gpus_per_node == 0 or ranks < 1:
        return
    num_parameters = read_model(Path(config.policy.model_name)).num_parameters
    weights = 2 if config.policy.precision == "bfloat16" else 4
    gradients = 4 if megatron.distributed_data_parallel_config.grad_reduce_in_fp32 else weights
    optimizer = 12 * (1 - megatron.optimizer.optimizer_offload_fraction * megatron.optimizer.optimizer_cpu_offload)
    if megatron.peft.enabled:
        gradients, optimizer = 0, 0.0
    # A lower bound: as if all parameters were experts, and all ranks shared the optimizer.
    cuts = (
        megatron.tensor_model_parallel_size
        * megatron.pipeline_model_parallel_size
        * megatron.expert_model_parallel_size
    )
    num_bytes = num_parameters * ((weights + gradients) / min(cuts, ranks) + optimizer / ranks)
    if num_bytes > COMMON_GPU_BYTES:
        rule = (
            f"weights, gradients and optimizer of {num_parameters / 1e9:.1f} billion parameters take "
            f"{num_bytes / 1e9:,.0f} GB on each of {counted(ranks, 'GPU')}; most have {COMMON_GPU_BYTES / 1e9:.0f}"
        )
        offload = f"{_OPTIMIZER}.optimizer_cpu_offload with optimizer_offload_fraction=1"
        way_out = f"more GPUs, larger parallel sizes, {offload}, or policy.megatron_cfg.peft.enabled=true"
        problems.add("policy.model_name", rule, way_out, others=["cluster.gpus_per_node", "cluster.num_nodes"])
