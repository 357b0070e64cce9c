"""The data of a run: files read, rendered, tokenised, and known to fit into the context."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mrl.config.environments import environment_names
from mrl.data.chat import ChatFormat, load_chat_format, load_tokenizer, render_prompts
from mrl.data.jsonl import Row, raise_errors, read_rows
from mrl.types import Prompt, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mrl.config.schema import RunConfig
    from mrl.config.schema_policy import PolicyConfig

PROCESSORS = ("math_data_processor", "math_hf_data_processor")
"""NeMo RL's names for what `mrl.data.jsonl` and `mrl.data.chat` do."""


@dataclass(frozen=True)
class PromptData:
    """What a run asks, and how."""

    train: list[Prompt]
    validation: list[Prompt]
    sampling: SamplingParams
    pad_token_id: int


@dataclass(frozen=True)
class PromptLimits:
    """How long a prompt may be, in tokens."""

    max_input_length: int | None
    """data.max_input_seq_length; None: only the context counts."""
    context_length: int
    """policy.generation.vllm_cfg.max_model_len."""
    max_new_tokens: int
    """policy.generation.max_new_tokens. As much as the context or more means: whatever the prompt leaves."""

    def reason_against(self, length: int) -> str | None:
        """What is wrong with a prompt of this length; None if it fits."""
        if self.max_input_length is not None and length > self.max_input_length:
            return f"the prompt has {length} tokens, data.max_input_seq_length allows {self.max_input_length}; raise that or drop the row"
        reserved = self.max_new_tokens if self.max_new_tokens < self.context_length else 1
        if length > self.context_length - reserved:
            return (
                f"the prompt has {length} tokens; policy.generation.vllm_cfg.max_model_len={self.context_length} less {reserved} "
                f"for the rollout (policy.generation.max_new_tokens={self.max_new_tokens}) leaves {self.context_length - reserved}; "
                f"raise the one, lower the other, or drop the row"
            )
        return None


def load_prompts(config: RunConfig) -> PromptData:
    """Reads and tokenises the training and validation files.

    Raises:
        ValueError: a setting or file is wrong; of a file, up to 20 bad rows are named.
    """
    data, grpo = config.data, config.grpo
    if data.default.processor not in PROCESSORS:
        raise ValueError(f"data.default.processor={data.default.processor} is not known; use one of {', '.join(PROCESSORS)}")
    tokenizer = load_tokenizer(config.policy.tokenizer.name)
    chat = load_chat_format(data.default, template_kwargs=config.policy.tokenizer.chat_template_kwargs)
    limits = PromptLimits(
        data.max_input_seq_length, config.policy.generation.vllm_cfg.max_model_len, config.policy.generation.max_new_tokens
    )
    reader = PromptReader(tokenizer, chat, limits, data.default.env_name, environment_names(config.env))
    train = reader.read(Path(data.train.data_path), setting="data.train.data_path")
    validation: list[Prompt] = []
    if data.validation is not None:
        path = Path(data.validation.data_path)
        validation = reader.read(path, setting="data.validation.data_path", max_rows=grpo.max_val_samples)
    # What stands in padding is never looked at; it only has to be in the vocabulary.
    pad_token_id = next(iter(_token_ids(tokenizer.pad_token_id)), 0)
    return PromptData(train, validation, sampling_params(config.policy, tokenizer), pad_token_id)


@dataclass(frozen=True)
class PromptReader:
    """Turns data files into prompts, all in the same way."""

    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat
    limits: PromptLimits
    default_env_name: str
    env_names: tuple[str, ...]

    def read(self, path: Path, *, setting: str, max_rows: int | None = None) -> list[Prompt]:
        """The first `max_rows` prompts of a file, in its order; the whole file is checked. `setting` is the config key that names it.

        Raises:
            ValueError: naming up to 20 rows that are wrong, too long, or of an unknown environment.
        """
        rows = read_rows(path, setting=setting)
        token_ids = render_prompts([row.question for row in rows], self.tokenizer, self.chat)
        prompts = [
            Prompt(row.prompt_id, ids, row.question, row.expected_answer, self._env_name(row))
            for row, ids in zip(rows, token_ids, strict=True)
        ]
        errors = [
            f"{path}:{row.line}: {reason}"
            for row, prompt in zip(rows, prompts, strict=True)
            if (reason := self._reason_against(prompt)) is not None
        ]
        raise_errors(errors, setting=setting, path=path)
        return prompts[:max_rows]

    def _env_name(self, row: Row) -> str:
        return self.default_env_name if row.env_name is None else row.env_name

    def _reason_against(self, prompt: Prompt) -> str | None:
        if prompt.env_name not in self.env_names:
            return f"env_name (by default data.default.env_name) {prompt.env_name!r} is not known; use one of {', '.join(self.env_names)}"
        return self.limits.reason_against(len(prompt.token_ids))


def sampling_params(policy: PolicyConfig, tokenizer: PreTrainedTokenizerBase) -> SamplingParams:
    """How rollouts are drawn. Without `stop_token_ids`, they stop at the end-of-sequence tokens of tokenizer and generation_config.json."""
    generation = policy.generation
    stop_token_ids = generation.stop_token_ids
    if stop_token_ids is None:
        stop_token_ids = sorted({*_token_ids(tokenizer.eos_token_id), *_generation_config_eos(Path(policy.model_name))})
    return SamplingParams(
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        max_new_tokens=generation.max_new_tokens,
        stop_token_ids=tuple(stop_token_ids),
    )


def _generation_config_eos(model: Path) -> list[int]:
    file = model / "generation_config.json"
    return _token_ids(json.loads(file.read_text()).get("eos_token_id")) if file.is_file() else []


def _token_ids(value: object) -> list[int]:
    """Token ids as configurations spell them: none, one, or a list."""
    values = value if isinstance(value, list) else [value]
    return [token_id for token_id in values if isinstance(token_id, int)]
