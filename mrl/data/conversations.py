"""Conversations to tokens, and which of them the assistant said: those are learned. Pure but for the tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mrl.data.chat import ChatFormat

Message = Mapping[str, object]


@dataclass(frozen=True)
class Conversation:
    """Messages as a row gives them, and the tools that the assistant may call (None: the template hears of no tools)."""

    messages: tuple[Message, ...]
    tools: tuple[Message, ...] | None = None


@dataclass(frozen=True)
class TokenSequence:
    """A sequence and the parts of it that are learned."""

    token_ids: np.ndarray
    """int32 [L]. Nothing follows the last part that is learned."""
    targets: tuple[tuple[int, int], ...]
    """Positions [start, stop) of tokens that are learned, in order, at least one; the first token of all is never among them."""


@dataclass(frozen=True)
class ConversationFormat:
    """How a conversation becomes tokens; the fields are the config keys of these names."""

    add_bos: bool
    add_eos: bool
    add_generation_prompt: bool
    only_unmask_final: bool
    template_kwargs: Mapping[str, object]


def with_prompts(conversation: Conversation, chat: ChatFormat) -> Conversation:
    """The conversation with the prompt file around its first user message, and the system message in front unless it has one."""
    messages = list(conversation.messages)
    first = next((index for index, message in enumerate(messages) if message["role"] == "user"), None)
    if first is not None and isinstance(messages[first]["content"], str):
        messages[first] = {**messages[first], "content": chat.prompt.format(messages[first]["content"])}
    if chat.system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": chat.system_prompt})
    return Conversation(tuple(messages), conversation.tools)


def tokenize(
    conversations: Sequence[Conversation], tokenizer: PreTrainedTokenizerBase, how: ConversationFormat
) -> list[TokenSequence | str]:
    """Tokens of each conversation, with those that its assistant messages consist of; or what is wrong with it.

    What a message consists of is the difference between the chat template's text up to it and the text before it.
    """
    plans = [_plan(conversation, tokenizer, how) for conversation in conversations]
    texts = [text for plan in plans if not isinstance(plan, str) for text in plan.texts()]
    # The template has written every special token that belongs there.
    token_ids: Iterator[list[int]] = iter(
        tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"] if texts else []
    )
    return [plan if isinstance(plan, str) else _sequence(plan, token_ids, tokenizer, how) for plan in plans]


@dataclass(frozen=True)
class _Plan:
    whole: str
    turns: list[tuple[str, str]]
    """The text before each assistant message that is learned, perhaps with what asks for it, and the text up to its end."""
    is_answer_last: bool

    def texts(self) -> list[str]:
        return [self.whole, *(text for turn in self.turns for text in turn)]


def _plan(conversation: Conversation, tokenizer: PreTrainedTokenizerBase, how: ConversationFormat) -> _Plan | str:
    messages = conversation.messages
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        return "no message has the role assistant, so there is nothing to learn"

    def render(count: int, *, add_generation_prompt: bool = False) -> str:
        extra: dict[str, Any] = dict(how.template_kwargs)
        # Templates take what transformers' annotations leave out: contents and tools of any JSON.
        shown: Any = list(messages[:count])
        tools: Any = None if conversation.tools is None else list(conversation.tools)
        return str(tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=add_generation_prompt, tools=tools, **extra))

    try:
        whole, turns = render(len(messages)), []
        for index in answers[-1:] if how.only_unmask_final else answers:
            before, after = render(index) if index else "", render(index + 1)
            if not whole.startswith(before) or not whole.startswith(after):
                return (
                    "the chat template writes a message differently once others follow it, so what belongs to it cannot be told; "
                    "set sft.only_unmask_final=true, or use another template"
                )
            turns.append((render(index, add_generation_prompt=True) if index and how.add_generation_prompt else before, after))
    except Exception as error:  # the template is the model's, written in Jinja, and raises what it likes
        return f"the chat template cannot render the conversation: {type(error).__name__}: {error}"
    return _Plan(whole, turns, is_answer_last=answers[-1] == len(messages) - 1)


def _sequence(
    plan: _Plan, token_ids: Iterator[list[int]], tokenizer: PreTrainedTokenizerBase, how: ConversationFormat
) -> TokenSequence | str:
    whole = next(token_ids)
    targets = []
    for _ in plan.turns:
        before, after = next(token_ids), next(token_ids)
        # Where the tokenizer merges the end of the one with the start of the other, the merged token belongs to the answer.
        targets.append((_num_common(before, whole), _num_common(after, whole)))
    if how.add_eos and tokenizer.eos_token is not None and plan.is_answer_last:
        # Some templates write a line break behind the end token.
        if not plan.whole.rstrip("\n").endswith(str(tokenizer.eos_token)):
            whole = [*whole, int(str(tokenizer.eos_token_id))]
            targets[-1] = (targets[-1][0], len(whole))
    if how.add_bos and tokenizer.bos_token is not None and whole[:1] != [tokenizer.bos_token_id]:
        whole = [int(str(tokenizer.bos_token_id)), *whole]
        targets = [(start + 1, stop + 1) for start, stop in targets]
    # Nothing predicts the first token.
    targets = [(max(start, 1), stop) for start, stop in targets if stop > max(start, 1)]
    if not targets:
        return "the assistant says nothing"
    return TokenSequence(np.array(whole[: targets[-1][1]], dtype=np.int32), tuple(targets))


def _num_common(first: list[int], second: list[int]) -> int:
    """Length of the common beginning."""
    return next((index for index, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
