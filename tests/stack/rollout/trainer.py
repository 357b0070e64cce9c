# SPDX-License-Identifier: Apache-2.0
"""A trainer of one rank in this process that reads its weights by Megatron's tables, and its refits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from conversion.adapters import HeldAdapters, adapter_family
from conversion.boxes import Layout, Slot
from conversion.families.common import EngineDtypes, MegatronCoords, MegatronParallel, VllmParallel
from conversion.families.registry import family
from mrl.config.schema.generation import Precision
from mrl.policy.weights import Arena
from mrl.refit.exchange import Exchange
from mrl.refit.inputs import RefitInputs, WorkerRefit
from tests.reading import read_canonical, read_layout
from tests.stack.refit.children import fill
from tests.waiting import HANG_S

if TYPE_CHECKING:
    from mrl.rollout.engine import Engine

SINGLE = VllmParallel()
TIMEOUT_S = HANG_S


class Trainer:
    """Weights a test sets, and the trainer side of refits of one engine, whose workers all share this rank's GPU."""

    def __init__(
        self,
        folder: Path,
        parallel: VllmParallel = SINGLE,
        *,
        precision: Precision = "float32",
        live: Sequence[EngineDtypes] | None = None,
        adapters: HeldAdapters | None = None,
        factors: Mapping[str, Tensor] | None = None,
    ) -> None:
        """`live` is what `Engine.tensor_dtypes` gives; without it all tensors of the engine are of its precision.

        With `adapters` it has these alone, made of canonical `factors`.
        """
        hf_config = json.loads((folder / "config.json").read_text())
        place = (MegatronParallel(), MegatronCoords(), "float32", "local")
        tables = family(hf_config)
        if adapters is not None:
            tables = adapter_family(tables, adapters.layers, adapters.dim)
        self._layout = tables.megatron_layout(hf_config, *place)
        workers = {worker: (worker, live[worker] if live else ()) for worker in range(parallel.num_workers)}
        gpus = dict.fromkeys(workers, 0)
        self.inputs = RefitInputs(
            hf_config, (place,), parallel, precision, workers, gpus, {0: 0}, buffer_bytes=1 << 20, adapters=adapters
        )
        self.schedule = self.inputs.schedule()
        tensors = read_layout(folder, self._layout) if factors is None else fill(self._layout, factors)
        self._arena = Arena(tensors, name="test-arena")
        self._exchange = Exchange(self.schedule, 0, self._arena.tensors(), self._arena.handle(), group=None)
        self._attempt = 0

    def load(self, folder: Path) -> None:
        """Takes the weights of another checkpoint."""
        with torch.no_grad():
            for slot, tensor in read_layout(folder, self._layout).items():
                self._arena.tensors()[slot].copy_(tensor)

    def exchange(self) -> int:
        """The trainer's part of the next attempt, whose number it returns."""
        assert self.schedule.num_rounds == 1
        self._attempt += 1
        self._exchange.run(self._attempt, self.inputs.workers.keys(), timeout_s=TIMEOUT_S)
        return self._attempt

    def workers(self) -> list[WorkerRefit]:
        """Inputs of `Engine.prepare_refit`."""
        handles = self._exchange.handles()
        return [WorkerRefit(self.inputs.signed(self.schedule), worker, handles) for worker in self.inputs.workers]


def refit(engine: Engine, trainer: Trainer, version: int) -> None:
    """One whole refit; the engine samples from version `version` afterwards."""
    engine.refit(trainer.exchange(), True, TIMEOUT_S)
    engine.serve(version)


def vllm_layout(
    folder: Path,
    parallel: VllmParallel = SINGLE,
    worker: int = 0,
    precision: Precision = "float32",
    live: EngineDtypes = (),
) -> Layout:
    """The table's layout of an engine worker for a checkpoint."""
    hf_config = json.loads((folder / "config.json").read_text())
    return family(hf_config).vllm_layout(hf_config, parallel, worker, precision, live)


def expected_tensors(
    folder: Path,
    parallel: VllmParallel = SINGLE,
    worker: int = 0,
    precision: Precision = "float32",
    live: EngineDtypes = (),
) -> dict[Slot, Tensor]:
    """Tensors that an engine worker must hold, built directly from the checkpoint by the table."""
    return fill(vllm_layout(folder, parallel, worker, precision, live), read_canonical(folder))
