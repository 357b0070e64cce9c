# SPDX-License-Identifier: Apache-2.0
"""Texts graders see under a reasoning parser: in NeMo Gym what follows the thoughts, in NeMo RL's environments all."""

import json
from dataclasses import replace

import pytest

from mrl.config.schema.env import EnvConfig
from mrl.config.schema.generation import ServingChatConfig
from mrl.config.schema.run import RunConfig
from mrl.envs import math
from mrl.envs.scorer import parsers_of
from mrl.envs.task import Task
from mrl.nemo.gym.graders import mcqa, structured_outputs


@pytest.mark.parametrize(
    ("turn", "without", "under"),
    [
        ("<think>a</think>\nb", "\nb", "\nb"),
        ("a</think>b", "b", "b"),
        ("a b", "a b", ""),
        ("<think>a", "<think>a", ""),
        ("a</think>b</think>c", "c", "b</think>c"),
        ("", "", ""),
    ],
)
def test_replies(turn: str, without: str, under: str):
    task = Task((turn, turn))
    assert task.replies == (without, without)
    assert replace(task, has_parser=True).replies == (under, under) and replace(task, has_parser=True).reply == under


def test_thoughts_count_only_where_gym_does_not_grade():
    score = math.make("hf_math_verify", is_strict=False)
    late, unfinished = "<think>\\boxed{32}</think>The answer is 5.", "so \\boxed{32}"
    for text in (late, unfinished):
        assert score(Task((text,), "32")).reward == 1.0
        assert score(Task((text,), "32", has_parser=True)).reward == 0.0
    row = json.dumps({"options": [{"A": "x"}, {"B": "y"}], "expected_answer": "B", "schema_str": "{}"})
    for make, text in ((mcqa.make, "\\boxed{B}"), (structured_outputs.make, "{}")):
        assert make()(Task((text,), row=row)).reward == 1.0
        assert make()(Task((text,), row=row, has_parser=True)).reward == 0.0


def test_what_the_config_says_of_parsers():
    run = RunConfig(env=EnvConfig(should_use_nemo_gym=True))
    generation = run.policy.generation
    generation.vllm_cfg.http_server_serving_chat_kwargs = ServingChatConfig(
        tool_parser="hermes", reasoning_parser="deepseek_r1"
    )
    assert parsers_of(run, "math", "{}") == (True, "hermes")
    assert parsers_of(run, "my_own", "{}") == (False, "hermes")
    assert parsers_of(run, "math", "{}", '{"enable_thinking": false}') == (False, "hermes")
    run.env.should_use_nemo_gym = False
    assert parsers_of(run, "math", "{}") == (False, "hermes")
    assert parsers_of(run, "math", json.dumps({"agent_ref": {"name": "math_with_judge_simple_agent"}})) == (
        True,
        "hermes",
    )
    run.env.should_use_nemo_gym = True
    run.policy.tokenizer.chat_template_kwargs = {"enable_thinking": False}
    assert parsers_of(run, "math", "{}") == (False, "hermes")
    assert parsers_of(run, "math", "{}", '{"enable_thinking": true}') == (True, "hermes")
    generation.vllm_cfg.http_server_serving_chat_kwargs = ServingChatConfig()
    run.policy.tokenizer.chat_template_kwargs = None
    assert parsers_of(run, "math", "{}") == (False, "qwen3_coder")
