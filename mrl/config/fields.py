"""What the sections of the config schema are written with: defaults that follow other keys, and types that several sections share."""

from __future__ import annotations

from typing import Any, Literal

Precision = Literal["float32", "bfloat16"]


def follows(expression: str) -> Any:
    """A default taken from other keys, in OmegaConf's syntax. Any: the text stands in for the field's own type until it is resolved."""
    return "${" + expression + "}"


def required() -> Any:
    """OmegaConf's mark for a key that has no default."""
    return "???"
