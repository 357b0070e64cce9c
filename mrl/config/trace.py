"""Which config keys product code has read. Every read of a field outside `mrl.config` is noted, in this process.

Loading, checking, printing, copying and pickling do not count. Processes hand their `reads()` to the driver, which calls `merge_reads`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping
from typing import TypeVar

Section = TypeVar("Section")

_reads: set[tuple[str, str]] = set()
"""(section class, field); a section class stands at one place in the schema, so this names the key."""
_merged: set[str] = set()
_follows: dict[str, frozenset[str]] = {}
"""Keys whose values were made from other keys. Whoever reads one has read the others."""

# These packages walk all fields of an object; that says nothing about whether the run depends on them.
_WALKERS = frozenset({"copy", "dataclasses", "omegaconf", "pickle", "pprint", "reprlib"})


def traced(cls: type[Section]) -> type[Section]:
    """The dataclass `cls`, with reads of its fields noted. Goes above `@dataclass`."""
    names = frozenset(field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]  # cls is a dataclass by contract
    section = cls.__name__

    def read(self: Section, name: str) -> object:
        if name in names and (section, name) not in _reads and _is_product_code():
            _reads.add((section, name))
        return object.__getattribute__(self, name)

    cls.__getattribute__ = read
    return cls


def _is_product_code() -> bool:
    """Whether the read two frames up was asked for by code outside `mrl.config`; a property of the schema counts as its caller."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("mrl.config.schema", __name__)):
        if frame.f_code.co_filename == "<string>":  # __repr__, __eq__: compiled from text by dataclasses
            return False
        frame = frame.f_back
    module = frame.f_globals.get("__name__", "") if frame is not None else ""
    return not module.startswith("mrl.config.") and module.partition(".")[0] not in _WALKERS


def reads() -> set[str]:
    """Dotted keys read so far by this process and by those whose reads were merged, and the keys that their values were made from."""
    from mrl.config.schema import KEYS

    found: set[str] = set()
    new = {key for key, place in KEYS.items() if place in _reads} | _merged
    while new:
        found |= new
        new = set().union(*(_follows.get(key, frozenset()) for key in new)) - found
    return found


def merge_reads(keys: Iterable[str]) -> None:
    """Adds the `reads()` of another process."""
    _merged.update(keys)


def note_expressions(follows: Mapping[str, frozenset[str]]) -> None:
    """Notes which keys each interpolated value of the loaded config was made from."""
    _follows.clear()
    _follows.update(follows)


def forget_reads() -> None:
    """Starts again with nothing read."""
    _reads.clear()
    _merged.clear()


def report() -> str:
    """The text of `--trace-config`: keys read, keys that a check fixes to one value, keys never read; one a line."""
    from mrl.config.ranges import FIXED
    from mrl.config.schema import KEYS

    read = reads()
    groups = {
        "read by this run": read,
        "fixed by a check": FIXED - read,
        "never read by this run": KEYS.keys() - read - FIXED,
    }
    lines = []
    for title, keys in groups.items():
        lines += [f"Config keys {title}: {len(keys)} of {len(KEYS)}", *(f"  {key}" for key in sorted(keys))]
    return "\n".join(lines)
