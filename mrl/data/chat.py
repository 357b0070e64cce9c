# SPDX-License-Identifier: Apache-2.0
"""Conversations to token ids, through the tokenizer's chat template. Text is tokenised here and nowhere else.

Some templates write the date (Llama 3.2, gpt-oss, Granite): a run has one date, whenever it resumes.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, time
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from conversion.files.reading import check_plain_folder, read_file, read_json
from mrl.config.parsers import CHAT
from mrl.config.rules.data import key_of
from mrl.config.rules.tokens import beyond_vocabulary
from mrl.data.fields import LEADING, Fields, Message
from mrl.data.rendering import Conversation, fit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mrl.config.schema.data import DataDefaultConfig, DatasetConfig
    from mrl.config.schema.policy import TokenizerConfig
    from mrl.config.schema.run import RunConfig

CLOCK = "strftime_now"
"""Function that transformers and vLLM give to templates, of a format of `strftime`; it reads the clock."""
KEY = "policy.tokenizer.template_date"
_CALL = re.compile(CLOCK + r"""\(\s*(?P<quote>['"])(?P<format>[^'"\\]*)(?P=quote)\s*\)""")
_TEMPLATES = ("chat_template*", "tokenizer_config.json", "additional_chat_templates/*.jinja")


def writes_date(tokenizer: TokenizerConfig, template: str | None) -> bool:
    """True if a run's template reads the clock: `template`, or, if None, one in the tokenizer's folder."""
    if template is not None:
        return CLOCK in template
    files = [path for pattern in _TEMPLATES for path in Path(tokenizer.name).glob(pattern) if path.is_file()]
    return any(CLOCK.encode() in read_file(path) for path in files)


def dated(template: str, day: str | None) -> str:
    """The template with a date, as 2026-01-31, in place of each call of the clock, at midnight; today's if None.

    Raises:
        ValueError: the date is none, or the template chooses the format as it renders.
    """
    if CLOCK not in template:
        return template
    try:
        moment = datetime.combine(date.fromisoformat(day) if day is not None else date.today(), time())
    except ValueError as error:
        raise ValueError(f"{KEY}={day} is no date ({error}); write it as 2026-01-31") from error
    fixed = _CALL.sub(lambda call: repr(moment.strftime(call["format"])), template)
    # `strftime_now is defined` and the like stay.
    if re.search(CLOCK + r"\s*\(", fixed):
        raise ValueError(
            f"policy.tokenizer.chat_template: it calls {CLOCK} with a format that it chooses as it renders, so "
            f"that the date of a run cannot be fixed; write the format there as a text in quotes"
        )
    return fixed


RESERVED = frozenset(
    {"add_generation_prompt", "chat_template", "continue_final_message", "messages", "tokenize", "tools"}
)
"""Words of templates whose values are no row's and no config's."""
OWN_TEMPLATE = "default"
"""Value of policy.tokenizer.chat_template for the tokenizer's own."""
JOINED = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""The template that joins messages as they are."""
PLAIN_TOKENIZERS = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Names that transformers has given to the class of fast tokenizers that consists of tokenizer.json alone."""
NO_OWN_TOKENIZER = ("nemotron_h",)
"""Model types for which transformers registers no class: there the folder's own settings decide."""
UNICODE_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
"""Normalisations that leave ASCII as it is."""
MAX_NORMALIZED_BYTES = 11
"""Unicode normalisation makes at most so many bytes of one: https://unicode.org/faq/normalization.html."""


@dataclass(frozen=True)
class ChatFormat:
    """Makes a conversation of a question: the user's message, `{}` for the question, the system's, template values."""

    prompt: str = "{}"
    system_prompt: str | None = None
    template_kwargs: dict[str, object] | None = None

    def with_values(self, own: Mapping[str, object]) -> ChatFormat:
        """This format with a row's own values for the template, which come before those of the run."""
        return replace(self, template_kwargs={**(self.template_kwargs or {}), **own}) if own else self


def load_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder. Runs no code from the folder."""
    try:
        check_plain_folder(Path(folder))
        # Imported here: readers of data without text need not wait.
        if _is_plain(Path(folder)):
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(folder)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except ImportError:
        raise
    except Exception as error:  # the tokenizers library raises what it likes
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(
            f"policy.tokenizer.name={folder}: transformers finds no tokenizer there ({first_line}); give the "
            "folder of the model's"
        ) from error


def tokenizer_of(config: RunConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a run, with its chat template. ValueError: the policy has no embedding of some of its tokens."""
    tokenizer = load_tokenizer(config.policy.tokenizer.name)
    use_chat_template(tokenizer, config.policy.tokenizer)
    if rule := beyond_vocabulary(config, 1 + max(tokenizer.get_vocab().values())):
        raise ValueError(f"policy.tokenizer.name={config.policy.tokenizer.name}: {rule}")
    return tokenizer


def _is_plain(folder: Path) -> bool:
    """True if AutoTokenizer only finds the plain class of fast tokenizers, after importing torch and its compiler."""
    files = [folder / name for name in ("config.json", "tokenizer_config.json", "tokenizer.json")]
    if not all(path.is_file() for path in files):
        return False
    config, settings = read_json(files[0]), read_json(files[1])
    if not isinstance(config, dict) or not isinstance(settings, dict) or "auto_map" in settings:
        return False
    return config.get("model_type") in NO_OWN_TOKENIZER and settings.get("tokenizer_class") in PLAIN_TOKENIZERS


def load_chat_format(
    dataset: DatasetConfig, default: DataDefaultConfig, key: str, *, template_kwargs: dict[str, object] | None
) -> ChatFormat:
    """The format of a data set that stands at `key` in the config. Reads its prompt files."""
    # Most data sets take their prompt files from data.default, and messages should name what the user wrote.
    prompt_key, system_key = (key_of(name, default, dataset, key) for name in ("prompt_file", "system_prompt_file"))
    prompt = "{}" if dataset.prompt_file is None else read_text(dataset.prompt_file, setting=prompt_key)
    system_prompt = (
        None if dataset.system_prompt_file is None else read_text(dataset.system_prompt_file, setting=system_key)
    )
    try:
        formatted = prompt.format("<question>")
    except (IndexError, KeyError, ValueError) as error:
        raise ValueError(
            f"{prompt_key}={dataset.prompt_file} is not a format string ({error!r}); "
            f"write {{}} for the question, and double every other brace"
        ) from error
    if "<question>" not in formatted:
        raise ValueError(
            f"{prompt_key}={dataset.prompt_file} has no place for the question; write {{}} where it belongs"
        )
    return ChatFormat(prompt, system_prompt, template_kwargs)


def with_prompts(messages: Sequence[Message], chat: ChatFormat, *, around: Literal["first", "last"]) -> list[Message]:
    """The conversation with the prompt around the first or last user message, and a system message first if missing."""
    asked = list(messages)
    questions = [
        index
        for index, message in enumerate(asked)
        if message["role"] == "user" and isinstance(message["content"], str)
    ]
    if questions:
        index = questions[0 if around == "first" else -1]
        asked[index] = {**asked[index], "content": chat.prompt.format(asked[index]["content"])}
    if chat.system_prompt is not None and asked[0]["role"] not in LEADING:
        asked.insert(0, {"role": "system", "content": chat.system_prompt})
    return asked


def template_text(chosen: str | None, *, setting: str = "policy.tokenizer.chat_template") -> str:
    """The template that the value `chosen` of a key names, unless that is the tokenizer's own."""
    if chosen is None:
        return JOINED
    return read_text(chosen, setting=setting) if chosen.endswith(".jinja") else chosen


def use_chat_template(tokenizer: PreTrainedTokenizerBase, config: TokenizerConfig) -> None:
    """Gives the tokenizer the chat template that the config names, with the run's date in it, if it writes one."""
    if config.chat_template != OWN_TEMPLATE:
        tokenizer.chat_template = template_text(config.chat_template)
    if tokenizer.chat_template is None:
        raise ValueError(
            f"policy.tokenizer.name={tokenizer.name_or_path} has no chat template; use an instruction-tuned "
            f"model's tokenizer, or add chat_template.jinja to that folder"
        )
    templates, day = tokenizer.chat_template, config.template_date
    if isinstance(templates, dict):
        tokenizer.chat_template = {name: dated(text, day) for name, text in templates.items()}
    else:
        tokenizer.chat_template = dated(templates, day)
    if (names := template_variables(tokenizer)) is None:
        return
    for name in config.chat_template_kwargs or ():
        if name not in names:
            (nearest,) = difflib.get_close_matches(name, names, n=1, cutoff=0.0) or [""]
            raise ValueError(
                f"policy.tokenizer.chat_template_kwargs.{name}: the chat template has no such variable; "
                f"correct it (the nearest word is {nearest!r}), or remove it"
            )


def served_template(chosen: str | None, config: TokenizerConfig) -> str | None:
    """The chat template for HTTP conversations that `chosen` names; None: the tokenizer's own, which writes no date."""
    template = None if chosen == OWN_TEMPLATE else template_text(chosen, setting=f"{CHAT}.chat_template")
    if not writes_date(config, template):
        return template
    if template is None:
        template = str(load_tokenizer(config.name).get_chat_template())
    return dated(template, config.template_date)


def template_variables(tokenizer: PreTrainedTokenizerBase) -> frozenset[str] | None:
    """Words of the chat template that may be variables. None: several templates; transformers picks one to render."""
    return _words(tokenizer.chat_template) if isinstance(tokenizer.chat_template, str) else None


@lru_cache(maxsize=8)
def _words(template: str) -> frozenset[str]:
    return frozenset(re.findall(r"[A-Za-z_]\w*", template)) - RESERVED


def render(
    messages: Sequence[Message], tools: Sequence[Fields], tokenizer: PreTrainedTokenizerBase, chat: ChatFormat
) -> str:
    """The text of a conversation that waits for the assistant's turn; errors as `fit` has them."""
    return fit(Conversation(messages, tools), tokenizer, chat.template_kwargs, add_generation_prompt=True)[1]


def tokenize(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, ...]]:
    """Token ids of rendered texts."""
    # The template has written every special token that belongs there.
    token_ids = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    return [tuple(ids) for ids in token_ids]


def most_tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """An upper bound of a text's tokens, without tokenising it: a token is at least one byte of the normalised text."""
    backend: Any = tokenizer.backend_tokenizer if tokenizer.is_fast else None
    normalizer = "" if backend is None else type(backend.normalizer).__name__
    keeps_bytes = normalizer == "NoneType" or (normalizer in UNICODE_FORMS and text.isascii())
    return len(text.encode()) * (1 if keeps_bytes else MAX_NORMALIZED_BYTES)


def read_text(path: str, *, setting: str) -> str:
    """The text of the file that a setting names. ValueError: it cannot be read."""
    try:
        return read_file(Path(path)).decode()
    except (OSError, ValueError) as error:
        raise ValueError(f"{setting}={path} cannot be read: {error}; give a UTF-8 text file") from error
