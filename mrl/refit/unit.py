"""What a worker unit shows to its engine workers: the weight arena of its trainer rank, if it has one, and its exchange memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from conversion.boxes import Slot
from conversion.schedule import Route, WorkerPart, align
from mrl.refit.host_memory import HostHandle
from mrl.refit.memory import MemoryHandle

# Two words (int64) in front of the body: the round that lies in the memory, and how many rounds were ever written.
_NUM_STAMPS = 2

# In place of a round index while the memory is being written.
NO_ROUND = -1


@dataclass(frozen=True)
class ArenaRow:
    """Where one slot lies in an arena: contiguous, `offset` in bytes."""

    offset: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class ArenaHandle:
    """An arena as another process sees it."""

    memory: MemoryHandle
    table: Mapping[Slot, ArenaRow]


@dataclass(frozen=True)
class UnitHandles:
    """All that an engine worker needs to pull from the trainer rank of its unit. Pickles."""

    unit: int
    arena: ArenaHandle | None
    """None on the unit of a dedicated engine, which has no trainer rank."""
    exchange: MemoryHandle | None
    """None on the unit of a dedicated engine, whose worker receives in memory of its own."""
    peers: Mapping[int, ArenaHandle] = field(default_factory=dict)
    """Arenas of other ranks of the node, by rank, that the worker reads too."""


@dataclass(frozen=True)
class ExchangeMemory:
    """The parts of an exchange memory."""

    stamps: Tensor
    """int64 [2]: index of the round that lies in it (NO_ROUND while it is written), number of rounds written so far."""
    body: Tensor
    """uint8: checksums of local copies, and messages as they arrived, at their scheduled offsets."""

    @staticmethod
    def num_bytes(body_bytes: int) -> int:
        """Size of the memory that holds both parts."""
        return align(8 * _NUM_STAMPS) + body_bytes

    @classmethod
    def split(cls, memory: Tensor) -> ExchangeMemory:
        """The parts of `memory` (uint8), as views."""
        return cls(memory[: 8 * _NUM_STAMPS].view(torch.int64), memory[align(8 * _NUM_STAMPS) :])


def reads_arena(route: Route, device: torch.device) -> bool:
    """Whether a worker reads the boxes of a route out of the sender's arena, so that only their checksums travel.

    Host memory can be mapped by every process of its node, memory of a GPU only by processes on that GPU.
    """
    return route.can_map and device.type == "cpu"


def handles_of(part: WorkerPart, handles: Mapping[int, UnitHandles]) -> UnitHandles:
    """What the worker of `part` needs of all units' handles: those of its own, and the arenas that it may read on its node."""
    own = handles[part.unit]
    arenas = {route.peer: handles[route.peer].arena for route in part.receives if route.can_map and isinstance(own.exchange, HostHandle)}
    return replace(own, peers={rank: arena for rank, arena in arenas.items() if arena is not None})


def wait_for(device: torch.device) -> None:
    """Returns when all that this process has queued on a GPU is done: another process looks at the memory next."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def live_tensors(model: nn.Module, chunk: int = 0) -> dict[Slot, Tensor]:
    """Parameters and persistent buffers of a model by slot: the tensors themselves, not copies."""
    # Transformer Engine adds `_extra_state` entries, which are not weights.
    state = model.state_dict(keep_vars=True)
    return {Slot(name, chunk): tensor for name, tensor in state.items() if not name.endswith("_extra_state")}


def bytes_as(memory: Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A contiguous tensor inside uint8 `memory` at byte `offset`, as a view."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return memory[offset : offset + num_bytes].view(dtype).view(shape)
