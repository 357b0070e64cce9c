# SPDX-License-Identifier: Apache-2.0
from mrl.plan.hardware import full_name


def test_the_beginning_of_one_name_is_that_gpu():
    assert [full_name(given) for given in ("h1", "h100", "H200-1", "b", "gb200")] == [
        *("h100-80g", "h100-80g", "h200-141g", "b200-192g", "gb200")
    ]
    assert [full_name(given) for given in ("a100", "h", "h1000", "h100-80g", "")] == [
        "a100",
        "h",
        "h1000",
        "h100-80g",
        "",
    ]
