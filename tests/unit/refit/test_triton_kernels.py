# SPDX-License-Identifier: Apache-2.0
"""The kernels of GPUs: run by Triton's interpreter on CPU tensors, and compiled for GPUs without one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from mrl.refit.strided import Strided, strided
from tests.sources import ROOT
from tests.waiting import HANG_S


def run(*arguments: str, **environment: str) -> str:
    """Output of a Python program; how kernels run is chosen when their module is imported."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_interpreted_kernels_do_what_torch_does():
    run("-m", "tests.unit.refit.kernel_cases", "1", TRITON_INTERPRET="1")


@pytest.mark.long("parity")
def test_interpreted_kernels_do_what_torch_does_many_times():
    run("-m", "tests.unit.refit.kernel_cases", "25", TRITON_INTERPRET="1")


@pytest.mark.long("parity")
def test_kernels_compile_for_gpus():
    assert run("-m", "tests.unit.refit.kernel_compile").split() == ["sm_90", "sm_100"]


def test_a_box_is_runs_of_the_longest_words():
    wide = torch.zeros(6, 10, 8, dtype=torch.bfloat16)
    address = wide.data_ptr()
    assert strided([wide], max_word_bytes=8) == Strided((address,), 8, 120, (), ((),))
    # Rows of 6 elements, 12 bytes, behind 2 elements: words of 4 bytes.
    assert strided([wide[:, :, 2:]], max_word_bytes=8) == Strided((address + 4,), 4, 3, (60,), ((4,),))
    assert strided([wide[:, :, 1:]], max_word_bytes=8) == Strided((address + 2,), 2, 7, (60,), ((8,),))
    # A run is one only where it is in both.
    both = strided([wide[:, 2:4], torch.zeros(6, 2, 8, dtype=torch.bfloat16)], max_word_bytes=8)
    assert (both.run, both.sizes, both.strides) == (4, (6,), ((20,), (4,)))


def test_boxes_of_many_dimensions_fall_into_parts():
    box = torch.arange(3 * 2 * 4 * 3 * 5 * 2).view(3, 2, 4, 3, 5, 2)[:2, :, :3, :2, :4, :1]
    whole = strided([box], max_word_bytes=8)
    assert not whole.is_walkable and whole.num_words == box.numel()
    parts = list(whole.parts())
    assert [part.addresses[0] for part in parts] == [box[a, b].data_ptr() for a in range(2) for b in range(2)]
    assert all(part.is_walkable for part in parts) and sum(part.num_words for part in parts) == box.numel()
