# SPDX-License-Identifier: Apache-2.0
"""Waits on conditions. Their limit catches a hang; it never measures a host."""

from __future__ import annotations

import os

PATIENCE = float(os.environ.get("MRL_TEST_PATIENCE", "1"))
"""Factor on every limit of the tests, for hosts that are very slow."""
