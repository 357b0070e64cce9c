# SPDX-License-Identifier: Apache-2.0
"""Place of each kind of memory in each phase of a run: the one table that policy ranks and colocated engines obey.

Dedicated engines share their memory with nobody: they keep weights and KV cache in all phases; and a policy without
other models beside it keeps gradients and optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, cast

Phase = Literal["load", "train", "logprob", "teacher", "value", "train_value", "refit", "generate", "checkpoint"]
Role = Literal["policy", "teacher", "critic", "reference"]
ModelName = str
"""A model that policy ranks may hold: the policy, and others that compute the same rows, each in a layout of its own.

It is named by its role, or, where several have that, by role and name, as in "teacher:math".
"""
REFERENCE: ModelName = "reference"
"""The policy's starting weights, as a model with nodes of its own."""
Place = Literal["device", "host", "none"]
"""`none`: freed, and allocated anew, with or without content, when it is needed again."""


def role_of(model: ModelName) -> Role:
    """Role of a model."""
    return cast("Role", model.partition(":")[0])


def is_frozen(model: ModelName) -> bool:
    """True if a model is never trained, so that only its weights are kept."""
    return role_of(model) in ("teacher", REFERENCE)


@dataclass(frozen=True)
class Residency:
    """Place of each kind of memory during a phase. Without a GPU, device and host are the same and nothing moves."""

    weights: Place = "device"
    """The policy's parameters and persistent buffers (the arena). Always on the device: CUDA frees no memory that
    another process maps, and engine workers map it once, at start."""
    gradients: Place = "none"
    optimizer: Place = "host"
    activations: Place = "none"
    engine_weights: Place = "none"
    kv_cache: Place = "none"
    teacher_weights: Place = "host"
    """Place of the weights of a model that is never trained; nothing else of it is kept."""
    critic_weights: Place = "host"
    critic_gradients: Place = "none"
    critic_optimizer: Place = "host"

    def of(self, model: ModelName) -> Residency:
        """Residency as one model sees it: where its own weights, gradients and optimizer are."""
        match role_of(model):
            case "policy":
                return self
            case "teacher" | "reference":
                return replace(self, weights=self.teacher_weights, gradients="none", optimizer="host")
            case "critic":
                return replace(
                    self, weights=self.critic_weights, gradients=self.critic_gradients, optimizer=self.critic_optimizer
                )


PHASES: dict[Phase, Residency] = {
    "load": Residency(engine_weights="device", teacher_weights="device", critic_weights="device"),
    "logprob": Residency(activations="device"),
    "train": Residency(gradients="device", optimizer="device", activations="device"),
    # What other models compute of the step's rows comes before the policy's train steps.
    "teacher": Residency(activations="device", teacher_weights="device"),
    "value": Residency(activations="device", critic_weights="device"),
    "train_value": Residency(
        activations="device", critic_weights="device", critic_gradients="device", critic_optimizer="device"
    ),
    # Both copies of the weights are live, so everything else has left, and the KV cache comes only afterwards.
    "refit": Residency(engine_weights="device"),
    "generate": Residency(engine_weights="device", kv_cache="device"),
    # Weights are saved between a refit or a validation and the next generation: the engine keeps what it was given.
    "checkpoint": Residency(engine_weights="device", critic_weights="device"),
}

WORKERS: dict[Phase, Role] = {"teacher": "teacher", "value": "critic", "train_value": "critic"}
"""The phases in which another model than the policy computes, and in which role; runs without it leave them out."""

_WORK: frozenset[Phase] = frozenset({"logprob", "teacher", "value", "train_value", "train"})
"""The phases in which models compute and train the rows of a step."""

TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    "load": frozenset({"refit", *_WORK}),
    "refit": frozenset({"load", "generate", "checkpoint"}),
    # An engine that was restarted is refitted before it goes on.
    "generate": frozenset({"refit", "checkpoint", *_WORK}),
    "logprob": _WORK,
    "teacher": _WORK,
    "value": _WORK,
    # To generate after an update takes a refit.
    "train_value": frozenset({"refit", *_WORK}),
    "train": frozenset({"refit", *_WORK}),
    "checkpoint": frozenset({"generate", "refit"}),
}


def enter(current: Phase | None, phase: Phase) -> Residency:
    """Residency after entering `phase` from `current`.

    A process starts from None, with `load`. Entering a phase again changes nothing.

    Raises:
        ValueError: no run goes from `current` to `phase`.
    """
    allowed = TRANSITIONS[current] | {current} if current is not None else frozenset({"load"})
    if phase not in allowed:
        raise ValueError(
            f"phase {phase} entered from {current or 'the start'}; from there a run enters {', '.join(sorted(allowed))}"
        )
    return PHASES[phase]
