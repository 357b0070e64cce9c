"""What a rank tells the driver besides metrics. Importable without Megatron, because the driver unpickles it."""

from __future__ import annotations

from dataclasses import dataclass

from conversion.files.manifest import FileRecord


@dataclass(frozen=True)
class SettleReport:
    """What settling compared."""

    num_bytes: int
    """Bytes of this rank that were checked."""
    num_shared_boxes: int
    """Boxes of which more than one rank holds a copy, over all ranks."""


@dataclass(frozen=True)
class WriteReport:
    """What a rank has written of a checkpoint."""

    files: dict[str, FileRecord]
    """Its files, by path below the folder of the weights. They are on disk, not only with the operating system."""
    hidden_s: float
    """Seconds of writing for which nobody waited."""
