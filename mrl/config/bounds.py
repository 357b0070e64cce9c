"""How large what a config says may become: nesting, repeated anchors, references to references, and numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import yaml

SAFE_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's loader where PyYAML has it, for mrl's own tables: ten times as fast."""

MAX_DEPTH = 64
MAX_NODES = 200_000
"""Of a file with its aliases written out; the longest recipe has a few thousand."""
MAX_CHARACTERS = 1 << 20
"""Of a value with its references written out."""
MAX_EXPRESSION = 2000
"""Characters of a value with an interpolation in it. The grammar of interpolations takes seconds for more."""
MAX_DIGITS = 1000

_DIGITS = re.compile(r"[-+.:_0-9a-fA-FoxX]+")
_NUMBER = re.compile(r"[-+]?\d{1,30}(\.\d{0,30})?([eE][-+]?\d{1,3})?")
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?\s*([\w.]+)")

Number = int | float


def check_yaml(text: str) -> None:
    """Returns if a YAML text can be loaded within seconds.

    Raises:
        ValueError: it is nested too deeply, or its aliases make it too large.
        yaml.YAMLError: it is no YAML.
    """
    # Parsing gives one event after the other. Loading recurses, and writes out every alias.
    sizes: dict[str, int] = {}
    opened: list[tuple[str | None, int]] = [(None, 0)]
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        size = 0
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, 1))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = opened.pop()
            sizes |= {anchor: size} if anchor else {}
        elif isinstance(event, yaml.AliasEvent):
            size = sizes.get(event.anchor, 1)
        elif isinstance(event, yaml.ScalarEvent):
            size = 1
            if len(event.value) > MAX_DIGITS and not event.style and _DIGITS.fullmatch(event.value):
                raise ValueError(f"a number of {len(event.value):,} digits at line {event.start_mark.line + 1}; write a smaller one")
        outer, count = opened[-1]
        opened[-1] = outer, count + size
        if len(opened) > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} deep at line {event.start_mark.line + 1}; write it flatter")
        if count + size > MAX_NODES:
            raise ValueError(f"more than {MAX_NODES:,} values with its aliases written out; write fewer")


def find_long_expressions(values: Mapping[str, object]) -> list[str]:
    """A problem for every key whose value has too long an expression, or becomes too long once its references are written out."""
    texts = {key: str(value) for key, value in values.items()}
    known: dict[str, int] = {}
    problems = []
    for key, text in texts.items():
        if "${" not in text:
            continue
        if len(text) > MAX_EXPRESSION:
            problems.append(f"{key}: an expression of {len(text):,} characters; write at most {MAX_EXPRESSION:,}")
        elif _length(key, texts, known, ()) > MAX_CHARACTERS:
            problems.append(f"{key}: with its references written out, a value of more than {MAX_CHARACTERS:,} characters; refer to fewer")
    return problems


def _length(name: str, texts: Mapping[str, str], known: dict[str, int], above: tuple[str, ...]) -> int:
    """Characters that a reference to a key, or to a section, stands for. One that leads back to itself is refused elsewhere."""
    if name in above or len(above) > MAX_DEPTH:
        return 0
    if name not in known:
        keys = [name] if name in texts else [key for key in texts if key.startswith(f"{name}.")]
        inner = (*above, name)
        known[name] = sum(
            len(texts[key]) + sum(_length(other, texts, known, inner) for other in _REFERENCE.findall(texts[key])) for key in keys
        )
    return known[name]


def of_numbers(operation: Callable[[Number, Number], Number]) -> Callable[[object, object], Number]:
    """An operation that takes nothing but numbers, and gives none that no key can have."""

    # What the arguments are is for us to say: OmegaConf would warn beside the error.
    def checked(a: object, b: object) -> Number:
        result = operation(_number(a), _number(b))
        if isinstance(result, int) and abs(result) >= 1 << 63:
            raise ValueError("the result has more than 64 bits")
        return result

    return checked


def _number(value: object) -> Number:
    if isinstance(value, str) and _NUMBER.fullmatch(value):  # environment variables give text
        return float(value) if "." in value or "e" in value.lower() else int(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{str(value)[:40]!r} is not a number")
    return value
