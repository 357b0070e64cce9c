# SPDX-License-Identifier: Apache-2.0
"""The arena moves weights without changing them, keeps shared storages shared, and notices weights that left it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from conversion.boxes import Slot
from mrl.policy.weights import Arena, live_tensors
from mrl.refit.memory import MappedMemory, SharedMemory, bytes_as
from tests.sources import ROOT
from tests.waiting import HANG_S


class Model(nn.Module):
    """A linear layer in a contiguous buffer, a frozen parameter, a bf16 one, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.bf16_scale = nn.Parameter(torch.randn(3, 3).bfloat16())
        self.register_buffer("expert_bias", torch.randn(4))
        self.register_buffer("counts", torch.zeros(4), persistent=False)


def contiguous_buffer(model: Model) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Lays the linear layer out as Megatron's DDP does: reverse order, padded, cut into buckets."""
    param_data = torch.zeros(64)
    start = 0
    for parameter in (model.linear.bias, model.linear.weight):
        view = param_data[start : start + parameter.numel()].view(parameter.shape)
        view.copy_(parameter.data)
        parameter.data = view
        start += 32
    return param_data, [param_data[:32], param_data[32:]]


def inside(tensor: torch.Tensor, arena: Arena) -> bool:
    memory = arena._memory.tensor
    return (
        memory.data_ptr() <= tensor.data_ptr()
        and tensor.data_ptr() + tensor.nbytes <= memory.data_ptr() + memory.nbytes
    )


def test_everything_moves_and_nothing_changes():
    model = Model()
    param_data, buckets = contiguous_buffer(model)
    before = {slot: tensor.detach().clone() for slot, tensor in live_tensors(model).items()}
    objects = {slot: id(tensor) for slot, tensor in live_tensors(model).items()}
    arena = Arena(live_tensors(model), [param_data, *buckets], name="test")

    live = live_tensors(model)
    assert {str(slot.name) for slot in live} == {"linear.weight", "linear.bias", "frozen", "bf16_scale", "expert_bias"}
    for slot, tensor in live.items():
        assert torch.equal(tensor, before[slot]) and id(tensor) == objects[slot] and inside(tensor, arena)
    assert model.linear.weight.requires_grad and model.linear.weight.is_leaf and not model.frozen.requires_grad
    assert not inside(model.get_buffer("counts"), arena)
    arena.check(live)


def test_views_of_a_contiguous_buffer_go_on_sharing_it():
    model = Model()
    param_data, buckets = contiguous_buffer(model)
    arena = Arena(live_tensors(model), [param_data, *buckets], name="test")
    assert inside(param_data, arena) and all(inside(bucket, arena) for bucket in buckets)
    buckets[1].fill_(3.0)
    assert (
        bool((model.linear.weight == 3.0).all())
        and bool((param_data[32:] == 3.0).all())
        and not bool((model.linear.bias == 3.0).any())
    )
    # An optimizer step through a view that is made later, as the distributed optimizer does.
    model.linear.weight.detach().view(-1)[2:4].sub_(1.0)
    assert param_data[34:36].tolist() == [2.0, 2.0]


def test_another_mapping_reads_what_training_writes():
    model = Model()
    arena = Arena(live_tensors(model), name="test")
    handle = arena.handle()
    memory = MappedMemory(handle.memory).tensor
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model.linear(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    for slot, tensor in live_tensors(model).items():
        row = handle.table[slot]
        assert row.offset % 256 == 0 and tensor.data_ptr() % 256 == 0
        assert torch.equal(bytes_as(memory, row.offset, row.shape, tensor.dtype), tensor)


def test_tied_weights_move_once():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    arena = Arena(live_tensors(model), name="test")
    assert model[0].weight is model[1].weight
    table = arena.handle().table
    assert table[Slot("0.weight")] == table[Slot("1.weight")]


def test_rebound_added_and_lost_weights_are_named():
    model = Model()
    arena = Arena(live_tensors(model), name="test")
    model.expert_bias = model.get_buffer("expert_bias") + 1
    with pytest.raises(RuntimeError, match="outside of the arena.*expert_bias"):
        arena.check(live_tensors(model))
    model = Model()
    arena = Arena(live_tensors(model), name="test")
    model.frozen.data = model.frozen.data.clone()
    model.register_parameter("lora", nn.Parameter(torch.ones(2)))
    with pytest.raises(RuntimeError, match="frozen.*lora"):
        arena.check(live_tensors(model))
    del model.bf16_scale
    with pytest.raises(RuntimeError, match="bf16_scale"):
        arena.check(live_tensors(model))


def test_strided_weights_are_refused():
    with pytest.raises(ValueError, match="contiguous.*turned"):
        Arena({Slot("turned"): torch.randn(3, 4).T}, name="test")


PEAK = """
import resource, sys
from pathlib import Path
import torch
from conversion.boxes import Slot
from mrl.policy.weights import Arena

def peak() -> int:
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10

weights = {Slot(f"weight{index}"): torch.full((1 << 22,), float(index)) for index in range(16)}
before, total = peak(), sum(tensor.nbytes for tensor in weights.values())
arena = Arena(weights, name="peak")
print((peak() - before) / total)
assert all((tensor == float(index)).all() for index, tensor in enumerate(weights.values()))
"""


def test_an_arena_never_holds_the_weights_twice():
    done = subprocess.run([sys.executable, "-c", PEAK], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    # One of the 16 storages is there twice, while it moves.
    assert float(done.stdout) < 2.5 / 16


def test_weights_of_a_gpu_leave_it_before_the_arena_takes_its_memory(monkeypatch: pytest.MonkeyPatch):
    """Stands in for a GPU by tensors that say they are on one: their memory is freed, and their values come back."""
    weights = {Slot(f"weight{index}"): torch.full((64,), float(index)) for index in range(3)}
    old = [tensor.untyped_storage() for tensor in weights.values()]
    sizes: list[int] = []

    def recorded(num_bytes: int, name: str, device: torch.device) -> SharedMemory:
        sizes.extend(storage.nbytes() for storage in old)
        return SharedMemory(num_bytes, name, device)

    monkeypatch.setattr("mrl.policy.weights.SharedMemory", recorded)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)
    Arena(weights, name="moved")
    assert sizes == [0, 0, 0]
    assert [tensor[0].item() for tensor in weights.values()] == [0.0, 1.0, 2.0]
