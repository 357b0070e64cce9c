# SPDX-License-Identifier: Apache-2.0
"""A byte-level tokenizer: 256 byte tokens without merges and eight special tokens, so any UTF-8 text round-trips."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

PAD, BOS, END, SYSTEM, USER, ASSISTANT = "<|pad|>", "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
# Two spare tokens round the vocabulary up to a multiple of eight.
SPECIAL_TOKENS = (PAD, BOS, END, SYSTEM, USER, ASSISTANT, "<|reserved_0|>", "<|reserved_1|>")
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
PAD_ID, BOS_ID, END_ID = 256, 257, 258

# Short, as its tokens are part of every prompt: one marker per message, and an end only where the model must learn to
# stop.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ('system', 'user', 'assistant') %}{{ raise_exception('unknown role ' + "
    "message['role']) }}{% endif %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def byte_tokenizer(model_max_length: int) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: ids below 256 are byte values, special tokens follow."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    spare = iter(range(256, 512))
    symbols = [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]
    tokenizer = Tokenizer(BPE(vocab={symbol: byte for byte, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=END,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=model_max_length,
    )


def save(folder: Path, *, model_max_length: int) -> PreTrainedTokenizerFast:
    """Writes the tokenizer's files into `folder` and returns the tokenizer."""
    tokenizer = byte_tokenizer(model_max_length)
    tokenizer.save_pretrained(folder)
    return tokenizer
