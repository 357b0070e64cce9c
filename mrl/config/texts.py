# SPDX-License-Identifier: Apache-2.0
"""Outside texts made harmless (of models, rows and reward functions), counts and tables. Standard library only."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

MAX_TEXT_CHARACTERS = 4 << 20
"""Limit of one rollout: a million tokens of prose. JSON spells a character in 12 bytes at most, so it fits into a
message to a child.
"""

REPLACEMENT = "\ufffd"
CUT = "\n[cut]\n"

# Controls but tab and newline (NUL, escapes of terminals), bidirectional embeddings, overrides and isolates, halves of
# surrogate pairs.
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


_UNSEEN = re.compile(
    "[\u00ad\u061c\u115f\u1160\u180e\u200b-\u200f\u2028\u2029\u2060-\u2064\u3164\ufeff\uffa0\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)
_JOINERS = "\u061c\u200b\u200c\u200d\u200e\u200f"
_VIRAMA = 9
"""Unicode's combining class of the signs behind which a joiner chooses a letter's form (RFC 5892, appendix A)."""


def counted(number: int, noun: str) -> str:
    """A number with its noun, in the plural where it is not 1: `1 row`, `2 rows`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def step_span(first: int, last: int) -> str:
    """Steps from `first` to `last`: `step 3`, `steps 3 to 5`."""
    return f"step {first}" if first == last else f"steps {first} to {last}"


def rounded(value: float) -> str:
    """A number for people, in three digits or as a whole one: `8` for 7.99999, `0.25`, `86400`."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def spell_bytes(number: float) -> str:
    """A size for people, in the unit that gives it a digit before the point: `442 GB`, `1.5 MB`, `0 kB`."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if number >= factor:
            return f"{rounded(number / factor)} {unit}"
    return f"{rounded(number / 1e3)} kB"


def rollout_name(request_id: str) -> str:
    """A rollout in words: `Rollout 7 of prompt train:3 in epoch 0`; a negative epoch is that of held-out prompts."""
    epoch, _, rest = request_id.partition("/")
    prompt, _, index = rest.rpartition("/")
    if epoch.startswith("-"):
        return f"Rollout {index} of held-out prompt {prompt}"
    return f"Rollout {index} of prompt {prompt} in epoch {epoch}" if prompt else f"Rollout {request_id}"


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row, with its columns below each other."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


def safe_text(text: str, max_characters: int = MAX_TEXT_CHARACTERS) -> str:
    """Replaces each character that could control a terminal, reorder a line, or not be encoded; newlines become `\\n`.

    Cuts the middle out of a text longer than `max_characters`, because answers are at the end.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if len(text) > max_characters:
        half = (max_characters - len(CUT)) // 2
        text = text[:half] + CUT + text[len(text) - half :]
    return _UNSAFE.sub(REPLACEMENT, text)


def spelled(text: str) -> str:
    """`text` with characters that nobody sees spelled out (`\\u200b`): names that look alike are told apart.

    Joiners, breaks between words and marks of direction stay within the scripts that need them.
    """
    if text.isascii():
        return text

    def spell(found: re.Match[str]) -> str:
        before, after = text[max(found.start() - 1, 0) : found.start()], text[found.end() : found.end() + 1]
        is_joined = not (before or "a").isascii() and not (after or "a").isascii()
        if found[0] in _JOINERS and (is_joined or (before and unicodedata.combining(before) == _VIRAMA)):
            return found[0]
        return ascii(found[0])[1:-1]

    return _UNSEEN.sub(spell, text)


def safe_values(value: object) -> object:
    """A value of JSON, YAML or CSV with `safe_text` of every text in it, for comparing it with a text made safe."""
    if isinstance(value, str):
        return safe_text(value)
    if isinstance(value, list):
        return [safe_values(part) for part in value]
    return {safe_values(key): safe_values(part) for key, part in value.items()} if isinstance(value, dict) else value
