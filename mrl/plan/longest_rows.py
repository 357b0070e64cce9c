# SPDX-License-Identifier: Apache-2.0
"""Longest rows that fit the GPUs of a run, and the keys that shorten rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mrl.config.model import with_section
from mrl.config.schema.policy import PolicyConfig
from mrl.config.schema.ppo import ValueConfig
from mrl.config.schema.run import RunConfig
from mrl.phases import WORKERS, ModelName, Phase
from mrl.plan.facts import PlanModel
from mrl.plan.hardware import Gpu
from mrl.plan.memory import all_ranks
from mrl.plan.search import worst_rank

Section = PolicyConfig | ValueConfig

_STEP_TOKENS = 256


def section_at_work(config: RunConfig, phase: Phase) -> str:
    """Section of the model that computes in a phase."""
    # Several teachers have the policy's values.
    return {"critic": "value", "teacher": "policy" if config.teacher is None else "teacher"}.get(
        WORKERS.get(phase, "policy"), "policy"
    )


def with_least_rows(config: RunConfig) -> RunConfig:
    """The config with rows of one sequence where rows are padded; rows filled to a token number keep their length."""

    def least(section: Section) -> Section:
        return section if _filling(section) else replace(section, train_micro_batch_size=1, logprob_batch_size=1)

    return _in_each_section(config, least)


def describe_longest(config: RunConfig, model: PlanModel, gpu: Gpu) -> str | None:
    """Describes the longest rows that fit and the keys that decide, if the longest do not fit; None if all or
    none fit.
    """
    ranks, _ = all_ranks(config, model, gpu)
    phases: dict[Phase, float] = {
        phase: max(sum(rank.phases[phase].values()) for rank in ranks) for phase in ranks[0].phases
    }
    too_large: list[Phase] = [phase for phase, size in phases.items() if size > gpu.memory]
    longest = _longest(config, model, gpu) if too_large else 0
    if not longest:
        return None
    keys = list(dict.fromkeys(_key(config, phase) for phase in too_large))
    is_full = any(key.endswith("_tokens") for key in keys)
    sections = dict.fromkeys(section_at_work(config, phase) for phase in too_large)
    too_long = [name for name in sections if longest < _at_work(config, name).longest_row]
    if is_full and too_long:  # in shorter rows than that, the run would end at such a sequence
        lengths = ", ".join(f"{name}.max_total_sequence_length" for name in too_long)
        way_out = f"lower {lengths}, and {', '.join(keys)} with it, as a row holds the longest sequence"
    else:
        way_out = f"lower {', '.join(keys)}" + ("" if is_full else " if sequences get that long")
    return f"rows of up to about {longest:,} tokens fit, the longest do not ({', '.join(too_large)}): {way_out}"


def _key(config: RunConfig, phase: Phase) -> str:
    name = section_at_work(config, phase)
    section = _at_work(config, name)
    kind = "train" if phase in ("train", "train_value") else "logprob"
    if filling := _filling(section):
        return f"{name}.{filling}.{kind}_mb_tokens"
    return f"{name}.train_micro_batch_size" if kind == "train" else f"{name}.logprob_batch_size"


def _at_work(config: RunConfig, name: str) -> PolicyConfig:
    models: dict[str, ModelName] = {"value": "critic", "teacher": "teacher"}
    return config.model(models.get(name, "policy"))


def _filling(section: Section) -> str:
    return (
        "sequence_packing"
        if section.sequence_packing.enabled
        else "dynamic_batching"
        if section.dynamic_batching.enabled
        else ""
    )


def _in_each_section(config: RunConfig, change: Callable[[Section], Section]) -> RunConfig:
    for model, section in config.sections.items():
        config = with_section(config, model, change(section))
    return config


def _cut(section: Section, tokens: int) -> Section:
    if name := _filling(section):
        filling = getattr(section, name)
        train, logprob = min(tokens, filling.train_mb_tokens), min(tokens, filling.logprob_mb_tokens)
        return replace(section, **{name: replace(filling, train_mb_tokens=train, logprob_mb_tokens=logprob)})
    return replace(section, train_micro_batch_size=1, logprob_batch_size=1, max_total_sequence_length=tokens)


def _longest(config: RunConfig, model: PlanModel, gpu: Gpu) -> int:

    def length(section: Section) -> int:
        if name := _filling(section):
            filling = getattr(section, name)
            return max(filling.train_mb_tokens, filling.logprob_mb_tokens)
        return section.max_total_sequence_length * max(section.train_micro_batch_size, section.logprob_batch_size)

    def fits(tokens: int) -> bool:
        cut = _in_each_section(config, lambda section: _cut(section, tokens))
        return worst_rank(cut, model, gpu)[0].peak <= gpu.memory

    low, high = 0, max(map(length, config.sections.values())) // _STEP_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * _STEP_TOKENS) else (low, middle - 1)
    return low * _STEP_TOKENS
