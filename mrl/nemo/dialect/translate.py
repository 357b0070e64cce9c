# SPDX-License-Identifier: Apache-2.0
"""NeMo RL's dialect: keys that have another name, another place or no meaning here, and the report of them.

Every key of NeMo RL is a field of the schema or stands in exactly one table of tables.yaml. `python -m mrl.keys`
shows them.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields, replace
from pathlib import Path

from mrl import env
from mrl.config.errors import COMMAND_LINE, Problem, spell
from mrl.config.files import Key, Setting, Settings, describe, packaged_configs, split_key, wrong
from mrl.config.migration import Migration
from mrl.config.schema.data import DATASETS, DatasetConfig
from mrl.config.schema.keys import LIKE_POLICY
from mrl.nemo.dialect.rules import REWRITTEN, TRANSLATED_SECTIONS, is_gyms, translate
from mrl.nemo.dialect.tables import (
    FOREIGN,
    GPU_VALUES,
    NO_EFFECT,
    NOTES,
    RENAMED,
    SAME_VALUE,
    TRANSLATED,
    VALUES,
    Foreign,
)

logger = logging.getLogger(__name__)

DIALECT_KEYS = frozenset([*FOREIGN, *TRANSLATED, *REWRITTEN, *RENAMED])
"""Every key that a config may have besides the schema's."""
HF_HOME = "${oc.env:HF_HOME}"
NEMO_RL_VARIABLES = "NRL_"
"""Beginning of the names of environment variables that are NeMo RL's own."""
NEMO_RL_PROMPTS = "examples/prompts"
OTHER_TEXT = (
    "the file is neither here nor above the config, and mrl's prompt of that name asks in other words than NeMo RL's; "
    "give the path of NeMo RL's file to ask as it does"
)

SECTIONS = {"generation": "policy.generation", "tokenizer": "policy.tokenizer"}
NAMES = {
    "generation.model_name": "policy.model_name",
    "generation.temperature": "policy.generation.val_temperature",
    "generation.top_p": "policy.generation.val_top_p",
    "generation.top_k": "policy.generation.val_top_k",
    "data.problem_key": "data.validation.input_key",
    "data.solution_key": "data.validation.output_key",
}
"""Keys of such a file that also have another name here."""
CONTEXT = "policy.generation.vllm_cfg.max_model_len"

_DATA_KEYS = {field.name for field in fields(DatasetConfig)}
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def use_own_forms(settings: Settings, folder: Path) -> None:
    """Gives the section `data` the schema's form, and writes out HF_HOME if unset; in place.

    A prompt file that the working directory lacks is looked for in `folder`, that of the config, and those above: NeMo
    RL's files name prompts from its checkout.
    """
    for key in (("data", "train"), ("data", "validation")):
        if key in settings and isinstance(settings[key].value, list):
            settings[(*key, "datasets")] = settings.pop(key)
    held_out = [key for key in settings if key[:2] == ("data", "validation") and len(key) > 2]
    if held_out and all(settings[key].value is None and settings[key].written_as for key in held_out):
        # Older files say so that there are none, and the section itself would ask for one.
        settings["data", "validation"] = [settings.pop(key) for key in held_out][-1]
    for key, setting in settings.items():
        if isinstance(setting.value, str) and HF_HOME in setting.value and not env.HF_HOME.read():
            home = str(Path("~/.cache/huggingface").expanduser())  # the Hugging Face libraries' default
            settings[key] = replace(setting, value=setting.value.replace(HF_HOME, home))
        elif _lacks_prompt(key, setting.value):
            places = (str(above / str(setting.value)) for above in (folder, *folder.parents))
            if (found := next(filter(os.path.isfile, places), None)) is not None:
                if folder != packaged_configs() or setting.origin == COMMAND_LINE:  # else no news
                    logger.info("Config: %s is not here; taking %s", describe(key, setting), found)
                settings[key] = replace(setting, value=found)


def _lacks_prompt(key: Key, value: object) -> bool:
    is_prompt = key[0] == "data" and key[-1] in ("prompt_file", "system_prompt_file") and isinstance(value, str)
    return is_prompt and Path(str(value)).parent.name == "prompts" and not os.path.exists(str(value))


def is_evaluation(settings: Settings) -> bool:
    """True if this is an evaluation file: `generation` and `tokenizer` at the top, `data` the evaluated set."""
    return ("generation", "model_name") in settings


def place_evaluation(settings: Settings) -> None:
    """Gives evaluation settings the schema's names, in place. Those under these names, as on the command line, stay."""
    moved: Settings = {}
    for key in list(settings):
        old = settings[key].written_as or ".".join(key)
        new = _name(old)
        if new == ".".join(key) or old in NO_EFFECT:
            continue
        setting = settings.pop(key)
        if old.startswith("generation.val_") and setting.value == f"${{{old.replace('val_', '')}}}":
            continue  # references have the schema's names
        value = None if new.endswith(".val_top_k") and setting.value == -1 else setting.value
        if old == "data.dataset_name" and isinstance(value, str) and _is_place(value):
            new = "data.validation.data_path"
        moved[split_key(new)] = replace(setting, value=value, written_as=old)
    for key, setting in moved.items():
        settings.setdefault(key, setting)
    for key, setting in list(settings.items()):
        if isinstance(setting.value, str):
            text = _REFERENCE.sub(lambda match: f"${{{_name(match[1])}}}", setting.value)
            settings[key] = replace(setting, value=text)
    if (context := settings.get(split_key(CONTEXT))) is not None:
        whole = replace(context, value=f"${{{CONTEXT}}}", written_as="")
        settings.setdefault(("policy", "max_total_sequence_length"), whole)


def _is_place(dataset_name: str) -> bool:
    return dataset_name not in DATASETS and (bool(re.search("[/.]", dataset_name)) or os.path.exists(dataset_name))


def _name(old: str) -> str:
    section, _, rest = old.partition(".")
    if old in NAMES:
        return NAMES[old]
    if section in SECTIONS:
        return f"{SECTIONS[section]}.{rest}"
    return f"data.validation.{rest}" if section == "data" and rest in _DATA_KEYS else old


def as_policy(key: Key) -> Key:
    """Maps a key of a section with keys of `policy` to the key of `policy`; returns any other key unchanged."""
    return ("policy", *key[1:]) if key[0] in LIKE_POLICY else key


def entry_of(key: Key) -> Foreign | None:
    """Finds the table entry of a key, or of the `policy` key that it stands for, or None."""
    if (found := FOREIGN.get(".".join(key))) is not None:
        return found
    sections = (FOREIGN.get(".".join(key[:depth])) for depth in range(len(key) - 1, 0, -1))
    found = next((entry for entry in sections if entry is not None and entry.is_section), None)
    if found is not None or key[0] not in LIKE_POLICY or (found := entry_of(as_policy(key))) is None:
        return found
    same = [
        accepted.replace("${policy.", f"${{{key[0]}.") if isinstance(accepted, str) else accepted
        for accepted in found.same or ()
    ]
    return replace(found, same=None if found.same is None else tuple(same))


_OF_DTENSOR = {target: source for source, target in SAME_VALUE.items()}
"""Key of Megatron's -> DTensor's of the same value."""


def is_foreign(key: Key, value: object) -> bool:
    """True if a setting belongs to the dialect alone: a key of its tables, or an empty section of them."""
    if entry_of(key) is not None or is_translated(key) or is_gyms(key, value):
        return True
    starts = tuple({f"{'.'.join(place)}." for place in (key, as_policy(key))})
    return value in (None, {}) and any(known.startswith(starts) for known in DIALECT_KEYS)


def is_translated(key: Key) -> bool:
    """True if this key is translated into others."""
    dotted = ".".join(as_policy(key))
    return (
        dotted in TRANSLATED
        or dotted in REWRITTEN
        or dotted.startswith(tuple(f"{section}." for section in TRANSLATED_SECTIONS))
    )


def migrate(
    settings: Settings, value_of: Callable[[str], object], problems: list[Problem], sections: Sequence[str]
) -> tuple[Settings, Migration]:
    """The settings the schema takes, and the report. `value_of` resolves a key of `settings`; adds to `problems`.

    `sections` are those of the models that are read.
    """
    report = Migration()
    report.renamed += [
        f"{describe(key, setting)} -> {'.'.join(key)}" for key, setting in settings.items() if setting.written_as
    ]
    translation = translate(settings, value_of, sections)
    report.translated += translation.lines
    problems += translation.problems
    report.without_effect += translation.without_effect
    report.different += translation.different
    for key, setting in settings.items():
        if key in translation.dropped and setting.value not in (None, {}) and key[2:] != ("enabled",):
            active = "dtensor_cfg" if key[1] == "megatron_cfg" else "megatron_cfg"
            theirs = _OF_DTENSOR.get(".".join(as_policy(key)), "").replace("policy", key[0], 1)
            reason = f"{key[0]}.{active} is the backend that is enabled{theirs and f', where {theirs} sets it'}"
            report.without_effect.append((key, setting, reason))
    kept: Settings = {}
    for key, setting in settings.items():
        if key in translation.dropped or is_translated(key):
            continue
        entry, value = entry_of(key), setting.value
        if entry is None:
            if is_gyms(key, value):
                continue  # which `translation` has dealt with
            if isinstance(value, Hashable) and (entry := GPU_VALUES.get((".".join(key), value))) is not None:
                problems.append(wrong("nemo-rl", key, setting, entry.reason, entry.way_out))
            elif not is_foreign(key, value):
                kept[key] = _in_own_words(key, setting, report)
            continue
        # A key without effect at any value may have an expression that cannot be resolved here.
        value = value if entry.same is None else value_of(".".join(key))
        same = [
            value_of(other[2:-1]) if isinstance(other, str) and other.startswith("${") else other
            for other in entry.same or ()
        ]
        resolved = replace(setting, value=value)
        if entry.same is None or value in same:
            is_read = key[0] != "checkpointing" or value_of("checkpointing.enabled") is not False
            notes = report.different if is_read and entry.differs(value) else report.without_effect
            notes.append((key, setting, entry.reason))
        elif entry.refuses(value):
            problems.append(wrong("nemo-rl", key, resolved, entry.reason, entry.way_out))
        else:
            rule, way_out = "no such value", f"known are {entry.known}; {entry.way_out}"
            problems.append(wrong("nemo-rl", key, resolved, rule, way_out))
    return kept | translation.settings, report


def _in_own_words(key: Key, setting: Setting, report: Migration) -> Setting:
    old = setting.value
    new = old
    if key[-1].startswith(NEMO_RL_VARIABLES) and "env_vars" in key:
        report.different.append((key, setting, "a variable that only NeMo RL's own workers read"))
    if isinstance(old, Hashable):
        new = VALUES.get((setting.written_as, old), VALUES.get((".".join(as_policy(key)), old), old))
    if _lacks_prompt(key, old):
        packaged = packaged_configs() / "prompts" / Path(str(old)).name
        if os.path.isfile(packaged):
            new = str(packaged)
            if Path(str(old)).parent.as_posix().endswith(NEMO_RL_PROMPTS):
                report.different.append((key, setting, OTHER_TEXT))
    if ".".join(key) == "eval.save_path" and old is None:
        report.different.append((key, setting, "results are written, to `evaluations` in checkpointing.checkpoint_dir"))
    if new == old:
        return setting
    note = NOTES.get((".".join(key), old)) if isinstance(old, Hashable) else None
    report.translated.append(f"{describe(key, setting)} -> {spell(new)}{f': {note}' if note else ''}")
    return Setting(new, setting.origin)


OF_MEDIA = frozenset(
    "audiomcq avqa clevr-cogent daily-omni geometry3k intent-bench intent-train mmpr-tiny refcoco".split()
)
"""NeMo RL's data sets with images, video or sound, and its environments of these names."""
BY_NAME = {
    "processor": frozenset({"vlm_hf_data_processor"}),
    "dataset_name": OF_MEDIA,
    "env_name": OF_MEDIA | {"vlm"},
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
