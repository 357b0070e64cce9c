"""The data of training without rollouts: rows read, rendered, tokenised, and known to fit into a row of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mrl.config.rules.data import key_of
from mrl.data.chat import load_chat_format, load_tokenizer, use_chat_template
from mrl.data.conversations import Conversation, ConversationFormat, TokenSequence, tokenize, with_prompts
from mrl.data.fields import Fields, RowError, optional_text
from mrl.data.files import find_data_files
from mrl.data.reading import Findings, Reader, Rows, TooLong, read_split
from mrl.data.rows import parse_pair, parse_row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mrl.config.schema.data import DatasetConfig
    from mrl.config.schema.run import RunConfig


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

    train: Rows[Example]
    """Tokenised when they are asked for."""
    validation: Rows[Example]
    pad_token_id: int
    findings: list[Findings]
    """What was left out of the data sets."""


def load_examples(config: RunConfig) -> SupervisedData:
    """Reads the training and validation rows through. Rows that are too long are left out, with a warning that counts them.

    Raises:
        ValueError: a setting or file is wrong; of a data set, up to 20 bad rows are named.
    """
    tokenizer = load_tokenizer(config.policy.tokenizer.name)
    use_chat_template(tokenizer, config.policy.tokenizer)
    train, validation, findings = read_split(config.data, lambda key, dataset: example_reader(key, dataset, config, tokenizer))
    pad_token_id = tokenizer.pad_token_id
    return SupervisedData(train, validation, pad_token_id if isinstance(pad_token_id, int) else 0, findings)


def example_reader(key: str, dataset: DatasetConfig, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> Reader[Example]:
    """How the rows of one data set become examples. `key` is where it stands in the config.

    Raises:
        ValueError: its files or its prompt files are not there.
    """
    data, template_kwargs = config.data, config.policy.tokenizer.chat_template_kwargs
    chat_key = key_of("prompt_file", data.default, dataset, key).rpartition(".")[0]
    chat = load_chat_format(dataset, template_kwargs=template_kwargs, key=chat_key)
    how = ConversationFormat(
        add_bos=data.add_bos,
        add_eos=data.add_eos,
        add_generation_prompt=data.add_generation_prompt,
        # Of a pair, it is the answers that are compared.
        only_unmask_final=config.learns_pairs or config.sft.only_unmask_final,
        template_kwargs=template_kwargs or {},
    )
    conversations_of = pair_of if config.learns_pairs else conversation_of
    max_tokens = min(config.policy.max_total_sequence_length, data.max_input_seq_length or config.policy.max_total_sequence_length)

    def make(fields: Fields, example_id: str) -> Example:
        conversations = [with_prompts(conversation, chat) for conversation in conversations_of(fields, dataset)]
        sequences = []
        for found in tokenize(conversations, tokenizer, how):
            if isinstance(found, str):
                raise RowError(found)
            sequences.append(found)
        return Example(example_id, tuple(sequences))

    def examine(fields: Fields) -> str | None:
        longest = max(len(sequence.token_ids) for sequence in make(fields, "").sequences)
        if longest > max_tokens:
            raise TooLong(longest)
        return optional_text(fields, "id")

    return Reader(key, dataset.source, find_data_files(dataset, setting=key), examine, make, dataset.repeat)


def conversation_of(fields: Fields, dataset: DatasetConfig) -> list[Conversation]:
    """The conversation of a row, with its reply.

    Raises:
        RowError: it has none.
    """
    row = parse_row(fields, dataset)
    reply = () if row.reply is None else (row.reply,)
    return [Conversation((*row.messages, *reply), tuple(row.tools) or None)]


def pair_of(fields: Fields, dataset: DatasetConfig) -> list[Conversation]:
    """The conversation of a row with the preferred answer, and with the other one.

    Raises:
        RowError: it has none.
    """
    pair = parse_pair(fields, dataset)
    return [Conversation((*pair.messages, *reply)) for reply in (pair.chosen, pair.rejected)]
