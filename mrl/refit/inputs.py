# SPDX-License-Identifier: Apache-2.0
"""The messages of a refit's driver: inputs from which all participants compute a schedule, and the memory to read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Self

from conversion.adapters import HeldAdapters, adapter_family, engine_adapter_family
from conversion.boxes import Layout, Slot
from conversion.families.common import (
    EngineDtypes,
    Flavour,
    HfConfig,
    MegatronCoords,
    MegatronParallel,
    VllmParallel,
    read_by_engines,
)
from conversion.families.registry import family
from conversion.files.hf_weights import is_rounded
from conversion.reshard import reshard
from conversion.schedule import NUM_BUFFERS, Schedule
from mrl.refit import RefitError
from mrl.refit.exchange import GpuHandles
from mrl.refit.group import GroupAddress

RankPlace = tuple[MegatronParallel, MegatronCoords, str, Flavour]
"""Arguments of `Family.megatron_layout` besides the model's configuration."""
Part = Literal["weights", "adapters"]
"""Part of an engine that refits move by a schedule of its own. Adapters are one where engines hold them apart."""


@dataclass(frozen=True)
class RefitInputs:
    """Inputs of a schedule. Tables give a worker's boxes, its live model gives their dtypes."""

    hf_config: HfConfig
    ranks: tuple[RankPlace, ...]
    """Places by trainer rank. Each rank has checked its layout against its live model."""
    parallel: VllmParallel
    precision: str
    workers: Mapping[int, tuple[int, EngineDtypes]]
    """Rank in its engine, and dtypes of its live model, by number of the engine worker."""
    gpu_of: Mapping[int, int]
    node_of: Mapping[int, int]
    buffer_bytes: int
    """Size of the exchange memory; a round takes one of its `NUM_BUFFERS` parts."""
    adapters: HeldAdapters | None = None
    """Adapters to move instead of the weights, in the dtype `precision`."""
    fingerprint: str | None = None
    """Fingerprint of the driver's schedule."""

    @property
    def part(self) -> Part:
        return "weights" if self.adapters is None else "adapters"

    def schedule(self) -> Schedule:
        """The schedule, proven complete: seconds of work, the same in every process."""
        layouts, targets = self._sources(), self._targets()
        sources = {rank: layouts[place] for rank, place in enumerate(self.ranks)}
        schedule = reshard(
            sources, targets, gpu_of=self.gpu_of, node_of=self.node_of, buffer_bytes=self.buffer_bytes // NUM_BUFFERS
        )
        if self.fingerprint not in (None, schedule.fingerprint()):
            raise RefitError(
                "this process computes another refit schedule than the driver; run the same version of mrl on "
                "every node"
            )
        return schedule

    def rounded(self, stored: Mapping[str, str]) -> frozenset[Slot]:
        """Engine tensors more precise than the trainer's: refit zero changes them. `stored` are the files' dtypes.

        The trainer rounds such a tensor to its precision; vLLM's loader keeps it in a wider dtype. Where both round to
        one dtype, both have the same bytes.
        """
        held = {
            piece.name: content.dtype
            for layout in self._sources().values()
            for content in layout.values()
            for piece in content.pieces
        }
        return frozenset(
            slot
            for layout in self._targets().values()
            for slot, content in layout.items()
            for piece in content.pieces
            if content.dtype != held[piece.name] and is_rounded(stored[piece.name], held[piece.name])
        )

    def _sources(self) -> dict[RankPlace, Layout]:
        tables = family(self.hf_config)
        if self.adapters is not None:
            factors = adapter_family(tables, self.adapters.layers, self.adapters.dim)
            return {
                place: factors.megatron_layout(self.hf_config, *place[:2], self.precision)
                for place in dict.fromkeys(self.ranks)
            }
        return {
            place: read_by_engines(tables.megatron_layout(self.hf_config, *place), self.parallel)
            for place in dict.fromkeys(self.ranks)
        }

    def _targets(self) -> dict[int, Layout]:
        tables = family(self.hf_config)
        if self.adapters is not None:
            tables = engine_adapter_family(tables, self.adapters)
        return {
            worker: tables.vllm_layout(self.hf_config, self.parallel, index, self.precision, dtypes)
            for worker, (index, dtypes) in self.workers.items()
        }

    def signed(self, schedule: Schedule) -> Self:
        """Returns these inputs with their schedule's fingerprint, which every participant compares with its own."""
        return replace(self, fingerprint=schedule.fingerprint())


@dataclass(frozen=True)
class ExchangeMember:
    """Data with which a worker of a dedicated engine takes part in the exchange."""

    address: GroupAddress
    timeout_s: float


@dataclass(frozen=True)
class WorkerRefit:
    """Data with which one engine worker prepares its refits."""

    inputs: RefitInputs
    worker: int
    memory: GpuHandles | ExchangeMember
    """Memory of the trainer ranks that it reads. A dedicated engine's worker reads none, and takes part in the
    exchange.
    """
