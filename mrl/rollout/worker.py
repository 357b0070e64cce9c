"""What runs inside vLLM's worker processes: the live model by slot, and the engine side of a refit.

vLLM imports this module in every worker before it builds the model, so this is also where a CPU host gets its repairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from torch import Tensor, nn
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from conversion.boxes import Slot
from conversion.families.common import EngineDtypes
from mrl.refit import RefitError
from mrl.refit.checksum import digest
from mrl.refit.exchange import Exchange
from mrl.refit.group import ExchangeGroup
from mrl.refit.inputs import ExchangeMember, WorkerRefit
from mrl.refit.pull import Puller, VerifyReport
from mrl.rollout.routes import RouteRecorder

if current_platform.is_cpu():
    from mrl.rollout import cpu

    cpu.install()

# Scales of a quantised KV cache. Attention registers them always; they stay 1 where the cache is not quantised, and no checkpoint has them.
CONSTANT_BUFFERS = ("_q_scale", "_k_scale", "_v_scale", "_prob_scale")


class RefitWorker:
    """Methods that vLLM adds to its worker class; `Engine` calls them by name on all workers."""

    # vLLM's worker has these; a definition here would be refused as a conflict.
    rank: int
    get_model: Callable[[], nn.Module]
    model_runner: GPUModelRunner

    recorder: RouteRecorder | None = None
    puller: Puller | None = None
    exchange: Exchange | None = None
    addresses: Mapping[Slot, int] | None = None
    """Of the live tensors when a refit was first prepared: CUDA graphs read there."""

    def live_digest(self) -> dict[Slot, int]:
        """Checksum of each live tensor."""
        return digest(engine_tensors(self.get_model()))

    def tensor_dtypes(self) -> EngineDtypes:
        """Name and dtype of each live tensor. vLLM chooses some by the GPU's capability: gates of nemotron_h are bfloat16 on 9.0."""
        tensors = engine_tensors(self.get_model())
        return tuple((slot.name, str(tensor.dtype).removeprefix("torch.")) for slot, tensor in tensors.items())

    def prepare_refit(self, workers: Sequence[WorkerRefit]) -> None:
        """Computes the schedule, maps the memory of its GPU's trainer rank or joins the exchange, and prepares its copies; see `Puller`.

        Collective over all participants of the exchange for the workers of dedicated engines.
        """
        mine = workers[self.rank]
        # Gives back what an earlier refit has mapped or received into.
        if self.exchange is not None:
            self.exchange.close()
        self.puller = self.exchange = None
        check_tensors(self.get_model())
        schedule, handles, own_memory = mine.inputs.schedule(), mine.memory, None
        if isinstance(handles, ExchangeMember):
            device = next(self.get_model().parameters()).device
            group = ExchangeGroup(handles.address, mine.worker, device=device, timeout_s=handles.timeout_s)
            # Without a trainer rank on its GPU it receives, and sends nothing.
            self.exchange = Exchange(schedule, mine.worker, {}, None, group=group)
            handles, own_memory = self.exchange.handles(), self.exchange.memory
        self.puller = Puller(
            lambda: engine_tensors(self.get_model()), schedule, mine.worker, handles, own_memory=own_memory, addresses=self.addresses
        )
        self.addresses = self.puller.addresses

    def exchange_round(self, round_index: int) -> None:
        """A dedicated engine's part of one round of the exchange; see `Exchange.run`."""
        assert self.exchange is not None, "only workers of dedicated engines exchange"
        self.exchange.run(round_index)

    def pull_round(self, round_index: int) -> int:
        """Copies one round into the live tensors; the bytes written."""
        return self._prepared().pull(round_index)

    def verify_round(self, round_index: int) -> VerifyReport:
        """Compares one round's live bytes with the trainer's checksums."""
        return self._prepared().verify(round_index)

    def finish_refit(self) -> VerifyReport:
        """The report of the whole refit; see `Puller.finish`. The model computes with the new weights from here on."""
        report = self._prepared().finish()
        self.rebuild_kernel_weights()
        return report

    def rebuild_kernel_weights(self) -> None:
        """Makes anew whatever kernels keep besides the parameters: weights repacked for a CPU, or reordered for FlashInfer.

        A refit writes parameters in the layout in which vLLM loads them. The engine's arguments and `cpu.install` choose only kernels that
        read them so, so nothing is left to do; refit zero and the witness tests fail for one that does not. A kernel with a layout of its
        own would be told here, after all bytes have been verified and before the first token.
        """

    def record_routes(self, layers: Sequence[int]) -> None:
        """From here on keeps the routes of the requests; see `RouteRecorder`."""
        self.recorder = RouteRecorder(self.model_runner, layers)

    def take_routes(self, request_ids: Sequence[str]) -> list[np.ndarray] | None:
        """Routes of finished requests; None on all but the first worker."""
        assert self.recorder is not None, "record_routes comes first"
        return self.recorder.take(request_ids) if self.rank == 0 else None

    def _prepared(self) -> Puller:
        assert self.puller is not None, "pull before prepare_refit"
        return self.puller


def engine_tensors(model: nn.Module) -> dict[Slot, Tensor]:
    """All that a forward pass reads and training may change: parameters and persistent buffers, each storage once.

    A tied parameter counts under its first name. Buffers that are views of a parameter (`conv_weights` of a Mamba mixer) follow it.
    """
    persistent = model.state_dict(keep_vars=True).keys()
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in persistent and not _is_constant(name)}
    return {Slot(name): tensor for name, tensor in tensors.items()}


def check_tensors(model: nn.Module) -> None:
    """Returns if a refit can write the tensors of a model.

    Raises:
        RefitError: two tensors overlap, so that some bytes would be written twice; or a constant buffer is not 1.
    """
    for name, buffer in model.named_buffers():
        if _is_constant(name) and buffer.item() != 1.0:
            raise RefitError(f"{name} is {buffer.item()}, but a refit knows no quantised KV cache")
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, slot) for slot, tensor in engine_tensors(model).items())
    for (_, end, slot), (start, _, following) in zip(spans, spans[1:], strict=False):
        if start < end:
            raise RefitError(f"{slot} and {following} share memory in the engine")


def _is_constant(name: str) -> bool:
    return name.rpartition(".")[2] in CONSTANT_BUFFERS
