"""The data of training without rollouts: files read, rendered, tokenised, and known to fit into a row."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mrl.data.chat import load_chat_format, load_tokenizer
from mrl.data.conversations import Conversation, ConversationFormat, TokenSequence, conversation_of, tokenize, with_prompts
from mrl.data.jsonl import raise_errors, read_objects, repeated_ids, row_id
from mrl.data.preferences import preference_of

if TYPE_CHECKING:
    from mrl.config.schema import RunConfig

logger = logging.getLogger(__name__)

MAX_SHOWN = 5


@dataclass(frozen=True)
class Example:
    """One row of data."""

    example_id: str
    """Stable id of the row: `<file stem>:<line number>` unless the row names its own."""
    sequences: tuple[TokenSequence, ...]
    """What is learned together: one conversation, or one with the preferred answer and one with the other."""


@dataclass(frozen=True)
class SupervisedData:
    """What a run learns, and what it is measured on."""

    train: list[Example]
    validation: list[Example]
    pad_token_id: int


@dataclass(frozen=True)
class _Row:
    line: int
    example_id: str
    conversations: tuple[Conversation, ...]


def load_examples(config: RunConfig) -> SupervisedData:
    """Reads and tokenises the training and validation files. Rows that are too long are left out, with a warning that counts them.

    Raises:
        ValueError: a setting or file is wrong; of a file, up to 20 bad rows are named.
    """
    data, tokenizer = config.data, load_tokenizer(config.policy.tokenizer.name)
    template_kwargs = config.policy.tokenizer.chat_template_kwargs
    chat = load_chat_format(data.default, template_kwargs=template_kwargs)
    how = ConversationFormat(
        add_bos=data.add_bos,
        add_eos=data.add_eos,
        add_generation_prompt=data.add_generation_prompt,
        # Of a pair, it is the answers that are compared.
        only_unmask_final=config.learns_pairs or config.sft.only_unmask_final,
        template_kwargs=template_kwargs or {},
    )
    conversations_of = preference_of if config.learns_pairs else lambda fields: (conversation_of(fields),)
    max_tokens = min(config.policy.max_total_sequence_length, data.max_input_seq_length or config.policy.max_total_sequence_length)

    def read(path: Path, setting: str) -> list[Example]:
        rows = read_objects(path, lambda line, fields: _row(line, fields, path.stem, conversations_of), setting=setting)
        raise_errors(repeated_ids(path, [(row.line, row.example_id) for row in rows]), setting=setting, path=path)
        conversations = [with_prompts(conversation, chat) for row in rows for conversation in row.conversations]
        tokenized = iter(tokenize(conversations, tokenizer, how))
        sequences = [[next(tokenized) for _ in row.conversations] for row in rows]
        errors = [
            f"{path}:{row.line}: {found}" for row, mine in zip(rows, sequences, strict=True) for found in mine if isinstance(found, str)
        ]
        raise_errors(errors, setting=setting, path=path)
        whole = [tuple(found for found in mine if isinstance(found, TokenSequence)) for mine in sequences]
        return _fitting(rows, whole, max_tokens=max_tokens, path=path, setting=setting)

    validation = [] if data.validation is None else read(Path(data.validation.data_path), "data.validation.data_path")
    return SupervisedData(
        train=read(Path(data.train.data_path), "data.train.data_path"), validation=validation, pad_token_id=tokenizer.pad_token_id or 0
    )


def _row(
    line: int, fields: Mapping[str, object], stem: str, conversations_of: Callable[[Mapping[str, object]], tuple[Conversation, ...]]
) -> _Row:
    return _Row(line, row_id(fields, stem=stem, line_number=line), conversations_of(fields))


def _fitting(
    rows: Sequence[_Row], sequences: Sequence[tuple[TokenSequence, ...]], *, max_tokens: int, path: Path, setting: str
) -> list[Example]:
    """The rows of which no sequence is too long."""
    longest = [max(len(sequence.token_ids) for sequence in mine) for mine in sequences]
    examples = [Example(row.example_id, mine) for row, mine, length in zip(rows, sequences, longest, strict=True) if length <= max_tokens]
    rule = f"more than policy.max_total_sequence_length or data.max_input_seq_length allow ({max_tokens})"
    if not examples:
        raise ValueError(f"{setting}={path}: every row is too long, the shortest with {min(longest)} tokens, {rule}; raise them")
    too_long = [f"line {row.line} ({length} tokens)" for row, length in zip(rows, longest, strict=True) if length > max_tokens]
    if too_long:
        more = ", ..." if len(too_long) > MAX_SHOWN else ""
        logger.warning(
            "%s: %d of %d rows are left out, being longer than %s: %s%s",
            path, len(too_long), len(rows), rule.removeprefix("more than "), ", ".join(too_long[:MAX_SHOWN]), more,
        )  # fmt: skip
    return examples
