# SPDX-License-Identifier: Apache-2.0
"""Phases of a colocated engine, by vLLM's executor, GPU worker and sleep allocator. Only driver calls are not CUDA's.

Memory that the driver unmaps is overwritten, so that a forward pass that reads what sleeps, or woke without content,
shows.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from mrl.phases import PHASES, Phase
from tests.rollouts import StartEngine, differences, random_requests, run
from tests.stack.rollout.ahead import schedule_ahead
from tests.stack.rollout.trainer import TIMEOUT_S, Trainer

if TYPE_CHECKING:
    from mrl.rollout.engine import Engine

# Of float32 and bfloat16 alike: not a number.
POISON = 0xFF
# What vLLM's GPU worker allocates beside weights and KV cache.
OTHER_TAGS = ("workspace", "runtime", "cudagraph")
# What a call of the workers reads or writes; all others are of memory itself, or of none.
NEEDS = {"execute_model": {"weights", "kv_cache", *OTHER_TAGS}, "live_digest": {"weights"}}


class Device:
    """CUDA's virtual memory calls, as `vllm.device_allocator.cumem` makes them, on the memory of a CPU engine."""

    def __init__(self, memory: Mapping[str, Sequence[torch.Tensor]]) -> None:
        self.memory = memory
        self.tag_at = {
            tensor.untyped_storage().data_ptr(): tag for tag, tensors in memory.items() for tensor in tensors
        }
        self.asleep: set[int] = set()
        self.moved: list[str] = []
        """Tag of every copy between device and host."""
        self.calls: list[str] = []
        """Calls of the workers, by the executor."""

    def unmap(self, device: int, size: int, address: int, handle: int) -> None:
        assert address not in self.asleep, f"{self.tag_at[address]} was released twice"
        self.asleep.add(address)
        ctypes.memset(address, POISON, size)

    def map(self, device: int, size: int, address: int, handle: int) -> None:
        assert address in self.asleep, f"{self.tag_at[address]} was woken twice"
        self.asleep.remove(address)
        # New memory: what was written to these addresses meanwhile is lost.
        ctypes.memset(address, POISON, size)

    def copy(self, target: int, source: int, size: int) -> None:
        self.moved.append(self.tag_at.get(target) or self.tag_at[source])
        ctypes.memmove(target, source, size)

    def checked(self, call: Callable[..., object]) -> Callable[..., object]:
        """The executor's call of its workers, which must not need what sleeps."""

        def checked_call(method: str, *args: object, **kwargs: object) -> object:
            asleep = NEEDS.get(method, set()) & self.sleeping_tags
            assert not asleep, f"{method} while {asleep} sleep"
            self.calls.append(method)
            return call(method, *args, **kwargs)

        return checked_call

    @property
    def sleeping_tags(self) -> set[str]:
        return {self.tag_at[address] for address in self.asleep}


def fail(message: str, *arguments: object) -> None:
    raise AssertionError(f"vLLM refuses: {message % arguments}")


@pytest.fixture
def device(
    request: pytest.FixtureRequest, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Engine, Device]]:
    """An engine that takes its host for a GPU once it is up, and the memory beneath it; True: it schedules ahead."""
    if getattr(request, "param", False):
        schedule_ahead(monkeypatch)
    engine = start_engine()
    from vllm import device_allocator
    from vllm.device_allocator import AllocationData, cumem
    from vllm.v1.executor import abstract
    from vllm.v1.worker.gpu_worker import Worker

    import mrl.rollout.engine

    device = Device(memory_of(engine))
    allocator = cumem.CuMemAllocator()
    for tag, tensors in device.memory.items():
        for storage in (tensor.untyped_storage() for tensor in tensors):
            allocator.pointer_to_data[storage.data_ptr()] = AllocationData(
                (0, storage.nbytes(), storage.data_ptr(), 0), tag
            )
    monkeypatch.setattr(cumem, "python_unmap_and_release", device.unmap)
    monkeypatch.setattr(cumem, "python_create_and_map", device.map)
    monkeypatch.setattr(cumem, "libcudart", SimpleNamespace(cudaMemcpy=device.copy))
    monkeypatch.setattr(device_allocator, "get_mem_allocator_instance", lambda: allocator)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.accelerator, name, lambda *_: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (0, 0))
    for name in ("sleep", "wake_up", "discard"):
        monkeypatch.setattr(type(worker_of(engine)), name, getattr(Worker, name))
    executor = engine.llm.model_executor
    monkeypatch.setattr(executor, "collective_rpc", device.checked(executor.collective_rpc))
    # It warns, and does nothing, when it is asked for what sleeps or is awake already.
    monkeypatch.setattr(abstract.logger, "warning", fail)
    monkeypatch.setattr(mrl.rollout.engine, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    yield engine, device
    assert {"execute_model", "wake_up"} <= set(device.calls)


def worker_of(engine: Engine):
    return engine.llm.model_executor.driver_worker.worker


def memory_of(engine: Engine) -> dict[str, list[torch.Tensor]]:
    """Tensors that a GPU worker has in its sleep allocator, by tag."""
    runner = worker_of(engine).model_runner
    caches = [
        tensor for cache in runner.kv_caches for tensor in (cache if isinstance(cache, list | tuple) else [cache])
    ]
    assert caches and all(isinstance(tensor, torch.Tensor) for tensor in caches)
    others = {tag: [torch.arange(8.0)] for tag in OTHER_TAGS}
    return {"weights": [*runner.model.parameters(), *runner.model.buffers()], "kv_cache": caches} | others


def enter(engine: Engine, device: Device, phase: Phase) -> list[str]:
    """Enters a phase, after which there is what the table says; tags that travelled between device and host."""
    device.moved.clear()
    engine.enter(phase)
    place = PHASES[phase]
    wanted = {
        tag for tag, where in (("weights", place.engine_weights), ("kv_cache", place.kv_cache)) if where == "device"
    }
    assert device.sleeping_tags & {"weights", "kv_cache"} == {"weights", "kv_cache"} - wanted
    # A forward pass, and a refit, need them beside the weights.
    assert not wanted or not device.sleeping_tags & set(OTHER_TAGS)
    return list(device.moved)


def refit(engine: Engine, device: Device, weights: list[torch.Tensor], version: int) -> None:
    """Writes every parameter, as a refit does, and nothing else: buffers are vLLM's to bring back."""
    assert "weights" not in device.sleeping_tags
    for live, kept in zip(worker_of(engine).model_runner.model.parameters(), weights, strict=True):
        live.data.copy_(kept)
    engine.set_weight_version(version)


@pytest.mark.parametrize("device", [False, True], ids=["plain", "ahead"], indirect=True)
def test_weights_stay_where_they_are_while_only_the_kv_cache_leaves(device: tuple[Engine, Device]):
    engine, memory = device
    requests = random_requests(3, max_new_tokens=6)
    digest = engine.live_digest()
    assert enter(engine, memory, "load") == []
    assert engine.live_digest() == digest
    assert enter(engine, memory, "refit") == []
    engine.set_weight_version(1)
    enter(engine, memory, "generate")
    before = run(engine, requests)
    # The last step has finished requests, of which vLLM's workers learn in the next one only.
    for phase in ("checkpoint", "generate", "refit"):
        assert enter(engine, memory, phase) == []
        assert engine.live_digest() == digest
    engine.set_weight_version(2)
    enter(engine, memory, "generate")
    assert differences(before, run(engine, requests)) == []


def test_a_step_finds_all_that_it_needs_after_every_sleep(device: tuple[Engine, Device]):
    engine, memory = device
    weights = [parameter.detach().clone() for parameter in worker_of(engine).model_runner.model.parameters()]
    requests = random_requests(3, max_new_tokens=6)
    enter(engine, memory, "load")
    before = None
    for version in (1, 2, 3):
        moved = enter(engine, memory, "refit")
        assert "weights" not in moved and "kv_cache" not in moved
        refit(engine, memory, weights, version)
        enter(engine, memory, "generate")
        rollouts = run(engine, requests)
        assert differences(before or rollouts, rollouts) == []
        before = rollouts
        for phase in ("checkpoint", "generate", "logprob", "logprob", "train"):
            assert {"weights", "kv_cache"}.isdisjoint(enter(engine, memory, phase))


@pytest.mark.parametrize("device", [False, True], ids=["plain", "ahead"], indirect=True)
def test_requests_under_way_are_dropped_with_the_cache_and_nothing_else(device: tuple[Engine, Device]):
    engine, memory = device
    for phase in ("load", "refit"):
        enter(engine, memory, phase)
    engine.set_weight_version(1)
    enter(engine, memory, "generate")
    requests = random_requests(2, max_new_tokens=6)
    before = run(engine, requests)
    engine.add(requests)
    engine.step()
    assert enter(engine, memory, "refit") == []
    engine.abort([request.request_id for request in requests])
    engine.set_weight_version(2)
    enter(engine, memory, "generate")
    assert differences(before, run(engine, requests)) == []


@pytest.mark.parametrize("device", [False, True], ids=["plain", "ahead"], indirect=True)
def test_rollouts_under_way_go_on_from_their_tokens(device: tuple[Engine, Device]):
    engine, memory = device
    weights = [parameter.detach().clone() for parameter in worker_of(engine).model_runner.model.parameters()]
    for phase in ("load", "refit"):
        enter(engine, memory, phase)
    refit(engine, memory, weights, 1)
    enter(engine, memory, "generate")
    requests = random_requests(3, max_new_tokens=24)
    before = run(engine, requests)
    engine.add(requests)
    for version in (2, 3):
        for _ in range(6):
            assert engine.step() == []
        for phase in ("logprob", "train", "refit"):
            enter(engine, memory, phase)
        refit(engine, memory, weights, version)
        enter(engine, memory, "generate")
    after = run(engine, ())
    assert [rollout.num_weight_versions for rollout in after.values()] == [3] * 3
    assert {rollout.weight_version for rollout in after.values()} == {1}
    for key, rollout in after.items():
        assert rollout.token_ids.tolist() == before[key].token_ids.tolist()
        np.testing.assert_allclose(rollout.generator_logprobs, before[key].generator_logprobs, rtol=0, atol=1e-5)


def test_weights_wake_when_the_policy_has_made_room(device: tuple[Engine, Device], checkpoint: Callable[[int], Path]):
    engine, memory = device
    trainer = Trainer(checkpoint(0))
    for phase in ("load", "refit"):
        enter(engine, memory, phase)
    engine.prepare_refit(trainer.workers())
    engine.refit(trainer.exchange(), True, TIMEOUT_S)
    engine.serve(1)
    before = run(engine, random_requests(3, max_new_tokens=6))
    for phase in ("logprob", "train"):
        enter(engine, memory, phase)
    with ThreadPoolExecutor(1) as pool:
        refitting = pool.submit(engine.refit, 2, True, TIMEOUT_S)
        # Long enough to wake, were it not for the policy, which is still training.
        time.sleep(1.0)
        assert "weights" in memory.sleeping_tags and not refitting.done()
        assert trainer.exchange() == 2
        assert [report.mismatches for report in refitting.result(TIMEOUT_S)] == [()]
    engine.serve(2)
    assert differences(before, run(engine, random_requests(3, max_new_tokens=6))) == []
