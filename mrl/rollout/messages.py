"""What the cluster layer hands to an engine besides requests. Importable without vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from conversion.boxes import Box, Slot
from conversion.reshard import Pull
from mrl.refit.unit import UnitHandles


@dataclass(frozen=True)
class WorkerRefit:
    """One worker's part of the refit schedule."""

    rounds: Sequence[Sequence[Pull]]
    """What the worker copies, by round."""
    padding: Mapping[Slot, Sequence[Box]]
    """Boxes of its live tensors that no weight fills; they are zeroed."""
    handles: UnitHandles
    """Memory of the trainer rank on the worker's unit."""
