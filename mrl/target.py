# SPDX-License-Identifier: Apache-2.0
"""What the argument of `python -m mrl.evaluate` means."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mrl.config.schema.run import CheckpointingConfig
from mrl.store.checkpoints import RUN_CONFIG, CheckpointStore


@dataclass(frozen=True)
class Target:
    """What is evaluated."""

    config: str
    """Config file that says how."""
    name: str
    """Of the results."""
    model: Path | None = None
    """Hugging Face folder; None = the config's model."""
    checkpoint: Path | None = None
    """Checkpoint of a run, to be exported first."""

    def model_overrides(self) -> list[str]:
        """The overrides that point the config at `model`."""
        return [] if self.model is None else [f"policy.model_name={self.model}", f"policy.tokenizer.name={self.model}"]


def find_target(name: str, config: str | None) -> Target:
    """What `name` means: a config, or a folder.

    Raises:
        ValueError: it is a folder of neither kind, or has no checkpoint.
    """
    folder = Path(name)
    if not folder.is_dir():
        return Target(name, Path(name).stem)
    if (folder / "config.json").is_file():
        if config is None:
            raise ValueError(f"{name} is a model; say with --config which config's data, environments and sampling it is asked with")
        return Target(config, folder.resolve().name, model=folder.resolve())
    run = folder if (folder / RUN_CONFIG).is_file() else folder.resolve().parent
    if not (run / RUN_CONFIG).is_file():
        raise ValueError(f"{name} is no run folder ({RUN_CONFIG}), none of its checkpoints, and no Hugging Face folder (config.json)")
    checkpoint = folder
    if run == folder:
        newest = CheckpointStore(run, CheckpointingConfig()).newest(with_shards=True)
        if newest is None:
            raise ValueError(f"{name} has no complete checkpoint yet; give the model's folder instead")
        checkpoint = newest.folder
    return Target(config or str(run / RUN_CONFIG), f"{run.resolve().name}-{checkpoint.name}", checkpoint=checkpoint)
