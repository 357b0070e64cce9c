# SPDX-License-Identifier: Apache-2.0
"""Roles of the models on the policy ranks, and the differences between policy, critic and frozen models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mrl import phases
from mrl.phases import ModelName, Phase, Residency, role_of
from mrl.policy.objectives import Objective, objective_of_policy, objective_of_values

if TYPE_CHECKING:
    from mrl.config.schema.run import RunConfig
    from mrl.policy.batch import RankBatch
    from mrl.policy.logprobs import TokenDistribution


@dataclass(frozen=True)
class ModelRole:
    """Settings of one role."""

    residency: Callable[[Phase | None, Phase], Residency]
    """Residency of its memory in a phase, entered from another one."""
    trains_in: Phase | None = None
    objective: Callable[[RunConfig, TokenDistribution, RankBatch], Objective] = objective_of_policy
    """Objective that its train steps minimise."""
    is_mapped: bool = False
    """True if engines map its weights: those never move, and are settled whenever somebody reads them."""
    has_head: bool = False
    """True if it has a linear layer to one number in place of the vocabulary."""


def role_for(model: ModelName) -> ModelRole:
    """The role of a model by its name. Other models than the policy may skip phases in which they do nothing."""

    def beside(_: Phase | None, phase: Phase) -> Residency:
        return phases.PHASES[phase].of(model)

    match role_of(model):
        case "policy":
            return ModelRole(phases.enter, "train", is_mapped=True)
        case "critic":
            return ModelRole(beside, "train_value", objective_of_values, has_head=True)
        case "teacher" | "reference":
            return ModelRole(beside)
