# SPDX-License-Identifier: Apache-2.0
"""Rows that go to graders of ours and which to NeMo Gym's servers, and what those are given."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mrl.config.errors import ConfigError, Problems
from mrl.config.load import load_run
from mrl.config.rules.data import check_environments, environment_names, is_agent, parts_at_work, route_of
from mrl.config.schema.env import EnvConfig, GymHeadConfig, NemoGymConfig, OwnEnvConfig
from mrl.config.schema.run import RunConfig
from mrl.nemo.gym.rules import COMPARED, describe_routes

PATHS = [
    "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml",
    "resources_servers/mcqa/configs/mcqa.yaml",
    "resources_servers/math_with_judge/configs/math_with_judge.yaml",
    "resources_servers/genrm_compare/configs/genrm_compare.yaml",
    "responses_api_agents/swe_agents/configs/swebench_openhands_training.yaml",
]
JUDGE = {"math_with_judge": {"resources_servers": {"math_with_judge": {"should_use_judge": True}}}}


def gym(**settings: Any) -> EnvConfig:
    return EnvConfig(should_use_nemo_gym=True, nemo_gym=NemoGymConfig(PATHS, **settings))


def problems_of(config: EnvConfig, *kinds: str) -> list[str]:
    run = RunConfig(env=config)
    run.policy.generation.vllm_cfg.expose_http_server = True
    run.data.default.env_name = "nemo_gym"
    check_environments(run, problems := Problems(run))
    return [str(problem) for problem in problems.merged if not kinds or problem.kind in kinds]


def test_rows_go_to_graders_to_servers_and_to_agents_of_the_user():
    alone, served = gym(), gym(command=sys.executable)
    agents = ("mcqa_simple_agent", "math_with_judge_simple_agent", "swe_agents_train", "genrm_simple_agent")
    assert [route_of(agent, alone) for agent in agents] == ["mcqa", "math", None, None]
    assert [route_of(agent, served) for agent in agents] == ["mcqa", "math", "swe_agents_train", "genrm_simple_agent"]
    assert [is_agent(name, served) for name in ("mcqa", "math", "code", "swe_agents_train")] == [
        False,
        False,
        False,
        True,
    ]
    assert not is_agent("swe_agents_train", alone)
    # A model judges there, and math-verify here.
    judged = gym(command=sys.executable, servers=JUDGE)
    assert [route_of(agent, judged) for agent in agents[:2]] == ["mcqa", "math_with_judge_simple_agent"]
    everything = gym(command=sys.executable, embedded=False)
    assert [route_of(agent, everything) for agent in agents[:2]] == list(agents[:2])
    own = gym(command=sys.executable)
    own.own, own.remote = OwnEnvConfig(agents={"mcqa_simple_agent": "a:b"}), {"swe_agents_train": "http://x/run"}
    assert [route_of(agent, own) for agent in agents[:3]] == ["mcqa_simple_agent", "math", "swe_agents_train"]
    assert "mcqa" in environment_names(own) and is_agent("mcqa_simple_agent", own)


def test_a_wait_names_what_of_the_users_has_the_rollouts():
    config = gym(command=sys.executable)
    config.own = OwnEnvConfig(functions={"sums": "my_rewards:sums"}, agents={"tools": "my_agents:tools"})
    config.remote = {"far": "http://far:8000/run"}
    assert parts_at_work(["far", "math", "sums", "far", "tools", "swe_agents_train"], config) == [
        "2 rollouts are with agent far (http://far:8000/run)",
        "1 rollouts are with environment math",
        "1 rollouts are with environment sums (my_rewards:sums)",
        "1 rollouts are with agent tools (my_agents:tools)",
        "1 rollouts are with agent swe_agents_train (of NeMo Gym's servers)",
    ]


def test_the_check_says_which_servers_somebody_starts():
    def routes(config: EnvConfig) -> str:
        return describe_routes(RunConfig(env=config))

    missing = (
        "rows of genrm_compare, swe_agents; nothing starts them: set env.nemo_gym.command or "
        "env.nemo_gym.head_server.host"
    )
    assert routes(gym()) == f"graded here: rows of mcqa, math_with_judge\non NeMo Gym's servers: {missing}"
    assert "rows of genrm_compare, swe_agents; the run starts them by ng_run" in routes(gym(command="ng_run"))
    head = gym(head_server=GymHeadConfig("h", 11000), policy_base_url="http://me:7000/gym/v1", servers=JUDGE)
    assert "graded here: rows of mcqa\n" in routes(head)
    assert "you start them, with their head server at h:11000 and policy_base_url=http://me:7000/gym/v1" in routes(head)
    assert routes(gym(command="ng_run", embedded=False)).startswith(
        "on NeMo Gym's servers: rows of mcqa, math_with_judge, genrm_compare"
    )
    embedded = EnvConfig(should_use_nemo_gym=True, nemo_gym=NemoGymConfig(PATHS[:2]))
    assert routes(embedded) == "graded here: rows of mcqa; there is nothing else to start"
    assert routes(EnvConfig()) == ""


def test_servers_that_nobody_starts_are_to_be_provided():
    (problem,) = problems_of(gym(servers=JUDGE), "to be provided")
    assert (
        "no grader for rows of math_with_judge, genrm_compare, swe_agents (math_with_judge: should_use_judge=true)"
        in problem
    )
    (problem,) = problems_of(gym(command="/nowhere/ng_run"), "to be provided")
    assert "no such program" in problem
    assert problems_of(gym(command=f"{sys.executable} -m x")) == []


@pytest.mark.parametrize(
    ("config", "messages"),
    [
        (gym(head_server=GymHeadConfig("h")), ["policy_base_url=null: ", "policy_api_key=null: "]),
        (
            gym(head_server=GymHeadConfig("h"), policy_base_url="http://me:1/v1", policy_api_key="k"),
            ["give http://HOST:PORT/gym/v1"],
        ),
        (gym(head_server=GymHeadConfig("h"), policy_base_url="http://me:1/gym/v1", policy_api_key="k"), []),
        (gym(command=sys.executable, thinking_tags=["<think>"]), ["an opening and a closing mark"]),
        (EnvConfig(nemo_gym=NemoGymConfig(command=sys.executable)), ["set env.should_use_nemo_gym=true"]),
        (gym(embedded=False), ["no grader for rows of mcqa"]),
    ],
)
def test_what_keeps_rows_from_servers_is_told(config: EnvConfig, messages: list[str]):
    if not config.should_use_nemo_gym:
        config.own = OwnEnvConfig(functions={"nemo": "a:b"})
    found = [problem for problem in problems_of(config) if "env.nemo_gym" in problem]
    assert len(found) == len(messages)
    assert all(message in problem for message, problem in zip(messages, found, strict=True))


def compared(number: object, name: str = "genrm_compare_resources_server") -> dict[str, Any]:
    return {name: {"resources_servers": {"genrm_compare": {"num_rollouts_per_prompt": number}}}}


@pytest.mark.parametrize(
    ("servers", "size", "told"),
    [
        ({}, 16, []),  # Gym's own number
        ({}, 8, ["genrm_compare waits for 16 answers of a prompt"]),
        (compared(8), 8, []),
        (
            compared(4),
            8,
            [
                "set env.nemo_gym.genrm_compare_resources_server.resources_servers.genrm_compare."
                "num_rollouts_per_prompt=8"
            ],
        ),
        (
            compared(8) | compared(16, "mine"),
            8,
            ["waits for 16 answers of a prompt (env.nemo_gym.mine.resources_servers"],
        ),
        (compared("8"), 8, ["waits for 8 answers"]),
    ],
)
def test_a_server_that_compares_a_group_waits_for_as_many_as_it_has(
    servers: dict[str, Any], size: int, told: list[str]
):
    run = RunConfig(env=gym(command=sys.executable, servers=servers))
    run.grpo.num_generations_per_prompt = size
    check_environments(run, problems := Problems(run))
    found = [problem for problem in map(str, problems.merged) if "genrm_compare" in problem]
    assert len(found) == len(told) and all(one in problem for one, problem in zip(told, found, strict=True))
    assert all(problem.startswith(f"grpo.num_generations_per_prompt={size}: ") for problem in found)
    # Its settings arrive only at servers that the run starts.
    run.env.nemo_gym.command = None
    check_environments(run, problems := Problems(run))
    assert not [problem for problem in map(str, problems.merged) if COMPARED in problem]


def test_agents_rules_hold_for_servers():
    run = RunConfig(env=gym(command=sys.executable))
    run.data.default.env_name = "nemo_gym"
    check_environments(run, problems := Problems(run))
    (problem,) = map(str, problems.merged)
    assert problem.startswith("policy.generation.vllm_cfg.expose_http_server=null: env.nemo_gym.command names agents")


def test_servers_tell_validation_by_what_they_send():
    run = RunConfig(env=gym(command=sys.executable))
    run.data.default.env_name, run.policy.generation.vllm_cfg.expose_http_server = "nemo_gym", True
    generation = run.policy.generation
    generation.temperature = generation.val_temperature = 0.5
    generation.val_top_p, generation.val_top_k = generation.top_p, 3
    check_environments(run, problems := Problems(run))
    (problem,) = map(str, problems.merged)
    assert problem.startswith(
        "policy.generation.val_top_k=3: env.nemo_gym.command names servers, which ask with temperature and top_p"
    )
    generation.val_temperature = 0.0
    check_environments(run, problems := Problems(run))
    assert not problems.merged


@pytest.fixture
def load(workplace: Path) -> Callable[..., RunConfig]:
    return lambda *overrides: load_run("grpo_tiny.yaml", overrides)[0]


KEYS = (
    "env.nemo_gym.uv_venv_dir=/venvs",
    "env.nemo_gym.port_range_low=${policy.max_total_sequence_length}",
    "env.nemo_gym.policy_model.responses_api_models.vllm_model.chat_template_kwargs.enable_thinking=true",
    "env.nemo_gym.policy_model_reasoning_off._copy=policy_model",
    "env.nemo_gym.code_gen.resources_servers.code_gen.num_processes=64",
    "env.nemo_gym.math_with_judge.resources_servers.math_with_judge.should_use_judge=true",
    "env.nemo_gym.judge_api_key=secret",
)


def test_keys_of_servers_are_handed_on_to_a_run_that_starts_them(load: Callable[..., RunConfig]):
    model = {"responses_api_models": {"vllm_model": {"chat_template_kwargs": {"enable_thinking": True}}}}
    config = load(*KEYS, "env.nemo_gym.command=ng_run")
    assert config.env.nemo_gym.servers == {
        "uv_venv_dir": "/venvs",
        "port_range_low": config.policy.max_total_sequence_length,
        "policy_model": model,
        "policy_model_reasoning_off": {"_copy": "policy_model"},
        "code_gen": {"resources_servers": {"code_gen": {"num_processes": 64}}},
        **JUDGE,
        "judge_api_key": "secret",
    }
    # What is ours, too, keeps its meaning here.
    assert config.env.code.num_workers == 64 and config.policy.tokenizer.chat_template_kwargs == {
        "enable_thinking": True
    }
    without = load(*KEYS)
    assert without.env.nemo_gym.servers == JUDGE and without.env.code.num_workers == 64


@pytest.mark.parametrize("key", ["confg_paths", "mcqa.resource_servers.mcqa.x", "policy_model", "num_gpu_node"])
def test_what_neither_takes_is_refused(load: Callable[..., RunConfig], key: str):
    with pytest.raises(ConfigError, match=f"env.nemo_gym.{key}.*: no such key"):
        load(f"env.nemo_gym.{key}=1")
