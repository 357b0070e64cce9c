# SPDX-License-Identifier: Apache-2.0
import pytest

from mrl.config.errors import Problems
from mrl.config.rules.data import check_environments, check_parsers, environment_names
from mrl.config.schema.algo import GrpoConfig
from mrl.config.schema.data import DataConfig, DataDefaultConfig
from mrl.config.schema.env import BUILT_IN, EnvConfig, NemoGymConfig, OwnEnvConfig
from mrl.config.schema.generation import ServingChatConfig
from mrl.config.schema.run import RunConfig

PATHS = [
    "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml",
    "resources_servers/code_gen/configs/code_gen.yaml",
]


def problems_of(config: EnvConfig, env_name: str) -> list[str]:
    run = RunConfig(env=config, data=DataConfig(default=DataDefaultConfig(env_name=env_name)))
    check_environments(run, problems := Problems(run))
    return list(map(str, problems.merged))


def test_servers_of_nemo_gym_choose_environments():
    config = EnvConfig(should_use_nemo_gym=True, nemo_gym=NemoGymConfig(config_paths=PATHS))
    assert environment_names(config) == ("code",)
    assert problems_of(config, "nemo_gym") == []
    assert "data.default.env_name=math" in problems_of(config, "math")[0]


def test_without_nemo_gym_all_environments_are_there():
    assert environment_names(EnvConfig(nemo_gym=NemoGymConfig(config_paths=PATHS))) == BUILT_IN
    assert "use one of math" in problems_of(EnvConfig(), "nemo_gym")[0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            EnvConfig(should_use_nemo_gym=True, nemo_gym=NemoGymConfig(["resources_servers/browser/a.yaml"])),
            "no grader for rows of browser",
        ),
        (EnvConfig(own=OwnEnvConfig(functions={"math": "a:b"})), "built-in environment has that name"),
    ],
)
def test_what_is_wrong_is_told_with_a_way_out(config: EnvConfig, message: str):
    (problem,) = problems_of(config, "math")
    assert message in problem


def test_agents_of_nemo_gym_take_their_own_number_of_turns():
    def most_turns(env: EnvConfig, turns: int) -> int:
        return RunConfig(env=env, grpo=GrpoConfig(max_rollout_turns=turns)).max_rollout_turns

    gym = EnvConfig(should_use_nemo_gym=True)
    assert (most_turns(EnvConfig(), 1), most_turns(EnvConfig(), 8), most_turns(gym, 1), most_turns(gym, 8)) == (
        1,
        8,
        6,
        8,
    )


def test_parsers_that_environments_do_not_read_are_refused_by_their_keys():
    chat = "policy.generation.vllm_cfg.http_server_serving_chat_kwargs"

    def refused(env: EnvConfig, env_name: str, *, tools: str | None = None, thoughts: str | None = None) -> list[str]:
        run = RunConfig(env=env, data=DataConfig(default=DataDefaultConfig(env_name=env_name)))
        run.policy.generation.vllm_cfg.http_server_serving_chat_kwargs = ServingChatConfig(
            tool_parser=tools, reasoning_parser=thoughts
        )
        check_parsers(run, problems := Problems(run))
        return list(map(str, problems.merged))

    gym = EnvConfig(
        should_use_nemo_gym=True, nemo_gym=NemoGymConfig(["resources_servers/workplace_assistant/configs/a.yaml"])
    )
    for env, env_name in ((gym, "nemo_gym"), (EnvConfig(), "workplace_assistant")):
        (problem,) = refused(env, env_name, tools="deepseek_v3")
        assert problem.startswith(f"{chat}.tool_parser=deepseek_v3: ") and "hermes" in problem
        assert refused(env, env_name, tools="llama3_json", thoughts="deepseek_r1") == []
    assert refused(EnvConfig(), "math", tools="deepseek_v3", thoughts="mistral") == []
    (problem,) = refused(gym, "nemo_gym", thoughts="mistral")
    assert problem.startswith(f"{chat}.reasoning_parser=mistral: ") and "qwen3" in problem
