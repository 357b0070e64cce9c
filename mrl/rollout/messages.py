"""What the cluster layer hands to an engine besides requests. Importable without vLLM."""

from __future__ import annotations

from dataclasses import dataclass

from conversion.schedule import WorkerPart
from mrl.refit.unit import UnitHandles


@dataclass(frozen=True)
class WorkerRefit:
    """One worker's part of the refit schedule."""

    part: WorkerPart
    """What the worker copies, and which boxes of its live tensors no weight fills."""
    handles: UnitHandles
    """Memory of the trainer rank on the worker's unit."""
