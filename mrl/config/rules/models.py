# SPDX-License-Identifier: Apache-2.0
"""Rules of the models beside the policy: those of the policy's own section, and what each needs besides."""

from __future__ import annotations

import dataclasses
import os
from contextlib import suppress
from pathlib import Path

from conversion.files.hf_folder import has_reward_head
from mrl.config.errors import Problems, Unchecked
from mrl.config.model import is_hub_id, read_model
from mrl.config.rules import algorithms, layout, training
from mrl.config.rules.teacher import num_tokens, section_of, token_difference, vocabulary_size
from mrl.config.schema.ppo import ValueConfig
from mrl.config.schema.run import RunConfig
from mrl.phases import ModelName

SECTIONS: dict[ModelName, str] = {"critic": "value"}
"""Models whose section has rules here, and its name."""

_OWN = tuple(f"policy.{field.name}" for field in dataclasses.fields(ValueConfig))


def check_critic(config: RunConfig, problems: Problems) -> None:
    """What PPO needs of its sections, and the rules of `policy` for `value`."""
    if not config.has_critic:
        return
    ppo, loss = config.ppo, config.loss_fn
    if loss.force_on_policy_ratio and ppo.ppo_epochs > 1:
        rule = f"it is right for one update per step, and ppo.ppo_epochs={ppo.ppo_epochs}"
        problems.add("loss_fn.force_on_policy_ratio", rule, "set it to false, or the latter to 1")
    if config.grpo.adv_estimator.name != "grpo":
        rule = "algorithm=ppo compares tokens with the critic's values, as ppo.adv_estimator says"
        problems.add("grpo.adv_estimator.name", rule, "leave it out")
    if config.value.max_total_sequence_length < config.policy.max_total_sequence_length:
        rule = f"the critic reads sequences of policy.max_total_sequence_length={config.policy.max_total_sequence_length}"
        problems.add("value.max_total_sequence_length", rule, "leave it out, and it follows")
    if config.value.megatron_cfg.env_vars not in (None, config.policy.megatron_cfg.env_vars):
        rule = "policy and critic share processes, which have policy.megatron_cfg.env_vars"
        problems.add("value.megatron_cfg.env_vars", rule, "set it there")
    if config.value.megatron_cfg.trains_mtp:
        problems.add("value.megatron_cfg.mtp_num_layers", "a critic predicts no tokens", "set it to 0")
    _check_tokens(config, problems)
    check_section(config, "critic", problems)


def check_heads(config: RunConfig, problems: Problems) -> None:
    """No model that is used without a head has one. As far as the weights are here."""
    used = {"policy.model_name": config.policy.model_name} if config.algorithm != "rm" else {}
    used |= {f"{section_of(model)}model_name": section.model_name for model, section in config.teachers.items()}
    for key, name in used.items():
        with suppress(OSError, ValueError):
            if has_reward_head(Path(name)):
                rule = f"it has the head of a reward model (score.weight), for which algorithm={config.algorithm} has no use here"
                problems.extend([f"{key}={name}: {rule}; take a language model: heads are of value.model_name, and of algorithm=rm"])


def check_section(config: RunConfig, model: ModelName, problems: Problems) -> None:
    """Applies the rules of `policy` to the section of a model beside it; problems name the keys of that section."""
    section, seen = SECTIONS[model], config.of_model(model)
    inner_origins = {_as_policy(key, section): origin for key, origin in config.origins.items() if not key.startswith("policy.")}
    inner = Problems(seen, inner_origins)
    checks = [algorithms.check_batch, algorithms.check_head, layout.check_cluster, training.check_rows, training.check_optimizer]
    for check in checks:
        check(seen, inner)
    name = seen.policy.model_name
    try:
        sizes = read_model(Path(name))
    except ValueError as error:
        if os.path.exists(os.path.join(name, "config.json")):
            inner.extend([f"policy.model_name={name}: {error}"])
        else:
            reason = "not in the local Hugging Face cache" if is_hub_id(name) else str(error)
            inner.add("policy.model_name", reason, "cannot be checked without its config.json: whether the layout divides it", Unchecked)
    else:
        layout.check_layout(seen, sizes, inner)
        training.check_recomputing(seen, sizes, inner)
        training.check_routing(seen, sizes, inner)
        training.check_trained(seen, inner)
    known = "\n".join(problems.texts)
    for text in inner.texts:
        # What the rules say of engines, and of values that follow the policy's, they have said for the policy.
        key = text.partition("=")[0]
        is_own = key.startswith("policy.") and key in inner_origins
        is_said = text.partition(": ")[2] in known and not is_own
        if text.startswith((*_OWN, "cluster.", "grpo.")) and not is_said:
            problems.extend([type(text)(text.replace("policy.", f"{section}."))])


def _check_tokens(config: RunConfig, problems: Problems) -> None:
    """The critic has an embedding of each of the policy's tokens, and of the same ones. As far as the files are here."""
    folder, tokenizer = Path(config.value.model_name), Path(config.policy.tokenizer.name)
    if difference := token_difference(tokenizer, folder):
        rule = f"its tokens are not those of policy.tokenizer.name={tokenizer}, which it reads: {difference}"
        problems.add("value.model_name", rule, "give a model of the policy's tokenizer")
    elif (folder / "config.json").is_file() and (found := vocabulary_size(folder)) < (needed := num_tokens(tokenizer)):
        rule = f"it has {found:,} tokens, and policy.tokenizer.name={tokenizer}, which it reads, {needed:,}"
        problems.add("value.model_name", rule, "give a model of the policy's tokenizer")


def _as_policy(key: str, section: str) -> str:
    return f"policy.{key.removeprefix(f'{section}.')}" if key.startswith(f"{section}.") else key
