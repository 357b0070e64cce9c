# SPDX-License-Identifier: Apache-2.0
"""Effect of the run's parsers of thoughts and tool calls on the rewards of its rows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from mrl.config.schema.env import BUILT_IN
from mrl.envs.task import DEFAULT_TOOL_PARSER

if TYPE_CHECKING:
    from mrl.config.schema.run import RunConfig


def parsers_of(config: RunConfig, env_name: str, row: str, template_kwargs: str = "") -> tuple[bool, str]:
    """`has_parser` and `tool_parser` of a row's tasks; `template_kwargs` are the row's own.

    Thoughts are graded where NeMo Gym does not grade the row, as in NeMo RL.
    """
    chat = config.policy.generation.vllm_cfg.http_server_serving_chat_kwargs
    is_gyms = env_name in BUILT_IN and (config.env.should_use_nemo_gym or '"agent_ref":' in row)
    # A model that is told not to think writes no mark.
    values = {**(config.policy.tokenizer.chat_template_kwargs or {}), **json.loads(template_kwargs or "{}")}
    thinks = values.get("enable_thinking") is not False
    return is_gyms and thinks and chat.reasoning_parser is not None, chat.tool_parser or DEFAULT_TOOL_PARSER
