# SPDX-License-Identifier: Apache-2.0
"""The dialect as `mrl.config.migration.Dialect` names it; `mrl.rooms` imports it by name."""

from mrl.nemo.dialect.media import find_media
from mrl.nemo.dialect.tables import RENAMED
from mrl.nemo.dialect.translate import (
    DIALECT_KEYS,
    is_evaluation,
    is_foreign,
    migrate,
    place_evaluation,
    use_own_forms,
)

__all__ = [
    "DIALECT_KEYS",
    "RENAMED",
    "find_media",
    "is_evaluation",
    "is_foreign",
    "migrate",
    "place_evaluation",
    "use_own_forms",
]
