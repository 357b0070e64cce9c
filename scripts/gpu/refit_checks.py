# SPDX-License-Identifier: Apache-2.0
"""Checks of the refit: kernels, their speed in one process, and a whole refit between two processes."""

from __future__ import annotations

import os
import subprocess
import sys

import torch
from torch import Tensor

from conversion.families.registry import family
from mrl.refit.checksum import Checksums, Summed
from mrl.refit.copies import Copies, TensorCopy
from scripts.bench import refit as bench
from scripts.bench.shapes import narrowed
from scripts.gpu.plan import Missed, Row, Setup, gpu_columns, seconds
from tests.sources import ROOT

NUM_SEEDS = 20
MIN_SPEED, MAX_TIME = bench.MIN_SPEED["cuda"], bench.MAX_TIME["cuda"]
# By what the hidden size of the 30B model is divided, from large to small.
DIVISORS = (1, 2, 4, 8, 16, 32, 64, 96)


def ipc(setup: Setup) -> list[Row]:
    """Results of the tests of tests/gpu. They need nothing but torch and pytest, and are all skipped on a CPU.

    Raises:
        Missed: one of them failed.
    """
    # Without this repository's settings, which need plugins.
    bare = ["-p", "no:cacheprovider", "--noconftest", "-c", os.devnull, "--rootdir", str(ROOT)]
    command = [sys.executable, "-m", "pytest", "-q", *bare, "tests/gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    sys.stdout.write(done.stdout)
    rows: list[Row] = [{"tests": done.stdout.strip().rpartition("\n")[2], **gpu_columns()}]
    if done.returncode:
        raise Missed(f"pytest tests/gpu ended with {done.returncode}", rows)
    return rows


def kernels(setup: Setup) -> list[Row]:
    """Raises AssertionError where a kernel differs from torch. On a CPU the kernels need Triton's interpreter."""
    from tests.unit.refit import kernel_cases

    for seed in range(NUM_SEEDS):
        kernel_cases.check_copies(seed, num_boxes=200, device=setup.device, large=[3, 1000, 1501])
        kernel_cases.check_sums(seed, num_boxes=100, device=setup.device, num_blocks=50)
    return [{"seeds": NUM_SEEDS, "boxes of a seed": 305, "different": 0, **gpu_columns()}]


def moving(setup: Setup) -> list[Row]:
    """Copies and checksums of contiguous and of strided boxes.

    Raises:
        Missed: copies are slower than the bound.
    """
    rows: list[Row] = []
    for kind, view in (("contiguous", slice(None)), ("rows of 2,688 bytes", slice(0, 1344))):
        sources, targets = boxes(setup, view)
        num_bytes = sum(source.nbytes for source in sources)
        plain, copy = (torch.ones(num_bytes, dtype=torch.uint8, device=setup.device) for _ in range(2))
        yardstick = seconds(setup.device, lambda copy=copy, plain=plain: copy.copy_(plain))
        copies = Copies([TensorCopy(target, source) for target, source in zip(targets, sources, strict=True)])
        checksums = Checksums([Summed(source) for source in sources])
        copying, summing = seconds(setup.device, copies.run), seconds(setup.device, checksums.take)
        assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))
        rows.append(
            {
                "boxes": kind,
                "gigabytes": num_bytes / 1e9,
                "plain copy GB/s": num_bytes / yardstick / 1e9,
                "copies / plain copy speed": yardstick / copying,
                "checksums GB/s": num_bytes / summing / 1e9,
                "copies + two checksums / plain copy time": (copying + 2 * summing) / yardstick,
                **gpu_columns(),
            }
        )
    slow = [row for row in rows if float(str(row["copies / plain copy speed"])) < MIN_SPEED]
    if slow and setup.device == "cuda":
        raise Missed(f"copies are slower than {MIN_SPEED} of a plain copy: {slow}", rows)
    return rows


def boxes(setup: Setup, view: slice) -> tuple[list[Tensor], list[Tensor]]:
    """bfloat16 sources and targets, a fifth of the gigabytes each: sources and two buffers to compare stand beside."""
    num_rows, width = 1024, 2688
    count = max(1, int(setup.gigabytes * 1e9 / 5 / (2 * num_rows * width)))
    sources = [torch.randn(num_rows, width, device=setup.device).bfloat16()[:, view] for _ in range(count)]
    return sources, [torch.zeros_like(source, memory_format=torch.contiguous_format) for source in sources]


def refit(setup: Setup) -> list[Row]:
    """All weights of the 30B model, or of a narrower one that fits.

    Raises:
        Missed: refit, or refit and verification, take longer than the bounds.
    """
    case = bench.CASES["TP1 to TP1"]
    divide = divisor(setup.gigabytes)
    hf_config = narrowed(divide)
    repeats = bench.measure(case, hf_config, 5, setup.device)
    row: Row = {**bench.row_of("TP1 to TP1", divide, hf_config, setup.device, repeats), **gpu_columns()}
    speed, multiple = float(str(row["refit / copy speed"])), float(str(row["refit + verification / copy time"]))
    if setup.device == "cuda" and (speed < MIN_SPEED or multiple > MAX_TIME):
        raise Missed(f"{speed:.2f} of a plain copy's speed and {multiple:.2f} of its time", [row])
    return [row]


def divisor(gigabytes: float) -> int:
    """The smallest divisor of the hidden size with which the weights are no larger; the largest one if none is."""
    for divide in DIVISORS:
        shapes = family(narrowed(divide)).canonical(narrowed(divide)).values()
        if 2 * sum(torch.Size(shape).numel() for shape in shapes) <= gigabytes * 1e9:
            return divide
    return DIVISORS[-1]
