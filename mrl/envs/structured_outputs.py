# SPDX-License-Identifier: Apache-2.0
"""Structured outputs: the whole text is JSON of the row's schema, every property given and none invented. Runs in `mrl.envs.child`."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import TYPE_CHECKING

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from jsonschema_specifications import REGISTRY
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012, Schema, SchemaResource

from mrl.envs.task import Environment, Outcome, RowFault, Score, Task, built_in, field_of

if TYPE_CHECKING:
    from referencing._core import Resolver

    from mrl.config.schema.env import EnvConfig


def environment(config: EnvConfig) -> Environment:
    """Declares `structured_outputs`."""
    return built_in("structured_outputs", config.structured_outputs, "schema_str", "schema_type")


def make() -> Score:
    """The reward function."""
    return score


def score(task: Task) -> Outcome:
    """1 if the text after `</think>` is one JSON value of `schema_str` made strict; `extracted` names the broken keyword and its place."""
    fields = task.fields
    if fields.get("schema_type", "json") != "json":
        raise RowFault(f"schema_type {fields['schema_type']!r:.100} is not supported; only json is")
    validator = _validator(field_of(fields, "schema_str", str))
    try:
        value = json.loads(task.reply, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return Outcome(0.0, extracted="no JSON")
    try:
        error = next(validator.iter_errors(value), None)
    except re.error as problem:
        raise RowFault(f"the row's schema_str has a pattern that is no regular expression: {problem}") from problem
    return Outcome(1.0, extracted="valid") if error is None else Outcome(0.0, extracted=f"{error.json_path}: {error.validator}")


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def strict(schema: object) -> object:
    """The schema with every property required and no others allowed, in all objects within; boolean schemas stay."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    # The values of these keys are data, not schemas.
    result = {key: value if key in ("enum", "const", "default", "examples", "required") else strict(value) for key, value in schema.items()}
    properties = schema.get("properties")
    if isinstance(properties, dict) and schema.get("type", "object") in ("object", ["object"], ["object", "null"]):
        result["properties"] = {name: strict(value) for name, value in properties.items()}
        result["required"] = list(properties)
        result["additionalProperties"] = False
    return result


@lru_cache(maxsize=256)
def _validator(schema_text: str) -> Draft202012Validator:
    try:
        schema = json.loads(schema_text)
        Draft202012Validator.check_schema(schema)
        made = strict(schema)
        assert isinstance(made, dict | bool)  # what a checked schema is
        # References resolve to metaschemas and the schema itself; nothing is fetched.
        resource = DRAFT202012.create_resource(made)
        _resolve_all(REGISTRY.resolver_with_root(resource), resource)
        validator = Draft202012Validator(made, registry=REGISTRY)
        # A schema that refers to itself in a circle judges nothing.
        validator.is_valid(None)
    except (ValueError, SchemaError, Unresolvable, RecursionError, re.error) as error:
        raise RowFault(f"the row's schema_str is no JSON schema that can be used: {type(error).__name__}: {str(error)[:200]}") from error
    return validator


def _resolve_all(resolver: Resolver[Schema], resource: SchemaResource) -> None:
    resolver = resolver.in_subresource(resource)
    for keyword in ("$ref", "$dynamicRef"):
        if isinstance(resource.contents, dict) and isinstance(reference := resource.contents.get(keyword), str):
            resolver.lookup(reference)
    for part in resource.subresources():
        _resolve_all(resolver, part)
