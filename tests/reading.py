# SPDX-License-Identifier: Apache-2.0
"""Readers of what mrl writes and only tests read back: a run page's data, and weights by a layout in new tensors."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path

import torch

from conversion.boxes import Layout, Slot
from conversion.files.hf_folder import stored_tensors
from conversion.files.safetensors import SafetensorsFolder, fill_layout
from conversion.tensors import read_whole, torch_dtype


def read_page(text: str) -> dict:
    """The data of a page, as `mrl.ops.view.page.page` took them."""
    encoded = text.partition('id="data">')[2].partition("<")[0]
    return json.loads(gzip.decompress(base64.b64decode(encoded)))


def read_canonical(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a Hugging Face folder by canonical names."""
    with SafetensorsFolder(folder) as source:
        return {name: read_whole(source, name) for name in stored_tensors(folder)}


def read_layout(folder: Path | str, layout: Layout) -> dict[Slot, torch.Tensor]:
    """New tensors of every slot of a layout, filled from a Hugging Face folder."""
    tensors = {slot: torch.empty(content.shape, dtype=torch_dtype(content.dtype)) for slot, content in layout.items()}
    fill_layout(folder, layout, tensors)
    return tensors
