# SPDX-License-Identifier: Apache-2.0
"""NeMo RL's names and keys, read from tables.yaml: what is renamed, translated, without effect, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

SAFE_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's loader where PyYAML has it: ten times as fast."""


@dataclass(frozen=True)
class Foreign:
    """A key of NeMo RL that no code of mrl reads."""

    reason: str
    """Reason why the key has no effect; with a way out, also why other values are refused. A clause without a full stop."""
    same: tuple[object, ...] | None = None
    """The values that are accepted; `"${a.b}"` is the value of another key. None = every value."""
    way_out: str = ""
    """Way out at another value. Empty only if every value is accepted."""
    is_section: bool = False
    """The entry stands for every key below it, too."""


_TABLES = yaml.load(Path(__file__).with_name("tables.yaml").read_bytes(), Loader=SAFE_LOADER)


def _foreign(title: str) -> dict[str, Foreign]:
    found: dict[str, Foreign] = {}
    for entry in _TABLES[title]:
        same = tuple(entry["accepted"]) if "accepted" in entry else None
        for group in ("keys", "sections"):
            for key in entry.get(group, []):
                assert key not in found, key
                found[key] = Foreign(entry["reason"], same, entry.get("way_out", ""), is_section=group == "sections")
    return found


NEEDS_GPU = "needs a GPU to be built honestly"
"""Reason of refusal for the keys of the table `needs_gpu`."""


def _needing_gpu() -> tuple[dict[str, Foreign], dict[tuple[str, object], Foreign]]:
    """Keys that the schema lacks, and values of keys that it has."""
    keys: dict[str, Foreign] = {}
    values: dict[tuple[str, object], Foreign] = {}
    for entry in _TABLES["needs_gpu"]:
        found = Foreign(f"{entry['what']} {NEEDS_GPU}", tuple(entry.get("accepted", ())), entry["way_out"])
        keys |= dict.fromkeys(entry.get("keys", ()), found)
        values |= {(key, value): found for key, value in entry.get("values", ())}
    return keys, values


RENAMED: Mapping[str, str] = _TABLES["renamed"]
VALUES: Mapping[tuple[str, object], object] = {(key, old): new for key, old, new in _TABLES["values"]}
"""(key, old value) -> present value."""
SAME_VALUE: Mapping[str, str] = _TABLES["same_value"]
"""Key of the DTensor backend -> key of Megatron that takes the same value."""
BY_RULE: Mapping[str, str] = _TABLES["by_rule"]
"""Key of the DTensor backend -> key of Megatron whose value a rule of `mrl.config.dialect.rules` makes of it."""
NO_EFFECT: Mapping[str, Foreign] = _foreign("without_effect")
_GPU_KEYS, GPU_VALUES = _needing_gpu()
REFUSED: Mapping[str, Foreign] = _foreign("refused") | _GPU_KEYS
FOREIGN: Mapping[str, Foreign] = {**NO_EFFECT, **REFUSED}
"""Keys that product code does not read."""
TRANSLATED = frozenset([*SAME_VALUE, *BY_RULE])
