# SPDX-License-Identifier: Apache-2.0
"""The data of training without rollouts: conversations, tokenised, with the tokens of them that are learned."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np

from mrl.data.chat import load_chat_format, template_variables, tokenizer_of, with_prompts
from mrl.data.extras import check_learned, is_learned, template_kwargs_of
from mrl.data.fields import Fields, Message, RowError, optional_text
from mrl.data.files import find_data_files
from mrl.data.reading import LeftOut, Parsed, Reader, Rows, TooLong, read_split, with_processor
from mrl.data.rendering import Conversation, fit, write
from mrl.data.rows import other_kind, parse_pair, parse_row
from mrl.data.trial import try_template
from mrl.data.turns import special_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mrl.config.schema.data import DatasetConfig
    from mrl.config.schema.run import RunConfig

_CONTENT = "the-next-words-stand-here"
"""Stands for a message's text in a rendered template; no template contains it."""


@dataclass(frozen=True)
class TokenSequence:
    """A sequence and the parts of it that are learned."""

    token_ids: np.ndarray
    """int32 [L]. Nothing follows the last part that is learned."""
    targets: tuple[tuple[int, int], ...]
    """Positions [start, stop) of tokens that are learned, in order, at least one; the first token of all is never among
    them.
    """


@dataclass(frozen=True)
class Example:
    """A row and what is learned together: one conversation, or one with the preferred answer and one with the other."""

    example_id: str
    sequences: tuple[TokenSequence, ...]


@dataclass(frozen=True)
class SupervisedData:
    """The examples of a run, and the rows that are left out, by data set."""

    train: Rows[Example]
    validation: Rows[Example]
    pad_token_id: int
    left_out: list[LeftOut]


@dataclass(frozen=True)
class ConversationFormat:
    """Conversion of a conversation to tokens; the fields are the config keys of these names."""

    add_bos: bool
    add_eos: bool
    add_generation_prompt: bool
    only_unmask_final: bool
    template_kwargs: Mapping[str, object]


def load_examples(config: RunConfig) -> SupervisedData:
    """A run's examples. Reads all training and validation rows; leaves out overlong rows and warns of their number."""
    tokenizer = tokenizer_of(config)

    def finish(example_id: str, example: Example) -> Example:
        return dataclasses.replace(example, example_id=example_id)

    try_template(tokenizer, config.policy.tokenizer.chat_template_kwargs)
    train, validation, left_out = read_split(
        config.data, lambda key, dataset: example_reader(key, dataset, config, tokenizer), finish
    )
    pad_token_id = tokenizer.pad_token_id
    return SupervisedData(train, validation, pad_token_id if isinstance(pad_token_id, int) else 0, left_out)


def example_reader(
    key: str, dataset: DatasetConfig, config: RunConfig, tokenizer: PreTrainedTokenizerBase | None
) -> Reader[Example]:
    """Reader of a data set's examples. Without a tokenizer they have no tokens, and may be too long."""
    data, template_kwargs = config.data, config.policy.tokenizer.chat_template_kwargs
    chat = load_chat_format(dataset, data.default, key, template_kwargs=template_kwargs)
    how = ConversationFormat(
        add_bos=data.add_bos,
        add_eos=data.add_eos,
        add_generation_prompt=data.add_generation_prompt,
        # The answers of a pair are compared, not its prompts.
        only_unmask_final=config.learns_pairs or config.sft.only_unmask_final,
        template_kwargs=template_kwargs or {},
    )
    max_tokens = min(
        config.policy.max_total_sequence_length, data.max_input_seq_length or config.policy.max_total_sequence_length
    )

    variables = None if tokenizer is None else template_variables(tokenizer)

    def parse(fields: Fields) -> Parsed[Example]:
        check_learned(fields, algorithm=config.algorithm)
        own = template_kwargs_of(fields, variables)
        if config.learns_pairs:
            pair = parse_pair(fields, dataset)
            unshown = pair.unshown
            conversations = [
                Conversation([*pair.messages, *reply], pair.tools) for reply in (pair.chosen, pair.rejected)
            ]
        else:
            row = parse_row(fields, dataset)
            unshown = row.unshown
            conversations = [Conversation([*row.messages, *([] if row.reply is None else [row.reply])], row.tools)]
        for conversation in conversations:
            learned_of(conversation, only_final=how.only_unmask_final)
        identity = json.dumps([[conversation.messages, conversation.tools] for conversation in conversations])
        if tokenizer is None:
            return Parsed(Example("", ()), optional_text(fields, "id"), identity, unshown)
        sequences = []
        for conversation in conversations:
            prompted = dataclasses.replace(
                conversation, messages=with_prompts(conversation.messages, chat, around="first")
            )
            sequences.append(
                tokenize(prompted, tokenizer, dataclasses.replace(how, template_kwargs={**how.template_kwargs, **own}))
            )
        longest = max(len(sequence.token_ids) for sequence in sequences)
        if longest > max_tokens:
            raise TooLong(longest)
        return Parsed(Example("", tuple(sequences)), optional_text(fields, "id"), identity, unshown)

    files = find_data_files(dataset, setting=key)
    hint = partial(other_kind, dataset=dataset, reads_pairs=config.learns_pairs, reads_gym=False)
    return Reader(key, dataset.source, files, with_processor(dataset.processor, parse), dataset.repeat, hint)


def learned_of(conversation: Conversation, *, only_final: bool) -> list[int]:
    """Indices of learned messages: the assistant's, or its last, but for those their marks exclude. RowError: none."""
    learned = [
        index for index, message in enumerate(conversation.messages) if is_learned(message, f"messages[{index}]")
    ]
    answers = [index for index, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    if not answers:
        raise RowError("no message has the role assistant, so there is nothing to learn")
    if only_final:
        learned = [index for index in learned if index == answers[-1]]
    if not learned:
        raise RowError("the row's marks exclude every message that would be learned; remove the row")
    return learned


def tokenize(conversation: Conversation, tokenizer: PreTrainedTokenizerBase, how: ConversationFormat) -> TokenSequence:
    """The tokens of a conversation, and which of them belong to the assistant's messages.

    A message is what the chat template's text up to its end adds to the text before it, and the mark of the next role
    where nothing else ends it. RowError: there is nothing to learn, or the template cannot render the conversation.
    """
    messages, learned = conversation.messages, learned_of(conversation, only_final=how.only_unmask_final)
    shown, text = fit(conversation, tokenizer, how.template_kwargs, add_generation_prompt=False)

    def render(count: int, *, add_generation_prompt: bool = False) -> str:
        part = Conversation(shown.messages[:count], shown.tools)
        return write(part, tokenizer, how.template_kwargs, add_generation_prompt=add_generation_prompt)

    texts = [text]
    marks = dict[int, str]()
    tail = _tail_of_turns(tokenizer, str(tokenizer.chat_template), json.dumps(how.template_kwargs))
    for index in learned:
        before, after = render(index) if index else "", render(index + 1)
        if not texts[0].startswith(before) or not texts[0].startswith(after):
            raise RowError(
                "the chat template writes a message differently once others follow it, so what belongs to it "
                "cannot be told; set sft.only_unmask_final=true, or use another template"
            )
        texts += [render(index, add_generation_prompt=True) if index and how.add_generation_prompt else before, after]
        if index + 1 < len(messages) and not (tail and after.rstrip().endswith(tail)):
            marks[index] = _mark_behind(shown, index, after, tokenizer, how)
    texts += [after + marks.get(index, "") for index, after in zip(learned, texts[2::2], strict=True)]
    whole, *parts = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    # Where the tokenizer merges the end of one text with the start of the next, the merged token belongs to the answer.
    num = 2 * len(learned)
    starts, stops, ends = (
        [_num_common(part, whole) for part in some] for some in (parts[0:num:2], parts[1:num:2], parts[num:])
    )
    targets = [_with_end(*bounds, whole, tokenizer) for bounds in zip(starts, stops, ends, strict=True)]
    # Some templates write a line break behind the end token.
    ends_itself = tokenizer.eos_token is None or texts[0].rstrip("\n").endswith(str(tokenizer.eos_token))
    if how.add_eos and learned[-1] == len(messages) - 1 and not ends_itself:
        whole = [*whole, int(str(tokenizer.eos_token_id))]
        targets[-1] = (targets[-1][0], len(whole))
    if how.add_bos and tokenizer.bos_token is not None and whole[:1] != [tokenizer.bos_token_id]:
        whole = [int(str(tokenizer.bos_token_id)), *whole]
        targets = [(start + 1, stop + 1) for start, stop in targets]
    # Nothing predicts the first token.
    targets = [(max(start, 1), stop) for start, stop in targets if stop > max(start, 1)]
    if not targets:
        raise RowError("the assistant says nothing")
    return TokenSequence(np.array(whole[: targets[-1][1]], dtype=np.int32), tuple(targets))


@lru_cache(maxsize=8)
def _tail_of_turns(tokenizer: PreTrainedTokenizerBase, template: str, template_kwargs: str) -> str:
    asked: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _CONTENT}]
    try:
        return (
            write(Conversation(asked), tokenizer, json.loads(template_kwargs), add_generation_prompt=False)
            .rpartition(_CONTENT)[2]
            .strip()
        )
    except RowError:
        return ""


def _mark_behind(
    shown: Conversation, index: int, after: str, tokenizer: PreTrainedTokenizerBase, how: ConversationFormat
) -> str:
    """The next message's role mark, up to white space, where the chat template ends an answer by nothing else; else "".

    Models of such templates (GLM, Vicuna) end their turns by writing it, and TRL's training templates learn it.
    """
    following = {"tool_call_id": "x", **shown.messages[index + 1], "content": _CONTENT}
    part = Conversation([*shown.messages[: index + 1], following], shown.tools)
    try:
        text = write(part, tokenizer, how.template_kwargs, add_generation_prompt=False)
    except RowError:
        return ""
    found = re.match(r"\s*\S+", text.removeprefix(after).partition(_CONTENT)[0]) if text.startswith(after) else None
    return found.group() if found else ""


def _with_end(
    start: int, stop: int, marked: int, whole: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> tuple[int, int]:
    """The part [start, stop), up to `marked` if no special token ends it; of several behind it, the first is
    its end.
    """
    special = special_ids(tokenizer)
    last = next(
        (token_id for token_id in reversed(whole[start:stop]) if str(tokenizer.decode([token_id])).strip()), None
    )
    if last in special:
        return start, stop
    return start, next((index + 1 for index in range(stop, marked) if whole[index] in special), max(stop, marked))


def _num_common(first: list[int], second: list[int]) -> int:
    return next(
        (index for index, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
