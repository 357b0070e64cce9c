# SPDX-License-Identifier: Apache-2.0
"""What a rank reports to the driver besides metrics. Importable without Megatron, because the driver unpickles it."""

from __future__ import annotations

from dataclasses import dataclass

from conversion.files.manifest import FileRecord


@dataclass(frozen=True)
class WriteReport:
    """The files that one rank wrote of a checkpoint."""

    files: dict[str, FileRecord]
    """By path below the folder of the weights; flushed to disk."""
    hidden_s: float
    """Seconds of writing that nobody waited for."""
    problem: str = ""
    """Why there is no checkpoint, the same on all ranks; "" if there is one."""
