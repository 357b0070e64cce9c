# SPDX-License-Identifier: Apache-2.0
"""Command-line overrides, read by Hydra's parser, over the settings of files. Takes 0.2 s to import."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.overrides_visitor import HydraOverrideVisitor
from hydra.core.override_parser.types import Glob, Override, OverrideType, Quote, QuotedString, Sweep
from hydra.errors import HydraException
from hydra.grammar.gen.OverrideLexer import CommonTokenStream, InputStream, OverrideLexer
from hydra.grammar.gen.OverrideParser import OverrideParser
from omegaconf.errors import OmegaConfBaseException

from mrl.config.errors import COMMAND_LINE, ConfigError, Problem, told
from mrl.config.files import Settings, flatten, one_line, overlay, rename, split_key, two_names
from mrl.config.known import nearest_key
from mrl.config.schema.keys import KEYS
from mrl.rooms import renamed_keys

MAX_CHARACTERS = 10_000
"""Limit of an override. Hydra's parser takes a second and a half for a list of that length, and four times as long for
twice the length.
"""
FORMS = "write key=value, +key=value, ++key=value or ~key, with dots between the parts of a key"

_PARSER = OverridesParser.create()


def apply_overrides(settings: Settings, overrides: Sequence[str]) -> list[Problem]:
    """Applies `a.b=c`, `+a.b=c` (new key), `++a.b=c` (new or not), `~a.b` (back to the default) in order, in place.

    Returns the problems found. Whether a key exists at all is the schema's business.
    """
    problems: list[Problem] = []
    for override in overrides:
        if problem := _slip(override, overrides):
            problems.append(told(problem, "override"))
            continue
        problem = None
        try:
            problem = _apply(settings, override)
        except ConfigError as error:
            problems += error.problems
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            quoted = "; put a text with other signs than Hydra's in quotes, as in key='a text, #1'"
            problem = f"override {override}: Hydra's grammar does not take it ({one_line(error)}); {FORMS}{quoted}"
        except RecursionError:
            problem = f"override {override[:80]}...: nested too deep; write it flatter"
        if problem is not None:
            problems.append(told(problem, "override") if isinstance(problem, str) else problem)
    return problems


def _slip(override: str, overrides: Sequence[str]) -> str | None:
    """Says what a word lacks that was meant as an override and is none by itself; None: Hydra's parser may read it."""
    name, sign, value = override.partition("=")
    if sign and name and name[-1].isspace():
        return f"override {override}: spaces before =; write {name.strip()}={value.strip()}"
    if not sign and override and not override.startswith("~"):
        lone = ", without spaces around =" if any(other.startswith("=") for other in overrides) else ""
        return f"override {override}: it has no value; {FORMS}{lone}"
    return None


def quoted(value: object) -> str:
    """A text as the value of an override that Hydra reads as that text."""
    return QuotedString(str(value), Quote.single).with_quotes()


def _apply(settings: Settings, override: str) -> Problem | str | None:
    if len(override) > MAX_CHARACTERS:
        return (
            f"override {override[:80]}...: {len(override):,} characters; write at most {MAX_CHARACTERS:,}, or "
            "the value into a file"
        )
    parsed = _PARSER.parse_override(override)
    name, value = parsed.key_or_group, parsed.value()
    if not name or parsed.package is not None or parsed.is_value_path or "/" in name:
        return f"override {override}: {FORMS}"
    if isinstance(value, Sweep | Glob):
        return (
            f"override {override}: several values, of which Hydra would make several runs; write a list, "
            f"{name}=[...], or quote the text"
        )
    if parsed.type == OverrideType.EXTEND_LIST:
        return f"override {override}: no list is extended; write the whole list"
    key = split_key(renamed_keys().get(name, name))
    below = [other for other in settings if other[: len(key)] == key]
    if parsed.is_delete():
        if not below:
            near = None if ".".join(key) in KEYS else nearest_key(key)
            problem = (
                f"override {override}: no config file sets {name}, so there is nothing to remove; drop the override"
            )
            return f"{problem}; the nearest key is {near}" if near else problem
        has_other = "=" in override and [settings[other].value for other in below] != [value]
        if has_other and [settings[other].text for other in below] != [_text(override)]:
            return f"override {override}: {name} has another value; write ~{name} to remove it whatever it is"
        for other in below:
            del settings[other]
        return None
    if parsed.is_add() and below:
        return (
            f"override {override}: {name} is already set by {settings[below[0]].origin}; write {override[1:]} "
            "to replace it"
        )
    new = rename(flatten(value, split_key(name), COMMAND_LINE, _text(override)))
    for written, setting in new.items():
        other = settings.get(written)
        if (
            other is not None
            and other.origin == COMMAND_LINE
            and other.written_as != setting.written_as
            and other.value != setting.value
        ):
            return two_names(written, other, setting)
    overlay(settings, new)
    return None


class _Texts(HydraOverrideVisitor):
    """Reads an override with its numbers and truth values as the texts that are written."""

    def visitPrimitive(self, ctx: OverrideParser.PrimitiveContext) -> Any:
        value = super().visitPrimitive(ctx)
        return ctx.getText().strip() if isinstance(value, bool | int | float) else value


def _text(override: str) -> object:
    """The value of an override that has been parsed, as `Setting.text`."""
    tree = OverrideParser(CommonTokenStream(OverrideLexer(InputStream(override)))).override()
    read = _Texts(_PARSER.functions).visit(tree)
    assert isinstance(read, Override)
    return read.value()
