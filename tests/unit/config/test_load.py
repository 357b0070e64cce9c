# SPDX-License-Identifier: Apache-2.0
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from mrl.config.errors import ConfigError
from mrl.config.files import find_config, packaged_configs, read_settings
from mrl.config.known import TRL_NAMES
from mrl.config.load import load_config
from mrl.config.overrides import apply_overrides, quoted
from mrl.config.schema.keys import KEYS, SCHEMA, SchemaNode
from mrl.config.schema.run import RunConfig
from tests.sources import ROOT

REQUIRED = "policy: {model_name: m}\ndata: {train: {data_path: d}}\n"


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def load(folder: Path, text: str, *overrides: str) -> RunConfig:
    return load_config(write(folder, "config.yaml", text), overrides)


def problems(folder: Path, text: str, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, *overrides)
    return tuple(map(str, caught.value.problems))


def test_packaged_config_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert find_config("grpo_tiny.yaml") == packaged_configs() / "grpo_tiny.yaml"
    assert load_config("grpo_tiny.yaml").policy.megatron_cfg.tensor_model_parallel_size == 2


def test_packaged_configs_share_no_run_folder():
    folders = {path.name: load_config(path).checkpointing.checkpoint_dir for path in packaged_configs().glob("*.yaml")}
    assert folders == {name: f"results/{name.removesuffix('.yaml')}" for name in folders}


def test_sections_of_one_class_have_their_values_apart(tmp_path: Path):
    env = load(tmp_path, REQUIRED, "env.mcqa.num_workers=7").env
    assert (env.mcqa.num_workers, env.structured_outputs.num_workers) == (
        7,
        RunConfig().env.structured_outputs.num_workers,
    )


def test_the_working_directory_comes_before_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "grpo_tiny.yaml", REQUIRED)
    assert find_config("grpo_tiny.yaml") == tmp_path / "grpo_tiny.yaml"


def test_missing_config_lists_the_packaged_ones():
    with pytest.raises(ConfigError, match=r"config nope\.yaml: no such file .*grpo_tiny\.yaml"):
        load_config("nope.yaml")


def test_values_are_plain_and_typed(tmp_path: Path):
    config = load(
        tmp_path,
        REQUIRED,
        "policy.megatron_cfg.optimizer.lr=1e-4",
        "policy.generation.stop_token_ids=[1, 2]",
        "policy.max_grad_norm=2",
    )
    assert config.policy.megatron_cfg.optimizer.lr == 1e-4
    assert type(config.policy.generation.stop_token_ids) is list
    assert type(config.policy.max_grad_norm) is float
    assert config.policy.megatron_cfg.optimizer.clip_grad == 2.0
    assert pickle.loads(pickle.dumps(config)) == config


def test_derived_values_follow(tmp_path: Path):
    config = load(
        tmp_path,
        REQUIRED,
        "grpo.num_prompts_per_step=3",
        "grpo.num_generations_per_prompt=5",
        "policy.model_name=there",
    )
    assert config.policy.train_global_batch_size == 15
    assert config.policy.tokenizer.name == "there"
    assert config.logger.log_dir == "results/grpo/logs"


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("mul:3,4", 12),
        ("add:3,4", 7),
        ("div:12,4", 3),
        ("max:3,4", 4),
        ("mul:${add:1,2},${grpo.seed}", 126),
        ("grpo.seed", 42),
    ],
)
def test_resolvers(tmp_path: Path, expression: str, value: int):
    assert load(tmp_path, REQUIRED, f"grpo.max_num_steps='${{{expression}}}'").grpo.max_num_steps == value


def test_defaults_are_inherited_depth_first(tmp_path: Path):
    write(tmp_path, "root.yaml", "grpo: {seed: 1, max_num_steps: 1, val_period: 1}\n" + REQUIRED)
    write(tmp_path, "left.yaml", "defaults: root.yaml\ngrpo: {max_num_steps: 2, val_period: 2}\n")
    write(tmp_path, "right.yaml", "grpo: {val_period: 3}\n")
    grpo = load(tmp_path, "defaults: [left.yaml, right.yaml]\ngrpo: {num_prompts_per_step: 4}\n").grpo
    assert (grpo.seed, grpo.max_num_steps, grpo.val_period, grpo.num_prompts_per_step) == (1, 2, 3, 4)


def test_defaults_are_relative_to_their_file_or_packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "configs"
    folder.mkdir()
    write(folder, "base.yaml", "defaults: grpo_tiny.yaml\ngrpo: {seed: 7}\n")
    path = write(folder, "top.yaml", "defaults: base.yaml\n")
    monkeypatch.chdir(tmp_path)
    config = load_config(path)
    assert (config.grpo.seed, config.grpo.max_num_steps) == (7, 160)


def test_a_circle_of_defaults_and_a_missing_base_are_named(tmp_path: Path):
    write(tmp_path, "a.yaml", "defaults: config.yaml\n")
    assert "config.yaml -> a.yaml -> config.yaml" in problems(tmp_path, "defaults: a.yaml\n")[0]
    assert "nope.yaml" in problems(tmp_path, "defaults: nope.yaml\n")[0]


def test_null_removes_an_optional_section_and_a_later_key_brings_it_back(tmp_path: Path):
    with_validation = REQUIRED + "grpo: {}\n"
    assert (
        load(tmp_path, with_validation, "data.validation={data_path: v}", "data.validation=null").data.validation
        is None
    )
    validation = load(tmp_path, with_validation, "data.validation=null", "data.validation.data_path=v").data.validation
    assert validation is not None and validation.data_path == "v"


def test_override_signs(tmp_path: Path):
    text = REQUIRED + "grpo: {seed: 1}\n"
    assert load(tmp_path, text, "grpo.seed=2").grpo.seed == 2
    assert load(tmp_path, text, "++grpo.seed=3").grpo.seed == 3
    assert load(tmp_path, text, "~grpo.seed").grpo.seed == RunConfig().grpo.seed
    assert load(tmp_path, text, "+grpo.max_num_steps=5").grpo.max_num_steps == 5
    assert load(tmp_path, text, "~grpo").grpo.seed == RunConfig().grpo.seed
    kwargs = load(
        tmp_path, text, "+policy.generation.vllm_kwargs.a.b=1", "++policy.generation.vllm_kwargs.c=[x]"
    ).policy.generation.vllm_kwargs
    assert kwargs == {"a": {"b": 1}, "c": ["x"]}
    assert problems(tmp_path, text, "+grpo.seed=2") == (
        "override +grpo.seed=2: grpo.seed is already set by config.yaml:3; write grpo.seed=2 to replace it",
    )
    assert "nothing to remove" in problems(tmp_path, text, "~grpo.max_num_steps")[0]
    assert "nearest" not in problems(tmp_path, text, "~grpo.max_num_steps")[0]
    assert problems(tmp_path, text, "~grpo.sed")[0].endswith("; drop the override; the nearest key is grpo.seed")
    assert problems(tmp_path, text, "grpo.seed = 5") == ("override grpo.seed = 5: spaces before =; write grpo.seed=5",)
    name, sign, value = problems(tmp_path, text, "grpo.seed", "=", "5")
    assert name.startswith("override grpo.seed: it has no value; write key=value") and "write key=value" in sign
    assert name.endswith(", without spaces around =") and value.endswith(", without spaces around =")


@pytest.mark.parametrize("override", ["grpo", "=3", "grpo..seed=3", "+~grpo.seed", "+++grpo.seed=1", ".=1", "", "~"])
def test_malformed_overrides(tmp_path: Path, override: str):
    assert "write key=value" in problems(tmp_path, REQUIRED, override)[0]


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("grpo.num_prompt_per_step", "grpo.num_prompts_per_step"),
        ("tensor_model_parallel_size", "policy.megatron_cfg.tensor_model_parallel_size"),
        ("policy.generation.gpu_memory_utilization", "policy.generation.vllm_cfg.gpu_memory_utilization"),
        ("polcy.precision", "policy"),
        ("policy.megatron_cfg.optimiser.lr", "policy.megatron_cfg.optimizer"),
        ("learning_rate", "policy.megatron_cfg.optimizer.lr"),
        ("grpo.num_generations", "grpo.num_generations_per_prompt"),
        ("grpo.beta", "loss_fn.reference_policy_kl_penalty"),
    ],
)
def test_unknown_key_fails_with_the_nearest(tmp_path: Path, key: str, nearest: str):
    assert problems(tmp_path, REQUIRED, f"{key}=1") == (
        f"{key}=1 (command line): no such key; the nearest is {nearest}",
    )


def test_names_of_trl_are_told_by_keys_that_there_are():
    assert set(TRL_NAMES.values()) <= KEYS.keys() and not any(
        name in key.split(".") for name in TRL_NAMES for key in KEYS
    )


def test_all_problems_come_at_once_with_file_and_line(tmp_path: Path):
    write(tmp_path, "base.yaml", "\n\nloss_fn:\n  ratio_clip: 0.2\n")
    text = (
        "defaults: base.yaml\ngrpo:\n  seed: abc\n  val_at_end: 3\npolicy:\n  precision: fp8\n  tokenizer: 4\n  "
        "model_name: {a: b}\n"
    )
    found = problems(tmp_path, text, "cluster.num_nodes=1.5", "grpo.max_num_steps=${nope}")
    expected = [
        "loss_fn.ratio_clip=0.2 (base.yaml:4)",
        "grpo.seed=abc (config.yaml:3)",
        "grpo.val_at_end=3 (config.yaml:4)",
    ]
    expected += [
        "policy.precision=fp8 (config.yaml:6)",
        "policy.tokenizer=4 (config.yaml:7)",
        "policy.model_name.a=b (config.yaml:8)",
    ]
    expected += ["cluster.num_nodes=1.5 (command line)", "grpo.max_num_steps=${nope} (command line)"]
    for start in expected:
        assert any(problem.startswith(start) for problem in found), (start, found)


@pytest.mark.parametrize("value", ["true", "1.5", "abc", "[1]", "{a: 1}", "''", "null"])
def test_a_whole_number_takes_nothing_else(tmp_path: Path, value: str):
    assert problems(tmp_path, REQUIRED, f"grpo.seed={value}")[0].startswith("grpo.seed")


@pytest.mark.parametrize("value", ["1", "0", "maybe", "null", "[true]"])
def test_a_truth_value_takes_nothing_else(tmp_path: Path, value: str):
    assert problems(tmp_path, REQUIRED, f"grpo.val_at_end={value}")[0].startswith("grpo.val_at_end")


@pytest.mark.parametrize(
    "override",
    [
        "grpo.seed=${div:1,0}",
        "grpo.seed=${grpo.seed}",
        "grpo.seed=${mul:x,y}",
        "grpo.seed=${mul:1}",
        "grpo.seed=${oc.env:NO_SUCH_VARIABLE}",
    ]
    + [
        "grpo.seed=${nope:1}",
        "policy.model_name=${unclosed",
        "grpo.seed=[1,",
        "policy.train_global_batch_size=${div:3,2}",
    ],
)
def test_an_expression_that_cannot_be_resolved_is_one_problem(tmp_path: Path, override: str):
    found = problems(tmp_path, REQUIRED, override)
    assert len(found) == 1 and override.partition("=")[0] in found[0]


@pytest.mark.parametrize(
    "text", ["- a\n", "a: [1\n", "just text\n", "a: 1\na: 2\n", "\t: x\n", "grpo: {seed: '${'}\n", "a: &x 1\n<<: 3\n"]
)
def test_a_file_that_is_no_config_is_named(tmp_path: Path, text: str):
    assert "config.yaml" in problems(tmp_path, text)[0]


def test_an_unreadable_encoding_is_named(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_bytes(b"\xff\xfe\x00grpo: 1")
    with pytest.raises(ConfigError, match="config.yaml"):
        load_config(path)


def test_a_config_error_crosses_processes():
    error = pickle.loads(pickle.dumps(ConfigError(["a", "b"])))
    assert [problem.rule for problem in error.problems] == ["a", "b"] and str(error) == "a\nb"


def test_a_marked_section_replaces_the_inherited_one(tmp_path: Path):
    write(tmp_path, "base.yaml", REQUIRED + "cluster: {num_nodes: 4, gpus_per_node: 8}\nlogger: {log_dir: there}\n")
    text = (
        "defaults: base.yaml\ncluster: {_override_: true, gpus_per_node: 2}\nlogger: {_override_: false, "
        "tensorboard_enabled: true}\n"
    )
    config = load(tmp_path, text)
    assert (config.cluster.num_nodes, config.cluster.gpus_per_node) == (1, 2)
    assert (config.logger.log_dir, config.logger.tensorboard_enabled) == ("there", True)
    assert (
        "_override_=3 (config.yaml:4): it marks a section to replace; set it to true or false"
        in problems(tmp_path, REQUIRED + "\ncluster: {_override_: 3}\n")[0]
    )


def test_an_expression_may_be_relative(tmp_path: Path):
    text = (
        REQUIRED
        + "grpo: {max_num_steps: '${.seed}', seed: 7, val_period: '${..cluster.num_nodes}'}\ncluster: {num_nodes: 3}\n"
    )
    grpo = load(tmp_path, text).grpo
    assert (grpo.max_num_steps, grpo.val_period) == (7, 3)


def test_a_dot_at_the_top_of_a_file_stands_for_a_level(tmp_path: Path):
    config = load(tmp_path, REQUIRED + "loss_fn.reference_policy_kl_penalty: 0.05\ncheckpointing.save_period: 3\n")
    assert (config.loss_fn.reference_policy_kl_penalty, config.checkpointing.save_period) == (0.05, 3)
    assert "loss_fn.reference_kl=1 (config.yaml:3)" in problems(tmp_path, REQUIRED + "loss_fn.reference_kl: 1\n")[0]


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("+policy.generation.vllm_kwargs.x={a:1,b:{c:[2,null]}}", {"a": 1, "b": {"c": [2, None]}}),
        ("+policy.generation.vllm_kwargs.x={url:http://a/b}", {"url": "http://a/b"}),
        ("+policy.generation.vllm_kwargs.x='a: {b:1}'", "a: {b:1}"),
        ('+policy.generation.vllm_kwargs.x="1"', "1"),
        ("+policy.generation.vllm_kwargs.x=", ""),
        ("+policy.generation.vllm_kwargs.x=null", None),
        ("++policy.generation.vllm_kwargs.x=1e-3", 1e-3),
        ("+policy.generation.vllm_kwargs.x='one\ntwo'", "one\ntwo"),
        ("+policy.generation.vllm_kwargs.x='Solve problem #1: now'", "Solve problem #1: now"),
        ("+policy.generation.vllm_kwargs.x=Answer: a number", "Answer: a number"),
        (r"+policy.generation.vllm_kwargs.x=Hello\, world", "Hello, world"),
        (r"+policy.generation.vllm_kwargs.x=[a\,b]", ["a,b"]),
        ("+policy.generation.vllm_kwargs.x={mode: on}", {"mode": "on"}),
        ("+policy.generation.vllm_kwargs.x=off", "off"),
        (r'+policy.generation.vllm_kwargs.x=["\n"]', [r"\n"]),
        ("+policy.generation.vllm_kwargs.x=NULL", None),
        ("+policy.generation.vllm_kwargs.x=TRUE", True),
        ("+policy.generation.vllm_kwargs.x=int('3')", 3),
        ("+policy.generation.vllm_kwargs.x='it\\'s'", "it's"),
        (
            "+policy.generation.vllm_kwargs.x={a:'hi,b:c',d:/opt/x,e:[{f:1},{g:h:2}]}",
            {"a": "hi,b:c", "d": "/opt/x", "e": [{"f": 1}, {"g": "h:2"}]},
        ),
        ("+policy.generation.vllm_kwargs.x=[{a:b.jsonl},{a:c.jsonl}]", [{"a": "b.jsonl"}, {"a": "c.jsonl"}]),
        ("+policy.generation.vllm_kwargs.x=12:30", "12:30"),
        ("+policy.generation.vllm_kwargs.x=010", "010"),
        ("+policy.generation.vllm_kwargs.x=0x1F", "0x1F"),
        ("+policy.generation.vllm_kwargs.x=1_000", 1000),
        ("+policy.generation.vllm_kwargs.x=0", 0),
        ("+policy.generation.vllm_kwargs.x=0.5", 0.5),
    ],
)
def test_values_of_overrides_are_hydra_s(tmp_path: Path, override: str, value: object):
    assert load(tmp_path, REQUIRED, override).policy.generation.vllm_kwargs["x"] == value


@pytest.mark.parametrize(
    "override",
    [
        "x=a #1",
        "x=one\ntwo",
        "x=a,b",
        "x=range(1,3)",
        "x=glob(*)",
        "x=extend_list(1)",
        "x=${mul:${a},2}",
        "x=[1",
        "x={a}",
        "x@y=1",
        "x/y=1",
        "x[0]=1",
    ],
)
def test_an_override_that_hydra_refuses_or_gives_several_values_is_one_problem(tmp_path: Path, override: str):
    (problem,) = problems(tmp_path, REQUIRED, f"logger.wandb.{override}")
    assert problem.startswith(f"override logger.wandb.{override}: ") and "write " in problem


def test_an_override_is_read_within_seconds(tmp_path: Path):
    assert "write at most 10,000" in problems(tmp_path, REQUIRED, f"logger.wandb.tags=[{'1,' * 20_000}1]")[0]


@pytest.mark.parametrize("text", ["it's", "a\\", "a, b", "{x: 1}", "", "\\'", "0123", "${not.a.key", "é #1\n"])
def test_a_quoted_text_is_that_text(tmp_path: Path, text: str):
    settings = read_settings(write(tmp_path, "config.yaml", REQUIRED))
    assert apply_overrides(settings, [f"x={quoted(text)}"]) == [] and settings["x",].value == text


WRITTEN = ("0123", "12:30:00", "1e5", "1_000", "0x1F", "1.50", "true", "2026-01-02", ".5", "1e400", "007")


@pytest.mark.parametrize("text", WRITTEN)
def test_a_key_of_a_text_keeps_what_is_written(tmp_path: Path, text: str):
    file = f"logger: {{wandb: {{name: {text}, tags: [{text}], group: '{text}', notes: '${{logger.wandb.name}}'}}}}\n"
    file += f"env: {{own: {{functions: {{f: {text}}}}}}}\n"
    config = load(tmp_path, REQUIRED + file)
    wandb = config.logger.wandb
    assert (wandb.name, wandb.tags, wandb.group, wandb.notes, config.env.own.functions) == (
        text,
        [text],
        text,
        text,
        {"f": text},
    )
    overrides = [f"logger.wandb.name={text}", f"logger.wandb.tags=[{text}, x]", f"++env.own.functions={{f: {text}}}"]
    config = load(tmp_path, REQUIRED, *overrides)
    wandb = config.logger.wandb
    assert (wandb.name, wandb.tags, config.env.own.functions) == (text, [text, "x"], {"f": text})


def test_what_is_written_is_kept_in_lists_of_sections_choices_and_nemo_rl_s_keys(tmp_path: Path):
    text = (
        "policy: {model_name: 0123, dtensor_cfg: {enabled: true, env_vars: {X: 0123}}}\ndata: {train: "
        "[{data_path: 1e5, seed: 1_0}]}\n"
    )
    config = load(tmp_path, text + "logger: {wandb: {name: off, project: null}}\n", "logger.wandb.project=on")
    assert (config.policy.model_name, config.policy.tokenizer.name, config.logger.wandb.name) == ("0123", "0123", "off")
    (rows,) = config.data.train.datasets or []
    assert (rows.data_path, rows.seed, config.policy.megatron_cfg.env_vars) == ("1e5", 10, {"X": "0123"})


def test_what_is_written_of_a_secret_is_one(tmp_path: Path):
    secrets: set[str] = set()
    load_config(
        write(tmp_path, "config.yaml", REQUIRED + "env: {nemo_gym: {policy_api_key: 0123456701234567}}\n"),
        secrets=secrets,
    )
    assert "0123456701234567" in secrets


def test_a_key_is_removed_if_it_has_the_value_that_is_written(tmp_path: Path):
    text = REQUIRED + "grpo: {seed: 1}\n"
    assert load(tmp_path, text, "~grpo.seed=1").grpo.seed == RunConfig().grpo.seed
    assert "grpo.seed has another value; write ~grpo.seed" in problems(tmp_path, text, "~grpo.seed=2")[0]


@pytest.mark.parametrize("folder", ["examples/configs", "examples/nemo_gym", "/opt/nemo-rl/examples/configs"])
def test_a_path_of_nemo_rl_falls_back_to_the_packaged_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, folder: str
):
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO")
    assert find_config(f"{folder}/grpo_tiny.yaml") == packaged_configs() / "grpo_tiny.yaml"
    assert f"{folder}/grpo_tiny.yaml is not here; taking {packaged_configs() / 'grpo_tiny.yaml'}" in caplog.text
    with pytest.raises(ConfigError, match="no such file"):
        find_config("elsewhere/grpo_tiny.yaml")


def test_a_file_beside_nemo_rl_s_own_inherits_it(tmp_path: Path):
    for name in ("grpo_math_1B.yaml", "grpo_math_8B.yaml"):
        write(tmp_path, name, (ROOT / "tests/data/nemo_rl" / name).read_text())
    text = (
        "defaults: grpo_math_8B.yaml\ndata: {train: {data_path: d}}\npolicy: {dtensor_cfg: {tensor_parallel_size: 2}}\n"
    )
    config = load(tmp_path, text)
    assert (config.grpo.num_prompts_per_step, config.policy.megatron_cfg.tensor_model_parallel_size) == (64, 2)


@pytest.mark.parametrize(
    "key",
    ["cluster.num_nodes", "policy.model_name", "policy.megatron_cfg.optimizer.lr", "policy.generation.stop_strings"],
)
def test_an_empty_mapping_is_no_value_of_another_type(key: str):
    with pytest.raises(ValueError, match=rf"{key}=\{{\}} \(command line\): must be a "):
        load_config("grpo_tiny.yaml", [f"{key}={{}}"])


def test_reading_a_config_stays_in_few_files(workplace: Path):
    """A move is a call or return between two files of mrl; a table of the schema is walked in one."""
    load_config("grpo_tiny.yaml")  # fills caches
    stack, moves = [""], 0

    def watch(frame: FrameType, event: str, _: object) -> None:
        nonlocal moves
        if event == "call":
            stack.append(frame.f_code.co_filename)
            moves += stack[-2] != stack[-1] and all("/mrl/" in name for name in stack[-2:])
        elif event == "return" and len(stack) > 1:
            left = stack.pop()
            moves += left != stack[-1] and all("/mrl/" in name for name in (left, stack[-1]))

    sys.setprofile(watch)
    try:
        load_config("grpo_tiny.yaml")
    finally:
        sys.setprofile(None)
    assert 100 < moves <= 1000


def test_a_variable_that_is_not_set_is_named(tmp_path: Path):
    (said,) = problems(tmp_path, REQUIRED, "grpo.max_num_steps=${oc.env:MRL_NO_SUCH}")
    assert said.endswith(
        ": the environment has no variable MRL_NO_SUCH; set it, or give the value itself, as an override"
    )


def required(node: SchemaNode, prefix: str = "", is_item: bool = False) -> Iterator[str]:
    """Keys without a default in the items of mappings, each named `one`."""
    for name, child in node.children.items():
        if is_item and child.default == "???":
            yield prefix + name
        yield from required(child, f"{prefix}{name}.", is_item)
        if child.of_dict and child.of_dict.section:
            yield from required(child.of_dict, f"{prefix}{name}.one.", is_item=True)


def test_what_an_item_of_a_mapping_lacks_is_the_only_problem():
    found = list(required(SCHEMA))
    assert {"judges.one.model_name", "data.difficulty_pools.one.threshold"} <= set(found)
    for key in found:
        with pytest.raises(ConfigError) as caught:
            load_config("grpo_tiny.yaml", [f"{key.rpartition('.')[0]}={{}}"])
        assert [problem.key for problem in caught.value.problems] == [key]
