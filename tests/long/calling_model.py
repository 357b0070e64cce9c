# SPDX-License-Identifier: Apache-2.0
"""A tiny model that calls tools, and steps in which it does: two calls are one token each, as likely as all else."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, NemotronHForCausalLM

from mrl.cluster.payload import pull
from mrl.loop.run import Step
from mrl.recipes import tokenizer
from mrl.recipes.tokenizer import END_ID
from mrl.types import RolloutGroup, RunState
from tests.drivers import train_step
from tests.models import save_nemotron_h, unclamp_dt
from tests.stack.loop.conftest import LiveRun
from tests.stack.loop.test_agents import Drawn, rounded, take_drawn, turns
from tests.waiting import HANG_S

CALLS: tuple[tuple[str, dict[str, object]], ...] = (
    ("increment_counter", {"count": 4}),
    ("get_weather", {"city": "Rome"}),
)
CALL_IDS = (262, 263)
"""The spare tokens of the byte tokenizer."""
CHAT = [
    "policy.generation.vllm_cfg.expose_http_server=true",
    "policy.generation.vllm_cfg.http_server_share=1.0",
    "policy.generation.vllm_cfg.http_server_serving_chat_kwargs.enable_auto_tools=true",
    "policy.generation.vllm_cfg.http_server_serving_chat_kwargs.tool_parser=hermes",
]
"""Settings of a run whose agents call tools."""
TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"
    "{% for message in messages %}{{ '<|assistant|>' if message.role == 'assistant' else '<|user|>' }}{{ "
    "message.content or '' }}{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson "
    "}}</tool_call>{% endfor %}{% if message.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
QUESTIONS = ("10? A or B, in a box.", "count to 12", "weather in 14", "the answer of all questions")


def save_calling_model(folder: Path) -> Path:
    """Writes a model, with a byte tokenizer, that makes these calls, in hermes' format, into `folder`; returns it."""
    save_nemotron_h(folder)
    tokenizer.save(folder, model_max_length=1280)
    generation = {"eos_token_id": 258, "pad_token_id": 256, "bos_token_id": 257}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    tokenizer_file = folder / "tokenizer.json"
    text = tokenizer_file.read_text()
    for index, (name, arguments) in enumerate(CALLS):
        said = f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
        text = text.replace(json.dumps(f"<|reserved_{index}|>"), json.dumps(said))
    whole = json.loads(text)
    for token in whole["added_tokens"]:
        token["special"] &= token["id"] not in CALL_IDS
    tokenizer_file.write_text(json.dumps(whole))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    _set_logits(folder)
    return folder


def _set_logits(folder: Path) -> None:
    model = unclamp_dt(NemotronHForCausalLM.from_pretrained(folder).float().eval())
    reader = AutoTokenizer.from_pretrained(folder)
    prompts = [
        reader.apply_chat_template([{"role": "user", "content": one}], tokenize=False, add_generation_prompt=True)
        for one in QUESTIONS
    ]
    with torch.no_grad():
        # D hidden: the last states of a question, and of a call behind it.
        questions = [reader(prompt, add_special_tokens=False).input_ids for prompt in prompts]
        asked_D, called_D = (
            torch.stack([model.model(torch.tensor([ids])).last_hidden_state[0, -1] for ids in rows]).mean(dim=0)
            for rows in (questions, [[*ids, call] for ids in questions for call in CALL_IDS])
        )
        file = folder / "model.safetensors"
        weights = load_file(file)
        head_VD = weights["lm_head.weight"]
        rest = torch.logsumexp(head_VD @ asked_D, dim=0)
        for call in CALL_IDS:
            head_VD[call] = asked_D * rest / asked_D.square().sum()
        head_VD[END_ID] = called_D * (torch.logsumexp(head_VD @ called_D, dim=0) + 4) / called_D.square().sum()
        save_file(weights, file, metadata={"format": "pt"})


class Steps:
    """Steps of a run, of which each is looked at. Its engines are watched (`watch`)."""

    def __init__(self, live: LiveRun, monkeypatch: pytest.MonkeyPatch) -> None:
        self.live, self.groups = live, list[RolloutGroup]()
        sample = live.run.supplier.sample

        async def noted(state: RunState, step: Step) -> list[RolloutGroup]:
            self.groups = await sample(state, step)
            return self.groups

        monkeypatch.setattr(live.run.supplier, "sample", noted)

    def step(self, agents: Iterable[str]) -> dict[str, float]:
        """Trains a step, to which all these agents have come; its metrics."""
        train_step(self.live.run, self.live.state)
        assert {group.prompt.env_name for group in self.groups} == set(agents)
        for group in self.groups:
            assert all(verdict.is_valid for verdict in group.verdicts), [verdict.reason for verdict in group.verdicts]
        assert self.live.state.metrics["train/token_mult_prob_error"] <= 1.001
        return self.live.state.metrics

    def trained(self) -> Counter[Drawn]:
        """The turns that ranks have trained on, token by token."""
        infos = [info for group in self.groups for rollout in group.rollouts for info in rollout.sequences]
        return rounded(turns(pull(infos, timeout_s=HANG_S)))

    def drawn(self) -> Counter[Drawn]:
        """Answers of the engines since the last call."""
        return rounded([one for engine in self.live.on_engines(take_drawn) for one in engine])
