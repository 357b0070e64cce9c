# SPDX-License-Identifier: Apache-2.0
"""Section `data`, and data sets by NeMo RL's names. See `mrl.config.schema.run`; how rows are read is in `mrl.data`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Literal

from mrl.config.fields import Count, Positive, Range, Share, follows

GYM_PROCESSOR = "nemo_gym_data_processor"
PROCESSORS = ("default", "math_data_processor", "math_hf_data_processor", "sft_processor", GYM_PROCESSOR)
"""NeMo RL's names. Here all read rows by the data set's format; that of NeMo Gym leaves conversations as its rows give
them.
"""


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
    """True if it is published with every question many times; each is asked once an epoch."""
    rows: Literal["answers", "conversations", "pairs"] = "answers"
    """Rows that rollouts and SFT read, that SFT alone does, or that DPO and reward models do."""


DATASETS: Mapping[str, KnownDataset] = MappingProxyType(
    {
        "AIME2024": KnownDataset("HuggingFaceH4/aime_2024"),
        "AIME2025": KnownDataset("opencompass/AIME2025"),
        "AIME2026": KnownDataset("MathArena/aime_2026"),
        "BinaryPreferenceDataset": KnownDataset(rows="pairs"),
        "DAPOMath17K": KnownDataset("BytedTsinghua-SIA/DAPO-Math-17k", repeats_rows=True),
        "DAPOMathAIME2024": KnownDataset("BytedTsinghua-SIA/AIME-2024", repeats_rows=True),
        "DeepScaler": KnownDataset("agentica-org/DeepScaleR-Preview-Dataset"),
        "GSM8K": KnownDataset("openai/gsm8k", subset="main"),
        "gsm8k": KnownDataset("openai/gsm8k", subset="main"),
        "HelpSteer3": KnownDataset("nvidia/HelpSteer3", subset="preference", rows="pairs"),
        "NemoGymDataset": KnownDataset(),
        "Nemotron-Cascade-2-SFT-Math": KnownDataset(
            "nvidia/Nemotron-Cascade-2-SFT-Data", subset="math", split_validation_size=0.05, rows="conversations"
        ),
        "OpenMathInstruct-2": KnownDataset("nvidia/OpenMathInstruct-2", split="train_1M", split_validation_size=0.05),
        "OpenR1-Math-220k": KnownDataset("open-r1/OpenR1-Math-220k", subset="default"),
        "PreferenceDataset": KnownDataset(rows="pairs"),
        "ResponseDataset": KnownDataset(),
        "math": KnownDataset(),
        "math500": KnownDataset("HuggingFaceH4/MATH-500", split="test"),
        "openai_format": KnownDataset(),
        "squad": KnownDataset("rajpurkar/squad"),
        "tulu3_sft_mixture": KnownDataset(
            "allenai/tulu-3-sft-mixture", split_validation_size=0.05, rows="conversations"
        ),
    }
)
"""Known data sets by the name that NeMo RL gives them, with its defaults."""


def names_of(*rows: str) -> str:
    """Names of the data sets with rows of these kinds, for a message."""
    return ", ".join(name for name, dataset in DATASETS.items() if dataset.rows in rows)


def known_dataset(name: str | None) -> KnownDataset:
    """The data set of that name; for None, or a name that a check refuses, one without defaults of its own."""
    return DATASETS.get(name or "", KnownDataset())


@dataclass
class RowsConfig:
    """Rows of a data set: their place, and how they are read."""

    dataset_name: str | None = None
    """A data set known by name (`mrl.config.schema.data`): where its rows are and what their keys mean. null = the keys
    of a row tell.
    """
    subset: str | None = None
    """Config of the data set's README.md that is read, or folder; null = its default config, or all."""
    split: str | None = None
    """Split that is read; null = the data set's own, or train."""
    input_key: str | None = None
    """Key of the question; null = the first of question, problem, prompt, input, after the text under `instruction`, if
    there is one.
    """
    output_key: str | None = None
    """Key of the answer; null = the first of expected_answer, answer, output."""
    prompt_key: str = "prompt"
    """Key of the prompt, a text or a list of messages, in rows of chosen and rejected replies."""
    chosen_key: str = "chosen"
    """Key of the better reply."""
    rejected_key: str = "rejected"
    """Key of the worse reply."""
    chat_key: str = "messages"
    """Key of the conversation in rows of OpenAI's chat format."""
    system_key: str | None = None
    """Key of a system message in rows of any kind; null = none."""
    system_prompt: str | None = None
    """System message of rows without one; null = none."""
    tool_key: str = "tools"
    """Key of the tools that a conversation may call, in rows of any kind."""
    processor: str = "math_data_processor"
    """Function that makes a prompt of a row: nemo_gym_data_processor applies no prompt files and system messages, NeMo
    RL's others do.

    `package.module:name` is a function of yours (docs/extend/processor.md), and the prompt files apply.
    """
    env_name: str = "math"
    """The environment that scores rollouts of rows that name none; nemo_gym = the one for the row's
    `agent_ref.name`.
    """
    prompt_file: str | None = None
    """Text file with `{}` in place of the question; null = the question alone."""
    system_prompt_file: str | None = None
    """Text file with the system message; null = none."""
    teacher_key: str | None = None
    """Key of what a teacher is asked in place of the policy's question, in training rows: a list of messages, or a text
    (a solution, a hint) in place of the last question. null = teachers are asked what the policy is.
    """
    teacher_prompt_file: str | None = None
    """Text file with `{}` in place of the question and `{hint}` in place of the text under `teacher_key`; null = that
    text, in `prompt_file`.
    """


@dataclass
class DataDefaultConfig(RowsConfig):
    split_validation_size: Annotated[float, Range(0, 2**31)] | None = None
    """Held out of training rows for validation: a share below 1, or a number of rows. null = the data set's own share,
    mostly 0.
    """
    seed: Count = 42
    """Decides which rows are held out."""


@dataclass
class DatasetConfig(RowsConfig):
    """One data set. Missing keys follow `data.default`."""

    dataset_name: str | None = follows("data.default.dataset_name")
    subset: str | None = follows("data.default.subset")
    split: str | None = follows("data.default.split")
    input_key: str | None = follows("data.default.input_key")
    output_key: str | None = follows("data.default.output_key")
    prompt_key: str = follows("data.default.prompt_key")
    chosen_key: str = follows("data.default.chosen_key")
    rejected_key: str = follows("data.default.rejected_key")
    chat_key: str = follows("data.default.chat_key")
    system_key: str | None = follows("data.default.system_key")
    system_prompt: str | None = follows("data.default.system_prompt")
    tool_key: str = follows("data.default.tool_key")
    processor: str = follows("data.default.processor")
    env_name: str = follows("data.default.env_name")
    prompt_file: str | None = follows("data.default.prompt_file")
    system_prompt_file: str | None = follows("data.default.system_prompt_file")
    teacher_key: str | None = follows("data.default.teacher_key")
    teacher_prompt_file: str | None = follows("data.default.teacher_prompt_file")
    data_path: str | None = None
    """File (.jsonl, .json, .parquet, .arrow), folder of such files, or Hub id; null = where `dataset_name` is found on
    the Hub.
    """
    repeat: Positive = 1
    """Times that every row is asked in an epoch."""

    @property
    def source(self) -> str:
        """Returns the place of the rows: a path, or an id of the Hub; empty if unset."""
        return self.data_path or known_dataset(self.dataset_name).hub_id or ""


@dataclass
class TrainDatasetConfig(DatasetConfig):
    """One data set to train on."""

    split_validation_size: Annotated[float, Range(0, 2**31)] | None = follows("data.default.split_validation_size")
    """Rows held out for validation."""
    weight: Annotated[float, Range(0, is_low_open=True)] | None = None
    """Share of the prompts (sft, dpo, rm: rows) of each step, over the sum of all weights; the data set then has epochs
    of its own. Of several data sets all have one, or none. null = by number of rows.
    """
    max_samples: Positive | None = None
    """Use only so many of the rows, before any are held out; null = all."""
    seed: Count = follows("data.default.seed")
    """Decides which rows are used and held out."""

    @property
    def held_out(self) -> float:
        """Share or number of rows that are held out for validation."""
        if self.split_validation_size is not None:
            return self.split_validation_size
        return known_dataset(self.dataset_name).split_validation_size


@dataclass
class TrainDataConfig(TrainDatasetConfig):
    datasets: list[TrainDatasetConfig] | None = None
    """Several data sets, read in this order, instead of the other keys of this section; a list at `data.train` means
    this.
    """


@dataclass
class ValidationDataConfig(DatasetConfig):
    datasets: list[DatasetConfig] | None = None
    """Several data sets, read in this order, instead of the other keys of this section; a list at `data.validation`
    means this.
    """


@dataclass
class DifficultyPoolConfig:
    threshold: float
    """Highest mean reward of the pool's prompts: of their last rollouts, shaped by `env.effort_levels`. Rewards above
    all thresholds belong to the last pool.
    """
    weight: Share = 1.0
    """Share of the epochs that ask a prompt of this pool: 1 = each, 0.2 = every fifth, 0 = none."""


@dataclass
class DataConfig:
    max_input_seq_length: Positive | None = None
    """Longest prompt in tokens; null = the context less `max_new_tokens`."""
    add_bos: bool = True
    """Put the tokenizer's begin token before a conversation to learn, unless the chat template has; without such a
    token, nothing.
    """
    add_eos: bool = True
    """Put the tokenizer's end token behind a conversation to learn, unless the chat template has; without such a token,
    nothing.
    """
    add_generation_prompt: bool = False
    """Learn only the answer proper: text that the chat template writes before an answer then belongs to the question
    (conversations).
    """
    shuffle: bool = True
    """Shuffle training rows in each epoch, by the run's seed."""
    on_bad_row: Literal["refuse", "skip"] = "refuse"
    """Treatment of an unusable row: refuse the run, or skip the row and keep it in the run folder's `quarantine`, with
    its reason.
    """
    max_bad_row_share: Share = 0.01
    """Share of a data set's rows that may be skipped; above it the run is refused all the same."""
    drop_rows_without_environment: bool = False
    """Leave out rows whose `agent_ref.name` or `env_name` has no environment here, and say which share of the rows that
    is.
    """
    difficulty_pools: dict[str, DifficultyPoolConfig] = field(default_factory=dict)
    """Curriculum by difficulty: name -> pool of the prompts whose mean reward is at most its threshold. An epoch asks
    them by its weight, and always those without a reward. Empty = each epoch asks every prompt.
    """
    default: DataDefaultConfig = field(default_factory=DataDefaultConfig)
    train: TrainDataConfig = field(default_factory=TrainDataConfig)
    validation: ValidationDataConfig | None = None
    """null = no validation, unless rows of `data.train` are held out."""

    @property
    def train_sets(self) -> dict[str, TrainDatasetConfig]:
        """The training data sets by their key: `data.train`, or `data.train.datasets[0]` and so on."""
        if self.train.datasets is None:
            return {"data.train": self.train}
        return {f"data.train.datasets[{index}]": dataset for index, dataset in enumerate(self.train.datasets)}

    @property
    def validation_sets(self) -> dict[str, DatasetConfig]:
        """The data sets of `data.validation`, likewise."""
        if self.validation is None:
            return {}
        if self.validation.datasets is None:
            return {"data.validation": self.validation}
        return {f"data.validation.datasets[{index}]": dataset for index, dataset in enumerate(self.validation.datasets)}

    @property
    def sets(self) -> dict[str, DatasetConfig]:
        """All data sets by their key."""
        return self.train_sets | self.validation_sets

    @property
    def has_validation(self) -> bool:
        """Tells whether there are validation rows: their own, or held out of the training rows."""
        return bool(self.validation_sets) or any(dataset.held_out for dataset in self.train_sets.values())
