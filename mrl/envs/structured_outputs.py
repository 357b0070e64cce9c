"""Structured outputs: the whole text is JSON of the row's schema, every property given and none invented. Runs in `mrl.envs.child`."""

from __future__ import annotations

import json
from functools import lru_cache

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from mrl.envs.task import Outcome, Score, Task, field_of, text_after_thinking


def make() -> Score:
    """The reward function."""
    return score


def score(task: Task) -> Outcome:
    """1 if what follows `</think>` is one JSON value of `schema_str` made strict, else 0; `extracted` says what is wrong.

    Raises:
        ValueError: the row's schema is none, or its `schema_type` is not json.
    """
    fields = task.fields
    if fields.get("schema_type", "json") != "json":
        raise ValueError(f"schema_type {fields['schema_type']!r} is not supported; only json is")
    validator = _validator(str(field_of(fields, "schema_str", str)))
    try:
        value = json.loads(text_after_thinking(task.text), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        return Outcome(0.0, extracted=f"no JSON: {error}"[:200])
    error = next(validator.iter_errors(value), None)
    if error is not None:
        return Outcome(0.0, extracted=f"{error.json_path}: {error.message}"[:200])
    return Outcome(1.0, extracted="valid")


def strict(schema: object) -> object:
    """The schema with every property required and no others allowed, in all objects within; boolean schemas stay."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    # What is data, not schema, stays as it is.
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
    except (ValueError, SchemaError) as error:
        raise ValueError(f"the row's schema_str is no JSON schema: {str(error)[:200]}") from error
    made = strict(schema)
    assert isinstance(made, dict | bool)  # what a checked schema is
    return Draft202012Validator(made)


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")
