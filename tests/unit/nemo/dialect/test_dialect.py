# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from pathlib import Path

import pytest

from mrl.config.errors import ConfigError, Problem
from mrl.config.files import Setting, split_key
from mrl.config.load import load_config, load_run
from mrl.config.migration import Dialect, dialect
from mrl.config.schema.keys import KEYS
from mrl.config.schema.run import RunConfig
from mrl.nemo.dialect import translate
from mrl.nemo.dialect.tables import FOREIGN, NO_EFFECT, REFUSED, RENAMED, TRANSLATED
from mrl.nemo.dialect.translate import DIALECT_KEYS, is_foreign, migrate
from tests.sources import ROOT

NEMO_RL = ROOT / "tests/data/nemo_rl"
WORDS: Dialect = translate  # which pyright compares with what the program calls
REQUIRED = "policy: {model_name: m}\ndata: {train: {data_path: d}}\n"


def test_the_program_finds_the_dialect_by_name():
    assert dialect() is WORDS


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., RunConfig]:
    def load(text: str, *overrides: str) -> RunConfig:
        path = tmp_path / "config.yaml"
        path.write_text(REQUIRED + text)
        return load_config(path, overrides)

    return load


@pytest.fixture
def refused(load: Callable[..., RunConfig]) -> Callable[..., str]:
    def refused(text: str, *overrides: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load(text, *overrides)
        return str(caught.value)

    return refused


MEDIA = (
    "policy.is_vlm=true",
    "data.default.processor=vlm_hf_data_processor",
    "data.train.dataset_name=daily-omni",
    "data.default.env_name=vlm",
)


@pytest.mark.parametrize("setting", MEDIA)
def test_a_config_on_images_is_refused_for_that_alone(refused: Callable[..., str], setting: str):
    """Settings of NeMo RL's examples/configs/vlm_grpo_3B.yaml, sft_avlm.yaml and recipes/vlm."""
    said = refused("", f"++{setting}", "++env.geometry3k.num_workers=8", "++policy.generation.bad_words=[x]")
    assert said.splitlines() == [
        f"{setting} (command line): this config trains on images, video or sound, which mrl does not; "
        "use a config that trains on texts; no other key of this one was checked"
    ]


def test_all_settings_about_images_are_named_at_once_and_names_of_ones_own_are_none(
    load: Callable[..., RunConfig], refused: Callable[..., str]
):
    said = refused("", *(f"++{setting}" for setting in MEDIA))
    assert len(said.splitlines()) == 1 and all(setting in said for setting in MEDIA)
    own = ["++data.default.env_name=vlm", "++env.own.functions.vlm=my.judge:judge", "++policy.is_vlm=false"]
    assert load("", *own).data.default.env_name == "vlm"


def test_a_key_is_in_the_schema_or_in_one_table():
    groups = {"the schema": set(KEYS), "RENAMED": set(RENAMED), "TRANSLATED": set(TRANSLATED)}
    groups |= {"NO_EFFECT": set(NO_EFFECT), "REFUSED": set(REFUSED)}
    places: dict[str, list[str]] = {}
    for group, keys in groups.items():
        for key in keys:
            places.setdefault(key, []).append(group)
    assert {key: found for key, found in places.items() if len(found) > 1} == {}


def test_every_key_of_nemo_rl_has_a_place():
    known = KEYS.keys() | DIALECT_KEYS

    def has_place(dotted: str) -> bool:
        is_section = any(key.startswith(f"{dotted}.") for key in known)
        below_value = any(dotted.startswith(f"{key}.") for key in KEYS)
        return dotted in known or is_section or below_value or is_foreign(tuple(dotted.split(".")), 1)

    keys = (NEMO_RL / "keys.txt").read_text().split()
    assert len(keys) > 700
    assert [key for key in keys if not has_place(key)] == []


def test_whatever_is_refused_says_a_way_out():
    assert [key for key, entry in FOREIGN.items() if (entry.same is None) == bool(entry.way_out)] == []
    assert [key for key, entry in FOREIGN.items() if entry.same is not None and not entry.way_out] == []


def test_old_names_are_renamed_and_reported(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text("policy: {model_name: m}\ndata: {train_jsonl_fpath: a, validation_jsonl_fpath: b}\n")
    config, migration = load_run(path, ["data.train_jsonl_fpath=c"])
    assert config.data.validation is not None
    assert (config.data.train.data_path, config.data.validation.data_path) == ("c", "b")
    assert sorted(migration.renamed) == [
        "data.train_jsonl_fpath=c (command line) -> data.train.data_path",
        "data.validation_jsonl_fpath=b (config.yaml:2) -> data.validation.data_path",
    ]


def test_two_names_with_two_values_are_refused(refused: Callable[..., str], load: Callable[..., RunConfig]):
    two = "two names of data.train.data_path with two values; keep one of them"
    assert two in refused("", "data.train_jsonl_fpath=a", "data.train.data_path=b")
    assert load("", "data.train_jsonl_fpath=a", "data.train.data_path=a").data.train.data_path == "a"


def test_two_names_in_one_file_are_refused(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text("policy: {model_name: m}\ndata: {train_jsonl_fpath: a, train: {data_path: b}}\n")
    with pytest.raises(
        ConfigError,
        match="data.train_jsonl_fpath=a .* and data.train.data_path=b .*: two names of data.train.data_path",
    ):
        load_config(path)


def test_no_effect_is_reported_with_the_reason(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text(REQUIRED + "data_plane: {enabled: true}\n")
    _, migration = load_run(path, ["policy.generation_batch_size=64"])
    assert migration.sections()["without effect"] == [
        (
            "data_plane.enabled=true (config.yaml:3): rollouts stay where they were made, and their readers pull them; "
            "no service lies between"
        )
    ]
    assert migration.idle_overrides() == [
        "policy.generation_batch_size=64 (command line): NeMo RL reads it nowhere, and there is nothing for it to say "
        "here; it has no effect"
    ]


UNKNOWN = {"boolean": "maybe", "number": "many", "text": 7, "list": 7, "mapping": 7}
KNOWN = {
    "boolean": [True, False],
    "number": [3, 0.5],
    "text": ["a"],
    "list": [["a"]],
    "mapping": [{"a": 1}],
    "any": ["a", 3],
}


@pytest.mark.parametrize("key", [key for key, entry in FOREIGN.items() if entry.same is not None])
def test_a_reason_is_given_for_the_values_that_it_is_about(key: str):
    entry = FOREIGN[key]
    assert entry.same is not None

    def said(value: object) -> list[str]:
        problems: list[Problem] = []
        settings = {split_key(key): Setting(value, "a.yaml:1")}
        migrate(settings, lambda dotted: value if dotted == key else None, problems, ["policy"])
        return list(map(str, problems))

    refused = KNOWN[entry.refused] if isinstance(entry.refused, str) else entry.refused
    for value in refused:
        assert value in entry.same or [entry.reason in problem for problem in said(value)] == [True]
    for value in entry.same:
        assert isinstance(value, str) and "${" in value or said(value) == []
    if entry.refused != "any":
        (problem,) = said(UNKNOWN[entry.refused] if isinstance(entry.refused, str) else "unheard_of")
        assert (
            "no such value; known are " in problem and entry.reason not in problem and problem.endswith(entry.way_out)
        )


# As in examples/nemo_gym/nemotron-3.5-super/student_rlvr.yaml of NeMo RL's commit 472bb6451248.
SUPER = """
checkpointing: {load_replay_buffer: false, save_replay_buffer: true}
env: {genrm_agent_names: [genrm_simple_agent], use_genrm_compare: true}
grpo:
  async_grpo: {enabled: true, max_trajectory_age_steps: 1, in_flight_weight_updates: true, nemo_gym_stream_retries: 1}
  orm_advantage_weight: 0
  use_orm_advantage: false
  seq_logprob_error_force_on_policy: false
loss_fn: {behaviour_kl_input_clamp_value: 20, behaviour_kl_output_clamp_value: 10, behaviour_kl_penalty: 0,
  behaviour_kl_type: k3}
"""


def test_the_off_values_of_a_newer_recipe_change_nothing(load: Callable[..., RunConfig], refused: Callable[..., str]):
    engine, megatron = "policy.generation.vllm_cfg", "policy.megatron_cfg"
    config = load(SUPER, f"{engine}.load_format=dummy", f"{megatron}.moe_flex_dispatcher_backend=null")
    plain = load("grpo: {async_grpo: {enabled: true, max_trajectory_age_steps: 1, in_flight_weight_updates: true}}")
    assert config == plain
    for key, reason in {
        "loss_fn.behaviour_kl_penalty=0.1": "no loss holds the policy near the weights that sampled",
        "grpo.use_orm_advantage=true": "a key of on_policy_distillation",
        "grpo.seq_logprob_error_force_on_policy=true": "a masked sequence is not trained",
        "policy.megatron_cfg.fp32_lm_head=tf32": "the output layer computes in policy.precision",
    }.items():
        assert f"{key} (command line): {reason}" in refused(SUPER, key)


def test_sections_for_references_only_have_a_leading_underscore(
    load: Callable[..., RunConfig], refused: Callable[..., str], tmp_path: Path
):
    text = "_teachers: {general: /models/g, math: '${_teachers.general}', unused: 3}\n"
    config = load(text, "policy.model_name=${_teachers.math}", "logger.wandb.name=${_teachers.general}")
    assert (config.policy.model_name, config.logger.wandb.name) == ("/models/g", "/models/g")
    words = ["++_a={b: 1, c: 2, d: 3, e: [4]}", "logger.wandb.name=${_a.b}"]
    words += ["grpo.seed=${oc.select:_a.d,0}", "grpo.num_prompts_per_step=${_a.e[0]}"]
    report = load_run(tmp_path / "config.yaml", words)[1]
    assert report.idle_overrides() == ["_a.c=2 (command line): no key refers to it; it has no effect"]
    assert "teachers_ (config.yaml:3): no such section" in refused("teachers_: {general: a, math: b}\n")
    said = refused("env: {sliding_puzzle_game: {cfg: {}, size: 5, moves: 3}}\n")
    assert "no such section, with 3 keys; mrl has no such environment: leave it out, or write it as a function" in said
    assert "policy.model_name=${_teachers.maths}" in refused(text, "policy.model_name=${_teachers.maths}")


FUSED = """
policy:
  dtensor_cfg: {enabled: true, moe_parallelizer: {ignore_router_for_ac: true}}
  optimizer:
    name: transformer_engine.pytorch.optimizers.fused_adam.FusedAdam
    kwargs: {lr: 1.0e-06, master_weights: true, store_param_remainders: true, exp_avg_dtype: torch.bfloat16}
"""


def test_automodel_s_fused_adam_is_megatron_s(tmp_path: Path, refused: Callable[..., str]):
    path = tmp_path / "fused.yaml"
    path.write_text("data: {train: {data_path: d}}\n" + FUSED)
    optimizer = load_config(path, ["policy.model_name=m"]).policy.megatron_cfg.optimizer
    # Transformer Engine's default of weight_decay, unlike torch's.
    assert (optimizer.optimizer, optimizer.lr, optimizer.weight_decay) == ("adam", 1e-6, 0.0)
    said = refused("", "policy.dtensor_cfg.enabled=true", "policy.optimizer.kwargs.master_weights=false")
    assert "master_weights=false (command line): parameters are updated in float32" in said


@pytest.mark.parametrize(
    ("option", "accepted"),
    [(name, "false") for name in ("amsgrad", "maximize", "differentiable", "use_decoupled_grad")]
    + [(name, "true") for name in ("adam_w_mode", "bias_correction", "master_weights")],
)
def test_an_optimizer_s_option_passes_at_what_megatron_does(
    load: Callable[..., RunConfig], refused: Callable[..., str], option: str, accepted: str
):
    other = "true" if accepted == "false" else "false"
    option = f"policy.optimizer.kwargs.{option}"
    adam = ("policy.dtensor_cfg.enabled=true", "policy.optimizer.name=torch.optim.AdamW")
    assert load("", *adam, f"{option}={accepted}") == load("", *adam)
    assert f"{option}={other}" in refused("", *adam, f"{option}={other}")


@pytest.mark.parametrize(
    ("excluded", "layers"),
    [
        ("['*out_proj*']", ["out_proj"]),
        ("null", []),
        ("[]", []),
        # No adapter is ever made for these.
        ("['*lm_head*', embed_tokens]", []),
        ("[lm_head, gate_proj, up_proj]", ["linear_fc1"]),
    ],
)
def test_layers_without_adapters_are_named_as_automodel_does(
    load: Callable[..., RunConfig], excluded: str, layers: list[str]
):
    peft = load("", f"policy.dtensor_cfg={{enabled: true, lora_cfg: {{enabled: true, exclude_modules: {excluded}}}}}")
    assert peft.policy.megatron_cfg.peft.exclude_modules == layers


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("ppo.adv_estimator.name=gea", "no such value; use gae"),
        ("ppo.adv_estimator.name=grpo", "no other estimator gives returns"),
        ("policy.generation.vllm_cfg.logprobs_mode=raw_logprob", "no such value; use processed_logprobs"),
        ("policy.generation.vllm_cfg.logprobs_mode=raw_logprobs", "logprobs of another distribution"),
    ],
)
def test_one_value_of_a_text_is_told_from_slips(refused: Callable[..., str], override: str, reason: str):
    assert f"{override} (command line): {reason}" in refused("", override)


def test_dtensor_is_translated(load: Callable[..., RunConfig]):
    policy = load(
        "",
        (
            "policy.dtensor_cfg={enabled: true, tensor_parallel_size: 4, context_parallel_size: 2, "
            "activation_checkpointing: true}"
        ),
        (
            "policy.dtensor_cfg.lora_cfg={enabled: true, dim: 16, alpha: 8, match_all_linear: false, target_modules: "
            "[q_proj,k_proj,v_proj]}"
        ),
        "policy.dtensor_cfg.lora_cfg.lora_A_init=uniform",
        "policy.megatron_cfg.enabled=false",
        "policy.megatron_cfg.pipeline_model_parallel_size=2",
        "policy.precision=bfloat16",
    ).policy
    megatron = policy.megatron_cfg
    assert (
        megatron.tensor_model_parallel_size,
        megatron.context_parallel_size,
        megatron.pipeline_model_parallel_size,
    ) == (4, 2, 1)
    assert (
        megatron.sequence_parallel
        and megatron.activation_checkpointing
        and megatron.enabled
        and megatron.optimizer.bf16
    )
    assert (megatron.peft.enabled, megatron.peft.dim, megatron.peft.alpha) == (True, 16, 8)
    assert (megatron.peft.target_modules, megatron.peft.lora_A_init_method) == (["linear_qkv"], "kaiming")
    assert policy.make_sequence_length_divisible_by == 4


def test_a_torch_optimizer_and_its_schedule_are_translated():
    megatron = load_config(NEMO_RL / "grpo_math_8B.yaml", ["data.train.data_path=d"]).policy.megatron_cfg
    assert (megatron.optimizer.lr, megatron.optimizer.min_lr, megatron.optimizer.weight_decay) == (3e-7, 3e-7, 0.01)
    without = load_config(NEMO_RL / "grpo_math_8B.yaml", ["data.train.data_path=d", "~policy.optimizer.kwargs.lr"])
    assert without.policy.megatron_cfg.optimizer.lr == 1e-3  # torch's default
    assert (megatron.optimizer.adam_beta1, megatron.optimizer.adam_beta2, megatron.optimizer.adam_eps) == (
        0.9,
        0.999,
        1e-8,
    )
    scheduler = megatron.scheduler
    assert (scheduler.lr_decay_style, scheduler.lr_warmup_iters, scheduler.lr_warmup_init) == (
        "constant",
        13,
        pytest.approx(3e-8),
    )


def test_the_line_about_a_schedule_names_a_key_of_the_file(tmp_path: Path):
    path = tmp_path / "torch.yaml"
    warmup = "{name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, end_factor: 1.0, total_iters: 9}}"
    for written, said in (
        ("", "policy.optimizer.name (torch.yaml:3), without policy.scheduler -> policy.megatron_cfg.scheduler: "),
        (f", scheduler: {warmup}", "policy.scheduler (torch.yaml:3) -> policy.megatron_cfg.scheduler: "),
    ):
        optimizer = "{name: torch.optim.AdamW, kwargs: {lr: 5.0e-6}}"
        path.write_text(
            f"data: {{train: {{data_path: d}}}}\npolicy:\n  {{model_name: m, optimizer: {optimizer}{written}}}\n"
        )
        (line,) = [line for line in load_run(path, [])[1].translated if "megatron_cfg.scheduler:" in line]
        assert line.startswith(said)
    assert line.endswith("lr_warmup_iters=9, lr_warmup_init=5e-07")


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        (
            "{name: torch.optim.lr_scheduler.CosineAnnealingLR, kwargs: {T_max: 90, eta_min: 1.0e-7}}",
            ("cosine", 100, 1e-7),
        ),
        (
            "{name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 1.0, end_factor: 0.5, total_iters: 40}}",
            ("linear", 50, 5e-6),
        ),
    ],
)
def test_decays_are_translated(load: Callable[..., RunConfig], phase: str, expected: tuple[str, int, float]):
    warmup = "{name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, end_factor: 1.0, total_iters: 10}}"
    schedule = f"policy.scheduler=[{warmup}, {phase}, {{milestones: [10]}}]"
    megatron = load("", "policy.optimizer={name: torch.optim.AdamW, kwargs: {lr: 1e-5}}", schedule).policy.megatron_cfg
    scheduler = megatron.scheduler
    assert (scheduler.lr_decay_style, scheduler.lr_decay_iters, megatron.optimizer.min_lr) == expected
    assert (scheduler.lr_warmup_iters, scheduler.lr_warmup_init) == (10, pytest.approx(1e-6))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "policy.optimizer={name: torch.optim.SGD, kwargs: {lr: 0.1}}",
            "torch.optim.SGD is not supported; use torch.optim.AdamW",
        ),
        ("policy.optimizer.kwargs.betas=[0.9]", "AdamW has two"),
        (
            "policy.scheduler={name: torch.optim.lr_scheduler.StepLR, kwargs: {step_size: 5}}",
            "set it to null and write policy.megatron_cfg.scheduler",
        ),
        ("policy.scheduler=[{name: a.ConstantLR, kwargs: {factor: 1.0}}, {milestones: [7]}]", "set it to null"),
        ("policy.scheduler={name: a.LinearLR, kwargs: {last_epoch: 5}}", "without further options; set it to null and"),
        ("policy.dtensor_cfg.lora_cfg={enabled: true, target_modules: [q_proj]}", "q_proj: no whole layer of Megatron"),
        ("policy.dtensor_cfg.lora_cfg={enabled: true, lora_A_init: zeros}", "use one of xavier, uniform"),
        (
            "policy.dtensor_cfg.tensor_paralel_size=2",
            "no such key; the nearest is policy.dtensor_cfg.tensor_parallel_size",
        ),
    ],
)
def test_torch_settings_without_a_counterpart_are_refused(refused: Callable[..., str], override: str, said: str):
    assert said in refused("", override)


def test_the_backend_that_is_off_has_no_effect(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text(REQUIRED)
    overrides = [
        "policy.megatron_cfg.enabled=true",
        "policy.dtensor_cfg.enabled=false",
        "policy.dtensor_cfg.tensor_parallel_size=8",
    ]
    config, migration = load_run(path, [*overrides, "policy.optimizer.kwargs.lr=1"])
    assert config.policy.megatron_cfg.tensor_model_parallel_size == 1
    assert config.policy.megatron_cfg.optimizer.lr == RunConfig().policy.megatron_cfg.optimizer.lr
    assert (
        "policy.optimizer.kwargs.lr=1 (command line): policy.megatron_cfg is the backend that is enabled; it has no "
        "effect" in migration.idle_overrides()
    )
    assert not any(line.startswith("policy.dtensor_cfg.enabled") for line in migration.idle_overrides())
    on = ["policy.dtensor_cfg.enabled=true", "policy.megatron_cfg.optimizer.lr=1", "policy.megatron_cfg.enabled=false"]
    assert load_run(path, on)[1].idle_overrides() == [
        "policy.megatron_cfg.optimizer.lr=1 (command line): policy.dtensor_cfg is the backend that is enabled, where "
        "policy.optimizer.kwargs.lr sets it; it has no effect"
    ]


def test_keys_of_lora_that_is_off_are_one_line_without_effect(tmp_path: Path):
    path = tmp_path / "config.yaml"
    lora = "{enabled: false, dim: 16, alpha: 8, target_modules: [x]}"
    path.write_text(
        REQUIRED.replace("model_name: m", f"model_name: m, dtensor_cfg: {{enabled: true, lora_cfg: {lora}}}")
    )
    config, migration = load_run(path, [])
    assert not config.policy.megatron_cfg.peft.enabled and "lora_cfg" not in str(migration.sections()["translated"])
    said = migration.sections()["without effect"]
    assert "policy.dtensor_cfg.lora_cfg: 3 keys (alpha, dim, target_modules): LoRA is off" in said


def test_keys_of_lora_speak_to_megatrons_switch(load: Callable[..., RunConfig]):
    on, lora = "policy.megatron_cfg.peft.enabled=true", "policy.dtensor_cfg.lora_cfg"
    assert not load("", on, f"{lora}.enabled=false").policy.megatron_cfg.peft.enabled
    assert load("", on, f"{lora}.dim=16").policy.megatron_cfg.peft.dim == 16


def test_two_backends_are_refused(refused: Callable[..., str]):
    said = refused("", "policy.megatron_cfg.enabled=true", "policy.dtensor_cfg.enabled=true")
    assert "policy.dtensor_cfg.enabled=true (command line): policy.megatron_cfg.enabled is true, too" in said


def test_a_key_may_follow_a_key_that_only_nemo_rl_has(load: Callable[..., RunConfig]):
    policy = load(
        "", "policy.dtensor_cfg.tensor_parallel_size=2", "grpo.seed=${policy.dtensor_cfg.tensor_parallel_size}"
    )
    assert policy.grpo.seed == 2


def test_a_switch_of_vllm_s_compiler_names_it_now(refused: Callable[..., str], load: Callable[..., RunConfig]):
    compilation = "policy.generation.vllm_kwargs.compilation_config"
    kwargs = load(
        "", f"++{compilation}.use_inductor=False", f"++{compilation}.backend=eager"
    ).policy.generation.vllm_kwargs
    assert kwargs == {"compilation_config": {"backend": "eager"}}
    said = refused("", f"++{compilation}.use_inductor=False", f"++{compilation}.backend=inductor")
    assert (
        "it means backend=eager, and policy.generation.vllm_kwargs.compilation_config.backend=inductor; keep one "
        "of them"
    ) in said


def test_variables_of_dtensor_s_workers_become_megatron_s(load: Callable[..., RunConfig]):
    assert load("", "policy.dtensor_cfg.env_vars={A_B: x}").policy.megatron_cfg.env_vars == {"A_B": "x"}
    assert load("", "policy.dtensor_cfg.env_vars={}").policy.megatron_cfg.env_vars is None


@pytest.mark.parametrize(
    ("sampler", "lag", "freshest"),
    [
        ("", 1, False),
        ("sampler: {name: in_order, max_lookahead_versions: 0}", 0, False),
        ("sampler: {name: in_order, max_lookahead_versions: 3}", 3, False),
        ("sampler: {name: windowed, max_staleness_versions: 2, sample_freshest_first: true}", 2, True),
        ("sampler: {name: ready_first}", 1, False),
    ],
)
def test_a_single_controller_runs_as_far_ahead_as_its_sampler_lets_it(
    load: Callable[..., RunConfig], sampler: str, lag: int, freshest: bool
):
    text = (
        f"grpo: {{async_grpo: null}}\nasync_rl:\n  recompute_kv_cache_after_weight_updates: true\n  "
        f"max_inflight_prompts: 4\n  {sampler}\n"
    )
    found = load(text).grpo.async_grpo
    assert (found.max_lag_steps, found.sample_freshest_first) == (lag, freshest)
    assert found.in_flight_weight_updates == found.recompute_kv_cache_after_weight_updates == (lag > 0)


def test_a_sampler_of_the_users_own_is_refused(refused: Callable[..., str]):
    assert "async_rl.sampler.name=custom (config.yaml:3): no such sampler; use one of in_order, windowed" in refused(
        "async_rl: {sampler: {name: custom}}\n"
    )
