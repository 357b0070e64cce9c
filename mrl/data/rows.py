# SPDX-License-Identifier: Apache-2.0
"""Formats of rows: each row becomes a conversation that waits for a reply, the reply, and its judge.

Tools and calls lose the nulls that tables fill in: `datasets` exports them to JSON lines, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from mrl import rooms
from mrl.config.schema.data import GYM_PROCESSOR
from mrl.data.fields import (
    LEADING,
    REQUEST,
    Fields,
    Message,
    RowError,
    agent_of,
    checked_text,
    first_key,
    first_text,
    is_conversation,
    messages_of,
    optional_text,
    plain_text,
    said,
    text_of,
)

if TYPE_CHECKING:
    from mrl.config.schema.data import DatasetConfig

QUESTION_KEYS = ("question", "problem", "prompt", "input")
SHAREGPT_KEY = "conversations"
GYM_DATASET = "NemoGymDataset"
INSTRUCTION_KEY = "instruction"
"""Alpaca's rows have the task here, and what it is about, if anything, under `input`."""
ANSWER_KEYS = ("expected_answer", "answer", "output", "completion")
NEEDED = (
    "context",
    "passage",
    "choices",
    "options",
    "image",
    "images",
    "video",
    "videos",
    "audio",
    "system",
    "system_prompt",
    "history",
)
"""Keys of question answering and of chats: few questions make sense without their values."""
GOLD_MARK = "####"
"""GSM8K writes the solution, this mark, and the gold answer."""
_THOUSANDS = re.compile(r"[-+$€£ ]*\d{1,3}(,\d{3})+(\.\d+)?[^\d,()\[\]{}]*")
"""A number with separators of thousands, perhaps with a unit; in intervals and lists commas separate."""


@dataclass(frozen=True)
class ParsedRow:
    """A row before prompt files and chat template: the conversation up to the turn asked for, and what the row says."""

    messages: list[Message]
    reply: Message | None = None
    """The assistant's turn that the row shows; None where it shows none."""
    answer: str = ""
    """Expected answer; empty where the row has it in other fields."""
    tools: list[Fields] = field(default_factory=list)
    """In OpenAI's chat format."""
    rest: Fields = field(default_factory=dict)
    row_id: str | None = None
    env_name: str | None = None
    agent: str | None = None
    """NeMo Gym's name of the environment."""
    unshown: tuple[str, ...] = ()
    """Keys that a reply seems to need, and that the conversation does not show."""

    @property
    def question(self) -> str:
        """The user's last message."""
        texts = [message["content"] for message in self.messages if message["role"] == "user"]
        return str(texts[-1]) if texts else ""


@dataclass(frozen=True)
class ParsedPair:
    """One row with two replies to one conversation, the better and the worse."""

    messages: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    tools: list[Fields] = field(default_factory=list)
    unshown: tuple[str, ...] = ()
    rest: Fields = field(default_factory=dict)
    """The fields that the conversation and the replies are not made of."""


Shown = tuple[list[Message], Message | None, str, tuple[str, ...]]
"""Conversation, reply and answer that a row shows, and the keys that hold them."""


def parse_row(fields: Fields, dataset: DatasetConfig) -> ParsedRow:
    """The row in the format `dataset` names, else in the one that its keys tell; with its tools and system message."""
    has_request, name = REQUEST in fields, dataset.dataset_name
    if name == GYM_DATASET or (has_request and name not in _KEYS and name not in _FORMATS):
        return _gym(fields, dataset)
    messages, reply, answer, used = _shown(fields, dataset)
    rest = _without(fields, *used, "id", "env_name")
    row_id, env_name = (None if fields.get(key) is None else optional_text(fields, key) for key in ("id", "env_name"))
    if dataset.processor != GYM_PROCESSOR:
        messages = _with_system(messages, fields, dataset)
    if has_request:
        return ParsedRow(messages, reply, gold_of(answer), rest=rest, row_id=row_id, env_name=env_name)
    tools, unshown = _tools(fields, dataset), _unshown(rest, messages)
    if any("tool_calls" in message for message in messages):
        messages = calls_as_written(messages, tools)
    if reply is not None and "tool_calls" in reply:
        (reply,) = calls_as_written([reply], tools)
    rest = _without(rest, dataset.tool_key, dataset.system_key)
    return ParsedRow(messages, reply, gold_of(answer), tools, rest, row_id, env_name, unshown=unshown)


def _shown(fields: Fields, dataset: DatasetConfig) -> Shown:
    name = dataset.dataset_name or ""
    if name in _KEYS:
        question_key, answer_key = _KEYS[name]
        setting = f"data.default.dataset_name=null (it is {name}) with data.default.input_key"
        return _question(fields, (question_key,), (dataset.output_key or answer_key,), setting, needs_answer=True)
    if name in _FORMATS:
        return _FORMATS[name](fields, dataset)
    if dataset.chat_key in fields:
        return _chat(fields, dataset)
    if isinstance(fields.get("reward_model"), dict) and is_conversation(fields.get("prompt")):
        return _verl(fields, dataset)
    question_keys = QUESTION_KEYS if dataset.input_key is None else (dataset.input_key,)
    # TRL's rows have a conversation where others have its question.
    asked = next((key for key in question_keys if fields.get(key) is not None), "")
    for key in (SHAREGPT_KEY, asked):
        if key in fields and is_conversation(fields[key]):
            return _chat(fields, dataset, key)
    return _question(fields, question_keys, answer_keys(dataset))


def teacher_messages(
    fields: Fields, row: ParsedRow, dataset: DatasetConfig, teacher_prompt: str | None
) -> list[Message] | None:
    """The conversation that a row's teacher sees, before prompt files; None: the policy's.

    A text under `teacher_key` takes the place of the last question; in `teacher_prompt`, if there is one.
    """
    if (key := dataset.teacher_key) is None:
        return None
    value = fields[first_key(fields, (key,), "data.default.teacher_key")]
    if is_conversation(value):
        if teacher_prompt is not None:
            raise RowError(f"{key} is a conversation, and teacher_prompt_file takes a text; set that to null")
        return _with_system(calls_as_written(messages_of(value, key), row.tools), fields, dataset)
    hint, messages = checked_text(value, key), list(row.messages)
    last = next((place for place in reversed(range(len(messages))) if messages[place]["role"] == "user"), None)
    if last is None or not isinstance(question := messages[last]["content"], str):
        raise RowError(f"{key} is a text, which takes the place of a question, and the row has none; give messages")
    asked = hint if teacher_prompt is None else teacher_prompt.format(question, hint=hint)
    messages[last] = {**messages[last], "content": asked}
    return messages


def parse_pair(fields: Fields, dataset: DatasetConfig) -> ParsedPair:
    """A row's pair of replies: ranked completions, HelpSteer3's, or a chosen and a rejected reply; RowError: none."""
    pair = _parse_pair_format(fields, dataset)
    messages, tools = _with_system(pair.messages, fields, dataset), _tools(fields, dataset)
    asked, chosen, rejected = (calls_as_written(part, tools) for part in (messages, pair.chosen, pair.rejected))
    return replace(
        pair, messages=asked, chosen=chosen, rejected=rejected, tools=tools, unshown=_unshown(pair.rest, messages)
    )


def _parse_pair_format(fields: Fields, dataset: DatasetConfig) -> ParsedPair:
    if "completions" in fields:
        completions = fields["completions"]
        if (
            not isinstance(completions, list)
            or len(completions) != 2
            or not all(isinstance(entry, dict) for entry in completions)
        ):
            raise RowError("completions must be a list of two objects with rank and completion")
        ranks = [entry.get("rank") for entry in completions]
        if not all(isinstance(rank, int | float) for rank in ranks) or ranks[0] == ranks[1]:
            raise RowError(
                f"the ranks of the completions are {ranks[0]} and {ranks[1]}; they must be two numbers, the better "
                "one lower"
            )
        chosen, rejected = (
            _turns(entry, "completion", "assistant") for entry in sorted(completions, key=lambda entry: entry["rank"])
        )
        return ParsedPair(
            _turns(fields, "context", "user"), chosen, rejected, rest=_without(fields, "context", "completions")
        )
    if "overall_preference" in fields:
        preference = fields["overall_preference"]
        if not isinstance(preference, int | float):
            raise RowError("overall_preference must be a number")
        # A tie teaches nothing: both replies are the first one, as in NeMo RL.
        better, worse = (
            ("response2", "response1")
            if preference > 0
            else ("response1", "response2" if preference < 0 else "response1")
        )
        chosen, rejected = (_turns(fields, key, "assistant") for key in (better, worse))
        return ParsedPair(
            _turns(fields, "context", "user"), chosen, rejected, rest=_without(fields, "context", better, worse)
        )
    chosen, rejected = (_turns(fields, key, "assistant") for key in (dataset.chosen_key, dataset.rejected_key))
    num_shared = next(
        (index for index, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other), len(chosen)
    )
    if num_shared == len(chosen) or num_shared >= len(rejected):
        raise RowError(f"{dataset.chosen_key} and {dataset.rejected_key} do not differ")
    # Whole conversations begin alike, and so may replies of several turns.
    shared = chosen[:num_shared]
    if not shared or shared[0]["role"] == "assistant":
        shared = [*_turns(fields, dataset.prompt_key, "user"), *shared]
    rest = _without(fields, dataset.prompt_key, dataset.chosen_key, dataset.rejected_key)
    return ParsedPair(shared, chosen[num_shared:], rejected[num_shared:], rest=rest)


def other_kind(fields: Fields, dataset: DatasetConfig, *, reads_pairs: bool, reads_gym: bool) -> str:
    """Describes, to end a message, the other kind of row that these keys suggest; "" if none.

    A file may be read as rows of a known data set, whose name a config inherits.
    """
    is_pair = {dataset.chosen_key, dataset.rejected_key} <= fields.keys() or bool(
        {"overall_preference", "completions"} & fields.keys()
    )
    if is_pair and not reads_pairs:
        return "; it looks like a pair of replies, which algorithm=dpo and algorithm=rm read"
    if REQUEST in fields and not reads_gym:
        return "; it looks like a row of NeMo Gym, which algorithm=grpo reads"
    if reads_pairs and not is_pair and {dataset.chat_key, "completion", *answer_keys(dataset)} & fields.keys():
        return "; it looks like a conversation with one reply, which algorithm=sft reads"
    if dataset.dataset_name is not None and dataset.data_path is not None:
        return f" (read as a row of {dataset.dataset_name}); data.default.dataset_name=null reads rows by their keys"
    return ""


def answer_keys(dataset: DatasetConfig) -> tuple[str, ...]:
    """Keys of the answer: a row has it under the first of these that is there."""
    return ANSWER_KEYS if dataset.output_key is None else (dataset.output_key,)


def _turns(fields: Fields, key: str, role: str) -> list[Message]:
    value = fields[first_key(fields, (key,))]
    return messages_of(value, key) if is_conversation(value) else [said(role, checked_text(value, key))]


def _with_system(messages: list[Message], fields: Fields, dataset: DatasetConfig) -> list[Message]:
    key, first = dataset.system_key, messages[0]
    beside = plain_text(fields[key], key) if key is not None and fields.get(key) is not None else ""
    if first["role"] in LEADING:
        if beside.strip() and beside != first["content"]:
            raise RowError(f"{key} and the first message are two different system messages; keep one of them")
        return messages
    system = beside if beside.strip() else dataset.system_prompt
    return messages if system is None else [said("system", system), *messages]


def _unshown(fields: Fields, messages: list[Message]) -> tuple[str, ...]:
    """Keys of `NEEDED` whose texts or media are in no message; of a conversation under such a key contents count."""
    shown = " ".join(" ".join(str(message["content"]).split()) for message in messages).casefold()

    def is_shown(value: object) -> bool:
        if isinstance(value, dict):
            return all(is_shown(part) for key, part in value.items() if key not in ("role", "from", "type"))
        if isinstance(value, str) and is_conversation(value):
            value = json.loads(value)
        if isinstance(value, list):
            return all(map(is_shown, value))
        return not isinstance(value, str) or " ".join(value.split()).casefold() in shown

    return tuple(key for key in NEEDED if fields.get(key) and not is_shown(fields[key]))


def _tools(fields: Fields, dataset: DatasetConfig) -> list[Fields]:
    key = dataset.tool_key
    tools = fields.get(key) or []
    if isinstance(tools, str):
        # Tables of tools with unlike arguments hold them as text.
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise RowError(f"{key} is a text that is not JSON: {error}") from error
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError(
            f"{key} must be a list of objects; if it holds something else, let data.default.tool_key name another key"
        )
    return [tool for tool in map(schema_as_written, tools) if isinstance(tool, dict)]


def _without(fields: Fields, *keys: str | None) -> Fields:
    return {key: value for key, value in fields.items() if key not in keys}


def gold_of(answer: str) -> str:
    """Expected answer: the part after `GOLD_MARK` if there is one such part, else the whole text."""
    gold = answer.rpartition(GOLD_MARK)[2].strip()
    first, _, rest = gold.partition("\n")
    first = first.strip()
    # MetaMath repeats the gold answer in words. Other lines may be of a heading in Markdown, which has the same mark.
    if GOLD_MARK not in answer or not gold or (rest and not re.search(rf"(?<!\w){re.escape(first)}\W*$", rest)):
        return answer.strip()
    return first.replace(",", "") if _THOUSANDS.fullmatch(first) else first


def _question(
    fields: Fields,
    question_keys: Sequence[str],
    keys: Sequence[str],
    setting: str = "data.default.input_key",
    *,
    needs_answer: bool = False,
) -> Shown:
    question, used = _asked(fields, question_keys, setting)
    messages: list[Message] = [{"role": "user", "content": question}]
    if not needs_answer and all(fields.get(key) is None for key in keys):
        return messages, None, "", used
    key, reply = first_text(fields, keys, "data.default.output_key")
    return messages, {"role": "assistant", "content": reply}, reply, (*used, key)


def _asked(fields: Fields, question_keys: Sequence[str], setting: str) -> tuple[str, tuple[str, ...]]:
    """The question of a row, and the keys that hold it."""
    task = fields.get(INSTRUCTION_KEY)
    if question_keys != QUESTION_KEYS or not isinstance(task, str) or not task.strip():
        key, text = first_text(fields, question_keys, setting)
        return text, (key,)
    key = next((key for key in question_keys if fields.get(key) is not None), INSTRUCTION_KEY)
    about = plain_text(fields[key], key)
    rest = about.strip().removeprefix(task.strip())
    if rest == about.strip() or rest[:1].isalnum():
        about = f"{task}\n\n{about}" if about.strip() else task
    return plain_text(about, INSTRUCTION_KEY), (key, INSTRUCTION_KEY)


def _chat(fields: Fields, dataset: DatasetConfig, key: str = "") -> Shown:
    key, keys = key or dataset.chat_key, answer_keys(dataset)
    messages = messages_of(fields.get(key), key)
    given = [name for name in keys if fields.get(name) is not None]
    completion = next((name for name in given if is_conversation(fields[name])), None)
    if completion is not None:
        turns = messages_of(fields[completion], completion)
        if [turn["role"] for turn in turns] != ["assistant"]:
            raise RowError(
                f"{completion} must be one message of the assistant; give a longer conversation as {dataset.chat_key}"
            )
        messages += turns
        given.remove(completion)
    reply = messages.pop() if messages[-1]["role"] == "assistant" else None
    if not any(message["role"] == "user" for message in messages):
        raise RowError(f"{key} has no message of the user before the reply")
    answer = text_of(fields, given) if given else ""
    if not answer and reply is not None:
        answer = str(reply["content"] or "")
    return messages, reply, answer, (key, *(name for name in keys if name != completion))


def _verl(fields: Fields, dataset: DatasetConfig) -> Shown:
    messages = messages_of(fields.get("prompt"), "prompt")
    reward_model = fields.get("reward_model")
    if not isinstance(reward_model, dict):
        raise RowError("reward_model must be an object with ground_truth")
    # Own functions get what is no text as it is; others refuse the row.
    has_text = not isinstance(reward_model.get("ground_truth"), dict | list | None)
    answer = text_of(reward_model, ("ground_truth",)) if has_text else ""
    return messages, said("assistant", answer) if answer else None, answer, ("prompt",)


def _squad(fields: Fields, dataset: DatasetConfig) -> Shown:
    answers = fields[first_key(fields, ("answers",))]
    texts = answers.get("text") if isinstance(answers, dict) else None
    if not isinstance(texts, list) or not texts:
        raise RowError("answers.text must be a list of answers, not empty")
    answer = checked_text(texts[0], "answers.text[0]")
    messages = [said("system", text_of(fields, ("context",))), said("user", text_of(fields, ("question",)))]
    return messages, said("assistant", answer), answer, ("context", "question")


def _gym(fields: Fields, dataset: DatasetConfig) -> ParsedRow:
    messages, tools = rooms.gym_conversation(fields)
    name = agent_of(fields)
    answer = fields.get("expected_answer")
    answer = "" if answer is None or isinstance(answer, list | dict) else plain_text(answer, "expected_answer").strip()
    if dataset.processor != GYM_PROCESSOR:
        messages = _with_system(messages, fields, dataset)
    # Their ids are those of the data sets that a blend was made of, and may repeat.
    return ParsedRow(messages, answer=answer, tools=tools, rest=_without(fields, REQUEST), agent=name)


_KEYS: dict[str, tuple[str, str]] = {
    "AIME2024": ("problem", "answer"),
    "AIME2025": ("question", "answer"),
    "AIME2026": ("problem", "answer"),
    "DeepScaler": ("problem", "answer"),
    "GSM8K": ("question", "answer"),
    "gsm8k": ("question", "answer"),
    "OpenMathInstruct-2": ("problem", "expected_answer"),
    "OpenR1-Math-220k": ("problem", "answer"),
}
"""Keys of question and answer, by the name of the data set."""
_FORMATS: dict[str, Callable[[Fields, DatasetConfig], Shown]] = {
    "DAPOMath17K": _verl,
    "DAPOMathAIME2024": _verl,
    "openai_format": _chat,
    "squad": _squad,
    "tulu3_sft_mixture": _chat,
}


_DATA = ("default", "const", "enum", "examples")
"""Keywords of JSON Schema whose values are any JSON (draft 2020-12, Validation 6.1 and 9). Under all others a null
means nothing.
"""
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values are schemas by names, which may be those of keywords."""


def schema_as_written(schema: object) -> object:
    """A tool, or any other schema, without the nulls that no schema has; `default: null` and `const: null` stay."""
    if isinstance(schema, list):
        return [schema_as_written(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            value = {name: schema_as_written(part) for name, part in value.items() if part is not None}
        if key in _DATA or value is not None:
            kept[key] = value if key in _DATA or key in _NAMED else schema_as_written(value)
    return kept


def calls_as_written(messages: Sequence[Message], tools: Sequence[Fields]) -> list[Message]:
    """The messages, their calls without null arguments that the tool lacks. Without properties a tool may have any."""
    functions = [tool.get("function", tool) for tool in tools]
    schemas = {str(entry.get("name")): entry.get("parameters") for entry in functions if isinstance(entry, dict)}

    def written(call: Fields) -> Fields:
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
            return call
        shown = function | {"arguments": _known(function["arguments"], schemas.get(str(function.get("name"))))}
        return call | {"function": shown} if "function" in call else shown

    calls = [message.get("tool_calls") for message in messages]
    return [
        message | {"tool_calls": [written(call) for call in entries]} if isinstance(entries, list) else message
        for message, entries in zip(messages, calls, strict=True)
    ]


def _known(value: object, schema: object) -> object:
    known = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(value, dict) or not isinstance(known, dict):
        return value
    return {key: _known(entry, known.get(key)) for key, entry in value.items() if entry is not None or key in known}
