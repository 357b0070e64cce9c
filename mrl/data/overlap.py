# SPDX-License-Identifier: Apache-2.0
"""Rows that two data sets share, told by hashes of their contents."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import numpy as np


class Identities:
    """Hashes of the identities of rows, by their rising positions: 16 bytes a row."""

    def __init__(self) -> None:
        self._positions, self._hashes = array("Q"), array("Q")

    def add(self, position: int, digest: int) -> None:
        """Notes a row behind all others."""
        self._positions.append(position)
        self._hashes.append(digest)

    def num_shared(self, positions: Sequence[int], others: Sequence[int]) -> int:
        """Number of rows at `positions` that ask and teach the same as one at `others`; rows without hash do not."""
        return int(np.isin(self._of(positions), self._of(others)).sum())

    def _of(self, positions: Sequence[int]) -> np.ndarray:
        known, hashes, asked = (np.array(one, dtype=np.uint64) for one in (self._positions, self._hashes, positions))
        places = np.searchsorted(known, asked)
        is_known = places < len(known)
        is_known[is_known] = known[places[is_known]] == asked[is_known]
        return hashes[places[is_known]]


def hash_of(identity: str) -> int:
    """Hash of the text that is equal for equal rows, 64 bits."""
    return int.from_bytes(hashlib.blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def told_of_shared(num_shared: int, num_rows: int, rows: str = "validation rows") -> str:
    """A warning of validation rows that are training rows, too, or ""."""
    if not num_shared:
        return ""
    return (
        f"{num_shared:,} of {num_rows:,} {rows} are training rows, too: there validation measures what has been "
        "trained on; name other rows in data.validation, or hold some out with data.train.split_validation_size"
    )
