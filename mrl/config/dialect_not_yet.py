"""Keys of NeMo RL that product code will read but does not yet: accepted where the behaviour that we have is meant, refused otherwise.

Whoever implements a key adds its field to the schema and deletes its line here: a key in both places fails tests/unit/config.
"""

from __future__ import annotations

from mrl.config.dialect_entry import Foreign

_OFF = (False, None)
_NULL = (None,)


def _later(same: tuple[object, ...] | None = None, *, is_section: bool = False) -> Foreign:
    return Foreign("not supported yet", same, "leave it out", is_section)


# fmt: off
NOT_YET: dict[str, Foreign] = {
}
# fmt: on
"""Key -> the values that are accepted."""
