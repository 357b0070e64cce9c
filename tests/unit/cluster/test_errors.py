# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re

import pytest
import torch

from mrl.cluster.errors import BROKEN_NETWORK, OUT_OF_MEMORY, way_out
from mrl.config.schema.keys import KEYS


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."), OUT_OF_MEMORY),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB."), OUT_OF_MEMORY),
        (ValueError("Free memory on device cuda:0 (10.0/80.0 GiB) on startup is less than desired"), OUT_OF_MEMORY),
        (torch.distributed.DistBackendError("unhandled system error"), BROKEN_NETWORK),
        (RuntimeError("NCCL communicator was aborted on rank 3."), BROKEN_NETWORK),
        (RuntimeError("the train step gave loss nan"), ""),
    ],
)
def test_errors_of_libraries_get_a_way_out(error: Exception, expected: str):
    assert way_out(error) == expected


def test_the_keys_that_are_named_exist():
    named = re.findall(r"policy\.[\w.]*\w", OUT_OF_MEMORY)
    assert len(named) == 5 and [key for key in named if key not in KEYS] == []
