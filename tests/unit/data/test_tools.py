# SPDX-License-Identifier: Apache-2.0
"""Nulls of tools and calls: those that JSON Schema (draft 2020-12) allows stay, as written by hand."""

from mrl.data.fields import Fields
from tests.unit.data.test_rows import assistant, calls, parse, user

NULLABLE: Fields = {
    "type": "object",
    "properties": {
        "limit": {"type": ["integer", "null"], "default": None, "examples": [{"x": None}]},
        "mode": {"anyOf": [{"const": None}, {"enum": [None, "x"]}]},
        "of": {"properties": {"c": {"type": "null"}}},
        "any": {"type": "object"},
        "default": {"type": "string"},
    },
}


def tool(parameters: object, **keys: object) -> Fields:
    return {"type": "function", "function": {"name": "add", "parameters": parameters, **keys}}


def test_nulls_that_a_schema_may_have_are_the_rows_own():
    given = {"limit": None, "mode": None, "of": {"c": None}, "any": {"y": None, "z": [None, {"e": None}]}}
    row = parse({"messages": [user("q"), calls(given), assistant("a")], "tools": [tool(NULLABLE)]})
    assert (row.tools, row.messages[1:]) == ([tool(NULLABLE)], [calls(given)])
    assert parse({"messages": [user("q"), calls({"x": None}), assistant("a")], "tools": [tool({})]}).messages[1:] == [
        calls({"x": None})
    ]
    assert parse({"messages": [user("q"), calls({"x": None}), assistant("a")]}).messages[1:] == [calls({"x": None})]
    gym = {"input": "q", "tools": [{"type": "function", "name": "add", "parameters": NULLABLE, "strict": None}]}
    assert parse({"responses_create_params": gym}).tools == [tool(NULLABLE)]


def test_nulls_that_no_schema_has_come_from_other_rows():
    filled = {
        "type": "object",
        "items": None,
        "properties": {"a": {"type": "integer", "format": None}, "default": None},
    }
    call = calls({"a": 1, "default": None, "b": None})
    row = parse({"messages": [user("q"), call, assistant("a")], "tools": [tool(filled, strict=None)]})
    assert row.tools == [tool({"type": "object", "properties": {"a": {"type": "integer"}}})]
    assert row.messages[1:] == [calls({"a": 1})]
    # A null in JSON text is the row's own.
    text = calls('{"b": null}')
    assert parse({"messages": [user("q"), text, assistant("a")], "tools": [tool(filled)]}).messages[1:] == [text]
