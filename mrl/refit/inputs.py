# SPDX-License-Identifier: Apache-2.0
"""What the driver of a refit sends: the inputs from which every participant computes the same schedule, and whose memory to read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from conversion.boxes import Layout, Slot
from conversion.families.common import EngineDtypes, Flavour, HfConfig, MegatronCoords, MegatronParallel, VllmParallel, read_by_engines
from conversion.families.registry import family
from conversion.files.hf_weights import is_rounded
from conversion.reshard import reshard
from conversion.schedule import NUM_BUFFERS, Schedule
from mrl.refit import RefitError
from mrl.refit.exchange import GpuHandles
from mrl.refit.group import GroupAddress

RankPlace = tuple[MegatronParallel, MegatronCoords, str, Flavour]
"""What `Family.megatron_layout` takes besides the model's configuration."""


@dataclass(frozen=True)
class RefitInputs:
    """All that a schedule follows from. Tables say which boxes a worker has; of which dtype, its live model says."""

    hf_config: HfConfig
    ranks: tuple[RankPlace, ...]
    """By trainer rank. Each has checked its layout against its live model."""
    parallel: VllmParallel
    precision: str
    """Of the engines."""
    workers: Mapping[int, tuple[int, EngineDtypes]]
    """By number of the engine worker: its rank in its engine, and the dtypes of its live model."""
    gpu_of: Mapping[int, int]
    """By engine worker."""
    node_of: Mapping[int, int]
    """By GPU."""
    buffer_bytes: int
    """Of which a round takes one part in `NUM_BUFFERS`."""
    fingerprint: str | None = None
    """Of the driver's schedule."""

    def schedule(self) -> Schedule:
        """The schedule, proven complete: seconds of work, the same in every process."""
        layouts, targets = self._sources(), self._targets()
        sources = {rank: layouts[place] for rank, place in enumerate(self.ranks)}
        schedule = reshard(sources, targets, gpu_of=self.gpu_of, node_of=self.node_of, buffer_bytes=self.buffer_bytes // NUM_BUFFERS)
        if self.fingerprint not in (None, schedule.fingerprint()):
            raise RefitError("this process computes another refit schedule than the driver; run the same version of mrl on every node")
        return schedule

    def rounded(self, stored: Mapping[str, str]) -> frozenset[Slot]:
        """Tensors of engines that hold digits which the trainer has not: refit zero changes them. `stored` are the dtypes of the files.

        The trainer rounds such a tensor to its precision; vLLM's loader keeps it in a wider dtype. Where both round to one dtype, both have
        the same bytes.
        """
        held = {piece.name: content.dtype for layout in self._sources().values() for content in layout.values() for piece in content.pieces}
        return frozenset(
            slot
            for layout in self._targets().values()
            for slot, content in layout.items()
            for piece in content.pieces
            if content.dtype != held[piece.name] and is_rounded(stored[piece.name], held[piece.name])
        )

    def _sources(self) -> dict[RankPlace, Layout]:
        tables = family(self.hf_config)
        # Ranks at one place share one layout object, by which the schedule knows them as equal.
        return {
            place: read_by_engines(tables.megatron_layout(self.hf_config, *place), self.parallel) for place in dict.fromkeys(self.ranks)
        }

    def _targets(self) -> dict[int, Layout]:
        tables = family(self.hf_config)
        return {
            worker: tables.vllm_layout(self.hf_config, self.parallel, index, self.precision, dtypes)
            for worker, (index, dtypes) in self.workers.items()
        }

    def signed(self, schedule: Schedule) -> Self:
        """These inputs with the fingerprint of their schedule, which every participant compares with its own."""
        return replace(self, fingerprint=schedule.fingerprint())


@dataclass(frozen=True)
class ExchangeMember:
    """What a worker of a dedicated engine needs to take part in the exchange."""

    address: GroupAddress
    timeout_s: float


@dataclass(frozen=True)
class WorkerRefit:
    """What one engine worker needs to prepare its refits."""

    inputs: RefitInputs
    worker: int
    """Its number in the schedule."""
    memory: GpuHandles | ExchangeMember
    """Memory of the trainer ranks that it reads. A dedicated engine's worker reads none, and takes part in the exchange."""
