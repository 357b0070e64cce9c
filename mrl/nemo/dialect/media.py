# SPDX-License-Identifier: Apache-2.0
"""Configs that train on images, video or sound, by the settings that say so."""

from __future__ import annotations

from mrl.config.errors import Problem
from mrl.config.files import Settings, describe, wrong

DATASETS = frozenset(
    "audiomcq avqa clevr-cogent daily-omni geometry3k intent-bench intent-train mmpr-tiny refcoco".split()
)
"""NeMo RL's data sets with images, video or sound, and its environments of these names."""
BY_NAME = {
    "processor": frozenset({"vlm_hf_data_processor"}),
    "dataset_name": DATASETS,
    "env_name": DATASETS | {"vlm"},
}
IS_VLM = ("policy", "is_vlm")


def find_media(settings: Settings) -> list[Problem]:
    """One problem if a config trains on images, video or sound; it names all settings that say so."""
    found = {
        key: setting
        for key, setting in settings.items()
        if (key == IS_VLM and setting.value is True)
        or (key[0] == "data" and isinstance(setting.value, str) and setting.value in BY_NAME.get(key[-1], ()))
    }
    own = {key[-1] for key in settings if key[:2] in (("env", "own"), ("env", "remote"))}
    found = {key: setting for key, setting in found.items() if setting.value not in own}
    if not found:
        return []
    (key, first), *others = found.items()
    also = ", ".join(describe(*other) for other in others)
    rule = "this config trains on images, video or sound, which mrl does not" + (f" (see also {also})" if also else "")
    return [wrong("media", key, first, rule, "use a config that trains on texts; no other key of this one was checked")]
