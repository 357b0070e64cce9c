# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrl.config.load import load_config, read_run
from mrl.config.model import with_cached_folders
from mrl.config.parsers import CHAT, TOOL_CALLS, readers
from mrl.config.passthrough import arguments_of
from tests.unit.config.problems import problems_of
from tests.unit.config.tool_calls import CALLS

VLLM = "policy.generation.vllm_cfg"
AGENT = "++env.remote.mine=http://host:1/run"
QWEN = "{% if tools %}<tools>{{ tools }}</tools>{% endif %}{{ messages }}<tool_call>{{ '{\"name\": ' }}</tool_call>"
CODER = "{{ tools }}{{ messages }}<tool_call>\n<function=f>\n<parameter=p>\n</function></tool_call>"


@pytest.fixture
def template(workplace: Path):
    """Writes the chat template of the tiny model's tokenizer."""
    return lambda text: (workplace / "prepared/tiny/model/chat_template.jinja").write_text(text)


def chat_of(*overrides: str):
    vllm = with_cached_folders(load_config("grpo_tiny.yaml", overrides)).policy.generation.vllm_cfg
    chat = vllm.http_server_serving_chat_kwargs
    return vllm.expose_http_server, chat.enable_auto_tools, chat.tool_parser


@pytest.mark.parametrize("name", CALLS)
def test_a_call_s_marks_name_its_parser(name: str):
    assert readers(f"{{{{ tools }}}} {CALLS[name]}", TOOL_CALLS)[0] == name


def test_all_parsers_are_vllm_s():
    plugins = {"nemotron_json"}
    assert {name for _, names in TOOL_CALLS for name in names} - plugins <= {*arguments_of("tool_parser")}


def test_agents_bring_what_they_need_of_the_engines(template):
    assert chat_of() == (False, False, "qwen3_coder")
    assert chat_of(AGENT) == (True, True, "qwen3_coder")  # the tiny model's template shows no tools
    template(QWEN)
    assert chat_of(AGENT) == (True, True, "hermes")
    assert chat_of(AGENT, f"{CHAT}.enable_auto_tools=false")[1] is False
    template(CODER)
    assert chat_of(AGENT) == (True, True, "qwen3_coder")
    assert chat_of(AGENT, f"{CHAT}.tool_parser=qwen3_xml")[2] == "qwen3_xml"
    assert problems_of(AGENT, f"{CHAT}.tool_parser=qwen3_xml") == []


def test_of_several_templates_that_for_tools_counts(template, workplace: Path):
    folder = workplace / "prepared/tiny/model"
    (folder / "chat_template.jinja").unlink()
    fields = json.loads((folder / "tokenizer_config.json").read_text())
    named = [{"name": "default", "template": "{{ messages }}"}, {"name": "tool_use", "template": QWEN}]
    (folder / "tokenizer_config.json").write_text(json.dumps(fields | {"chat_template": named}))
    assert chat_of(AGENT)[2] == "hermes"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text(CODER)
    assert chat_of(AGENT)[2] == "qwen3_coder"


def test_a_format_that_is_not_known_is_asked_for_in_one_message(template):
    template("{{ tools }} call: {{ messages }}")
    (problem,) = problems_of(AGENT)
    assert f"{CHAT}.enable_auto_tools=true and {CHAT}.tool_parser=NAME" in problem
    for words in (f"{CHAT}.enable_auto_tools=false", f"{CHAT}.tool_parser=hermes"):
        assert problems_of(AGENT, words) == []


@pytest.mark.parametrize(
    ("text", "words", "wanted"),
    [
        (QWEN, f"{CHAT}.tool_parser=qwen3_coder", "use hermes"),
        (CODER, f"{CHAT}.tool_parser=hermes", "use qwen3_coder"),
        ("{{ tools }}<TOOLCALL>{{ messages }}", f"{CHAT}.tool_parser=qwen3_coder", "use nemotron_json"),
        ("{{ messages }}<think>", f"{CHAT}.reasoning_parser=seed_oss", "use deepseek_r1"),
        ("{{ messages }}[THINK]", f"{CHAT}.reasoning_parser=nemotron_v3", "use mistral"),
    ],
)
def test_a_parser_that_the_template_contradicts_is_refused(template, text: str, words: str, wanted: str):
    template(text)
    (problem,) = problems_of(f"{VLLM}.expose_http_server=true", words)
    assert problem.startswith(f"{words}: the chat template of prepared/tiny/model writes ") and wanted in problem
    assert problems_of(words) == []  # nobody reads it without a server


@pytest.mark.parametrize("size", ["nano", "super"])
def test_a_parser_that_comes_with_a_model_is_named_with_it(size: str):
    config, migration, problems = read_run("grpo_tiny.yaml", [f"{CHAT}.reasoning_parser={size}_v3"])
    assert problems == [] and config is not None
    assert config.policy.generation.vllm_cfg.http_server_serving_chat_kwargs.reasoning_parser == "nemotron_v3"
    (line,) = (line for line in migration.translated if f"{size}_v3" in line)
    assert "-> nemotron_v3" in line and f"Nemotron 3 {size.capitalize()}" in line
