"""Configs of which some values cannot be read, so that rules which need one of them cannot be applied."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import NoReturn

from mrl.config.schema.run import RunConfig


class NotKnown(Exception):
    """Whoever read a value that is not known meets this."""

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(f"{key} is not known")


def hide(config: RunConfig, faults: Mapping[str, str]) -> RunConfig:
    """A copy of `config` in which reading one of the keys of `faults` raises NotKnown with the key that is at fault.

    Below a section that is null, reading that section does. A key that the schema has not hides nothing.
    """
    hidden = copy.deepcopy(config) if faults else config
    for key, fault in faults.items():
        section: object = hidden
        name, *rest = key.split(".")
        for below in rest:
            inner = vars(section).get(name)
            if not dataclasses.is_dataclass(inner):
                break
            section, name = inner, below
        if name in vars(section):
            _hide_field(section, name, fault)
    return hidden


def _hide_field(section: object, name: str, fault: str) -> None:
    def read(_: object) -> NoReturn:
        raise NotKnown(fault)

    kind = type(section)
    section.__class__ = type(kind.__name__, (kind,), {name: property(read)})
