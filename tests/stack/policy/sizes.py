# SPDX-License-Identifier: Apache-2.0
"""Layouts by name: "tp2 sp pp2 dp2 ep2" or "pp2 uneven, recomputed"."""

from __future__ import annotations

import re

KEYS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
WORDS: dict[str, dict[str, object]] = {
    "one": {},
    "sp": dict(sequence_parallel=True),
    "uneven": dict(num_layers_in_first_pipeline_stage=3),
    "recomputed": dict(activation_checkpointing=True),
}


def sizes(layout: str) -> tuple[int, dict[str, object]]:
    """Number of ranks, the fewest that the named sizes need, and Megatron's settings. Of "dp2", the first alone."""
    given, settings = dict.fromkeys(KEYS, 1) | {"dp": 1}, dict[str, object]()
    for word in layout.replace(",", "").split():
        if word in WORDS:
            settings |= WORDS[word]
            continue
        name, size = re.fullmatch(r"([a-z]+)(\d)", word).groups()  # type: ignore[union-attr]  # a name that is none fails here
        given[name] = int(size)
        settings |= {KEYS[name]: int(size)} if name != "dp" else {}
    in_stage = max(given["tp"] * given["cp"] * given["dp"], given["ep"] * given["etp"])
    return given["pp"] * in_stage, settings
