"""NeMo RL's names and keys, read from tables.yaml: what is renamed, translated, without effect, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from mrl.config.bounds import SAFE_LOADER


@dataclass(frozen=True)
class Foreign:
    """A key of NeMo RL that no code of mrl reads."""

    reason: str
    """Why the key has no effect; with a way out, also why other values are refused. A clause without a full stop."""
    same: tuple[object, ...] | None = None
    """The values that are accepted; `"${a.b}"` is the value of another key. None = every value."""
    way_out: str = ""
    """What to do at another value. Empty only if every value is accepted."""
    is_section: bool = False
    """The entry stands for every key below it, too."""


def _foreign(entries: list[dict[str, object]]) -> dict[str, Foreign]:
    found: dict[str, Foreign] = {}
    for entry in entries:
        accepted = entry.get("accepted")
        same = tuple(accepted) if isinstance(accepted, list) else None
        for group in ("keys", "sections"):
            keys = entry.get(group, [])
            assert isinstance(keys, list), entry
            for key in keys:
                assert key not in found, key
                found[key] = Foreign(str(entry["reason"]), same, str(entry.get("way_out", "")), group == "sections")
    return found


def _values(rows: list[tuple[str, object, object]]) -> dict[str, dict[object, object]]:
    found: dict[str, dict[object, object]] = {}
    for key, old, new in rows:
        found.setdefault(key, {})[old] = new
    return found


_TABLES = yaml.load(Path(__file__).with_name("tables.yaml").read_bytes(), Loader=SAFE_LOADER)

RENAMED: Mapping[str, str] = _TABLES["renamed"]
"""Old name -> present name."""
VALUES: Mapping[str, Mapping[object, object]] = _values(_TABLES["values"])
"""Key -> old value -> present value."""
SAME_VALUE: Mapping[str, str] = _TABLES["same_value"]
"""Key of the DTensor backend -> key of Megatron that takes the same value."""
BY_RULE: Mapping[str, str] = _TABLES["by_rule"]
"""Key of the DTensor backend -> key of Megatron whose value a rule of `mrl.config.dialect.rules` makes of it."""
NO_EFFECT: Mapping[str, Foreign] = _foreign(_TABLES["without_effect"])
REFUSED: Mapping[str, Foreign] = _foreign(_TABLES["refused"])
FOREIGN: Mapping[str, Foreign] = {**NO_EFFECT, **REFUSED}
"""Keys that product code does not read."""
TRANSLATED = frozenset([*SAME_VALUE, *BY_RULE])
