# SPDX-License-Identifier: Apache-2.0
"""Rows that two data sets share, told by hashes of their contents."""

from __future__ import annotations

import hashlib


def hash_of(identity: str) -> int:
    """Hash of the text that is equal for equal rows, 64 bits."""
    return int.from_bytes(hashlib.blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def told_of_shared(num_shared: int, num_rows: int, rows: str = "validation rows") -> str:
    """Warns of validation rows that are training rows, too; "" if there are none."""
    if not num_shared:
        return ""
    return (
        f"{num_shared:,} of {num_rows:,} {rows} are training rows, too: there validation measures what has been "
        "trained on; name other rows in data.validation, or hold some out with data.train.split_validation_size"
    )
