"""NeMo RL's evaluation files, in which `generation` and `tokenizer` stand at the top and `data` is the data set that is asked.

Only `python -m mrl.evaluate` reads them: they say nothing about training.
"""

from __future__ import annotations

import dataclasses
import re

from mrl.config.datasets import DATASETS
from mrl.config.dialect.tables import NO_EFFECT
from mrl.config.files import Settings, split_key
from mrl.config.schema.data import DatasetConfig

SECTIONS = {"generation": "policy.generation", "tokenizer": "policy.tokenizer"}
"""Section of such a file -> where it stands in the schema."""
NAMES = {
    "generation.model_name": "policy.model_name",
    "generation.temperature": "policy.generation.val_temperature",
    "generation.top_p": "policy.generation.val_top_p",
    "generation.top_k": "policy.generation.val_top_k",
    "data.problem_key": "data.validation.input_key",
    "data.solution_key": "data.validation.output_key",
}
"""Keys that also have another name here."""
CONTEXT = "policy.generation.vllm_cfg.max_model_len"

_DATA_KEYS = {field.name for field in dataclasses.fields(DatasetConfig)}
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def is_evaluation(settings: Settings) -> bool:
    """Whether settings are those of such a file."""
    return ("generation", "model_name") in settings


def place_evaluation(settings: Settings) -> None:
    """Gives the settings of such a file the schema's names, in place. What is set by its own name, as on the command line, stays."""
    moved: Settings = {}
    for key in list(settings):
        old = settings[key].written_as or ".".join(key)
        new = _name(old)
        if new == ".".join(key) or old in NO_EFFECT:
            continue
        setting = settings.pop(key)
        if old.startswith("generation.val_") and setting.value == f"${{{old.replace('val_', '')}}}":
            continue  # what it refers to has its name here
        value = None if new.endswith(".val_top_k") and setting.value == -1 else setting.value
        if old == "data.dataset_name" and value not in DATASETS:
            new = "data.validation.data_path"
        moved[split_key(new)] = dataclasses.replace(setting, value=value, written_as=old)
    for key, setting in moved.items():
        settings.setdefault(key, setting)
    for key, setting in list(settings.items()):
        if isinstance(setting.value, str):
            text = _REFERENCE.sub(lambda match: f"${{{_name(match[1])}}}", setting.value)
            settings[key] = dataclasses.replace(setting, value=text)
        if key[:2] == ("data", "validation"):
            # Nothing is trained, but a config has training rows.
            settings.setdefault(("data", "train", *key[2:]), dataclasses.replace(settings[key], written_as=""))
    if (context := settings.get(split_key(CONTEXT))) is not None:
        whole = dataclasses.replace(context, value=f"${{{CONTEXT}}}", written_as="")
        settings.setdefault(("policy", "max_total_sequence_length"), whole)


def _name(old: str) -> str:
    """The name of a key of such a file in the schema."""
    section, _, rest = old.partition(".")
    if old in NAMES:
        return NAMES[old]
    if section in SECTIONS:
        return f"{SECTIONS[section]}.{rest}"
    return f"data.validation.{rest}" if section == "data" and rest in _DATA_KEYS else old
