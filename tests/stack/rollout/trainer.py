"""A trainer of one rank that holds canonical tensors as they stand in the checkpoint, in this process, and its refits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file
from torch import Tensor

from conversion.boxes import Layout, Piece, Slot, SlotLayout, full
from conversion.families.common import EngineDtypes, VllmParallel
from conversion.families.registry import family
from conversion.reshard import reshard
from mrl.config.schema.generation import Precision
from mrl.policy.arena import Arena
from mrl.refit.exchange import Exchange
from mrl.rollout.messages import WorkerRefit

if TYPE_CHECKING:
    from mrl.rollout.engine import Engine

SINGLE = VllmParallel()


class Trainer:
    """Weights that a test sets, and the trainer side of refits of one engine, whose workers all share the unit of this rank."""

    def __init__(
        self,
        folder: Path,
        parallel: VllmParallel = SINGLE,
        *,
        precision: Precision = "float32",
        live: Sequence[EngineDtypes] | None = None,
    ) -> None:
        """`live` is what `Engine.tensor_dtypes` gives; without it all tensors of the engine are of its precision."""
        weights = load_file(folder / "model.safetensors")
        source: Layout = {
            Slot(name): SlotLayout(tuple(tensor.shape), "float32", (Piece(name, full(tensor.shape), full(tensor.shape)),))
            for name, tensor in weights.items()
        }
        self._num_workers = parallel.tp
        targets = {worker: vllm_layout(folder, parallel, worker, precision, live[worker] if live else ()) for worker in range(parallel.tp)}
        self.schedule = reshard({0: source}, targets, unit_of=dict.fromkeys(targets, 0), buffer_bytes=1 << 20)
        self._arena = Arena({Slot(name): tensor for name, tensor in weights.items()}, name="test-arena")
        self._exchange = Exchange(self.schedule.rank_part(0), self._arena.tensors(), self._arena.handle(), group=None)

    def load(self, folder: Path) -> None:
        """Takes the weights of another checkpoint."""
        with torch.no_grad():
            for name, tensor in load_file(folder / "model.safetensors").items():
                self._arena.tensors()[Slot(name)].copy_(tensor)

    def exchange(self, round_index: int) -> None:
        """The trainer's part of one round."""
        self._exchange.run(round_index)

    def workers(self) -> list[WorkerRefit]:
        """What `Engine.prepare_refit` needs."""
        handles = self._exchange.handles()
        return [WorkerRefit(self.schedule.worker_part(worker), handles) for worker in range(self._num_workers)]


def refit(engine: Engine, trainer: Trainer, version: int) -> None:
    """One whole refit; the engine samples from version `version` afterwards."""
    for index in range(trainer.schedule.num_rounds):
        trainer.exchange(index)
        engine.pull(index)
        engine.verify(index)
    engine.set_weight_version(version)


def vllm_layout(
    folder: Path, parallel: VllmParallel = SINGLE, worker: int = 0, precision: Precision = "float32", live: EngineDtypes = ()
) -> Layout:
    """The table's layout of an engine worker for a checkpoint."""
    hf_config = json.loads((folder / "config.json").read_text())
    return family(hf_config).vllm_layout(hf_config, parallel, worker, precision, live)


def expected_tensors(
    folder: Path, parallel: VllmParallel = SINGLE, worker: int = 0, precision: Precision = "float32", live: EngineDtypes = ()
) -> dict[Slot, Tensor]:
    """What an engine worker must hold, built directly from the checkpoint by the table."""
    from tests.stack.refit.children import fill

    return fill(vllm_layout(folder, parallel, worker, precision, live), load_file(folder / "model.safetensors"))
