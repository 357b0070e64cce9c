# SPDX-License-Identifier: Apache-2.0
"""What is resident where in each phase of a run: the one table that policy ranks and colocated engines obey.

Dedicated engines share their memory with nobody: they keep weights and KV cache in all phases, and the policy gradients and optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal["load", "train", "logprob", "refit", "generate", "checkpoint"]
Place = Literal["device", "host", "none"]
"""`none`: freed, and allocated anew, with or without content, when it is needed again."""


@dataclass(frozen=True)
class Residency:
    """Where each kind of memory is during a phase. Without a GPU, device and host are the same memory and nothing moves."""

    weights: Place = "device"
    """The policy's parameters and persistent buffers (the arena). Always on the device: CUDA frees no memory that another process maps, and
    engine workers map it once, at start."""
    gradients: Place = "none"
    optimizer: Place = "host"
    activations: Place = "none"
    engine_weights: Place = "none"
    kv_cache: Place = "none"


PHASES: dict[Phase, Residency] = {
    "load": Residency(engine_weights="device"),
    "logprob": Residency(activations="device"),
    "train": Residency(gradients="device", optimizer="device", activations="device"),
    # Both copies of the weights are live, so everything else has left, and the KV cache comes only afterwards.
    "refit": Residency(engine_weights="device"),
    "generate": Residency(engine_weights="device", kv_cache="device"),
    # Weights are saved between a refit or a validation and the next generation: the engine keeps what it was given.
    "checkpoint": Residency(engine_weights="device"),
}

TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    # Refit zero comes first, also in a resumed run; a policy without engines goes straight to work.
    "load": frozenset({"refit", "logprob", "train"}),
    # After refit zero a resumed run loads its checkpoint.
    "refit": frozenset({"load", "generate", "checkpoint"}),
    # An engine that was restarted is refitted before it goes on.
    "generate": frozenset({"logprob", "train", "refit", "checkpoint"}),
    "logprob": frozenset({"train"}),
    # To generate after an update takes a refit.
    "train": frozenset({"refit", "logprob"}),
    "checkpoint": frozenset({"generate", "refit"}),
}


def enter(current: Phase | None, phase: Phase) -> Residency:
    """What must be resident after entering `phase` from `current`.

    A process starts from None, with `load`. Entering a phase again changes nothing.

    Raises:
        ValueError: no run goes from `current` to `phase`.
    """
    allowed = TRANSITIONS[current] | {current} if current is not None else frozenset({"load"})
    if phase not in allowed:
        raise ValueError(f"phase {phase} entered from {current or 'the start'}; from there a run enters {', '.join(sorted(allowed))}")
    return PHASES[phase]
