# SPDX-License-Identifier: Apache-2.0
"""Prompts that a teacher sees in place of the policy's: a column of the row, with a solution or a hint.

Teachers score the tokens that the policy drew behind its own prompt as if they stood behind this one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mrl.config.rules.data import is_agent, key_of
from mrl.data.chat import read_text
from mrl.data.fields import RowError
from mrl.data.rows import teacher_messages

if TYPE_CHECKING:
    from mrl.config.schema.data import DataDefaultConfig, DatasetConfig
    from mrl.config.schema.run import RunConfig
    from mrl.data.chat import ChatFormat
    from mrl.data.fields import Fields, Message
    from mrl.data.rows import ParsedRow
    from mrl.phases import ModelName


def load_teacher_prompt(dataset: DatasetConfig, default: DataDefaultConfig, key: str) -> str | None:
    """Reads the prompt file for the teacher's question of a data set that stands at `key` in the config, if any."""
    if (path := dataset.teacher_prompt_file) is None:
        return None
    setting = f"{key_of('teacher_prompt_file', default, dataset, key)}={path}"
    template = read_text(path, setting=setting.removesuffix(f"={path}"))
    try:
        formatted = template.format("", hint="<hint>")
    except (AttributeError, IndexError, KeyError, ValueError) as error:
        raise ValueError(
            f"{setting} is not a format string ({error!r}); write {{}} for the question, {{hint}} for the text under "
            "teacher_key, and double every other brace"
        ) from error
    if "<hint>" not in formatted:
        raise ValueError(f"{setting} has no place for the text under teacher_key; write {{hint}} where it belongs")
    return template


@dataclass(frozen=True)
class TeacherPrompts:
    """Prompts for the teachers of a data set's rows. `template`: the text of `teacher_prompt_file`, if any."""

    dataset: DatasetConfig
    config: RunConfig
    template: str | None

    def messages(self, fields: Fields, row: ParsedRow, env_name: str) -> list[Message] | None:
        """The conversation that a row's teacher sees; None: the policy's. RowError: there is none."""
        if self.dataset.teacher_key is None:
            return None
        if is_agent(env_name, self.config.env):
            raise RowError(
                f"the agent {env_name} writes the prompts of its rollouts itself, and no teacher sees others; set "
                "teacher_key=null, or use an environment that is no agent"
            )
        return teacher_messages(fields, row, self.dataset, self.template)

    def form(self, chat: ChatFormat) -> ChatFormat:
        """The policy's chat format, without its prompt file if the teacher has one of its own."""
        return chat if self.template is None else replace(chat, prompt="{}")

    def check_length(self, teacher: ModelName, length: int, asked: int) -> None:
        """Raises RowError if a prompt of `length` tokens and the longest rollout exceed the teacher's context.

        `asked`: tokens of the policy's prompt, which leaves the rest of its context to the rollout.
        """
        generation, most = self.config.policy.generation, self.config.model(teacher).max_total_sequence_length
        room = generation.vllm_cfg.max_model_len - asked
        if self.config.rollouts.max_rollout_turns == 1:
            room = min(room, generation.max_new_tokens)
        if length + room > most:
            raise RowError(
                f"the teacher's prompt has {length} tokens, and a rollout up to {room}: together more than the "
                f"teacher's max_total_sequence_length={most}; raise that, lower policy.generation.max_new_tokens, "
                f"shorten {self.dataset.teacher_key}, or drop the row"
            )
