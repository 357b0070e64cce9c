# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from mrl.ops.doctor.gpus import runs_on


@pytest.mark.parametrize(
    ("capability", "built_for", "expected"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 9), ["sm_80", "sm_90"], True),  # a later one of the same major version
        ((7, 0), ["sm_75", "sm_80"], False),  # an earlier one
        ((12, 0), ["sm_90", "sm_100"], False),
        ((12, 0), ["sm_90", "compute_90"], True),  # compiled when it is loaded
        ((9, 0), ["sm_90a"], True),
        ((10, 3), ["sm_100a"], False),
        ((12, 1), ["sm_120"], True),
    ],
)
def test_which_gpus_run_a_build(capability: tuple[int, int], built_for: list[str], expected: bool):
    assert runs_on(capability, built_for) == expected
