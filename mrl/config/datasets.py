# SPDX-License-Identifier: Apache-2.0
"""Data sets and processors by the names that NeMo RL gives them, and where each is found. How their rows are read is in `mrl.data`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

GYM_PROCESSOR = "nemo_gym_data_processor"
PROCESSORS = ("default", "math_data_processor", "math_hf_data_processor", "sft_processor", GYM_PROCESSOR)
"""NeMo RL's names. Here all read rows by the data set's format; that of NeMo Gym leaves conversations as its rows give them."""


@dataclass(frozen=True)
class KnownDataset:
    """A data set that a name stands for."""

    hub_id: str | None = None
    """Repository on the Hugging Face Hub; None: `data_path` must say where the rows are."""
    subset: str | None = None
    """Folder of the repository that is read unless the config names another."""
    split: str = "train"
    """Split that is read unless the config names another."""
    split_validation_size: float = 0.0
    """Share held out unless the config gives another."""
    repeats_rows: bool = False
    """Whether it is published with every question many times; each is asked once an epoch."""


DATASETS: Mapping[str, KnownDataset] = MappingProxyType(
    {
        "AIME2024": KnownDataset("HuggingFaceH4/aime_2024"),
        "AIME2025": KnownDataset("opencompass/AIME2025"),
        "AIME2026": KnownDataset("MathArena/aime_2026"),
        "BinaryPreferenceDataset": KnownDataset(),
        "DAPOMath17K": KnownDataset("BytedTsinghua-SIA/DAPO-Math-17k", repeats_rows=True),
        "DAPOMathAIME2024": KnownDataset("BytedTsinghua-SIA/AIME-2024", repeats_rows=True),
        "DeepScaler": KnownDataset("agentica-org/DeepScaleR-Preview-Dataset"),
        "GSM8K": KnownDataset("openai/gsm8k", subset="main"),
        "gsm8k": KnownDataset("openai/gsm8k", subset="main"),
        "HelpSteer3": KnownDataset("nvidia/HelpSteer3", subset="preference"),
        "NemoGymDataset": KnownDataset(),
        "Nemotron-Cascade-2-SFT-Math": KnownDataset("nvidia/Nemotron-Cascade-2-SFT-Data", subset="math", split_validation_size=0.05),
        "OpenMathInstruct-2": KnownDataset("nvidia/OpenMathInstruct-2", split="train_1M", split_validation_size=0.05),
        "OpenR1-Math-220k": KnownDataset("open-r1/OpenR1-Math-220k", subset="default"),
        "PreferenceDataset": KnownDataset(),
        "ResponseDataset": KnownDataset(),
        "openai_format": KnownDataset(),
        "squad": KnownDataset("rajpurkar/squad"),
        "tulu3_sft_mixture": KnownDataset("allenai/tulu-3-sft-mixture", split_validation_size=0.05),
    }
)
"""By the name that NeMo RL gives the data set, with its defaults."""


def known_dataset(name: str | None) -> KnownDataset:
    """The data set of that name; for None, or a name that a check refuses, one without defaults of its own."""
    return DATASETS.get(name or "", KnownDataset())
