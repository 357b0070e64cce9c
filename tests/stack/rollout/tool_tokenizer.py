# SPDX-License-Identifier: Apache-2.0
"""The byte tokenizer with the marks of tool calls as tokens."""

from __future__ import annotations

from pathlib import Path

from mrl.recipes.tokenizer import save


def save_tool_tokenizer(folder: Path) -> Path:
    """Writes it into `folder`, which it gives back; the marks take the place of the spare tokens."""
    save(folder, model_max_length=1280)
    file = folder / "tokenizer.json"
    text = file.read_text()
    for index, mark in enumerate(("<tool_call>", "</tool_call>")):
        text = text.replace(f"<|reserved_{index}|>", mark)
    file.write_text(text)
    return folder
