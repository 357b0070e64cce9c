# SPDX-License-Identifier: Apache-2.0
"""Tables of config keys for docs/config.md and docs/nemo_rl.md, and what tests ask about the schema's keys.

`python -m mrl.keys` prints the manual of each key.
"""

from __future__ import annotations

from collections.abc import Mapping

from mrl.config.fields import Only, Range
from mrl.config.schema.keys import KEYS, SAME_KEYS, fields_of, section_of
from mrl.config.schema.run import RunConfig
from mrl.nemo.dialect.tables import DIFFERENT
from mrl.ops.manual import all_manuals, marker_of, same_values

_TEACHERS = "mrl.config: the teachers' sections are made of it"
_MTP = "a check: a model with one MTP layer repeats it"
IN_CONFIG: dict[str, str] = {
    "policy.megatron_cfg.mtp_use_repeated_layer": _MTP,
    "value.megatron_cfg.mtp_use_repeated_layer": _MTP,
    "on_policy_distillation.non_colocated_teachers.default_teacher_cfg": _TEACHERS,
    "on_policy_distillation.non_colocated_teachers.teacher_overrides": _TEACHERS,
}
"""Keys that say what other keys say, and are looked at where the config is read."""

FIXED = frozenset(
    [
        "policy.megatron_cfg.moe_router_enable_expert_bias",
        "value.megatron_cfg.moe_router_enable_expert_bias",
        "policy.generation.backend",
        "policy.reward_model_cfg.enabled",
        "policy.reward_model_cfg.reward_model_type",
    ]
)
"""Keys with one possible value, by their type or by a rule of `find_problems`: no code has to read them. So are those
with `Only`.
"""


def names_of(section: str) -> list[str]:
    """The names of a section's keys."""
    return [key.removeprefix(f"{section}.") for key in KEYS if key.startswith(f"{section}.")]


def config_tables() -> str:
    """The table of docs/config.md: each section with the names of its keys. A section that repeats another names it."""
    rows: dict[str, list[str]] = {}
    for each in all_manuals():
        section, _, name = each.key.rpartition(".")
        if each.same_as:
            rows[each.key] = [f"as in `{each.same_as}`"]
        elif each.default == f"${{data.default.{name}}}":
            lacks = [f"`{key}`" for key in names_of("data.default") if f"{section}.{key}" not in KEYS]
            rows.setdefault(section, ["as in `data.default`" + (f" without {' and '.join(lacks)}" if lacks else "")])
        else:
            rows.setdefault(section, []).append(f"`{name}`")
    lines = [f"| {f'`{section}`' if section else '–'} | {', '.join(names)} |" for section, names in rows.items()]
    return "\n".join(["| section | keys |", "| --- | --- |", *lines]) + "\n"


def difference_table() -> str:
    """The table of docs/nemo_rl.md: keys at which NeMo RL and mrl differ, by what mrl does."""
    rows: dict[str, list[str]] = {}
    for key, entry in sorted(DIFFERENT.items()):
        rows.setdefault(entry.reason, []).append(f"`{key}`{same_values(entry)}")
    lines = [f"| {', '.join(keys)} | {reason} |" for reason, keys in rows.items()]
    return "\n".join(["| keys | here, at every value |", "| --- | --- |", *lines]) + "\n"


def unread_keys(readers: Mapping[str, object]) -> set[str]:
    """The keys that no product module reads, less those that a check fixes to one value, and those of `IN_CONFIG`."""
    return (
        KEYS.keys()
        - readers.keys()
        - FIXED
        - IN_CONFIG.keys()
        - {key for key, marker in markers().items() if isinstance(marker, Only)}
    )


def markers(section: type = RunConfig, prefix: str = "") -> dict[str, Range | Only]:
    """Limits by dotted key: the numbers or the only value that the field's type allows."""
    found: dict[str, Range | Only] = {}
    for name, hint in fields_of(section).items():
        if prefix + name in SAME_KEYS:
            continue
        if (inner := section_of(hint)) is not None:
            found |= markers(inner, f"{prefix}{name}.")
        elif (marker := marker_of(hint)) is not None:
            found[prefix + name] = marker
    return found
