"""Refit zero: the tables of both sides could share one error, so the first refit, of unchanged weights, must change nothing.

What stands in the engine before it was written by vLLM's own loader, which knows nothing of our tables.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from conversion.boxes import Slot
from mrl.refit.checksum import checksum
from mrl.refit.errors import RefitError

# Enough to see which kind of layer is wrong.
_MAX_NAMED = 12


def digest(tensors: Mapping[Slot, Tensor]) -> dict[Slot, int]:
    """Checksum of each live tensor."""
    return {slot: checksum(tensor) for slot, tensor in tensors.items()}


def check_unchanged(before: Mapping[Slot, int], after: Mapping[Slot, int]) -> None:
    """Returns if the digests before and after refit zero are equal.

    Raises:
        RefitError: naming the slots that differ.
    """
    changed = sorted(str(slot) for slot in before.keys() | after.keys() if before.get(slot) != after.get(slot))
    if changed:
        more = f" and {len(changed) - _MAX_NAMED} more" if len(changed) > _MAX_NAMED else ""
        raise RefitError(
            f"refit zero changed {len(changed)} of {len(before)} tensors of the engine: the conversion tables disagree with vLLM's loader "
            f"on {', '.join(changed[:_MAX_NAMED])}{more}"
        )
