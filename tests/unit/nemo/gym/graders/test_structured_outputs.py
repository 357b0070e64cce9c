# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from mrl.envs.task import Task
from mrl.nemo.gym.graders.structured_outputs import score, strict

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "object", "properties": {"id": {"type": "integer"}}}},
        "kind": {"enum": ["a", "b"]},
    },
    "required": ["name"],
}
GOOD = {"name": "x", "tags": [{"id": 1}], "kind": "a"}


def judge(text: str, schema: object = SCHEMA) -> tuple[float, str]:
    outcome = score(Task((text,), row=json.dumps({"schema_str": json.dumps(schema), "schema_type": "json"})))
    return outcome.reward, outcome.extracted


def test_exactly_the_schema_is_right():
    assert judge(json.dumps(GOOD)) == (1.0, "valid")
    assert judge("<think>{}</think>\n" + json.dumps(GOOD) + "\n") == (1.0, "valid")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (json.dumps({**GOOD, "more": 1}), "$: additionalProperties"),
        (json.dumps({"name": "x", "kind": "a"}), "$: required"),
        (json.dumps({**GOOD, "tags": [{}]}), "$.tags[0]: required"),
        (json.dumps({**GOOD, "kind": "c"}), "$.kind: enum"),
        ("```json\n" + json.dumps(GOOD) + "\n```", "no JSON"),
        ("Here: " + json.dumps(GOOD), "no JSON"),
        (json.dumps(GOOD)[:-1], "no JSON"),
        ('{"name": NaN}', "no JSON"),
        ("", "no JSON"),
        ("[" * 100_000, "no JSON"),
    ],
)
def test_what_is_wrong_is_told(text: str, reason: str):
    reward, extracted = judge(text)
    assert reward == 0.0 and reason in extracted


@pytest.mark.parametrize(
    ("form", "text"),
    [("xml", "<a>" * 3000 + "</a>" * 3000), ("yaml", "x: 2024-99-99"), ("csv", "a\nx,y"), ("toml", "a")],
)
def test_what_cannot_be_read_is_wrong(form: str, text: str):
    schema = {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "string"}}}}
    assert score(Task((text,), row=json.dumps({"schema_str": json.dumps(schema), "schema_type": form}))).reward == 0.0


def test_a_property_may_be_called_like_a_keyword():
    schema = {"type": "object", "properties": {"properties": {"type": "string"}, "required": {"type": "integer"}}}
    assert strict(schema) == {**schema, "required": ["properties", "required"], "additionalProperties": False}
    assert judge('{"properties": "a", "required": 2}', schema) == (1.0, "valid")


@pytest.mark.parametrize(
    "fields", [{"schema_str": "{"}, {"schema_str": '{"type": 7}'}, {}, {"schema_str": "{}", "schema_type": "ini"}]
)
def test_a_row_without_a_schema_is_an_error(fields: dict[str, object]):
    with pytest.raises(ValueError):
        score(Task(("{}",), row=json.dumps(fields)))
