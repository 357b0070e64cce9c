# SPDX-License-Identifier: Apache-2.0
"""Config files that never end, and pass-through keys that would run a model folder's code."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest

from mrl.config.errors import ConfigError, Problems
from mrl.config.load import load_config
from mrl.config.passthrough import check_arguments
from mrl.data.chat import load_tokenizer
from mrl.recipes.tokenizer import save

BOMB = pytest.mark.attack("a config that never ends")
REMOTE_CODE = pytest.mark.attack("a model folder carries code")
STEP = "grpo: {{num_prompts_per_step: '{}'}}\n"
DOUBLING = "".join(f"b{index}: '${{b{index - 1}}}${{b{index - 1}}}'\n" for index in range(1, 41))
NODES = "".join(f"c{index}: {{x: '${{c{index - 1}}}', y: '${{c{index - 1}}}'}}\n" for index in range(1, 31))

FILES = {
    "flow 2,000 deep": ("a: " + "[" * 2000 + "]" * 2000, "nested more than 64 deep"),
    "mappings 2,000 deep": ("".join(" " * depth + "a:\n" for depth in range(2000)), "nested more than 64 deep"),
    "aliases": (
        "a0: &a0 [x,x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1},*a{i - 1}]\n" for i in range(1, 40)),
        "aliases written out",
    ),
    "merge keys": (
        "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: *a{i - 1}, y: *a{i - 1}}}\n" for i in range(1, 40)),
        "aliases written out",
    ),
    "an alias of itself": ("a: &a [*a]\n", "recursive"),
    "a number of 60,000 digits": (
        f"grpo: {{num_prompts_per_step: {':'.join(['59'] * 20_000)}}}",
        "a number of 59,999 digits",
    ),
    "a product of a text": (STEP.format("${mul:xxxxxxxxxx,100000000}"), "num_prompts_per_step=.*is not a number"),
    "a product of products": (
        STEP.format("${mul:${mul:99999999999999,99999999999999},9}"),
        "num_prompts_per_step=.*more than 64 bits",
    ),
    "a sum of lists": (STEP.format("${add:[1],[2]}"), "num_prompts_per_step=.*is not a number"),
    "a division by zero": (STEP.format("${div:1,0}"), "num_prompts_per_step=.*zero"),
    "a maximum of a text": (STEP.format("${max:x,1}"), "num_prompts_per_step=.*is not a number"),
    "resolvers 5,000 deep": (
        STEP.format("${mul:1," * 5000 + "1" + "}" * 5000),
        "not readable as a config|at most 2,000",
    ),
    "brackets in a resolver": (
        STEP.format("${mul:" + "[" * 900 + "1" + "]" * 900 + ",1}"),
        "not readable as a config|num_prompts_per_step",
    ),
    "an expression that never closes": (STEP.format("${" * 900), "not readable as a config|num_prompts_per_step"),
    "references that double": (
        f"logger: {{log_dir: '${{b40}}'}}\nb0: xxxxxxxxxx\n{DOUBLING}",
        "logger.log_dir: with its references written out",
    ),
    "sections that double": (
        f"logger: {{log_dir: '${{c30}}'}}\nc0: {{x: 1}}\n{NODES}",
        "logger.log_dir: with its references written out",
    ),
    "5 MB": ("a: x\n" + "# " + "x" * (5 << 20), "more than 4 MiB"),
}


@BOMB
@pytest.mark.parametrize("name", FILES)
def test_a_config_ends_in_one_error_within_seconds(tmp_path: Path, name: str):
    text, message = FILES[name]
    path = tmp_path / "hostile.yaml"
    path.write_text(f"defaults: grpo_tiny.yaml\n{text}")
    with pytest.raises(ConfigError, match=rf"(?s)hostile\.yaml.*({message})|({message})"):
        load_config(path)


@BOMB
@pytest.mark.parametrize("value", ["[" * 2000 + "]" * 2000, "${mul:xxxxxxxxxx,100000000}"], ids=["deep", "product"])
def test_an_override_ends_in_one_error_within_seconds(value: str):
    with pytest.raises(ConfigError, match="num_prompts_per_step=.*(nested too deep|is not a number)"):
        load_config("grpo_tiny.yaml", [f"grpo.num_prompts_per_step={value}"])


PASS_THROUGH = {
    "policy.generation.vllm_kwargs.trust_remote_code=true": "policy.generation.vllm_kwargs.trust_remote_code=true",
    "policy.generation.vllm_kwargs.trust_remote_code='yes'": "policy.generation.vllm_kwargs.trust_remote_code=yes",
    "policy.generation.vllm_kwargs={trust-remote-code:true}": "policy.generation.vllm_kwargs.trust-remote-code=true",
    "policy.generation.vllm_kwargs.model_loader_extra_config={a:{trust_remote_code:true}}": (
        "policy.generation.vllm_kwargs.model_loader_extra_config.a.trust_remote_code=true"
    ),
    "policy.generation.vllm_kwargs.additional_config={a:[{trust_remote_code:1}]}": (
        "policy.generation.vllm_kwargs.additional_config.a.0.trust_remote_code=1"
    ),
    "policy.hf_config_overrides.trust_remote_code=true": "policy.hf_config_overrides.trust_remote_code=true",
    "policy.tokenizer.chat_template_kwargs.trust_remote_code=true": (
        "policy.tokenizer.chat_template_kwargs.trust_remote_code=true"
    ),
    "policy.megatron_cfg.model_overrides.trust_remote_code=true": (
        "policy.megatron_cfg.model_overrides.trust_remote_code=true"
    ),
}


@REMOTE_CODE
@pytest.mark.parametrize("override", PASS_THROUGH)
def test_no_key_lets_a_library_run_code_of_a_model_folder(override: str):
    problems = Problems(config := load_config("grpo_tiny.yaml", [f"++{override}"]))
    check_arguments(config, problems)
    assert [
        problem
        for problem in problems.merged
        if str(problem).startswith(f"{PASS_THROUGH[override]}: mrl runs no Python files")
    ]


@pytest.mark.parametrize("value", ["false", "null"])
def test_code_of_a_model_folder_may_be_switched_off(value: str):
    config = load_config("grpo_tiny.yaml", [f"++policy.generation.vllm_kwargs.trust_remote_code={value}"])
    check_arguments(config, problems := Problems(config))
    assert not [problem for problem in problems.merged if "Python files" in problem.rule]


@REMOTE_CODE
@pytest.mark.parametrize("name", ["tokenizer_config.json", "config.json"])
def test_a_tokenizer_that_names_code_does_not_run_it(tmp_path: Path, name: str):
    marker = tmp_path / "ran"
    save(tmp_path / "model", model_max_length=64)
    (tmp_path / "model/evil.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Evil: pass\n")
    path = tmp_path / "model" / name
    content = json.loads(path.read_text()) if path.exists() else {"model_type": "evil"}
    auto_map = {"AutoTokenizer": ["evil.Evil", "evil.Evil"], "AutoConfig": "evil.Evil"}
    path.write_text(json.dumps(content | {"auto_map": auto_map, "tokenizer_class": "Evil"}))
    with suppress(ValueError):
        load_tokenizer(str(tmp_path / "model"))
    assert not marker.exists()
