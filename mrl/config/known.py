# SPDX-License-Identifier: Apache-2.0
"""Sorts settings into known and unknown ones, and translates NeMo RL's into the words of the schema."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args, get_origin

from omegaconf.errors import MissingMandatoryValue

from mrl.config.errors import Problem
from mrl.config.files import Key, Settings, split_key, wrong
from mrl.config.migration import Migration, dialect
from mrl.config.passthrough import UNSAMPLED, UNSAMPLED_RULE
from mrl.config.schema.keys import KEYS, LIKE_POLICY, SAME_KEYS, SCHEMA
from mrl.config.values import REFERENCE, REFERENCE_OR_SELECT, Tree, Unresolved

ALGORITHMS: tuple[str, ...] = get_args(SCHEMA.children["algorithm"].hint)

SCRATCH = "_"
"""Beginning of the names of sections that hold values for others to refer to."""


@dataclass(frozen=True)
class Translated:
    """Settings in the words of the schema."""

    settings: Settings
    beside: Settings
    """Settings of keys that the schema lacks, to which expressions may refer."""
    migration: Migration
    misplaced: set[str]
    """Known keys where a section and a value are mixed up."""
    problems: list[Problem]
    refused: list[Problem]
    """Problems of values in NeMo RL's words."""


def translate_settings(
    settings: Settings, elsewhere: Settings, secrets: set[str], sections: Sequence[str]
) -> Translated:
    """Translates settings, which may refer to others `elsewhere`. `sections` are those of the models among them."""
    problems: list[Problem] = []
    known, unknown, misplaced = _sort_out(settings, problems)
    written = known | unknown | elsewhere
    tree = Tree(written, secrets)

    def value_of(dotted: str) -> object:
        try:
            return tree.value(dotted)
        except (MissingMandatoryValue, Unresolved) as error:
            if isinstance(error, Unresolved) and (key := split_key(dotted)) in written:
                problems.append(wrong("expression", key, written[key], error))
            return None

    refused: list[Problem] = []
    translated, migration = dialect().migrate(known, value_of, refused, sections)
    notes = {key: setting for key, setting in unknown.items() if key[0].startswith(SCRATCH)}
    read = {name for setting in written.values() for name in REFERENCE_OR_SELECT.findall(str(setting.value))}
    migration.without_effect += [
        (key, setting, "no key refers to it")
        for key, setting in notes.items()
        if read.isdisjoint(".".join(key[:depth]) for depth in range(1, len(key) + 1))
    ]
    named = {name for setting in known.values() for name in REFERENCE.findall(str(setting.value))}
    # Expressions may name keys that the schema lacks, or keys of the inactive backend.
    beside = {
        key: written[key] for name in sorted(named) if (key := split_key(name)) in written and key not in translated
    }
    return Translated(translated, notes | beside, migration, misplaced, problems, refused)


def _sort_out(settings: Settings, problems: list[Problem]) -> tuple[Settings, Settings, set[str]]:
    """Splits settings into those of known and unknown keys, and known keys where a section and a value are mixed up."""
    known: Settings = {}
    unknown: Settings = {}
    misplaced: set[str] = set()
    starts: dict[Key, list[Key]] = {}
    algorithm = str(settings["algorithm",].value) if ("algorithm",) in settings else "grpo"
    for key, setting in settings.items():
        is_known, at, fault = _place(key, setting.value)
        if is_known or dialect().is_foreign(key, setting.value):
            known[key] = setting
        elif at:
            misplaced.add(at)
            problems.append(wrong("section", key, setting, fault))
        elif key[0].startswith(SCRATCH):
            unknown[key] = setting
        else:
            unknown[key] = setting
            start = next((key[:end] for end in range(1, len(key)) if _listed(key[:end]) not in _beginnings()), key)
            starts.setdefault(start, []).append(key)
    for start, keys in starts.items():
        first, nearest = settings[keys[0]], nearest_key(start, algorithm)
        hint = f"; the nearest is {nearest}" if nearest else ", and none that is spelt alike; mrl keys lists them"
        if start[0] == "env" and len(start) == 2 and not (nearest or "").startswith("env."):
            hint = "; mrl has no such environment: leave it out, or write it as a function (docs/extend/environment.md)"
        if start[-1] in UNSAMPLED:
            hint = f"; {UNSAMPLED_RULE}: leave it out"
        if len(keys) == 1:
            problems.append(wrong("unknown-key", keys[0], first, f"no such key{hint}"))
        else:
            rule, _, way_out = f"no such section, with {len(keys)} keys{hint}".partition("; ")
            name = (first.written_as or ".".join(keys[0])).removesuffix(f".{'.'.join(keys[0][len(start) :])}")
            problems.append(
                Problem("unknown-section", name, None, rule, way_out, origin=first.origin, says_origin=True)
            )
    return known, unknown, misplaced


def _place(key: Key, value: object) -> tuple[bool, str, str]:
    """Checks that a setting fits the schema; else returns the key at which a section and a value are mixed up."""
    node = SCHEMA
    for depth, name in enumerate(key, start=1):
        if (inner := node.children.get(name)) is None:
            return False, "", ""
        node, dotted = inner, ".".join(key[:depth])
        if node.section is None:
            is_known = depth == len(key) or any(get_origin(kind) is dict for kind in node.kinds)
            return is_known, dotted, f"{dotted} is a value and has no keys below it"
    is_empty = value == {} or (value is None and type(None) in node.kinds)
    return is_empty, ".".join(key), f"a section; set one of its keys: {', '.join(node.children)}"


TRL_NAMES = {
    "learning_rate": "policy.megatron_cfg.optimizer.lr",
    "num_generations": "grpo.num_generations_per_prompt",
    "beta": "loss_fn.reference_policy_kl_penalty",
    "epsilon": "loss_fn.ratio_clip_min",
    "epsilon_high": "loss_fn.ratio_clip_max",
    "max_completion_length": "policy.generation.max_new_tokens",
    "max_prompt_length": "data.max_input_seq_length",
    "max_length": "policy.max_total_sequence_length",
    "per_device_train_batch_size": "policy.train_micro_batch_size",
    "gradient_accumulation_steps": "policy.train_global_batch_size",
    "gradient_checkpointing": "policy.megatron_cfg.activation_checkpointing",
    "num_train_epochs": "grpo.max_num_epochs",
    "max_steps": "grpo.max_num_steps",
    "eval_steps": "grpo.val_period",
    "save_steps": "checkpointing.save_period",
    "output_dir": "checkpointing.checkpoint_dir",
    "model_name_or_path": "policy.model_name",
    "warmup_steps": "policy.megatron_cfg.scheduler.lr_warmup_iters",
    "lr_scheduler_type": "policy.megatron_cfg.scheduler.lr_decay_style",
    "vllm_gpu_memory_utilization": "policy.generation.vllm_cfg.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "policy.generation.vllm_cfg.tensor_parallel_size",
}
"""Keys by their names in TRL and transformers, where the spelling is too different to guess."""


def nearest_key(key: Key, algorithm: str = "grpo") -> str | None:
    """The known key most likely meant: a sibling spelt alike, the same name elsewhere, or one alike; None if none.

    Of keys that several algorithms have it takes that of the config's own.
    """
    if (listed := _listed(key)) != key and (nearest := nearest_key(listed, algorithm)) is not None:
        return nearest.replace(listed[0], key[0], 1) if nearest.startswith(f"{listed[0]}.") else nearest
    *parents, name = key
    prefix = "".join(f"{parent}." for parent in parents)
    known, names = _known_keys()
    if name in TRL_NAMES and name not in names:
        section, _, rest = TRL_NAMES[name].partition(".")
        return f"{algorithm}.{rest}" if section == "grpo" and f"{algorithm}.{rest}" in known else TRL_NAMES[name]
    siblings = list(
        dict.fromkeys(other.removeprefix(prefix).split(".")[0] for other in known if other.startswith(prefix))
    )
    if alike := difflib.get_close_matches(name, siblings, n=1, cutoff=0.7):
        return prefix + alike[0]
    # First the nearest name, then its few keys: comparing every whole key takes seconds in a file with many unknown
    # keys.
    closest = [name] if name in names else difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    if not closest:
        return None
    elsewhere = {*LIKE_POLICY, *ALGORITHMS} - {algorithm}
    meant = [other for other in names[closest[0]] if split_key(other)[0] not in elsewhere] or names[closest[0]]
    own = [other for other in meant if split_key(other)[0] == algorithm] or meant
    return difflib.get_close_matches(prefix + name, own if not parents else meant, n=1, cutoff=0.0)[0]


def _listed(key: Key) -> Key:
    """The key that is listed for one of `SAME_KEYS`; any other unchanged."""
    return (SAME_KEYS[key[0]], *key[1:]) if key[0] in SAME_KEYS else key


@functools.cache
def _beginnings() -> set[Key]:
    parts = [tuple(known.split(".")) for known in _known_keys()[0]]
    return {key[:end] for key in parts for end in range(1, len(key))}


@functools.cache
def _known_keys() -> tuple[list[str], dict[str, list[str]]]:
    """All known keys, and the keys that each name is a part of."""
    known, names = [*KEYS, *sorted(dialect().DIALECT_KEYS - KEYS.keys())], dict[str, list[str]]()
    for key in known:
        for name in dict.fromkeys(key.split(".")):
            names.setdefault(name, []).append(key)
    return known, names
