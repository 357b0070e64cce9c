# SPDX-License-Identifier: Apache-2.0
"""NeMo RL's names and keys, from tables.yaml: renamed, translated, without effect, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any

import yaml

from mrl.config.errors import spell
from mrl.config.files import SAFE_LOADER
from mrl.config.schema.data import DataDefaultConfig

KINDS: Mapping[str, type | UnionType] = {
    "boolean": bool,
    "number": int | float,
    "text": str,
    "list": list,
    "mapping": dict,
    "any": object,
}
"""Kinds of values that a key may have."""


@dataclass(frozen=True)
class Foreign:
    """A key of NeMo RL that no code of mrl reads."""

    reason: str
    """Reason why the key has no effect; with a way out, also why other values are refused. A clause without a full
    stop.
    """
    same: tuple[object, ...] | None = None
    """The values that are accepted; `"${a.b}"` is the value of another key. None = every value."""
    refused: tuple[object, ...] | str = "any"
    """The values that `reason` is about, or their kind, one of `KINDS`. Any other is unknown."""
    way_out: str = ""
    """Way out at another value. Empty only if every value is accepted."""
    is_section: bool = False
    """The entry stands for every key below it, too."""
    same_at: tuple[object, ...] | None = None
    """Values with which NeMo RL does what mrl does at every value. None = with all of them."""

    def differs(self, value: object) -> bool:
        """True if NeMo RL does something else than mrl with a value that is accepted."""
        return self.same_at is not None and value not in self.same_at

    def refuses(self, value: object) -> bool:
        """True if `reason` is about a value; else it is unknown."""
        if not isinstance(self.refused, str):
            return value in self.refused
        return isinstance(value, KINDS[self.refused]) and (
            not isinstance(value, bool) or self.refused in ("boolean", "any")
        )

    @property
    def known(self) -> str:
        """The accepted and refused values as a message names them."""
        refused = (f"a {self.refused}",) if isinstance(self.refused, str) else self.refused
        return ", ".join(spell(value) for value in (*(self.same or ()), *refused))


_TABLES = yaml.load(Path(__file__).with_name("tables.yaml").read_bytes(), Loader=SAFE_LOADER)


def _entry(entry: Mapping[str, Any], reason: str, *, is_section: bool = False) -> Foreign:
    accepted, refused = entry.get("accepted"), entry.get("refused")
    if refused is None:
        kinds = [
            kind
            for kind, of_kind in KINDS.items()
            for value in accepted or ()
            if value is not None and isinstance(value, of_kind)
        ]
        refused = kinds[0] if kinds and not is_section else "any"
        assert refused != "text", f"say which values are refused: {entry}"
    return Foreign(
        reason,
        None if accepted is None else tuple(accepted),
        refused if isinstance(refused, str) else tuple(refused),
        entry.get("way_out", ""),
        is_section,
        None if (alike := entry.get("same_at")) is None else tuple(alike),
    )


def _foreign(title: str) -> dict[str, Foreign]:
    found: dict[str, Foreign] = {}
    for entry in _TABLES[title]:
        for group in ("keys", "sections"):
            for key in entry.get(group, []):
                assert key not in found, key
                found[key] = _entry(entry, entry["reason"], is_section=group == "sections")
    return found


NEEDS_GPU = "is not built"
"""Reason of refusal for the keys of the table `needs_gpu`."""


def _needing_gpu() -> tuple[dict[str, Foreign], dict[tuple[str, object], Foreign]]:
    """Keys that the schema lacks, and values of keys that it has."""
    keys: dict[str, Foreign] = {}
    values: dict[tuple[str, object], Foreign] = {}
    for entry in _TABLES["needs_gpu"]:
        found = _entry(entry, f"{entry['what']} {NEEDS_GPU}")
        keys |= dict.fromkeys(entry.get("keys", ()), found)
        values |= {(key, value): found for key, value in entry.get("values", ())}
    return keys, values


OF_ROWS = {
    f"data.{each.name}": f"data.default.{each.name}"
    for each in fields(DataDefaultConfig)
    if not each.name.startswith("teacher_")  # mrl's own
}
"""Keys of rows where older files have them."""
RENAMED: Mapping[str, str] = OF_ROWS | _TABLES["renamed"]
VALUES: Mapping[tuple[str, object], object] = {(key, old): new for key, old, new, *_ in _TABLES["values"]}
"""(key, old value) -> present value."""
NOTES: Mapping[tuple[str, object], str] = {
    (key, old): note for key, old, _, *notes in _TABLES["values"] for note in notes
}
"""(key, old value) -> a clause for those who wrote that value."""
SAME_VALUE: Mapping[str, str] = _TABLES["same_value"]
"""Key of the DTensor backend -> key of Megatron that takes the same value."""
BY_RULE: Mapping[str, str] = _TABLES["by_rule"]
"""Key of the DTensor backend -> key of Megatron whose value a rule of `mrl.nemo.dialect.rules` makes of it."""
DIFFERENT: Mapping[str, Foreign] = _foreign("different")
NO_EFFECT: Mapping[str, Foreign] = _foreign("without_effect") | DIFFERENT
_GPU_KEYS, GPU_VALUES = _needing_gpu()
REFUSED: Mapping[str, Foreign] = _foreign("refused") | _GPU_KEYS
FOREIGN: Mapping[str, Foreign] = {**NO_EFFECT, **REFUSED}
"""Keys that product code does not read."""
TRANSLATED = frozenset([*SAME_VALUE, *BY_RULE])

GYM_GLOBAL = frozenset(
    "allow_openai_version_skew cache_dir default_host disallowed_ports head_server_deps hf_token "
    "model_call_capture_dir model_endpoint_readiness_timeout_seconds nemo_gym_log_dir observability_enabled "
    "pip_install_verbose policy_max_input_tokens port_range_high port_range_low profiling_enabled "
    "profiling_results_dirpath python_version ray_head_node_address results_dir skip_venv_if_present use_absolute_ip "
    "uv_cache_dir uv_pip_set_python uv_venv_dir verbose".split()
)
GYM_HTTP = ("global_aiohttp_", "gzip_responses_", "run_response_cache_", "uvicorn_")
"""Keys of NeMo Gym (nemo_gym/global_config.py, server_utils.py) that are no servers, and beginnings of others."""
GYM_ENDPOINT = ("_base_url", "_api_key", "_model_name")
"""Endings of names by which NeMo Gym's config files ask for the address of a judge."""
GYM_KINDS = ("resources_servers", "responses_api_agents", "responses_api_models")
GYM_COPIES = ("_copy", "_delete_key", "_inherit_from")
"""Keys with which a server takes over another one's options."""
