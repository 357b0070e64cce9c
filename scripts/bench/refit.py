# SPDX-License-Identifier: Apache-2.0
"""Speed of a refit in one host against a plain copy of the same bytes, at the same time of day, by as many processes.

Trainer ranks and engine workers are real processes that share memory and exchange over gloo, as in a run. Weights are
those of Nemotron-3-Nano-30B-A3B, all 52 layers and 128 experts, with the hidden size divided by --divide and nothing
else. Matrices that a layout cuts along their columns have the hidden size as their height, so their rows, which strided
copies run along, are as long as in the real model; matrices are smaller by the factor, so what a copy costs apart from
its bytes weighs more than there. Repeats of copy and refit take turns.

- refit: exchange and pull, ranks and workers at the same time as in a run, but all checksums are zero. Its speed is
  given as a share of the plain copy's (one Tensor.copy_ by every engine worker of as many bytes as it has weights).
- refit + verification: all of it, with the checksums that the ranks take and those that the workers compare. As a
  multiple of the time of the plain copy. Bytes moved are those of this one.

Prints a line for each pair of layouts and writes docs/data/refit.json.

Usage: python -m scripts.bench.refit [--divide 16] [--repeats 9] [--device cpu|cuda] [--only NAME] [--no-record]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from conversion.boxes import DTYPE_BYTES, Layout, volume
from conversion.families.common import HfConfig, MegatronParallel, VllmParallel
from conversion.families.registry import family
from conversion.reshard import reshard
from conversion.schedule import NUM_BUFFERS, Schedule
from conversion.tensors import torch_dtype
from mrl.policy.weights import Arena
from mrl.refit.checksum import Checksums
from mrl.refit.exchange import Exchange, GpuHandles, handles_for
from mrl.refit.group import ExchangeGroup, GroupAddress, Incoming, Outgoing
from mrl.refit.memory import wait_for
from scripts.bench.shapes import narrowed
from scripts.bench.turns import bench_parser, lowest_to_highest
from tests.long.record import Row, record
from tests.stack.refit import children
from tests.stack.refit.children import Child, call_all

BUFFER_BYTES = 1_000_000_000
# More than any cache holds.
MAX_COPY_BYTES = 1 << 30
# Largest share of the plain copy's speed, and multiples of its time, that DESIGN asks for: on CPU, on a GPU.
MIN_SPEED = {"cpu": 0.8, "cuda": 0.7}
MAX_TIME = {"cpu": 3.5, "cuda": 2.5}


@dataclass(frozen=True)
class Case:
    """A layout of the policy and one of the engine, which share GPUs from 0 on."""

    policy: MegatronParallel
    engine: VllmParallel
    num_ranks: int = 2
    num_hosts: int = 1
    """2: ranks may not read each other's arenas, as if they ran on two hosts; their messages still go through
    this one.
    """

    def layouts(self, hf_config: HfConfig) -> tuple[dict[int, Layout], dict[int, Layout]]:
        """Layouts of the trainer ranks, and of the engine's workers."""
        tables, places = (
            family(hf_config),
            {rank: self.policy.coords_of(rank, self.num_ranks) for rank in range(self.num_ranks)},
        )
        sources = {
            rank: tables.megatron_layout(hf_config, self.policy, place, "bfloat16") for rank, place in places.items()
        }
        return sources, {
            worker: tables.vllm_layout(hf_config, self.engine, worker, "bfloat16") for worker in range(self.engine.tp)
        }


CASES = {
    "TP2 ETP2 to TP2": Case(MegatronParallel(tp=2, etp=2), VllmParallel(tp=2)),
    "TP2 EP2 to TP2 EP2": Case(MegatronParallel(tp=2, ep=2), VllmParallel(tp=2, ep=2)),
    "TP2 EP2 to TP1": Case(MegatronParallel(tp=2, ep=2), VllmParallel(tp=1)),
    "TP2 EP2 to TP2": Case(MegatronParallel(tp=2, ep=2), VllmParallel(tp=2)),
    "TP2 EP2 to TP2, gloo": Case(MegatronParallel(tp=2, ep=2), VllmParallel(tp=2), num_hosts=2),
    "TP1 to TP1": Case(MegatronParallel(), VllmParallel(), num_ranks=1),
}
# Of several ranks on one GPU NCCL makes no group.
CASES_OF = {"cpu": [name for name in CASES if name != "TP1 to TP1"], "cuda": ["TP1 to TP1"]}


TAKE = Checksums.take


class State(children.State):
    """State that a process of the bench keeps between calls."""

    plain: Tensor
    copy: Tensor
    num_bytes: int
    """Bytes of the live tensors."""
    group: CountingGroup | None


class CountingGroup(ExchangeGroup):
    """Counts what leaves."""

    sent_bytes = 0

    def run(
        self,
        outgoing: Sequence[Outgoing],
        incoming: Sequence[Incoming],
        *,
        what: str,
        meanwhile: Callable[[], None],
        deadline: float,
    ) -> None:
        """One round."""
        self.sent_bytes += sum(message.buffer.nbytes for message in outgoing)
        super().run(outgoing, incoming, what=what, meanwhile=meanwhile, deadline=deadline)


def build_trainer(
    state: State, rank: int, layout: Layout, schedule: Schedule, address: GroupAddress | None, device: str
) -> GpuHandles:
    """Random weights in an arena, and this rank's part of the exchange."""
    generator = torch.Generator(device).manual_seed(rank)
    weights = {
        slot: torch.empty(item.shape, dtype=torch_dtype(item.dtype), device=device).normal_(generator=generator)
        for slot, item in layout.items()
    }
    state.arena = Arena(weights, name=f"mrl-arena-{rank}")
    state.group = CountingGroup(address, rank, device=torch.device(device), timeout_s=60.0) if address else None
    state.exchange = Exchange(schedule, rank, weights, state.arena.handle(), group=state.group)
    return state.exchange.handles()


def build_engine(state: State, layout: Layout, device: str) -> None:
    """Live tensors, and two buffers as large as all of them, up to a limit."""
    state.live = {
        slot: torch.empty(item.shape, dtype=torch_dtype(item.dtype), device=device) for slot, item in layout.items()
    }
    state.num_bytes = sum(tensor.nbytes for tensor in state.live.values())
    buffer_bytes = min(state.num_bytes, MAX_COPY_BYTES)
    state.plain = torch.ones(buffer_bytes, dtype=torch.uint8, device=device)
    state.copy = torch.zeros(buffer_bytes, dtype=torch.uint8, device=device)


def plain_copy(state: State) -> None:
    """The yardstick."""
    for start in range(0, state.num_bytes, len(state.copy)):
        part = slice(0, min(len(state.copy), state.num_bytes - start))
        state.copy[part].copy_(state.plain[part])
    wait_for(state.copy.device)


def take_checksums(state: State, is_wanted: bool) -> None:
    """Sets whether this process takes checksums; else all of them are zero."""

    def take_none(self: Checksums) -> Tensor:
        return torch.zeros(
            len(self._on_host) if self._on_device is None else self._on_device._num_values, dtype=torch.int64
        )

    Checksums.take = TAKE if is_wanted else take_none


def sent_bytes(state: State) -> int:
    """Bytes of all messages that this rank has sent so far."""
    return state.group.sent_bytes if state.group else 0


@dataclass
class Repeat:
    """Seconds of wall time, and bytes."""

    plain_copy: float
    refit: float
    verified_refit: float
    moved_bytes: int
    """Written to engines' parameters, and sent by ranks."""


def refit(ranks: Sequence[Child], workers: Sequence[Child], attempt: int) -> int:
    """One refit of all rounds; bytes written to engines' parameters."""
    for rank in ranks:
        rank.send(children.exchange, attempt, range(len(workers)), children.DEADLINE_S)
    for worker in workers:
        worker.send(children.pull_all, attempt, children.DEADLINE_S)
    return sum(cast(int, child.result(children.DEADLINE_S)) or 0 for child in [*ranks, *workers])


def seconds(function: Callable[..., object], *arguments: object) -> tuple[object, float]:
    """Result of a function, and the wall time of the call."""
    start = time.perf_counter()
    value = function(*arguments)
    return value, time.perf_counter() - start


@contextmanager
def processes(
    sources: dict[int, Layout], targets: dict[int, Layout], *, num_hosts: int, device: str
) -> Iterator[tuple[list[Child], list[Child]]]:
    """Trainer ranks with random weights and engine workers, prepared for refits."""
    nodes, gpus = {rank: rank % num_hosts for rank in sources}, {target: target for target in targets}
    schedule = reshard(sources, targets, gpu_of=gpus, node_of=nodes, buffer_bytes=BUFFER_BYTES // NUM_BUFFERS)
    ranks, workers = [Child() for _ in sources], [Child() for _ in targets]
    try:
        ranks[0].call(children.open_store)
        port, _ = cast(tuple[int, int], ranks[0].call(children.count_group))
        address = GroupAddress("127.0.0.1", port, "exchange", tuple(range(len(ranks)))) if len(ranks) > 1 else None
        for rank, child in enumerate(ranks):
            child.send(build_trainer, rank, sources[rank], schedule, address, device)
        handles = {rank: cast(GpuHandles, child.result(children.DEADLINE_S)) for rank, child in enumerate(ranks)}
        for target, worker in enumerate(workers):
            worker.call(build_engine, targets[target], device)
            worker.call(children.prepare_pull, schedule, target, handles_for(schedule, target, handles))
        yield ranks, workers
    finally:
        for child in ranks + workers:
            child.stop()


def measure(case: Case, hf_config: HfConfig, num_repeats: int, device: str) -> list[Repeat]:
    """Starts processes and repeats plain copy and refit in turn; omits the first pass, which touches fresh pages."""
    repeats = []
    with processes(*case.layouts(hf_config), num_hosts=case.num_hosts, device=device) as (ranks, workers):
        for repeat in range(num_repeats + 1):
            _, plain = seconds(call_all, workers, plain_copy)
            call_all([*ranks, *workers], take_checksums, False)
            _, moving = seconds(refit, ranks, workers, 2 * repeat + 1)
            call_all([*ranks, *workers], take_checksums, True)
            sent_before = sum(cast(list[int], call_all(ranks, sent_bytes)))
            written, verified = seconds(refit, ranks, workers, 2 * repeat + 2)
            call_all(workers, children.finish)
            sent = sum(cast(list[int], call_all(ranks, sent_bytes))) - sent_before
            repeats.append(Repeat(plain, moving, verified, cast(int, written) + sent))
    return repeats[1:]


def row_of(name: str, divide: int, hf_config: HfConfig, device: str, repeats: Sequence[Repeat]) -> Row:
    """One line of the table."""
    items = [item for layout in CASES[name].layouts(hf_config)[1].values() for item in layout.values()]
    needed = sum(DTYPE_BYTES[item.dtype] * volume(piece.local) for item in items for piece in item.pieces)
    speeds = [item.plain_copy / item.refit for item in repeats]
    multiples = [item.verified_refit / item.plain_copy for item in repeats]
    has_target = CASES[name].num_hosts == 1
    return {
        "policy to engine": name,
        "device": device,
        "hidden size divided by": divide,
        "gigabytes": needed / 1e9,
        "bytes moved / needed": round(max(item.moved_bytes for item in repeats) / needed, 3),
        "plain copy GB/s": needed / statistics.median(item.plain_copy for item in repeats) / 1e9,
        "refit / copy speed": statistics.median(speeds),
        "at least": MIN_SPEED[device] if has_target else None,
        "lowest to highest": lowest_to_highest(speeds),
        "refit + verification / copy time": statistics.median(multiples),
        "at most": MAX_TIME[device] if has_target else None,
        "lowest to highest time": lowest_to_highest(multiples),
        "repeats": len(repeats),
    }


def main() -> None:
    """Measures and prints."""
    parser = bench_parser(__doc__, repeats=9)
    parser.add_argument("--divide", type=int, default=16, help="what the hidden size of the model is divided by")
    parser.add_argument("--device", choices=sorted(MIN_SPEED), default="cpu")
    parser.add_argument("--only", choices=list(CASES), help="one case")
    arguments = parser.parse_args()
    rows = []
    hf_config = narrowed(arguments.divide)
    for name in [arguments.only] if arguments.only else CASES_OF[arguments.device]:
        repeats = measure(CASES[name], hf_config, arguments.repeats, arguments.device)
        rows.append(row_of(name, arguments.divide, hf_config, arguments.device, repeats))
        print(
            ", ".join(
                f"{key}: {value:.3g}" if isinstance(value, float) else f"{key}: {value}"
                for key, value in rows[-1].items()
            ),
            flush=True,
        )
    # `scripts/gpu_check.sh` records what GPUs give.
    if not arguments.no_record and arguments.device == "cpu":
        record("refit", rows, command="python -m scripts.bench.refit")


if __name__ == "__main__":
    main()
