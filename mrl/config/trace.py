"""Which config keys product code has read. The first read of a field outside `mrl.config` is noted, in this process, and whose it was.

Loading, checking, printing, copying and pickling do not count. Processes hand their `readers()` to the driver, which calls `merge_readers`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping
from typing import TypeVar

Section = TypeVar("Section")

Readers = dict[str, set[str]]
"""By dotted key: the modules that read it, of every process the first one."""

_first_reader: dict[tuple[str, str], str] = {}
"""(section class, field) -> module; a section class stands at one place in the schema, so this names the key."""
_merged: Readers = {}
_follows: dict[str, frozenset[str]] = {}
"""Keys whose values were made from other keys. Whoever reads one has read the others."""

# A read in the schema, or where its data sets are listed, is a read of whoever called there.
OWN_MODULES = ("mrl.config.schema", "mrl.config.rules.data", "mrl.config.datasets", __name__)
# These packages walk all fields of an object; that says nothing about whether the run depends on them.
_WALKERS = frozenset({"copy", "dataclasses", "omegaconf", "pickle", "pprint", "reprlib"})


def traced(cls: type[Section]) -> type[Section]:
    """The dataclass `cls`, with reads of its fields noted. Goes above `@dataclass`."""
    names = frozenset(field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]  # cls is a dataclass by contract
    section = cls.__name__

    def read(self: Section, name: str) -> object:
        if name in names and (section, name) not in _first_reader and (module := _product_module()):
            _first_reader[section, name] = module
        return object.__getattribute__(self, name)

    cls.__getattribute__ = read
    return cls


def _product_module() -> str:
    """The module outside `mrl.config` that asked for the read two frames up, or ""; a property of the schema counts as its caller, and so
    does what lists its data sets.

    What runs as a script is told by its file.
    """
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(OWN_MODULES):
        if frame.f_code.co_filename == "<string>":  # __repr__, __eq__: compiled from text by dataclasses
            return ""
        frame = frame.f_back
    module = frame.f_globals.get("__name__", "") if frame is not None else ""
    if module == "__main__" and frame is not None:
        spec = frame.f_globals.get("__spec__")
        module = spec.name if spec is not None else module
    return "" if module.startswith("mrl.config.") or module.partition(".")[0] in _WALKERS else module


def readers() -> Readers:
    """The keys read so far by this process and by those whose readers were merged, and the keys that their values were made from."""
    from mrl.config.schema.run import KEYS

    found: Readers = {key: set(modules) for key, modules in _merged.items()}
    for key, place in KEYS.items():
        if place in _first_reader:
            found.setdefault(key, set()).add(_first_reader[place])
    new = list(found)
    while new:
        key = new.pop()
        for source in _follows.get(key, frozenset()):
            if not found[key] <= found.get(source, set()):
                found.setdefault(source, set()).update(found[key])
                new.append(source)
    return found


def merge_readers(others: Mapping[str, Iterable[str]]) -> None:
    """Adds the `readers()` of another process."""
    for key, modules in others.items():
        _merged.setdefault(key, set()).update(modules)


def note_expressions(follows: Mapping[str, frozenset[str]]) -> None:
    """Notes which keys each interpolated value of the loaded config was made from."""
    _follows.clear()
    _follows.update(follows)


def forget_reads() -> None:
    """Starts again with nothing read."""
    _first_reader.clear()
    _merged.clear()


def report() -> str:
    """The text of `--trace-config`: keys read and their readers, keys that a check fixes to one value, keys never read; one a line."""
    from mrl.config.rules.ranges import FIXED
    from mrl.config.schema.run import KEYS

    read = readers()
    groups = {
        "read by this run": {f"{key}: {', '.join(sorted(modules))}" for key, modules in read.items()},
        "fixed by a check": FIXED - read.keys(),
        "never read by this run": KEYS.keys() - read.keys() - FIXED,
    }
    lines = []
    for title, entries in groups.items():
        lines += [f"Config keys {title}: {len(entries)} of {len(KEYS)}", *(f"  {entry}" for entry in sorted(entries))]
    return "\n".join(lines)
