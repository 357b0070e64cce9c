"""What the cluster layer hands to an engine besides requests. Importable without vLLM."""

from __future__ import annotations

from dataclasses import dataclass

from conversion.schedule import RankPart, WorkerPart
from mrl.refit.group import GroupAddress
from mrl.refit.unit import UnitHandles


@dataclass(frozen=True)
class WorkerRefit:
    """One worker's part of the refit schedule."""

    part: WorkerPart
    """What the worker copies, and which boxes of its live tensors no weight fills."""
    source: UnitHandles | ExchangeSeat
    """Memory of the trainer ranks that it reads. A dedicated engine's worker reads none, and takes part in the exchange."""


@dataclass(frozen=True)
class ExchangeSeat:
    """What a worker of a dedicated engine needs to take part in the exchange."""

    part: RankPart
    address: GroupAddress
    timeout_s: float
