# SPDX-License-Identifier: Apache-2.0
"""A wrong yet consistent conversion rule: the schedule fits, checksums agree, only vLLM's own loader knows better."""

from __future__ import annotations

import dataclasses

from conversion.cuts import Qkv
from conversion.families import nemotron_h
from conversion.families.common import HfConfig, Model
from tests import models

ATTENTION_LAYER = str(models.TINY_NEMOTRON_H["hybrid_override_pattern"]).index("*")


def swapped(hf_config: HfConfig, padded_vocabulary: int | None = None) -> Model:
    """The model's rules with query and key exchanged, for every holder."""
    right = nemotron_h.model(hf_config, padded_vocabulary)
    layers = []
    for rules in right.layers:
        cuts = [
            dataclasses.replace(rule.cut, query=rule.cut.key, key=rule.cut.query)
            if isinstance(rule.cut, Qkv)
            else rule.cut
            for rule in rules
        ]
        layers.append(tuple(dataclasses.replace(rule, cut=cut) for rule, cut in zip(rules, cuts, strict=True)))
    return dataclasses.replace(right, layers=tuple(layers))


WRONG_FAMILY = dataclasses.replace(nemotron_h.FAMILY, model=swapped)
"""To be put into `registry.FAMILIES` under "nemotron_h"."""
