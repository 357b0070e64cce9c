# SPDX-License-Identifier: Apache-2.0
"""Answers that make their grader fail, and answers that keep it from judging others: in live pools of real children."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mrl.config.schema.env import BUILT_IN, EnvConfig
from mrl.config.schema.run import RunConfig
from mrl.envs.scorer import LONG_CHARACTERS, TEXT_FAULT
from mrl.envs.task import MAX_MESSAGE_BYTES, Environment, Task
from mrl.envs.workers import num_workers
from tests.unit.envs.deadlines import culprits_miss_theirs
from tests.unit.envs.pools import Pool, build_environment
from tests.waiting import HANG_S, SOON_S

# One of its faults leaves a file, to be another the second time.
FAULTS = Environment("tests.hostile.fault_grader:make", allowances=("files",), blames_text=True)
SCHEMA = {"$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}, "$ref": "#/$defs/tree"}
NUM_HONEST = 48


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(replace(FAULTS, num_workers=2, timeout_s=HANG_S)) as pool, culprits_miss_theirs("spin", "hang", "stop"):
        yield pool


@pytest.fixture(scope="module")
def graders() -> Iterator[dict[str, Pool]]:
    names = ("math", "structured_outputs", "instruction_following", "mcqa", "workplace_assistant")
    pools = {name: build_environment(name, EnvConfig()) for name in names}
    yield pools
    for pool in pools.values():
        pool.close()


# Of the table in docs/environments.md: who is at fault.
TEXT = ("ok", True, 0.0, (TEXT_FAULT,))
NOBODY = ("ok", True, 1.0, ())
ROW = MACHINE = ("error", False, 0.0, ())
OWN = ("timeout", False, 0.0, ())


@pytest.mark.attack("an answer makes its grader fail")
@pytest.mark.parametrize(
    ("text", "culprit"),
    [
        *((text, TEXT) for text in ("recursion", "overflow", "memory", "value", "spin", "hang", "stop", "exit")),
        *(("exit-once", NOBODY), ("row", ROW), ("disk", MACHINE), ("host", MACHINE)),
    ],
)
def test_each_row_of_the_table_of_faults(pool: Pool, tmp_path: Path, text: str, culprit: tuple[object, ...]):
    text += f" {tmp_path / 'seen'}" if text == "exit-once" else ""
    verdict, neighbour = pool.score([Task((text,)), Task((f"good, beside {text}",))])
    assert (verdict.status, verdict.is_valid, verdict.reward, verdict.flags) == culprit
    assert (neighbour.reward, neighbour.is_valid) == (1.0, True)
    # What the grader said of its fault is for the log alone.
    assert verdict.extracted == "" or culprit == NOBODY


def test_a_row_that_is_too_long_is_the_rows_fault(pool: Pool):
    (verdict,) = pool.score([Task(("good",), row=json.dumps({"tests": "x" * MAX_MESSAGE_BYTES}))])
    assert (verdict.status, verdict.is_valid) == ("error", False)
    assert "row is too long" in verdict.reason


def test_a_fault_of_the_row_names_the_fields_that_are_read(graders: dict[str, Pool]):
    (verdict,) = graders["instruction_following"].score([Task(("good",), row='{"instruction_ids": []}')])
    assert (verdict.status, verdict.is_valid) == ("error", False)
    assert "instruction_id_list, kwargs" in verdict.reason


@pytest.mark.parametrize("text", ["hang", "spin"])
def test_a_users_own_function_is_not_believed_that_the_text_did_it(text: str):
    own = Environment("mrl.envs.own:make", {"function": "tests.unit.envs.hostile:score"})
    with Pool(replace(own, num_workers=1, timeout_s=SOON_S)) as pool:
        (verdict,) = pool.score([Task((text,))])
    assert (verdict.status, verdict.is_valid, verdict.reward, verdict.flags) == OWN


@pytest.mark.attack("an answer makes its grader fail")
@pytest.mark.parametrize(
    ("name", "text", "fields"),
    [
        ("structured_outputs", "[" * 900 + "]" * 900, {"schema_str": json.dumps(SCHEMA)}),
        ("structured_outputs", "[" * 100_000, {"schema_str": json.dumps(SCHEMA)}),
        ("structured_outputs", "9" * 100_000, {"schema_str": '{"type": "string"}'}),
        ("structured_outputs", '{"\\ud800": 1}', {"schema_str": '{"type": "object", "properties": {}}'}),
        (
            "instruction_following",
            "[" * 40_000,
            {"instruction_id_list": ["detectable_content:number_placeholders"], "kwargs": [{"num_placeholders": 1}]},
        ),
        ("instruction_following", "<" * 40_000, {"instruction_id_list": ["detectable_format:title"], "kwargs": [None]}),
        (
            "instruction_following",
            "`" * 40_000,
            {"instruction_id_list": ["detectable_format:json_format"], "kwargs": [None]},
        ),
        (
            "instruction_following",
            "a" + " " * 40_000 + "b",
            {"instruction_id_list": ["detectable_format:json_format"], "kwargs": [None]},
        ),
        (
            "instruction_following",
            "a" + "\n" * 40_000 + "x",
            {"instruction_id_list": ["detectable_format:number_bullet_lists"], "kwargs": [{"num_bullets": 1}]},
        ),
        ("mcqa", "answer" + " " * 40_000 + "1", {"expected_answer": "A"}),
        ("mcqa", "\\boxed{" + " " * 40_000 + "1", {"expected_answer": "A"}),
        (
            "workplace_assistant",
            "<tool_call><function=f>" + "<parameter=a>" * 20_000 + "</function></tool_call>",
            {
                "ground_truth": [{"name": "email_delete_email", "arguments": {"email_id": "1"}}],
                "tables": {"emails": [{"email_id": "1"}]},
            },
        ),
        (
            "workplace_assistant",
            f"<tool_call><function=f><parameter=a>{'[' * 100_000}</parameter></function></tool_call>",
            {
                "ground_truth": [{"name": "email_delete_email", "arguments": {"email_id": "1"}}],
                "tables": {"emails": [{"email_id": "1"}]},
                "tools": [{"name": "f", "parameters": {"properties": {"a": {"type": "array"}}}}],
            },
        ),
        ("math", "(" * 40_000, {}),
        ("math", "\\(\\boxed{a}" * 2_000, {}),
        ("math", "\\boxed{" + "\\frac{1}{" * 2_000 + "42" + "}" * 2_001, {}),
        ("math", "\\boxed{" + "9" * 100_000 + "}", {}),
    ],
)
def test_what_a_grader_cannot_read_is_reward_0(
    graders: dict[str, Pool], name: str, text: str, fields: dict[str, object]
):
    (verdict,) = graders[name].score([Task((text,), "42", row=json.dumps(fields))])
    assert (verdict.status, verdict.is_valid, verdict.reward) == ("ok", True, 0.0), verdict.reason


@pytest.mark.attack("an answer makes its grader fail")
@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/none"},
        {"properties": {"a": {"$ref": "schema.json"}}},
        {"allOf": [{"$ref": "https://[broken"}]},
        {"type": "nothing"},
        {"pattern": "("},
    ],
)
def test_a_schema_that_judges_nothing_is_the_rows_fault(graders: dict[str, Pool], schema: dict[str, object]):
    task = Task(('"a"',), row=json.dumps({"schema_str": json.dumps(schema)}))
    (verdict,) = graders["structured_outputs"].score([task])
    assert (verdict.status, verdict.is_valid) == ("error", False)


@pytest.mark.attack("an answer starves the others")
@pytest.mark.parametrize(
    "bad",
    [
        "\\boxed{9^{9^{9}}}",
        "9^9^9",
        "\\boxed{99999999!}",
        "\\boxed{\\binom{1000000000}{500000000}}",
        "\\boxed{\\gcd(9^{9^{9}},3)}",
        "\\boxed{((9!)!)!}",
        "\\boxed{1.1^{9^{9}}}",
        "\\boxed{(x+y+z)^{999}}",
        "\\boxed{\\prod_{k=1}^{100000000} k}",
        "\\boxed{\\Gamma(99999999)}",
        "\\boxed{" + "|x" * 100 + "|" * 100 + "}",
        "\\boxed{" + "(" * 300 + "42" + ")" * 300 + "}",
        "\\(\\boxed{a}" * 1_000,
        "\\boxed{1}" * 200,
        "\\boxed{\\int_0^1 \\frac{\\sin(x^3)}{1+x^5} dx}",
        "\\boxed{x = \\int_{x=0}^1 \\frac{\\sin(x^3)}{1+x^5} dx}",
        "\\boxed{\\lim_{x\\to 0} \\frac{\\sin(x^3)}{x^5}}",
        "\\boxed{" + "+".join(f"\\sin({k}x)\\cos({k + 1}x)" for k in range(1, 14)) + "}",
    ],
)
def test_costly_mathematics_masks_no_honest_neighbour(graders: dict[str, Pool], bad: str):
    tasks = [
        Task((f"{'a' * index} {bad}" if index % 4 == 0 else f"so \\boxed{{{index}}}",), str(index))
        for index in range(4 * NUM_HONEST // 3)
    ]
    verdicts = graders["math"].score(tasks)
    assert [verdict.reward for index, verdict in enumerate(verdicts) if index % 4] == [1.0] * NUM_HONEST
    # At once: not one child had to be killed.
    assert {(v.reward, v.is_valid, v.flags) for index, v in enumerate(verdicts) if index % 4 == 0} == {(0.0, True, ())}


@pytest.mark.attack("an answer starves the others")
def test_long_texts_and_suspects_go_last():
    with Pool(replace(FAULTS, num_workers=1, timeout_s=HANG_S)) as pool:
        verdicts = pool.score([Task(("exit",)), Task(("x" * (LONG_CHARACTERS + 1),)), Task(("a",)), Task(("b",))])
    # The crash ends the first child, so that the second one counts from 1.
    assert [verdict.extracted for verdict in verdicts] == ["", "3", "1", "2"]
    assert verdicts[0].flags == (TEXT_FAULT,)


@pytest.mark.attack("an answer starves the others")
def test_culprits_do_not_pass_their_deadline_on(pool: Pool):
    tasks = [Task((f"spin {index}" if index % 16 == 0 else f"honest {index}",)) for index in range(32)]
    verdicts = pool.score(tasks)
    assert [verdict.reward for verdict in verdicts] == [float(index % 16 != 0) for index in range(32)]
    # What a text did once it is known for.
    before = pool.counts["cached"]
    assert pool.score(tasks[:1])[0].flags == (TEXT_FAULT,) and pool.counts["cached"] == before + 1


def test_each_built_in_grader_has_two_children():
    assert [num_workers(name, RunConfig(), num_cores=1) for name in BUILT_IN] == [2] * len(BUILT_IN)
