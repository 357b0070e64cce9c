# SPDX-License-Identifier: Apache-2.0
"""Engine side of a refit: a worker copies boxes from its GPU's memory into its live tensors and verifies them there."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from conversion.boxes import Box, Slot, lengths, tiling_fault
from conversion.files.limits import LimitedThread
from conversion.schedule import CHECKSUM_BYTES, Pull, Schedule
from conversion.tensors import box_view, torch_dtype
from conversion.texts import listed
from mrl.refit import RefitError
from mrl.refit.checksum import Checksums, Summed
from mrl.refit.copies import Copies, TensorCopy
from mrl.refit.device_checksum import bytes_of
from mrl.refit.exchange import Exchange, GpuHandles
from mrl.refit.memory import MappedMemory, bytes_as, wait_for
from mrl.refit.pace import Pace
from mrl.refit.staging import PullGroup, Quantiser, completed_rounds, plan_turns, staged_tensors

_MAX_REPORTED = 8


@dataclass(frozen=True)
class VerifyReport:
    """Amount that a verification has read. Bytes are those of the live tensors."""

    num_bytes: int
    padding_bytes: int
    total_bytes: int
    mismatches: tuple[str, ...]
    """One line for each box that differs: slot, box, source rank, GPU."""


class _Batch(NamedTuple):
    pulls: Sequence[Pull]
    copies: Copies
    checksums: Checksums
    """Checksums of the live boxes, in the order of the pulls."""
    expected_words: Tensor
    """Places of the expected checksums in the memory's body, in words (int64)."""
    num_bytes: int
    """Bytes of live tensors."""
    quantiser: Quantiser | None
    """Makes the live tensors of a layer, once this batch is there."""


class Puller:
    """The pulls of one engine worker.

    A refit is `run`, which for each round in order does `pull`, `verify` and `quantise`; then `finish`. Only after that
    may the engine sample.
    """

    def __init__(
        self,
        live: Callable[[], Mapping[Slot, Tensor]],
        schedule: Schedule,
        worker: int,
        handles: GpuHandles,
        *,
        own: Exchange | None = None,
        addresses: Mapping[Slot, int] | None = None,
        quantisers: Sequence[Quantiser] = (),
        peers: Sequence[int] = (),
    ) -> None:
        """Maps the memory of the worker's GPU and prepares all copies.

        `live` gives the worker's parameters and persistent buffers as the model holds them at the call; `worker` is its
        number in the schedule. `own` is the exchange whose memory belongs to this process (a dedicated engine).
        `addresses` are those of an earlier puller of this model. `quantisers` are the layers that the engine makes of
        staged weights, together with the workers `peers`, itself among them.
        """
        self._live = live
        self._gpu = handles.gpu
        tensors, rounds, padding = live(), schedule.pulls(worker), schedule.class_of(worker).padding
        completed = completed_rounds(schedule, peers) if quantisers else {}
        turns = plan_turns(quantisers, rounds, completed)
        self._staged = staged_tensors(turns, quantisers, next(iter(tensors.values())).device)
        made = {slot for quantiser in quantisers for slot in quantiser.made}
        targets = {slot: tensor for slot, tensor in tensors.items() if slot not in made} | self._staged
        check_coverage(targets, list(chain.from_iterable(rounds)), padding)
        # CUDA graphs and views of the model hold addresses: writes elsewhere would not be read.
        self.addresses = dict(addresses) if addresses is not None else _addresses(tensors)
        self._check_addresses(tensors)
        self._total_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._own, self._worker = own, worker
        self._exchange: MappedMemory | None = None
        if own is not None:
            self._body, self._pace = own.memory.tensor, own.pace
        else:
            assert handles.exchange is not None and handles.pace is not None
            self._exchange = MappedMemory(handles.exchange)
            self._body = self._exchange.tensor
            self._pace = Pace(MappedMemory(handles.pace, is_writable=True), handles.gpu)
        self._reader = [number for number, found in schedule.workers.items() if found.gpu == handles.gpu].index(worker)
        check_devices(tensors, self._body.device, gpu=handles.gpu)
        mapped = dict(handles.peers) | ({handles.gpu: handles.arena} if handles.arena else {})
        if self._body.device.type == "cpu":
            assert schedule.mappable_ranks(worker) <= mapped.keys(), (
                "handles without the arenas of the node: see handles_for"
            )
        self._arenas = {rank: (MappedMemory(arena.memory), arena.table) for rank, arena in mapped.items()}
        self._rounds = [[self._prepare(targets, turn) for turn in round] for round in turns.rounds]
        self._padding = [(slot, box, box_view(targets[slot], box)) for slot, boxes in padding.items() for box in boxes]
        self._reports: dict[int, VerifyReport] = {}

    def run(self, attempt: int, *, timeout_s: float) -> int:
        """Pulls and verifies each round of an attempt once ready, and returns the bytes written to the live tensors."""
        if self._own is None:
            return self._run(attempt, timeout_s)
        thread = LimitedThread("exchange")
        receiving = thread.begin(self._own.run, attempt, [self._worker], timeout_s=timeout_s)
        thread.end()
        try:
            return self._run(attempt, timeout_s)
        except BaseException:
            self._own.leave(attempt)
            raise
        finally:
            # The exchange's error comes first, as the pulls only wait for it. Its own deadline has ended it.
            receiving.result(2 * timeout_s)

    def _run(self, attempt: int, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        self.begin(attempt)
        num_bytes = 0
        for round_index in range(len(self._rounds)):
            self._pace.wait_until_filled(round_index, deadline)
            num_bytes += self.pull(round_index)
            self.verify(round_index)
            self.quantise(round_index)
            self._pace.read(self._reader, round_index + 1)
        return num_bytes

    def begin(self, attempt: int) -> None:
        """Begins an attempt at a refit, with no round pulled."""
        self._pace.attempt = attempt
        self._reports = {}

    def wait_for_room(self, attempt: int, *, timeout_s: float) -> None:
        """Waits until the trainer rank on the GPU freed memory for this attempt; returns at once if there is none."""
        if self._own is None:
            self.begin(attempt)
            self._pace.wait_until_begun(time.monotonic() + timeout_s)

    @torch.inference_mode()
    def pull(self, round_index: int) -> int:
        """Copies one round's boxes into the live tensors and returns their bytes there. Round 0 also zeroes padding."""
        for memory in [self._exchange, *(memory for memory, _ in self._arenas.values())]:
            if memory is not None:
                memory.check()
        self._pace.check_filled(round_index)
        for _, _, target in self._padding if round_index == 0 else ():
            target.zero_()
        head = self._rounds[round_index][0]
        head.copies.run()
        wait_for(self._body.device)
        return head.num_bytes

    @torch.inference_mode()
    def verify(self, round_index: int) -> VerifyReport:
        """Compares live bytes of the round's boxes with the trainer's checksums; in round 0 also padding with zero."""
        head = self._rounds[round_index][0]
        mismatches, padding_bytes = self._different(head), 0
        for slot, box, target in self._padding if round_index == 0 else ():
            padding_bytes += target.nbytes
            # By bytes: a fresh engine's padding has no negative zeros or NaNs.
            if bytes_of(target).any():
                mismatches.append(f"padding of {slot} box {box} is not zero on the worker of GPU {self._gpu}")
        report = VerifyReport(head.num_bytes, padding_bytes, self._total_bytes, tuple(mismatches))
        self._reports[round_index] = report
        return report

    @torch.inference_mode()
    def quantise(self, round_index: int) -> None:
        """Makes the layers whose weights this round completes, and proves that a second making has the same bytes."""
        tensors = self._live() if len(self._rounds[round_index]) > 1 else {}
        for batch in self._rounds[round_index][1:]:
            assert batch.quantiser is not None
            batch.copies.run()
            wait_for(self._body.device)
            lines = self._different(batch)
            weights = {slot: self._staged[slot] for slot in batch.quantiser.loaded}
            lines += [
                f"{slot} is not what the engine makes of its verified weights (on GPU {self._gpu})"
                for slot in batch.quantiser.write(weights, tensors)
            ]
            num_bytes = sum(tensors[slot].nbytes for slot in batch.quantiser.made)
            report = self._reports[round_index]
            self._reports[round_index] = replace(
                report, num_bytes=report.num_bytes + num_bytes, mismatches=(*report.mismatches, *lines)
            )

    def finish(self) -> VerifyReport:
        """The report of the whole refit."""
        mismatches = tuple(line for report in self._reports.values() for line in report.mismatches)
        num_bytes = sum(report.num_bytes for report in self._reports.values())
        padding_bytes = sum(report.padding_bytes for report in self._reports.values())
        if mismatches:
            raise RefitError(f"refit: {listed(mismatches, _MAX_REPORTED, between='; ')}")
        if len(self._reports) != len(self._rounds) or num_bytes + padding_bytes != self._total_bytes:
            raise RefitError(
                f"refit: the worker of GPU {self._gpu} verified {len(self._reports)} of {len(self._rounds)} rounds, "
                f"{num_bytes} bytes and {padding_bytes} bytes of padding of {self._total_bytes} live bytes"
            )
        # Checked last: if the model has moved, the written and verified tensors are not the live ones.
        self._check_addresses(self._live())
        return VerifyReport(num_bytes, padding_bytes, self._total_bytes, ())

    def _different(self, batch: _Batch) -> list[str]:
        """Lines for the batch's boxes whose checksums are not the trainer's."""
        expected = self._body.view(torch.int64)[batch.expected_words].cpu()
        different = (batch.checksums.take() != expected).nonzero().flatten().tolist()
        return [
            f"{pull.copy.target} box {pull.copy.box} differs from source rank {pull.rank} (pulled on GPU {self._gpu})"
            for pull in (batch.pulls[index] for index in different)
        ]

    def _prepare(self, tensors: Mapping[Slot, Tensor], turn: PullGroup) -> _Batch:
        pulls = turn.pulls
        targets = [box_view(tensors[pull.copy.target], pull.copy.box) for pull in pulls]
        copies = [
            TensorCopy(target, self._source(pull), pull.copy.transform)
            for target, pull in zip(targets, pulls, strict=True)
        ]
        words = torch.tensor([pull.checksum_offset // CHECKSUM_BYTES for pull in pulls], dtype=torch.int64).to(
            self._body.device
        )
        checksums = Checksums([Summed(target) for target in targets])
        num_bytes = sum(
            target.nbytes for target, pull in zip(targets, pulls, strict=True) if pull.copy.target not in self._staged
        )
        return _Batch(pulls, Copies(copies), checksums, words, num_bytes, turn.quantiser)

    def _source(self, pull: Pull) -> Tensor:
        slot, box, dtype_name = pull.holding
        dtype, shape = torch_dtype(dtype_name), lengths(pull.copy.box)
        if pull.rank not in self._arenas:
            assert pull.offset is not None
            return bytes_as(self._body, pull.offset, shape, dtype)
        memory, table = self._arenas[pull.rank]
        row = table[slot]
        if row.dtype != dtype_name:
            raise RefitError(f"{slot} of rank {pull.rank} is {row.dtype}, the schedule says {dtype_name}")
        # Boxes differ at most by leading dimensions of length 1 (experts stacked in the engine), so this is a view.
        return box_view(bytes_as(memory.tensor, row.offset, row.shape, dtype), box).view(shape)

    def _check_addresses(self, tensors: Mapping[Slot, Tensor]) -> None:
        addresses = _addresses(tensors)
        if addresses != self.addresses:
            moved = sorted({str(slot) for slot, _ in addresses.items() ^ self.addresses.items()})
            raise RefitError(
                f"{len(moved)} engine tensors were rebound, added or lost after the refit was prepared: "
                f"{', '.join(moved[:_MAX_REPORTED])}"
            )


def _addresses(tensors: Mapping[Slot, Tensor]) -> dict[Slot, int]:
    return {slot: tensor.data_ptr() for slot, tensor in tensors.items()}


def check_devices(tensors: Mapping[Slot, Tensor], device: torch.device, *, gpu: int) -> None:
    """Raises RefitError unless all live tensors are on `device`, where the memory of their GPU is."""
    for slot, tensor in tensors.items():
        if tensor.device != device:
            raise RefitError(
                f"{slot} of the engine is on {tensor.device}, the memory of its GPU {gpu} on {device}: an engine "
                "worker runs on the device of the policy rank of its GPU; remove device_ids from "
                "policy.generation.vllm_kwargs"
            )


def check_coverage(
    tensors: Mapping[Slot, Tensor], pulls: Sequence[Pull], padding: Mapping[Slot, Sequence[Box]]
) -> None:
    """Raises unless pulls and padding together write every element of every live tensor exactly once.

    The schedule was proven against tables; this proves it against the live model.
    """
    boxes: dict[Slot, list[Box]] = {slot: list(padding.get(slot, ())) for slot in tensors}
    faults = [f"{slot} is not in the engine" for slot in padding if slot not in tensors]
    for copy in (pull.copy for pull in pulls):
        if copy.target not in tensors:
            faults.append(f"{copy.target} is not in the engine")
        elif (dtype := tensors[copy.target].dtype) != torch_dtype(copy.dtype):
            faults.append(f"{copy.target} is {dtype} in the engine and {copy.dtype} in the schedule")
        else:
            boxes[copy.target].append(copy.box)
    for slot, tensor in tensors.items():
        fault = tiling_fault(tensor.shape, boxes[slot])
        if fault is not None:
            faults.append(f"{slot} {tuple(tensor.shape)}: {fault}")
    if faults:
        raise RefitError("refit schedule does not fit the engine: " + "; ".join(faults[:_MAX_REPORTED]))
