"""Questions to token ids, through the tokenizer's chat template. Text is tokenised here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mrl.config.schema_data import DataDefaultConfig


@dataclass(frozen=True)
class ChatFormat:
    """How a question becomes a conversation."""

    prompt: str = "{}"
    """Text of the user's message, `{}` standing for the question."""
    system_prompt: str | None = None
    template_kwargs: dict[str, object] | None = None
    """Passed to the chat template."""


def load_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder. Runs no code from the folder.

    Raises:
        ValueError: there is none that transformers can read.
    """
    from transformers import AutoTokenizer  # takes seconds to import; readers of data without text need not wait

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(
            f"policy.tokenizer.name={folder}: transformers finds no tokenizer there ({first_line}); give the folder of the model's"
        ) from error


def load_chat_format(config: DataDefaultConfig, *, template_kwargs: dict[str, object] | None) -> ChatFormat:
    """The format that `data.default` describes; reads its files.

    Raises:
        ValueError: a file cannot be read, or the prompt file has no place for the question.
    """
    prompt = "{}" if config.prompt_file is None else _read(config.prompt_file, setting="data.default.prompt_file")
    try:
        formatted = prompt.format("<question>")
    except (IndexError, KeyError, ValueError) as error:
        raise ValueError(
            f"data.default.prompt_file={config.prompt_file} is not a format string ({error!r}); "
            f"write {{}} for the question, and double every other brace"
        ) from error
    if "<question>" not in formatted:
        raise ValueError(f"data.default.prompt_file={config.prompt_file} has no place for the question; write {{}} where it belongs")
    system_file = config.system_prompt_file
    system_prompt = None if system_file is None else _read(system_file, setting="data.default.system_prompt_file")
    return ChatFormat(prompt=prompt, system_prompt=system_prompt, template_kwargs=template_kwargs)


def render_prompts(questions: list[str], tokenizer: PreTrainedTokenizerBase, chat: ChatFormat) -> list[tuple[int, ...]]:
    """Token ids of each question as a conversation that waits for the assistant's turn.

    Raises:
        ValueError: the tokenizer has no chat template.
    """
    if tokenizer.chat_template is None:
        raise ValueError(
            f"policy.tokenizer.name={tokenizer.name_or_path} has no chat template; use an instruction-tuned model's tokenizer, "
            f"or add chat_template.jinja to that folder"
        )
    system = [] if chat.system_prompt is None else [{"role": "system", "content": chat.system_prompt}]
    conversations = [[*system, {"role": "user", "content": chat.prompt.format(question)}] for question in questions]
    template_kwargs: dict[str, Any] = dict(chat.template_kwargs or {})
    texts: Any = tokenizer.apply_chat_template(conversations, tokenize=False, add_generation_prompt=True, **template_kwargs)
    # The template has written every special token that belongs there.
    token_ids = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    return [tuple(ids) for ids in token_ids]


def _read(path: str, *, setting: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{setting}={path} cannot be read: {error}; give a UTF-8 text file") from error
