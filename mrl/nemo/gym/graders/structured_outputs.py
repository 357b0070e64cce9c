# SPDX-License-Identifier: Apache-2.0
"""Structured outputs: all text is JSON, YAML, TOML, XML or CSV of the row's schema, each property given, none invented.

Or, with `response_mode: tool_call`, the arguments of its one call. Verdicts are those of NeMo Gym's server. Runs in
`mrl.envs.child`.
"""

from __future__ import annotations

import csv
import io
import json
import re
import tomllib
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast
from xml.parsers import expat

import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from jsonschema_specifications import REGISTRY
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012, Schema, SchemaResource

from mrl.config.texts import safe_values
from mrl.envs.task import Environment, Outcome, RowFault, Score, Task, built_in, field_of
from mrl.envs.tool_calls import declared_tools, tool_calls

if TYPE_CHECKING:
    from referencing._core import Resolver

    from mrl.config.schema.env import EnvConfig


def environment(config: EnvConfig) -> Environment:
    """Declares `structured_outputs`."""
    return built_in(__name__, config.structured_outputs, "schema_str", "schema_type", "response_mode")


def make() -> Score:
    """The reward function."""
    return score


def score(task: Task) -> Outcome:
    """1 if the text after `</think>` fits strict `schema_str`; `extracted` names the broken keyword and its place."""
    fields = task.fields
    form, mode = fields.get("schema_type") or "json", fields.get("response_mode") or "text"
    if form not in FORMS or mode not in ("text", "tool_call"):
        raise RowFault(
            f"schema_type {form!r:.100} is none of {', '.join(FORMS)}, or response_mode {mode!r:.100} neither text "
            "nor tool_call"
        )
    schema, validator = _validator(field_of(fields, "schema_str", str))
    try:
        value = _payload(task, fields) if mode == "tool_call" else FORMS[str(form)](task.reply, schema)
    except (ValueError, RecursionError, TypeError, csv.Error, yaml.YAMLError, expat.ExpatError) as error:
        return Outcome(
            0.0, extracted=f"no {'one call' if mode == 'tool_call' else str(form).upper()}: {type(error).__name__}"
        )
    try:
        error = next(validator.iter_errors(cast(Any, safe_values(value))), None)
    except RecursionError:
        return Outcome(0.0, extracted="nested too deeply")
    except re.error as problem:
        raise RowFault(f"the row's schema_str has a pattern that is no regular expression: {problem}") from problem
    if error is None:
        return Outcome(1.0, extracted="valid")
    return Outcome(0.0, extracted=f"{error.json_path}: {error.validator}")


def _payload(task: Task, fields: Mapping[str, object]) -> object:
    """Arguments of the one call of the row's tool. ValueError: there is none."""
    calls = tool_calls(task.reply, declared_tools(fields), task.tool_parser)
    name, key = fields.get("tool_name"), fields.get("tool_payload_key")
    if len(calls) != 1 or calls[0].error or (name and calls[0].name != name) or (key and key not in calls[0].arguments):
        raise ValueError("no call, several, or not the one that is asked for")
    return calls[0].arguments[str(key)] if key else calls[0].arguments


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _not_empty(text: str) -> str:
    if not text.strip():
        raise ValueError("empty")
    return text


def _csv(text: str, schema: object) -> object:
    """A list of rows; cells get the types of the schema's items where they can be read so."""
    if not isinstance(schema, dict):
        raise ValueError("a schema without items")
    properties = schema.get("items", schema).get("properties", {})
    return [
        {key: _cell(value, properties.get(key, {}).get("type", "string")) for key, value in row.items()}
        for row in csv.DictReader(io.StringIO(_not_empty(text)))
    ]


def _cell(value: object, kind: object) -> object:
    if not isinstance(kind, list):
        return _scalar(value, kind)
    if value in (None, "") and "null" in kind:
        return None
    found = ((one, _scalar(value, one)) for one in kind if one != "null")
    return next((read for one, read in found if not isinstance(read, str) or one == "string"), value)


TRUTH = {"true": True, "1": True, "false": False, "0": False}


def _scalar(value: object, kind: object) -> object:
    if not isinstance(value, str) or not value:
        return value
    read = {"integer": int, "number": float, "boolean": lambda text: TRUTH.get(text.lower(), text)}.get(str(kind), str)
    try:
        return read(value)
    except ValueError:  # the schema says what is wrong with it
        return value


def _xml(text: str, schema: object) -> object:
    """Elements : objects of attributes (`@name`), children and text (`#text` beside others); equal names make lists."""
    root: dict[str, object] = {}
    open_elements: list[tuple[dict[str, object], list[str]]] = [(root, [])]

    def start(name: str, attributes: dict[str, str]) -> None:
        open_elements.append(({f"@{key}": value for key, value in attributes.items()}, []))

    def end(name: str) -> None:
        element, pieces = open_elements.pop()
        inside = "".join(pieces).strip()
        value: object = {**element, "#text": inside} if element and inside else element or inside or None
        parent, _ = open_elements[-1]
        if name not in parent:
            parent[name] = value
        elif isinstance(others := parent[name], list):
            others.append(value)
        else:
            parent[name] = [others, value]

    def refuse(*declaration: object) -> None:
        raise ValueError("entities are not read")

    parser = expat.ParserCreate("utf-8")
    parser.StartElementHandler, parser.EndElementHandler, parser.EntityDeclHandler = start, end, refuse
    parser.CharacterDataHandler = lambda data: open_elements[-1][1].append(data)
    parser.Parse(text.encode("utf-8", errors="replace"), True)
    return _of_schema(root, schema)


def _of_schema(data: object, schema: object) -> object:
    """Gives texts of XML the types of the schema; a single element becomes a list where the schema has one."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if not isinstance(schema, dict) or kind is None:
        return data
    if kind == "object" and isinstance(data, dict):
        properties = schema.get("properties", {})
        return {key: _of_schema(value, properties[key]) if key in properties else value for key, value in data.items()}
    if kind == "array":
        data = next(iter(data.values())) if isinstance(data, dict) and len(data) == 1 else data
        items = data if isinstance(data, list) else [] if data is None else [data]
        return [_of_schema(item, schema.get("items", {})) for item in items]
    return "" if data is None and kind == "string" else _scalar(data, kind)


FORMS: Mapping[str, Callable[[str, object], object]] = {
    "json": lambda text, schema: json.loads(text, parse_constant=_no_constant),
    "yaml": lambda text, schema: yaml.safe_load(_not_empty(text)),
    "toml": lambda text, schema: tomllib.loads(_not_empty(text)),
    "xml": _xml,
    "csv": _csv,
}


def strict(schema: object) -> object:
    """The schema with every property required and no others, in all objects within; as in Gym, list items stay."""
    if not isinstance(schema, dict):
        return schema
    result = {
        key: value if key in ("enum", "const", "default", "examples", "required") else strict(value)
        for key, value in schema.items()
    }
    properties = schema.get("properties")
    if isinstance(properties, dict):
        result["properties"] = {name: strict(value) for name, value in properties.items()}
        result["required"] = list(properties)
        result["additionalProperties"] = False
    return result


@lru_cache(maxsize=256)
def _validator(schema_text: str) -> tuple[object, Draft202012Validator]:
    try:
        schema = cast(Any, safe_values(json.loads(schema_text)))
        Draft202012Validator.check_schema(schema)
        made = strict(schema)
        assert isinstance(made, dict | bool)  # what a checked schema is
        resource = DRAFT202012.create_resource(made)
        _resolve_all(REGISTRY.resolver_with_root(resource), resource)
        validator = Draft202012Validator(made, registry=REGISTRY)
        # A schema that refers to itself in a circle judges nothing.
        validator.is_valid(None)
    except (ValueError, SchemaError, Unresolvable, RecursionError, re.error) as error:
        raise RowFault(
            f"the row's schema_str is no JSON schema that can be used: {type(error).__name__}: {str(error)[:200]}"
        ) from error
    return made, validator


def _resolve_all(resolver: Resolver[Schema], resource: SchemaResource) -> None:
    resolver = resolver.in_subresource(resource)
    for keyword in ("$ref", "$dynamicRef"):
        if isinstance(resource.contents, dict) and isinstance(reference := resource.contents.get(keyword), str):
            resolver.lookup(reference)
    for part in resource.subresources():
        _resolve_all(resolver, part)
