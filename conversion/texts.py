# SPDX-License-Identifier: Apache-2.0
"""Words of messages. Standard library only."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice


def listed(texts: Collection[str], most: int = 6, *, between: str = ", ") -> str:
    """The first texts, and how many others there are."""
    more = f"{between.rstrip(', ')} and {len(texts) - most} more" if len(texts) > most else ""
    return between.join(islice(texts, most)) + more or "none"
