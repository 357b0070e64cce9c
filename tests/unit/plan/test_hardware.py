# SPDX-License-Identifier: Apache-2.0
from mrl.plan.hardware import full_name


def test_the_beginning_of_one_name_is_that_gpu():
    assert [full_name(given) for given in ("h100", "H200", "gb200")] == ["h100-80g", "h200-141g", "gb200"]
    assert [full_name(given) for given in ("a100", "h1", "h100-80g", "")] == ["a100", "h1", "h100-80g", ""]
