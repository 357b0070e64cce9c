# SPDX-License-Identifier: Apache-2.0
"""The rule for skips."""

from __future__ import annotations

from tests.conftest import unexpected_skips

EXPECTED = """
# Needs hardware.
tests/gpu/*  # no GPU here
tests/unit/test_a.py::test_one  # until torch 3
"""


def test_only_listed_skips_are_expected():
    node_ids = ["tests/gpu/test_x.py::test_y", "tests/unit/test_a.py::test_one", "tests/unit/test_a.py::test_two"]
    assert unexpected_skips(node_ids, EXPECTED) == ["tests/unit/test_a.py::test_two"]


def test_comments_expect_nothing():
    assert unexpected_skips(["tests/unit/test_a.py::test_one"], "# only a comment\n") == [
        "tests/unit/test_a.py::test_one"
    ]
