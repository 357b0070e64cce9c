"""Versions that mrl wants: the ranges of pyproject.toml, and the exact versions of constraints-cpu.txt or constraints-gpu.txt."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mrl

_OPERATORS = re.compile(r"(>=|<=|==|!=|<|>)\s*([\w.*+]+)")


@dataclass(frozen=True)
class Wanted:
    """Versions that must be installed, and versions that are tested."""

    python: str
    """Range of Python versions, as `>=3.11,<3.13`."""
    ranges: Mapping[str, Mapping[str, str]]
    """Range of every package, by extra (`""`: always needed) and package."""
    pins: Mapping[str, Mapping[str, str]]
    """Exact version of every package, by kind of host (`cpu`, `gpu`)."""


def read_wanted() -> Wanted:
    """Reads what this mrl wants from its checkout, else from its installation."""
    root = Path(mrl.__file__).parent.parent
    # Beside the package in a checkout, inside it when installed.
    project_file = root / "pyproject.toml"
    pins_folder = root if project_file.is_file() else Path(mrl.__file__).parent
    pins = {kind: read_pins(pins_folder / f"constraints-{kind}.txt") for kind in ("cpu", "gpu")}
    if project_file.is_file():
        return _read_project(project_file.read_text(encoding="utf-8"), pins)
    metadata = importlib.metadata.metadata("mrl")
    ranges: dict[str, dict[str, str]] = {"": {}}
    for text in metadata.get_all("Requires-Dist") or ():
        requirement, _, marker = text.partition(";")
        extra = re.search(r"extra\s*==\s*['\"]([\w-]+)", marker)
        name, wanted = split_requirement(requirement)
        ranges.setdefault(extra[1] if extra else "", {})[name] = wanted
    return Wanted(metadata["Requires-Python"] or "", ranges, pins)


def _read_project(text: str, pins: dict[str, dict[str, str]]) -> Wanted:
    try:
        import tomllib
    except ModuleNotFoundError:
        # Python 3.10 has none; its only finding is that it is too old.
        (python,) = re.findall(r'^requires-python = "(.+)"$', text, re.MULTILINE)
        return Wanted(python, {"": {}}, pins)
    project = tomllib.loads(text)["project"]
    lines = {"": project["dependencies"], **project["optional-dependencies"]}
    return Wanted(project["requires-python"], {extra: dict(map(split_requirement, texts)) for extra, texts in lines.items()}, pins)


def read_pins(path: Path) -> dict[str, str]:
    """Versions of a constraints file by normalised name."""
    lines = (line.partition(";")[0].strip() for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    return {normalise(name): version for name, _, version in (line.partition("==") for line in lines) if version}


def split_requirement(text: str) -> tuple[str, str]:
    """Normalised name and range of a requirement such as `ray[default]>=2.60,<3`."""
    found = re.match(r"\s*([\w.-]+?)\s*(?:\[[^]]*\])?\s*((?:[<>=!].*)?)$", text.partition(";")[0].strip())
    assert found is not None, text
    return normalise(found[1]), found[2]


def normalise(name: str) -> str:
    """A distribution's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def is_in_range(version: str, wanted: str) -> bool:
    """Whether the numbers of a version lie in a range such as `>=2,<3`; a suffix (`rc1`, `+cpu`) does not count."""
    found = release(version)
    for operator, bound in _OPERATORS.findall(wanted):
        length = max(len(found), len(release(bound)))
        left, right = (numbers + (0,) * (length - len(numbers)) for numbers in (found, release(bound)))
        holds = {">=": left >= right, "<=": left <= right, "==": left == right, "!=": left != right, "<": left < right, ">": left > right}
        if not holds[operator]:
            return False
    return True


def release(version: str) -> tuple[int, ...]:
    """The numbers with which a version begins."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
