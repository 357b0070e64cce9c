"""What NeMo RL's files say of data before keys are looked at: lists of data sets, which are sections here, and the home of the Hub's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mrl import env
from mrl.config.files import Settings

HF_HOME = "${oc.env:HF_HOME}"


def name_dataset_lists(settings: Settings) -> None:
    """Moves a list at `data.train` or `data.validation` to the key `datasets` below, in place."""
    for key in (("data", "train"), ("data", "validation")):
        if key in settings and isinstance(settings[key].value, list):
            settings[(*key, "datasets")] = settings.pop(key)


def use_hf_home(settings: Settings) -> None:
    """Puts the folder that the Hugging Face libraries use without the variable HF_HOME in its place, where it is not set."""
    for key, setting in settings.items():
        if isinstance(setting.value, str) and HF_HOME in setting.value and not env.HF_HOME.read():
            home = str(Path("~/.cache/huggingface").expanduser())
            settings[key] = dataclasses.replace(setting, value=setting.value.replace(HF_HOME, home))
