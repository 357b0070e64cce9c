# SPDX-License-Identifier: Apache-2.0
"""Seconds of a run's start, phase by phase: one budget per process, from its command's start. Standard library only."""

from __future__ import annotations

import time
from collections.abc import Mapping

import mrl
from mrl.env import kill_point

PHASES = {
    "import": "Python and its libraries in the driver",
    "input": "config, data, tokenizer, and the checksums of model and data",
    "ray": "Ray, and a place for every slot",
    "build": "processes of policy ranks and engines, imports, process groups, models without weights",
    "load": "weights of the policy, from the cache of converted models or from the model's folder",
    "engines": "further seconds of the engines: imports, weights, KV cache, kernels",
    "rewards": "further seconds of the environments",
    "schedule": "schedule of the refit, exchange group, buffers",
    "refit_zero": "proof that policy and engines hold the same weights",
    "checkpoint": "check and load of the checkpoint that the run resumes from",
    "refit": "refit with the weights of step 0 or of the checkpoint",
    "validation": "validation before the first step",
    "first_rollouts": "the first step's rollouts and rewards, or examples",
}
"""Phase -> what happens in it. Each is what the driver waited for after the phase before; their sum is the time since
the command.
"""

_laps: dict[str, float] = {}
_last = [mrl.STARTED]
"""Time when the last phase ended; empty once the budget has been taken."""


def lap(phase: str) -> None:
    """Counts time since the last phase, or the command's start, towards a phase of `PHASES`. Nothing after `take`."""
    assert phase in PHASES
    if _last:
        kill_point("start")
        now = time.monotonic()
        _laps[phase] = _laps.get(phase, 0.0) + now - _last[0]
        _last[0] = now


def take() -> dict[str, float]:
    """Seconds by phase, once: the budget ends here. Empty if it was taken before."""
    laps = dict(_laps)
    _laps.clear()
    _last.clear()
    return laps


def lines(laps: Mapping[str, float]) -> list[str]:
    """The budget for people, one line per phase, and the sum."""
    rows = [f"Start: {seconds:7.1f} s  {phase:<15} {PHASES[phase]}" for phase, seconds in laps.items()]
    return [*rows, f"Start: {sum(laps.values()):7.1f} s  from the command to the first step's rollouts"]
