"""What runs inside vLLM's worker processes: the live model by slot, and the engine side of a refit.

vLLM imports this module in every worker before it builds the model, so this is also where a CPU host gets its repairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from vllm.platforms import current_platform

from conversion.boxes import Slot
from mrl.refit.errors import RefitError
from mrl.refit.pull import Puller, VerifyReport
from mrl.refit.zero import digest
from mrl.rollout.messages import WorkerRefit

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

    puller: Puller | None = None

    def live_layout(self) -> dict[Slot, tuple[tuple[int, ...], str]]:
        """Shape and dtype of each live tensor."""
        tensors = engine_tensors(self.get_model())
        return {slot: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for slot, tensor in tensors.items()}

    def live_digest(self) -> dict[Slot, int]:
        """Checksum of each live tensor."""
        return digest(engine_tensors(self.get_model()))

    def prepare_refit(self, workers: Sequence[WorkerRefit]) -> None:
        """Maps the trainer's memory and prepares this worker's copies; see `Puller`."""
        mine = workers[self.rank]
        self.puller = Puller(lambda: engine_tensors(self.get_model()), mine.part, mine.handles)

    def pull_round(self, round_index: int) -> int:
        """Copies one round into the live tensors; the bytes written."""
        return self._prepared().pull(round_index)

    def verify_round(self, round_index: int) -> VerifyReport:
        """Compares one round's live bytes with the trainer's checksums."""
        return self._prepared().verify(round_index)

    def finish_refit(self) -> VerifyReport:
        """The report of the whole refit; see `Puller.finish`."""
        return self._prepared().finish()

    def _prepared(self) -> Puller:
        assert self.puller is not None, "pull before prepare_refit"
        return self.puller


def engine_tensors(model: nn.Module) -> dict[Slot, Tensor]:
    """All that a forward pass reads and training may change: parameters and persistent buffers, each storage once.

    A tied parameter counts under its first name. Buffers that are views of a parameter (`conv_weights` of a Mamba mixer) follow it.

    Raises:
        RefitError: two tensors overlap, so that a refit would write some bytes twice; or a constant buffer is not 1.
    """
    persistent = model.state_dict(keep_vars=True).keys()
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[2] in CONSTANT_BUFFERS:
            if buffer.item() != 1.0:
                raise RefitError(f"{name} is {buffer.item()}, but a refit knows no quantised KV cache")
        elif name in persistent:
            tensors[name] = buffer
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name) for name, tensor in tensors.items())
    for (_, end, name), (start, _, following) in zip(spans, spans[1:], strict=False):
        if start < end:
            raise RefitError(f"{name} and {following} share memory in the engine")
    return {Slot(name): tensor for name, tensor in tensors.items()}
