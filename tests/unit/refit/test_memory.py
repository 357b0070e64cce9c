# SPDX-License-Identifier: Apache-2.0
"""Shared memory across real processes: mapping, epochs, dead owners, and that nothing is left behind."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from conversion.boxes import align
from mrl.env import with_expandable_segments
from mrl.refit import RefitError
from mrl.refit.memory import MappedMemory, SharedMemory
from tests.waiting import HANG_S

CPU = torch.device("cpu")
SPAWN = multiprocessing.get_context("spawn")


def own(connection: Connection) -> None:
    """Owns a memory of 0, 1, 2 ... until told to end; "bump" makes its handles stale."""
    memory = SharedMemory(1000, "test", CPU)
    memory.tensor.copy_(torch.arange(1000) % 251)
    connection.send(memory.handle())
    while connection.poll(HANG_S) and connection.recv() == "bump":
        memory.bump_epoch()
        connection.send(memory.handle())


@pytest.fixture
def owner():
    mine, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=own, args=(theirs,), daemon=True)
    process.start()
    assert mine.poll(HANG_S)
    yield process, mine, mine.recv()
    process.kill()
    process.join(HANG_S)


def test_another_process_maps_the_bytes_and_its_epochs_and_notices_its_death(owner):
    process, connection, handle = owner
    mapped = MappedMemory(handle)
    assert torch.equal(mapped.tensor, (torch.arange(1000) % 251).to(torch.uint8))
    assert mapped.tensor.data_ptr() % 64 == 0

    connection.send("bump")
    assert connection.poll(HANG_S)
    new_handle = connection.recv()
    with pytest.raises(RefitError, match="stale handle.*is at epoch 2, the handle is of epoch 1"):
        mapped.check()
    with pytest.raises(RefitError, match="stale handle"):
        MappedMemory(handle)
    mapped = MappedMemory(new_handle)
    mapped.check()

    process.kill()
    process.join(HANG_S)
    with pytest.raises(RefitError, match="owner.*gone"):
        MappedMemory(new_handle)
    with pytest.raises(RefitError, match="owner.*gone"):
        mapped.check()
    # The bytes stay readable, so that a copy in flight cannot crash.
    assert mapped.tensor[250] == 250


def test_a_reused_process_id_is_another_owner(monkeypatch):
    memory = SharedMemory(10, "test", CPU)
    mapped = MappedMemory(memory.handle())
    monkeypatch.setattr("mrl.refit.memory.start_of", lambda pid: 1)
    with pytest.raises(RefitError, match="owner.*gone"):
        mapped.check()


def test_a_descriptor_that_is_something_else_is_refused():
    handle = SharedMemory(10, "test", CPU).handle()
    fd = os.memfd_create("other")
    try:
        with pytest.raises(RefitError, match="something else"):
            MappedMemory(replace(handle, fd=fd))
        os.truncate(f"/proc/self/fd/{fd}", os.stat(f"/proc/self/fd/{fd}").st_size + 4096 + 10)
        with pytest.raises(RefitError, match="not shared memory of ours"):
            MappedMemory(replace(handle, fd=fd))
    finally:
        os.close(fd)


def test_released_memory_is_refused_even_where_its_descriptor_is_used_again():
    memory = SharedMemory(10, "old", CPU)
    old = memory.handle()
    mapped = MappedMemory(old)
    del memory
    with pytest.raises(RefitError, match="stale handle.*was released"):
        mapped.check()
    memory = SharedMemory(10, "new", CPU)
    assert memory.handle().fd == old.fd
    with pytest.raises(RefitError, match="stale handle"):
        MappedMemory(old)


def test_a_forked_child_does_not_release_the_memory_of_its_parent():
    memory = SharedMemory(10, "test", CPU)
    child = os.fork()
    if child == 0:
        del memory
        os._exit(0)
    os.waitpid(child, 0)
    MappedMemory(memory.handle()).check()


def test_memory_has_no_name_and_goes_with_its_last_user():
    before = set(os.listdir("/dev/shm"))
    memory = SharedMemory(1 << 20, "mrl-leak-probe", CPU)
    assert set(os.listdir("/dev/shm")) == before
    memory.tensor.fill_(7)
    tensor = memory.tensor
    mapped = MappedMemory(memory.handle())
    del memory
    assert tensor[0] == 7 and mapped.tensor[-1] == 7
    del tensor, mapped
    assert "mrl-leak-probe" not in Path("/proc/self/maps").read_text()


def test_only_memory_of_a_host_or_a_gpu_is_shared():
    memory = SharedMemory(10, "test", CPU)
    assert memory.handle().gpu is None and memory.tensor.tolist() == [0] * 10
    with pytest.raises(ValueError, match="'test' on device meta"):
        SharedMemory(10, "test", torch.device("meta"))


def test_align():
    assert [align(value) for value in (0, 1, 64, 65)] == [0, 64, 64, 128]


def test_one_option_of_the_allocator_changes_and_the_others_stay():
    text = "max_split_size_mb:512, expandable_segments:True,roundup_power2_divisions:[256:1,>:2]"
    assert (
        with_expandable_segments(text, False)
        == "max_split_size_mb:512,roundup_power2_divisions:[256:1,>:2],expandable_segments:False"
    )
    assert with_expandable_segments("", True) == "expandable_segments:True"
