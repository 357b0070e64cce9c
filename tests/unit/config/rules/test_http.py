# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

from mrl.config.load import load_run
from tests.sources import ROOT
from tests.unit.config.problems import found_with, problems_of

VLLM = "policy.generation.vllm_cfg"
CHAT = f"{VLLM}.http_server_serving_chat_kwargs"
SERVED = f"{VLLM}.expose_http_server=true"


def test_a_plugin_brings_its_own_names(workplace: Path):
    (workplace / "mine.py").write_text("")
    assert problems_of(SERVED, f"{VLLM}.tool_parser_plugin=mine.py", f"{CHAT}.tool_parser=mine") == []


def test_nemo_rl_s_parser_has_vllm_s_name(workplace: Path):
    config, migration = load_run(str(ROOT / "tests/data/nemo_rl/grpo_nanov3.yaml"), [])
    vllm_cfg = config.policy.generation.vllm_cfg
    chat = vllm_cfg.http_server_serving_chat_kwargs
    assert (vllm_cfg.expose_http_server, vllm_cfg.reasoning_parser_plugin) == (True, None)
    assert (chat.enable_auto_tools, chat.tool_parser, chat.reasoning_parser) == (True, "qwen3_coder", "nemotron_v3")
    assert any("nano_v3" in line and "-> nemotron_v3" in line for line in migration.translated)


def test_a_parser_of_a_model_s_repository_is_to_be_provided(workplace: Path):
    (problem,) = found_with(SERVED, f"{CHAT}.tool_parser=nemotron_json")
    assert problem.kind == "to be provided" and f"name the file in {VLLM}.tool_parser_plugin" in problem.way_out
    (workplace / "mine.py").write_text("")
    assert problems_of(SERVED, f"{VLLM}.tool_parser_plugin=mine.py", f"{CHAT}.tool_parser=nemotron_json") == []
