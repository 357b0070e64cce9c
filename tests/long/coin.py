# SPDX-License-Identifier: Apache-2.0
"""Rewards of which a model learns nothing, so that groups go on to differ: one bit of a checksum of the answer."""

from __future__ import annotations

import zlib


def coin(prompt: str, response: str) -> float:
    """0 or 1, always the same for the same answer to a prompt."""
    return float(zlib.crc32(f"{prompt} {response}".encode()) & 1)


def second(prompt: str, turns: list[str]) -> dict[str, object]:
    """The coin of the second turn, for which it asks."""
    if len(turns) == 1:
        return {"reward": 0.0, "observation": "again"}
    return {"reward": coin(prompt, " ".join(turns))}
