# SPDX-License-Identifier: Apache-2.0
"""Functions that the conversion tests run on the ranks."""

from __future__ import annotations

from pathlib import Path

import torch

from mrl.config.schema.run import RunConfig
from tests.reading import read_layout
from tests.stack.policy.policy_ranks import open_policy, train
from tests.stack.policy.save_ranks import save
from tests.stack.ranks import Rank


def load_and_save(rank: Rank, config: RunConfig, hf_folder: Path, source: Path, out: Path) -> list[str]:
    """Loads a checkpoint and resaves it; slots that differ from the layout tables' cut of the Hugging Face folder."""
    with open_policy(rank, config) as policy:
        for tensor in policy.settled_weights().values():
            tensor.detach().fill_(7)
        policy.load_checkpoint(source)
        expected, layout = read_layout(hf_folder, policy._layout), policy._layout
        differing = []
        for slot, tensor in policy.settled_weights().items():
            for box in layout[slot].padding:
                # Megatron leaves rows without a checkpointed value as they were.
                tensor.detach()[tuple(slice(start, stop) for start, stop in box)] = 0
            if not torch.equal(tensor.detach(), expected[slot]):
                differing.append(str(slot))
        save(policy, out)
        return differing


def load_save_and_step(rank: Rank, config: RunConfig, source: Path, out: Path) -> list[dict[str, float]]:
    """Loads a checkpoint and saves it again; metrics of the two steps that follow."""
    with open_policy(rank, config) as policy:
        policy.load_checkpoint(source)
        save(policy, out)
        return train(policy, 2)


def save_loaded_folder(rank: Rank, config: RunConfig, out: Path) -> None:
    """Saves the weights of the policy's model folder."""
    with open_policy(rank, config) as policy:
        save(policy, out)


def save_with_stacked_layers(rank: Rank, config: RunConfig, out: Path) -> None:
    """Saves the policy model folder's weights in Megatron's default form, which has one tensor for all layers."""
    from mrl.policy import checkpoint

    ours = dict(checkpoint._FORMAT)
    checkpoint._FORMAT["non_homogeneous_layers"] = False
    try:
        save_loaded_folder(rank, config, out)
    finally:
        checkpoint._FORMAT.update(ours)
