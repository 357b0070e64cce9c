# SPDX-License-Identifier: Apache-2.0
"""The prompts of a run: read from files, rendered, tokenised, and short enough for the context.

A teacher may see others in their place: a column of the row, with a solution or a hint. It scores the tokens that the
policy drew behind its own prompt as if they stood behind this one.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from conversion.files.hf_folder import read_config
from mrl.config.errors import ConfigError, Problem
from mrl.config.own import ANSWERS, REWARD, find_reward, missing_columns
from mrl.config.rules.data import NEMO_GYM, environment_names, is_agent, key_of, own_function, route_of
from mrl.config.schema.data import GYM_PROCESSOR, known_dataset
from mrl.config.schema.env import BUILT_IN, FROM_VERIFIERS, NEED_ANSWER
from mrl.config.texts import safe_text
from mrl.data.chat import (
    ChatFormat,
    load_chat_format,
    most_tokens,
    read_text,
    render,
    template_variables,
    tokenize,
    tokenizer_of,
    with_prompts,
)
from mrl.data.columns import LacksColumns, find_idle, find_lacking, find_unasked
from mrl.data.extras import check_asked, check_prompt, check_request, template_kwargs_of
from mrl.data.fields import REQUEST, Fields, Message, RowError, agent_of, first_key
from mrl.data.files import find_data_files
from mrl.data.reading import LeftOut, NoEnvironment, Parsed, Reader, Rows, read_split, with_processor
from mrl.data.rows import GOLD_MARK, ParsedRow, answer_keys, other_kind, parse_row, teacher_messages
from mrl.data.trial import try_template
from mrl.types import Prompt, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mrl.config.schema.data import DataDefaultConfig, DatasetConfig
    from mrl.config.schema.env import EnvConfig
    from mrl.config.schema.generation import GenerationConfig
    from mrl.config.schema.policy import PolicyConfig
    from mrl.config.schema.run import RunConfig
    from mrl.phases import ModelName

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptData:
    """The prompts of a run, how to sample their rollouts, and the rows that are left out, by data set."""

    train: Rows[Prompt]
    validation: Rows[Prompt]
    sampling: SamplingParams
    pad_token_id: int
    left_out: list[LeftOut]


@dataclass(frozen=True)
class PromptLimits:
    """Prompt length limits in tokens: data.max_input_seq_length (None: only context counts) and room in the context.

    `max_new_tokens` of the length of the context or more means whatever the prompt leaves.
    """

    max_input_length: int | None
    context_length: int
    max_new_tokens: int

    def reason_against(self, length: int) -> str | None:
        """Reason to refuse a prompt of this length; None if it fits."""
        if self.max_input_length is not None and length > self.max_input_length:
            return (
                f"the prompt has {length} tokens, data.max_input_seq_length allows {self.max_input_length}; "
                "raise that or drop the row"
            )
        reserved = self.max_new_tokens if self.max_new_tokens < self.context_length else 1
        if length > self.context_length - reserved:
            return (
                f"the prompt has {length} tokens; policy.generation.vllm_cfg.max_model_len={self.context_length} "
                f"less {reserved} for the rollout (policy.generation.max_new_tokens={self.max_new_tokens}) leaves "
                f"{self.context_length - reserved}; raise the one, lower the other, or drop the row"
            )
        return None


Rendered = tuple[str, Prompt]
"""The template's text of a prompt, and the prompt without its id and tokens, which it gets each time it is asked."""


def load_prompts(config: RunConfig) -> PromptData:
    """The prompts of a run. Reads all training and validation rows, and keeps those that can be asked."""
    tokenizer = tokenizer_of(config)

    def finish(prompt_id: str, rendered: Rendered) -> Prompt:
        text, prompt = rendered
        (token_ids,) = tokenize([text], tokenizer)
        return dataclasses.replace(prompt, prompt_id=prompt_id, token_ids=token_ids)

    try_template(tokenizer, config.policy.tokenizer.chat_template_kwargs)
    if problems := lacking_columns(config, config.data.sets):
        raise ConfigError(problems)
    train, validation, left_out = read_split(
        config.data, lambda key, dataset: prompt_reader(key, dataset, config, tokenizer), finish
    )
    begin, first = tokenizer.bos_token_id, (train if len(train) else validation)[0]
    if begin is not None and tokenizer("x")["input_ids"][:1] == [begin] and begin not in first.token_ids[:2]:
        logger.warning(
            "Prompts do not begin with %s, which the tokenizer puts before texts: the chat template "
            "(policy.tokenizer.chat_template) does not write it, and it writes all of a prompt's special tokens. "
            "If the model was trained with it, write {{ bos_token }} there",
            tokenizer.bos_token,
        )
    # What stands in padding is never looked at; it only has to be in the vocabulary.
    pad_token_id = next(iter(_token_ids(tokenizer.pad_token_id)), 0)
    asked = validation.select(range(len(validation))[: config.rollouts.max_val_samples])
    return PromptData(train, asked, sampling_params(config.policy, tokenizer), pad_token_id, left_out)


def lacking_columns(config: RunConfig, sets: Mapping[str, DatasetConfig]) -> list[Problem]:
    """`find_lacking` of the user's reward functions in these data sets; ValueError if one cannot be read."""
    functions = config.env.own.functions
    if not functions:
        return []
    return find_lacking((prompt_reader(key, dataset, config, None) for key, dataset in sets.items()), functions)


def idle_parts(config: RunConfig, sets: Mapping[str, DatasetConfig]) -> list[str]:
    """Misspelt parameters of the user's reward functions in these data sets, and environments that no row asks for.

    ValueError: one of the sets cannot be read.
    """
    functions = config.env.own.functions
    sources = {dataset.source for dataset in config.data.sets.values()}
    sections = {
        "own.functions": functions,
        "own.agents": config.env.own.agents,
        "remote": config.env.remote,
        "verifiers": {
            name: path for name, path in config.env.verifiers.items() if FROM_VERIFIERS + name not in sources
        },
    }
    named = {f"env.{key}.{name}": path for key, section in sections.items() for name, path in section.items()}
    if not named:
        return []
    readers = [prompt_reader(key, dataset, config, None) for key, dataset in sets.items()]
    return [*find_unasked(readers, named), *find_idle(readers, functions, only_misspelt=True)]


def prompt_reader(
    key: str, dataset: DatasetConfig, config: RunConfig, tokenizer: PreTrainedTokenizerBase | None
) -> Reader[Rendered]:
    """Reader of a data set's prompts. Without a tokenizer they are not rendered, and may be too long."""
    generation = config.policy.generation
    limits = PromptLimits(
        config.data.max_input_seq_length, generation.vllm_cfg.max_model_len, generation.max_new_tokens
    )
    chat = load_chat_format(
        dataset, config.data.default, key, template_kwargs=config.policy.tokenizer.chat_template_kwargs
    )
    variables = None if tokenizer is None else template_variables(tokenizer)
    teachers = TeacherPrompts(dataset, config, load_teacher_prompt(dataset, config.data.default, key))

    def parse(fields: Fields) -> Parsed[Rendered]:
        row = parse_row(_with_question(fields, config.env), dataset)
        env_name = environment_of(row, dataset, config.env)
        taught_as = agent_of(fields) or env_name
        teacher = config.teacher_of(taught_as) if key.startswith("data.train") else ""
        if teacher is None:
            raise RowError(f"no teacher: {taught_as} is not in on_policy_distillation.teacher_model_by_agent_name")
        if env_name in NEED_ANSWER:
            _check_answer(row.answer, fields, dataset, env_name)
        if (reward := own_function(env_name, config.env)) is not None:
            row = dataclasses.replace(row, rest=kept_columns(reward, fields, dataset) | row.rest)
            _check_columns(reward, row)
        request = fields.get(REQUEST)
        if isinstance(request, dict) and not is_agent(env_name, config.env):
            check_request(request, generation)
        if not is_agent(env_name, config.env):
            check_asked(fields)
        check_prompt(row.messages, row.reply)
        shown = teachers.messages(fields, row, env_name) if teacher else None
        own_kwargs = template_kwargs_of(fields, variables)
        form = chat.with_values(own_kwargs)
        text = "" if tokenizer is None else rendered(row, tokenizer, form)
        # The model gets the question as it is; people and graders get question and model's text made safe alike.
        rest = row.rest | ({"tools": row.tools} if row.tools else {})
        if is_agent(env_name, config.env) and row.agent is not None:
            rest = fields  # NeMo Gym's agents get the row as it is
        identity: list[object] = [row.messages, row.answer]
        if env_name not in BUILT_IN and reward is None:
            # Tasks of agents and environments may ask alike, and differ in other columns.
            identity.append({column: value for column, value in rest.items() if column != "id"})
        if env_name in {**config.env.own.agents, **config.env.remote}:
            rest = fields | rest  # question and answer by their own names, too
        prompt = Prompt(
            *("", (), safe_text(row.question), safe_text(row.answer), env_name, json.dumps(rest), teacher),
            json.dumps(own_kwargs) if own_kwargs else "",
        )
        if tokenizer is not None and shown is not None:
            own, asked = tokenize([text_of(shown, row, tokenizer, teachers.form(form)), text], tokenizer)
            teachers.check_length(teacher, len(own), len(asked))
            prompt = dataclasses.replace(prompt, teacher_token_ids=own)
        return Parsed((text, prompt), row.row_id, json.dumps(identity, sort_keys=True), row.unshown)

    def text_of(messages: list[Message], row: ParsedRow, tokenizer: PreTrainedTokenizerBase, form: ChatFormat) -> str:
        asked = messages if dataset.processor == GYM_PROCESSOR else with_prompts(messages, form, around="last")
        return render(asked, row.tools, tokenizer, form)

    def rendered(row: ParsedRow, tokenizer: PreTrainedTokenizerBase, form: ChatFormat) -> str:
        text = text_of(row.messages, row, tokenizer, form)
        # Tokenising takes longer than all else; most rows are short enough by their bytes.
        num_tokens = most_tokens(text, tokenizer)
        if limits.reason_against(num_tokens) is not None:
            num_tokens = len(tokenize([text], tokenizer)[0])
        if (reason := limits.reason_against(num_tokens)) is not None:
            raise RowError(reason)
        return text

    files = find_data_files(dataset, setting=key, section=config.env)
    hint = partial(other_kind, dataset=dataset, reads_pairs=False, reads_gym=True)
    parse_row_of = with_processor(dataset.processor, parse)
    drops_repeats = known_dataset(dataset.dataset_name).repeats_rows
    return Reader(key, dataset.source, files, parse_row_of, dataset.repeat, hint, drops_repeats)


def environment_of(row: ParsedRow, dataset: DatasetConfig, env: EnvConfig) -> str:
    """The environment of a row: its own, its agent's, or that of its data set."""
    if row.env_name is not None:
        env_name = asked = row.env_name
    elif row.agent is not None:
        env_name, asked = route_of(row.agent, env), row.agent
    else:
        env_name = asked = dataset.env_name
    if env_name == NEMO_GYM:
        raise RowError("no agent_ref.name, by which env_name=nemo_gym chooses the environment")
    if env_name is None or not (
        env_name in environment_names(env) or (env_name == row.agent and is_agent(env_name, env))
    ):
        raise NoEnvironment(asked)
    return env_name


def _with_question(fields: Fields, config: EnvConfig) -> Fields:
    """Adds an empty question to a row without one that goes to an agent: agents build theirs from other fields."""
    request, agent = fields.get(REQUEST), agent_of(fields)
    if (
        agent is None
        or not isinstance(request, dict)
        or request.get("input")
        or not is_agent(route_of(agent, config) or "", config)
    ):
        return fields
    return fields | {REQUEST: request | {"input": [{"role": "user", "content": ""}]}}


def _check_answer(answer: str, fields: Fields, dataset: DatasetConfig, env_name: str) -> None:
    """Raises RowError if no reply can be compared with the answer of a row."""
    if not answer and isinstance(held := fields.get("reward_model"), dict):
        kind = type(held.get("ground_truth")).__name__
        raise RowError(
            f"reward_model.ground_truth is {kind}, with which no reply can be compared; give a text, or use "
            "env.own.functions"
        )
    if not answer:
        key = first_key(fields, answer_keys(dataset), "data.default.output_key")
        raise RowError(
            f"{key} is {type(fields[key]).__name__}, with which no reply can be compared; give a text or a number"
        )
    if answer.lower() == "nan":
        raise RowError("the answer is nan, as tables write where none was given; give one, or remove the row")
    if env_name == "math" and answer.lower() in ("proof", "notfound"):
        raise RowError(
            f"the answer is {answer}, as NuminaMath writes where none was given; give one, or remove the row"
        )
    if GOLD_MARK in answer:
        raise RowError(
            f"{GOLD_MARK} in the answer is followed by no line, or by different ones; give the answer as "
            "expected_answer"
        )


def kept_columns(path: str, fields: Fields, dataset: DatasetConfig) -> Fields:
    """Columns that a reward function gets by their own names, though question, answer or id are read from them.

    A name of mrl's means mrl's value.
    """
    hook = find_reward(path)
    asked = {*hook.columns, *hook.optional, dataset.input_key, dataset.output_key} - {
        *REWARD.parameters,
        *REWARD.synonyms,
    }
    return {name: value for name, value in fields.items() if name in asked}


def _check_columns(path: str, row: ParsedRow) -> None:
    has = [name for name, value in row.rest.items() if value is not None or name not in ANSWERS]
    if missing := missing_columns(path, has, has_answer=bool(row.answer)):
        raise LacksColumns(path, missing, has, has_answer=bool(row.answer))


def sampling_params(policy: PolicyConfig, tokenizer: PreTrainedTokenizerBase) -> SamplingParams:
    """Sampling parameters of training.

    Without `stop_token_ids`, they stop at the end-of-sequence tokens of tokenizer and generation_config.json.
    """
    generation = policy.generation
    stop_token_ids = generation.stop_token_ids
    if stop_token_ids is None:
        stop_token_ids = sorted(_eos_token_ids(policy, tokenizer))
    return SamplingParams(
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        max_new_tokens=generation.max_new_tokens,
        stop_token_ids=tuple(stop_token_ids),
        stop_strings=tuple(generation.stop_strings or ()),
    )


def end_token_ids(policy: PolicyConfig, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Tokens that mark the end of a turn: the end-of-sequence tokens, and the special tokens that rollouts stop at."""
    generation = policy.generation
    special = {token_id: token.content for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    stops = {token_id for token_id in generation.stop_token_ids or () if token_id in special}
    return (
        _eos_token_ids(policy, tokenizer)
        | stops
        | {key for key, token in special.items() if token in (generation.stop_strings or ())}
    )


def _eos_token_ids(policy: PolicyConfig, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    file = Path(policy.model_name) / "generation_config.json"
    of_model = _token_ids(read_config(file).get("eos_token_id")) if file.is_file() else []
    return {*_token_ids(tokenizer.eos_token_id), *of_model}


def _token_ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [token_id for token_id in values if isinstance(token_id, int)]


def validation_sampling(sampling: SamplingParams, generation: GenerationConfig) -> SamplingParams:
    """Sampling parameters of validation: those of training, except for the `val_*` keys."""
    return dataclasses.replace(
        sampling, temperature=generation.val_temperature, top_p=generation.val_top_p, top_k=generation.val_top_k
    )


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
