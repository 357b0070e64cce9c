# SPDX-License-Identifier: Apache-2.0
"""Keys of NeMo RL's recipes beside the schema: each key does what it says there, or is shown to change nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mrl.config.errors import ConfigError, value_at
from mrl.config.load import load_run
from mrl.config.migration import Migration
from mrl.config.rules.checks import find_problems
from mrl.config.schema.run import RunConfig
from tests.unit.config.problems import texts_of

ENGINE = "policy.generation.vllm_cfg"
KWARGS = "policy.generation.vllm_kwargs"
MEGATRON = "policy.megatron_cfg"
CHAT = f"{ENGINE}.http_server_serving_chat_kwargs"
GYM_MODEL = "env.nemo_gym.policy_model.responses_api_models.vllm_model"


@pytest.fixture
def load(workplace: Path) -> Callable[..., tuple[RunConfig, Migration]]:
    def load(*overrides: str) -> tuple[RunConfig, Migration]:
        return load_run("grpo_tiny.yaml", overrides)

    return load


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        (f"{KWARGS}.max_num_seqs=512", f"{ENGINE}.max_num_seqs", 512),
        (f"{KWARGS}.max_num_batched_tokens=9000", f"{ENGINE}.max_num_batched_tokens", 9000),
        (f"{KWARGS}.enable_prefix_caching=true", f"{ENGINE}.enable_prefix_caching", True),
        (f"{ENGINE}.enable_prefix_caching=false", f"{ENGINE}.enable_prefix_caching", False),
        (
            "policy.sequence_packing.algorithm=modified_ffd",
            "policy.sequence_packing.algorithm",
            "modified_first_fit_decreasing",
        ),
        ("policy.max_grad_norm=null", "policy.max_grad_norm", 0.0),
        ("policy.max_grad_norm=null", f"{MEGATRON}.optimizer.clip_grad", 0.0),
        (f"{MEGATRON}.optimizer.clip_grad=0", "policy.max_grad_norm", 0.0),
        (f"{MEGATRON}.optimizer.clip_grad=null", f"{MEGATRON}.optimizer.clip_grad", 0.0),
        ("grpo.val_period=-1", "grpo.val_period", 0),
        ("grpo.async_grpo=null", "grpo.async_grpo.max_lag_steps", 0),
        ("loss_fn.ratio_clip_min=1.0", "loss_fn.ratio_clip_min", 1.0),
        ("policy.dtensor_cfg.expert_parallel_size=4", f"{MEGATRON}.expert_model_parallel_size", 4),
        ("policy.logprob_chunk_size=64", "policy.output_chunk_tokens", 64),
        (
            f"{CHAT}.default_chat_template_kwargs.enable_thinking=false",
            f"{CHAT}.default_chat_template_kwargs",
            {"enable_thinking": False},
        ),
        (
            f"{CHAT}.chat_template_kwargs.enable_thinking=true",
            f"{CHAT}.default_chat_template_kwargs",
            {"enable_thinking": True},
        ),
        (f"{CHAT}.chat_template=null", f"{CHAT}.chat_template", "default"),
        (f"{GYM_MODEL}.extra_body.chat_template_kwargs.a=1", "policy.tokenizer.chat_template_kwargs", {"a": 1}),
        (f"{GYM_MODEL}.chat_template_kwargs.a=1", "policy.tokenizer.chat_template_kwargs", {"a": 1}),
    ],
)
def test_a_value_arrives(load: Callable[..., tuple[RunConfig, Migration]], override: str, key: str, value: object):
    config, _ = load(override)
    assert value_at(config, key) == value
    assert [problem for problem in texts_of(config) if "expert_model" not in problem] == []


def test_two_names_of_an_engine_s_argument_must_agree(load: Callable[..., tuple[RunConfig, Migration]]):
    assert (
        load(f"{KWARGS}.max_num_seqs=64", f"{ENGINE}.max_num_seqs=64")[0].policy.generation.vllm_cfg.max_num_seqs == 64
    )
    with pytest.raises(
        ConfigError, match="two names of policy.generation.vllm_cfg.max_num_seqs, which is 32; keep one of them"
    ):
        load(f"{KWARGS}.max_num_seqs=64", f"{ENGINE}.max_num_seqs=32")


WITHOUT_EFFECT = [
    "cluster.segment_size=8",
    f"{ENGINE}.skip_tokenizer_init=false",
    f"{ENGINE}.enable_expert_parallel=true",
    f"{MEGATRON}.train_iters=100000",
    f"{MEGATRON}.scheduler.override_opt_param_scheduler=true",
    "grpo.penalize_invalid_tool_call=true",
    "grpo.penalize_malformed_thinking=true",
    "grpo.invalid_tool_call_strategy=mask",
    "policy.generation.mcore_generation_config.anything.new=1",
    "policy.generation.longest_first=true",  # stands in the config.yaml of earlier runs
    "env.nemo_gym.is_trajectory_collection=false",
    "env.nemo_gym.skip_verification=false",
    "env.nemo_gym.num_gpu_nodes=0",
    "env.nemo_gym.uv_venv_dir=/venvs",
    "env.nemo_gym.gzip_responses_enabled=true",
    "env.nemo_gym.global_aiohttp_tcp_keepalive_probes=3",
    "env.nemo_gym.judge_base_url=null",
    "data.validation.split_validation_size=0",
    "grpo.async_grpo.nemo_gym_stream_retries=0",
    "policy.optimizer.kwargs.foreach=false",
    "policy.optimizer.kwargs.fused=true",
    "policy.dequantize_base_checkpoint=true",
    "policy.generation._pad_token_id=3",
    "policy.generation.model_name=null",
    "data.default.data_path=null",
    "data.train.num_frames=0",
    "data_plane.ack_timeout_ms=5",
    "env.math.stop_strings=null",
]
# NeMo RL does something else with each: see the reasons in tables.yaml and rules.py.
DIFFERENT = [
    "env.nemo_gym.num_gpu_nodes=3",
    "env.nemo_gym.judge_base_url=http://judge/v1",
    f"{GYM_MODEL}.uses_reasoning_parser=true",
    "env.nemo_gym.tokenizer_config.name=other",
    "env.nemo_gym.genrm_compare_resources_server.resources_servers.genrm_compare.num_rollouts_per_prompt=4",
    "env.nemo_gym.rdkit_chemistry_agent._inherit_from=litmus_agent_agent",
    "data.validation.split_validation_size=0.1",
    "grpo.async_grpo.nemo_gym_stream_retries=2",
    "checkpointing.save_replay_buffer=false",
    f"{ENGINE}.enable_vllm_metrics_logger=true",
]
# NeMo RL's workers read these, and processes get them here, too.
VARIABLES = [f"++{ENGINE}.env_vars.NRL_VLLM_FP32_LM_HEAD='1'", f"++{MEGATRON}.env_vars.NRL_X='1'"]


@pytest.mark.parametrize("override", WITHOUT_EFFECT)
def test_what_has_no_effect_is_reported(load: Callable[..., tuple[RunConfig, Migration]], override: str):
    config, migration = load(override)
    assert config == load()[0]
    (line,) = migration.idle_overrides()
    assert line.startswith(f"{override} (command line): ") and migration.differences() == []


@pytest.mark.parametrize("override", VARIABLES)
def test_variables_of_nemo_rl_s_workers_are_said_to_be_theirs(
    load: Callable[..., tuple[RunConfig, Migration]], override: str
):
    (line,) = load(override)[1].differences() or []
    assert line.endswith(": a variable that only NeMo RL's own workers read")
    assert (load(override.replace("NRL", "NCCL"))[1].differences() or []) == []


def test_what_is_done_otherwise_with_checkpoints_is_no_difference_without_any(
    load: Callable[..., tuple[RunConfig, Migration]],
):
    override = "checkpointing.model_save_format=safetensors"
    assert load(override)[1].differences() != []
    migration = load(override, "checkpointing.enabled=false")[1]
    assert migration.differences() == []
    assert [line.partition(" ")[0] for line in migration.idle_overrides()] == [override]


@pytest.mark.parametrize("override", DIFFERENT)
def test_what_nemo_rl_does_otherwise_is_reported_apart(load: Callable[..., tuple[RunConfig, Migration]], override: str):
    config, migration = load(override)
    assert config == load()[0] and migration.sections() == {}
    (line,) = migration.differences() or []
    assert line.startswith(f"{override} (command line): ")


@pytest.mark.parametrize(
    "override",
    [
        f"{MEGATRON}.scheduler.override_opt_param_scheduler=false",
        "env.nemo_gym.is_trajectory_collection=true",
        "env.nemo_gym.skip_verification=true",
        "env.nemo_gym.pad_dynamic_image_shapes=true",
        "policy.sequence_packing.algorithm=ffd",
        "grpo.val_period=-2",
        "policy.generation.model_name=other",
        "data.default.data_path=rows.jsonl",
        "env.math.stop_strings=[a]",
        "async_rl.sampler.target=mine.Sampler",
    ],
)
def test_values_that_mean_something_else_are_refused(load: Callable[..., tuple[RunConfig, Migration]], override: str):
    def problems() -> list[str]:
        try:
            return texts_of(load(override)[0])
        except ConfigError as error:
            return list(map(str, error.problems))

    assert any(str(problem).startswith(override.partition("=")[0]) for problem in problems())


def test_rows_fit_sequence_parallelism_whatever_the_multiple(load: Callable[..., tuple[RunConfig, Migration]]):
    parallel = (
        f"{MEGATRON}.tensor_model_parallel_size=2",
        f"{MEGATRON}.sequence_parallel=true",
        "cluster.cpu_units_per_node=2",
    )
    packing = "policy.sequence_packing.sequence_length_round=1"
    multiples = {}
    for multiple in (1, 2, 3, 4):
        config, _ = load(*parallel, packing, f"policy.make_sequence_length_divisible_by={multiple}")
        assert [problem for problem in texts_of(config) if "divisible" in problem] == []
        multiples[multiple] = config.policy.row_multiple
    assert multiples == {1: 2, 2: 2, 3: 6, 4: 4}


@pytest.mark.parametrize(
    ("overrides", "leaves"),
    [
        ([], True),
        (["policy.generation.colocated.enabled=false"], False),
        (["policy.generation.colocated.enabled=false", "policy.offload_optimizer_for_logprob=true"], True),
        (["policy.generation.colocated.enabled=false", "algorithm=ppo"], True),
        (["algorithm=sft", "policy.offload_optimizer_for_logprob=true"], False),
    ],
)
def test_the_optimizer_leaves_the_gpus_where_it_is_asked_to(
    load: Callable[..., tuple[RunConfig, Migration]], overrides: list[str], leaves: bool
):
    assert load(*overrides)[0].frees_training_memory is leaves


def test_a_model_that_the_launcher_names_is_still_to_be_provided(load: Callable[..., tuple[RunConfig, Migration]]):
    problems = find_problems(load("policy.model_name=null")[0])
    assert [problem for problem in problems if problem.kind == "refused"] == []
    assert any(str(problem).startswith("policy.model_name=<model>: no readable config.json") for problem in problems)


def test_the_home_of_the_hub_has_its_default(
    load: Callable[..., tuple[RunConfig, Migration]], monkeypatch: pytest.MonkeyPatch
):
    override = "data.train.data_path=${oc.env:HF_HOME}/rows.jsonl"
    monkeypatch.setenv("HF_HOME", "/home/of/hub")
    assert load(override)[0].data.train.data_path == "/home/of/hub/rows.jsonl"
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    config, _ = load(override)
    assert config.data.train.data_path == "/home/me/.cache/huggingface/rows.jsonl"
    (problem,) = find_problems(config)
    assert problem.kind == "to be provided"


def test_what_has_no_effect_may_follow_what_is_not_there(load: Callable[..., tuple[RunConfig, Migration]]):
    load("env.nemo_gym.uv_venv_dir=${oc.env:NO_SUCH_VARIABLE}/venvs")


def test_multiple_choice_is_an_environment_of_its_own(load: Callable[..., tuple[RunConfig, Migration]]):
    for kind, env_name in (("math", "math"), ("english_multichoice", "mcqa"), ("multilingual_multichoice", "mcqa")):
        assert load(f"env.math.verifier_type={kind}")[0].data.default.env_name == env_name
    named = load(
        "env.math.verifier_type=english_multichoice", "data.default.env_name=code", "data.train.env_name=math"
    )[0].data
    assert (named.default.env_name, named.train.env_name) == ("code", "mcqa")
    with pytest.raises(ConfigError, match="no such verifier; use one of math, english_multichoice"):
        load("env.math.verifier_type=oracle")


def test_keys_of_nemotron_s_recipes_of_super_3_mean_what_their_branch_reads(
    load: Callable[..., tuple[RunConfig, Migration]],
):
    """Branch super-v3 of NeMo RL: nemo_rl/experience/rollouts.py, vllm_worker_async.py and environments/nemo_gym.py."""
    config, _ = load(
        "++run.env.container=image",
        "++effort_levels.low_weight=0.2",
        "++effort_levels.low_string=low",
        f"++{CHAT}.reasoning_parser_plugin=nemo_rl/utils/nano_v3_reasoning_parser.py",
        "++env.nemo_gym.rollout_max_attempts_to_avoid_lp_nan=1",
        f"++{ENGINE}.fp8_cfg.is_mx=false",
    )
    effort, vllm = config.env.nemo_gym.effort_levels, config.policy.generation.vllm_cfg
    assert (effort.low_weight, effort.low_string, vllm.reasoning_parser_plugin) == (0.2, "low", None)
    with pytest.raises(ConfigError, match="a rollout is sampled once, whatever its logprobs; set it to 1"):
        load("++env.nemo_gym.rollout_max_attempts_to_avoid_lp_nan=3")
    with pytest.raises(ConfigError, match="NeMo RL does not read it here; set policy.generation.vllm_cfg.is_mx"):
        load(f"++{ENGINE}.fp8_cfg.is_mx=true")


def test_keys_of_nemotrons_launcher_pass_while_they_are_off(workplace: Path):
    """Keys and expressions of the recipes of Nemotron 3.5 Lightning, at the top of each file."""
    off = ["+convert_initial_checkpoint_to_hf=false", "+converted_checkpoint_dir=null"]
    assert texts_of(load_run("grpo_tiny.yaml", off)[0]) == texts_of(load_run("grpo_tiny.yaml", [])[0])
    with pytest.raises(ConfigError, match="initial_checkpoint=/sft .*give policy.model_name what .*mcore-to-hf"):
        load_run("grpo_tiny.yaml", [*off, "+initial_checkpoint=/sft"])
    with pytest.raises(ConfigError, match=r"\{art:data,train\}.*: Unsupported .* art; give the value itself"):
        load_run("grpo_tiny.yaml", ["data.train.data_path=${art:data,train}"])
