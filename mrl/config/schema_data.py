"""Section `data`: rows. See `mrl.config.schema`."""

from __future__ import annotations

from dataclasses import dataclass, field

from mrl.config.fields import required
from mrl.config.trace import traced


@traced
@dataclass
class DataDefaultConfig:
    processor: str = "math_data_processor"
    """How a row becomes a prompt."""
    env_name: str = "math"
    """The environment that scores rollouts of rows that name none."""
    prompt_file: str | None = None
    """Text file with `{}` in place of the question; null = the question alone."""
    system_prompt_file: str | None = None
    """Text file with the system message; null = none."""


@traced
@dataclass
class TrainDataConfig:
    data_path: str = required()
    """JSONL file of training rows."""


@traced
@dataclass
class ValidationDataConfig:
    data_path: str = required()
    """JSONL file of validation rows."""


@traced
@dataclass
class DataConfig:
    max_input_seq_length: int | None = None
    """Longest prompt in tokens; null = what the context leaves beside `max_new_tokens`."""
    add_bos: bool = True
    """Put the tokenizer's begin token before a conversation to learn, unless the chat template has; without such a token, nothing."""
    add_eos: bool = True
    """Put the tokenizer's end token behind a conversation to learn, unless the chat template has; without such a token, nothing."""
    add_generation_prompt: bool = False
    """In a conversation to learn, what the chat template writes before an answer belongs to the question and is not learned."""
    shuffle: bool = True
    """Shuffle training rows in each epoch, by the run's seed."""
    default: DataDefaultConfig = field(default_factory=DataDefaultConfig)
    train: TrainDataConfig = field(default_factory=TrainDataConfig)
    validation: ValidationDataConfig | None = None
    """null = no validation."""
