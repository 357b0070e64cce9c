# SPDX-License-Identifier: Apache-2.0
"""Sections of the models that policy ranks hold: how messages name their keys, and a config with another one of them."""

from __future__ import annotations

import copy
import re

from mrl.config.schema.policy import PolicyConfig
from mrl.config.schema.ppo import ValueConfig
from mrl.config.schema.run import RunConfig
from mrl.phases import ModelName

# Not a part of a path or of another value.
_KEY_OF_POLICY = re.compile(r"(?<![\w./=-])policy\.")


def prefix_of(model: ModelName) -> str:
    """What messages put in front of a key of a model's section: "policy.", "value.", "teacher.", or which of several teachers it is."""
    role, _, name = model.partition(":")
    return f"on_policy_distillation, teacher {name}: " if name else {"critic": "value."}.get(role, f"{role}.")


def in_section(text: str, model: ModelName) -> str:
    """A problem of section `policy` as one of a model's section: it begins with a key of that, and names others of it."""
    prefix = prefix_of(model)
    inside = prefix if prefix.endswith(".") else ""
    return type(text)(_KEY_OF_POLICY.sub(lambda match: inside if match.start() else prefix, text))


def with_section(config: RunConfig, model: ModelName, section: PolicyConfig | ValueConfig) -> RunConfig:
    """A copy of the config in which a model has another section."""
    changed, name = copy.copy(config), model.partition(":")[2]
    if isinstance(section, ValueConfig):
        changed.value = section
    elif name:
        changed.further_teachers = {**config.further_teachers, name: section}
    elif model == "teacher":
        changed.teacher = section
    else:
        changed.policy = section
    return changed
