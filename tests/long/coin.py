# SPDX-License-Identifier: Apache-2.0
"""A reward of which a model learns nothing, so that groups go on to differ: one bit of a checksum of the answer."""

from __future__ import annotations

import zlib


def coin(prompt: str, response: str) -> float:
    """0 or 1, always the same for the same answer to a prompt."""
    return float(zlib.crc32(f"{prompt} {response}".encode()) & 1)
