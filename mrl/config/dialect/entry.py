"""What the tables of the dialect are made of: an entry says what a key of NeMo RL is worth here that no code of ours reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Foreign:
    """A key that product code does not read: the values at which that changes nothing, why, and what to do at any other."""

    reason: str
    """Why the key has no effect; with a way out, also why other values are refused. A clause without a full stop."""
    same: tuple[object, ...] | None = None
    """The values that are accepted; `"${a.b}"` is the value of another key. None = every value."""
    way_out: str = ""
    """What to do at another value. Empty only if every value is accepted."""
    is_section: bool = False
    """The entry stands for every key below it, too."""


def no_effect(reason: str, *names: str, prefix: str = "") -> dict[str, Foreign]:
    """Entries for `names` below `prefix`, all without effect at any value for one reason."""
    return {f"{prefix}{name}": Foreign(reason) for name in names}
