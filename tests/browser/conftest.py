# SPDX-License-Identifier: Apache-2.0
"""The browser of these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from scripts.chromium import Tab, find_chromium, open_tab


@pytest.fixture(scope="session", autouse=True)
def chromium() -> None:
    """Skips the tests where there is no Chromium."""
    if find_chromium() is None:
        pytest.skip("no Chromium; scripts/test.sh --with-chromium installs one (root, apt-get)")


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with open_tab() as opened:
        yield opened
