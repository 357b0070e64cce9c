# SPDX-License-Identifier: Apache-2.0
"""Rules of critics, teachers and judges: those of the policy's section, and their own."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from conversion.families.registry import family
from conversion.families.settings import known_keys
from conversion.files.hf_folder import OUTPUT, has_reward_head, read_config, stored_tensors
from conversion.files.hf_weights import has_output_alone
from mrl.config.errors import Problem, Problems, prefix_of
from mrl.config.judge_runs import judge_run
from mrl.config.model import ModelSizes, find_override_problems, is_hub_id, overridden_config, read_model
from mrl.config.passthrough import check_arguments
from mrl.config.rules import algorithms, fp8, layout, training
from mrl.config.rules.tokens import check_tokens
from mrl.config.schema.run import RunConfig
from mrl.phases import REFERENCE, ModelName

Check = Callable[[RunConfig, Problems], None]
ModelCheck = Callable[[RunConfig, ModelSizes, Problems], None]

NOT_CACHED = "not in the local Hugging Face cache; it is downloaded at the start of the run, or give a folder"
RULES: dict[str, Check] = {
    "parallel layout": layout.check_cluster,
    "rows": training.check_rows,
    "log-probabilities": training.check_logprobs,
}
"""Rules of section `policy` that the section of every model keeps."""
TRAINED_RULES: dict[str, Check] = {
    "batches": algorithms.check_batch,
    "head": algorithms.check_head,
    "optimizer": training.check_optimizer,
}
"""Further rules for the sections of other trained models."""
MODEL_RULES: dict[str, ModelCheck] = {
    "layout of the model": layout.check_trainer,
    "dispatch to experts": training.check_dispatch,
    "training in FP8": fp8.check_training,
    "gated delta nets": training.check_delta_nets,
}
TRAINED_MODEL_RULES: dict[str, ModelCheck] = {
    "recomputing": training.check_recomputing,
    "routing": training.check_routing,
    "what is trained": lambda config, model, problems: training.check_trained(config, problems),
}
"""Counterparts of `RULES` and `TRAINED_RULES` that need the model's config.json. Names as in
`mrl.config.rules.checks`.
"""
_QUANTISED = "hf_quant_config.json"


def check_critic(config: RunConfig, problems: Problems) -> None:
    """Checks PPO's sections beyond the rules that `value` shares with `policy`."""
    if not config.has_critic:
        return
    ppo, loss = config.ppo, config.loss_fn
    if loss.force_on_policy_ratio and ppo.ppo_epochs > 1:
        rule = f"it is right for one update per step, and ppo.ppo_epochs={ppo.ppo_epochs}"
        problems.add("loss_fn.force_on_policy_ratio", rule, "set it to false, or the latter to 1")
    if config.grpo.adv_estimator.name != "grpo":
        rule = "algorithm=ppo compares tokens with the critic's values, as ppo.adv_estimator says"
        problems.add("grpo.adv_estimator.name", rule, "leave it out")
    if config.value.megatron_cfg.env_vars not in (None, config.policy.megatron_cfg.env_vars):
        rule = "policy and critic share processes, which have policy.megatron_cfg.env_vars"
        problems.add("value.megatron_cfg.env_vars", rule, "set it there")
    if config.value.megatron_cfg.trains_mtp:
        problems.add("value.megatron_cfg.mtp_num_layers", "a critic predicts no tokens", "set it to 0")


def check_heads(config: RunConfig, problems: Problems) -> None:
    """Checks, as far as the weights are here, that models used without a reward head have none."""
    used = {"policy.model_name": config.policy.model_name} if config.algorithm != "rm" else {}
    used |= {f"{prefix_of(model)}model_name": section.model_name for model, section in config.teachers.items()}
    for key, name in used.items():
        with suppress(OSError, ValueError):
            if has_reward_head(Path(name)):
                rule = (
                    f"it has the head of a reward model (score.weight), for which algorithm={config.algorithm} "
                    "has no use here"
                )
                problems.tell(
                    key, name, rule, "take a language model: heads are of value.model_name, and of algorithm=rm"
                )


def check_engine_files(config: RunConfig, problems: Problems) -> None:
    """Checks, as far as the model is here, that vLLM will find its class and its embedding."""
    folder, overrides = Path(config.policy.model_name), config.policy.hf_config_overrides
    if not config.has_engines:
        return
    with suppress(OSError, ValueError):
        hf_config = overridden_config(read_config(folder / "config.json"), overrides)
        names = hf_config.get("architectures") or []
        known = known_keys().get(str(hf_config.get("model_type")), {}).get("class")
        ends = (known or "ForCausalLM", "ForSequenceClassification")
        if not (known and not names) and (not isinstance(names, list) or not str([*names, ""][0]).endswith(ends)):
            rule = (
                f"config.json: architectures={names!r} begins with no language model of its model_type, and vLLM takes "
                "its class from there"
            )
            problems.tell("policy.model_name", folder, rule, f"name {known or 'the one that ends with ForCausalLM'}")
        if (folder / _QUANTISED).exists():
            rule = f"it holds {_QUANTISED}, by which vLLM takes its weights for quantised"
            problems.tell("policy.model_name", folder, rule, "remove that file if they are not")
        for key, value in family(hf_config).stated:
            if hf_config.get(key) != value:
                rule = f"config.json has no {key}, and vLLM's default is not {value!r}, as transformers computes"
                problems.tell("policy.model_name", folder, rule, f"set policy.hf_config_overrides.{key}={value}")
        stored = stored_tensors(folder)
        is_stacked = any(tensor.is_stacked for _, tensor in stored.values())
        for is_unread, rule in (
            (
                has_output_alone(stored, hf_config),
                f"its tied embedding is stored as {OUTPUT} alone, which vLLM does not read",
            ),
            (
                is_stacked and not family(hf_config).vllm_reads_stacked_experts,
                "a layer's experts are stored as one tensor (save_original_format=False), which vLLM does not read",
            ),
            (
                hf_config.get("quantization_config") or any(tensor.is_mxfp4 for _, tensor in stored.values()),
                "its experts are in MXFP4, by config.json or as stored, in which engines would keep them, and refits "
                "write plain numbers",
            ),
        ):
            if not is_unread:
                continue
            way_out = (
                "convert it there and back with python -m mrl.convert (hf-to-mcore, then mcore-to-hf), and "
                "name the new folder"
            )
            problems.tell("policy.model_name", folder, rule, way_out)


def read_sizes(config: RunConfig, problems: Problems, unchecked: str) -> ModelSizes | None:
    """The policy model's sizes with its overrides; if unreadable, None, and a problem naming the `unchecked` rules."""
    at = problems.at
    name, overrides = problems.section.model_name, problems.section.hf_config_overrides
    try:
        model = read_model(Path(name))
        if not overrides:
            return model
        wrong = find_override_problems(Path(name), overrides)
        for key, value, rule in wrong:
            problems.tell(f"{at}{key}", value, rule)
        return model if wrong else read_model(Path(name), overrides)
    except ValueError as error:
        if os.path.exists(os.path.join(name, "config.json")):
            problems.tell(f"{at}model_name", name, error)
        else:
            reason = NOT_CACHED if is_hub_id(name) else str(error)
            problems.add(
                f"{at}model_name", reason, f"cannot be checked without its config.json: {unchecked}", "not checked"
            )
        return None


def check_sections(config: RunConfig, problems: Problems) -> None:
    """Checks sections of critics and teachers by rules of `policy`, and that their models read the policy's tokens."""
    said = problems.merged
    for model, section in config.sections.items():
        if model == "policy":
            continue
        needed, length = config.policy.max_total_sequence_length, section.max_total_sequence_length
        if length < needed:
            rule = f"the {model.partition(':')[0]} reads sequences of policy.max_total_sequence_length={needed}"
            key, way_out = f"{prefix_of(model)}max_total_sequence_length", "raise it, or leave it out, and it follows"
            problems.tell(key, length, rule, way_out)
        check_tokens(config, model, problems)
        _check_section(config, model, said, problems)
    if config.has_reference_apart:
        _check_section(config, REFERENCE, said, problems)


def _check_section(config: RunConfig, model: ModelName, said: list[Problem], problems: Problems) -> None:
    """Applies rules of `policy` to a model's section, and adds problems of it that are not yet `said`."""
    is_trained, inner = model in config.trained_models, Problems(config, config.facts.origins, model)
    for inner.group, check in (RULES | (TRAINED_RULES if is_trained else {})).items():
        check(config, inner)
    inner.group = "model"
    sizes = read_sizes(config, inner, "whether the layout divides it")
    if sizes is not None:
        for inner.group, check in (MODEL_RULES | (TRAINED_MODEL_RULES if is_trained else {})).items():
            check(config, sizes, inner)
    told = {(each.id, each.value) for problem in said for each in (problem, *problem.also)}
    for problem in inner.merged:
        if problem in said or (problem.key not in config.facts.origins and (problem.id, problem.value) in told):
            continue
        if not inner.is_of_section(problem):
            problem = replace(problem, rule=f"for the {model}, {problem.rule}")
        if not problem.key.startswith("policy."):  # of the engines
            problems.extend([problem])


LOSS_KEYS = ("kl_type", "mixed_kl_weight", "zero_outside_topk")
"""Keys of `loss_fn` for distillation; all others are GRPO's."""


def check_reference(config: RunConfig, problems: Problems) -> None:
    """Checks that a reference with nodes of its own is one that the loss compares with, and no policy rank holds."""
    key, keep = "reference.num_nodes", "set this to 0"
    if not config.reference.num_nodes:
        return
    if config.algorithm == "dpo":
        problems.add(key, "algorithm=dpo compares with the reference that its ranks keep", keep)
    elif config.algorithm not in ("grpo", "ppo"):
        problems.add(key, f"algorithm={config.algorithm} compares with no reference", keep)
    elif not config.has_reference_apart:
        penalty = "loss_fn.reference_policy_kl_penalty"
        problems.add(key, f"{penalty}=0 leaves nothing to compare with a reference", f"{keep}, or raise {penalty}")
    elif config.policy.megatron_cfg.peft.enabled:
        rule = (
            "the reference is the base of the policy's adapters (policy.megatron_cfg.peft.enabled=true), on its ranks"
        )
        problems.add(key, rule, keep)


def check_teacher(config: RunConfig, problems: Problems) -> None:
    """Checks that a distillation has a teacher, and that loss keys on its command line are read."""
    _check_on_policy(config, problems)
    if config.algorithm == "distillation":
        # Keys inherited from a GRPO config may stay.
        for key in (f"loss_fn.{name}" for name in vars(config.loss_fn) if name not in LOSS_KEYS):
            if config.facts.origins.get(key, "").startswith("command line"):
                problems.add(
                    key, "it belongs to GRPO's loss, and algorithm=distillation", f"use {', '.join(LOSS_KEYS)}"
                )
        if config.teacher is None and not any(key.startswith("teacher.") for key in config.facts.origins):
            rule = "algorithm=distillation has nobody to learn from"
            problems.tell("teacher", None, rule, "give teacher.model_name, the folder of a model or its id")
    for model, section in config.teachers.items():
        if section.megatron_cfg.peft.enabled:
            rule = "a teacher is not trained: what adapters add to a model is merged into its folder first"
            problems.tell(f"{prefix_of(model)}megatron_cfg.peft.enabled", "true", rule, "set it to false")


def _check_on_policy(config: RunConfig, problems: Problems) -> None:
    """Checks that both sections or none use teacher-logprob advantages, and both models score the whole vocabulary."""
    given, estimator, key = config.on_policy_distillation, config.grpo.adv_estimator.name, "on_policy_distillation"
    if given is None or not given.enabled:
        if estimator == "opd":
            problems.add(
                "grpo.adv_estimator.name",
                "opd compares with teachers, and there are none",
                f"set {key}.enabled=true, or use grpo",
            )
        return
    if config.algorithm != "grpo":
        rule = f"advantages are GRPO's, and algorithm={config.algorithm}"
        problems.add(f"{key}.enabled", rule, "set it to false; algorithm=distillation has the section teacher")
        return
    if estimator != "opd":
        rule = f"the teachers' logprobs would be unused: grpo.adv_estimator.name={estimator} does not read them"
        problems.add(
            f"{key}.enabled",
            rule,
            f"use opd, with {key}.orm_advantage_weight for the reward's share, or set this to false",
        )
    names = given.teacher_model_by_agent_name
    if not names:
        problems.add(
            f"{key}.teacher_model_by_agent_name", "no row has a teacher", "give a model for each agent or environment"
        )
    elif given.default_teacher_alias is not None and given.default_teacher_alias not in names:
        rule = f"it is none of the names in {key}.teacher_model_by_agent_name ({', '.join(names)})"
        problems.add(f"{key}.default_teacher_alias", rule, "use one of them, or null")
    for name in given.non_colocated_teachers.teacher_overrides if given.non_colocated_teachers else ():
        if given.teacher_of(name) != name:
            rule = f"no teacher is held under {name!r}: names of one model share the first of them"
            way_out = f"use one of {', '.join(config.facts.teachers)}"
            problems.add(f"{key}.non_colocated_teachers.teacher_overrides", rule, way_out)
    if given.use_orm_advantage != (given.orm_advantage_weight > 0):
        rule = f"{key}.use_orm_advantage={str(given.use_orm_advantage).lower()} does not go with it"
        problems.add(
            f"{key}.orm_advantage_weight", rule, "give the reward a weight above 0 and set that to true, or 0 and false"
        )
    generation = config.policy.generation
    if generation.top_p < 1.0 or generation.top_k is not None:
        rule = (
            "teachers' logprobs are of the whole vocabulary, but policy.generation.top_p or top_k truncates the "
            "policy's"
        )
        problems.add(f"{key}.enabled", rule, "set top_p=1 and top_k=null")


NAME = re.compile(r"[A-Za-z0-9_-]+")
TAKEN = ("policy_model", "policy")
"""Names of the policy, for NeMo Gym's servers and for agents."""
_KEYS = re.compile(
    r"\bpolicy\.(?:generation\.(?:vllm_cfg\.(?:http_server_serving_chat_kwargs\.)?|(?=vllm_kwargs))|(?=model_name))"
)
"""Beginnings of the policy's keys that a judge has, too."""


def check_judges(config: RunConfig, problems: Problems) -> None:
    """Checks that each judge can be asked by its name, and that its engines fit its nodes and its model."""
    slots = config.cluster.slots_per_node
    for name, judge in config.judges.items():
        at = f"judges.{name}"
        if not NAME.fullmatch(name) or name in TAKEN:
            rule = f"{name} is no name for a judge: it stands in its address"
            problems.tell(at, None, rule, f"use letters, digits, - and _, and not {' or '.join(TAKEN)}")
        workers, whole = judge.num_workers, judge.num_nodes * slots
        if whole % workers or (slots % workers and workers % slots):
            rule = f"its {judge.num_nodes} nodes of {slots} slots hold no whole engines of {workers} workers"
            way_out = "change its parallel sizes so that an engine takes a part of a node, or whole nodes"
            problems.add(f"{at}.num_nodes", rule, way_out)
            continue
        run = judge_run(config, name)
        inner = Problems(run)
        checks = (layout.check_engine_slots, layout.check_engines, layout.check_servers, check_arguments)
        for check in (*checks, check_engine_files):
            check(run, inner)
        if (sizes := read_sizes(run, inner, "whether its engines can hold it")) is not None:
            layout.check_layout(run, sizes, inner)
        for problem in inner.merged:
            if (of_judge := _KEYS.sub(f"{at}.", problem.key)) != problem.key:
                length = "policy.max_total_sequence_length", f"{at}.max_model_len"
                rule, way_out = (_KEYS.sub(f"{at}.", text.replace(*length)) for text in (problem.rule, problem.way_out))
                problems.tell(of_judge, problem.value, rule, way_out or " ", problem.kind)


def check_no_judges(config: RunConfig, problems: Problems) -> None:
    """Checks that a run without rollouts has no judges."""
    if config.judges:
        rule, way_out = f"algorithm={config.algorithm} has no rollouts to judge", "leave it out"
        problems.tell("judges", ", ".join(config.judges), rule, way_out)
