# SPDX-License-Identifier: Apache-2.0
"""Shared by the stack tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.stack.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Processes for up to eight ranks; few tests need more than four."""
    pool = RankPool(8)
    yield pool
    pool.close()
