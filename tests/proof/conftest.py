# SPDX-License-Identifier: Apache-2.0
"""Shared by the proof."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="session", autouse=True)
def few_frozen_objects() -> None:
    """Undoes the freeze of tests/conftest.py: `reshard` counts what is frozen, one by one, at each of its calls."""
    gc.unfreeze()
