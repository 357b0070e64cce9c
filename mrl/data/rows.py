# SPDX-License-Identifier: Apache-2.0
"""Rows: checked access to their fields, and their formats: each becomes a conversation that waits for a reply, the reply, and its judge.

A `RowError` says what is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mrl.config.schema.data import DatasetConfig

MAX_LINE_BYTES = 16 << 20
ROLES = ("system", "developer", "user", "assistant", "tool")
Fields = dict[str, object]
Message = dict[str, object]
"""`role`, `content` (a text, or None beside tool calls), and what else OpenAI's chat format gives a message, e.g. `tool_calls`."""
QUESTION_KEYS = ("question", "problem", "prompt", "input")
ANSWER_KEYS = ("expected_answer", "answer", "output")
GOLD_MARK = "####"
"""GSM8K writes the solution, this mark, and the gold answer."""


class RowError(Exception):
    """What is wrong with one row."""


@dataclass(frozen=True)
class ParsedRow:
    """One row, before prompt files and chat template: the conversation up to the turn that is asked for, and what the row says of it."""

    messages: list[Message]
    reply: Message | None = None
    """The assistant's turn that the row shows; None where it shows none."""
    answer: str = ""
    """What a right reply amounts to; empty where the row says it in other fields."""
    tools: list[Fields] = field(default_factory=list)
    """In OpenAI's chat format."""
    rest: Fields = field(default_factory=dict)
    """The other fields."""
    row_id: str | None = None
    env_name: str | None = None
    agent: str | None = None
    """NeMo Gym's name of the environment."""

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


def parse_row(fields: Fields, dataset: DatasetConfig) -> ParsedRow:
    """The row in the format that `dataset` names, else in the one that its keys tell."""
    name = dataset.dataset_name or ""
    if name in _KEYS:
        question_key, answer_key = _KEYS[name]
        return _question(fields, (question_key,), (dataset.output_key or answer_key,), needs_answer=True)
    if name in _FORMATS:
        return _FORMATS[name](fields, dataset)
    if "responses_create_params" in fields:
        return _gym(fields, dataset)
    if dataset.chat_key in fields:
        return _chat(fields, dataset)
    if isinstance(fields.get("prompt"), list) and isinstance(fields.get("reward_model"), dict):
        return _verl(fields, dataset)
    return _question(fields, QUESTION_KEYS if dataset.input_key is None else (dataset.input_key,), answer_keys(dataset))


def parse_pair(fields: Fields, dataset: DatasetConfig) -> ParsedPair:
    """The pair of replies in a row: ranked completions, HelpSteer3's, or a chosen and a rejected reply; a RowError if there is none."""
    if "completions" in fields:
        completions = fields["completions"]
        if not isinstance(completions, list) or len(completions) != 2 or not all(isinstance(entry, dict) for entry in completions):
            raise RowError("completions must be a list of two objects with rank and completion")
        ranks = [entry.get("rank") for entry in completions]
        if not all(isinstance(rank, int | float) for rank in ranks) or ranks[0] == ranks[1]:
            raise RowError(f"the ranks of the completions are {ranks[0]} and {ranks[1]}; they must be two numbers, the better one lower")
        chosen, rejected = (_turns(entry, "completion", "assistant") for entry in sorted(completions, key=lambda entry: entry["rank"]))
        return ParsedPair(_turns(fields, "context", "user"), chosen, rejected)
    if "overall_preference" in fields:
        preference = fields["overall_preference"]
        if not isinstance(preference, int | float):
            raise RowError("overall_preference must be a number")
        # A tie teaches nothing: both replies are the first one, as in NeMo RL.
        better, worse = ("response2", "response1") if preference > 0 else ("response1", "response2" if preference < 0 else "response1")
        return ParsedPair(_turns(fields, "context", "user"), _turns(fields, better, "assistant"), _turns(fields, worse, "assistant"))
    chosen, rejected = (_turns(fields, key, "assistant") for key in (dataset.chosen_key, dataset.rejected_key))
    num_shared = next((index for index, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other), len(chosen))
    if num_shared == len(chosen) or num_shared >= len(rejected):
        raise RowError(f"{dataset.chosen_key} and {dataset.rejected_key} do not differ")
    # Whole conversations begin alike.
    shared = chosen[:num_shared] or _turns(fields, dataset.prompt_key, "user")
    return ParsedPair(shared, chosen[num_shared:], rejected[num_shared:])


def answer_keys(dataset: DatasetConfig) -> tuple[str, ...]:
    """Keys of the answer: a row has it under the first of these that is there."""
    return ANSWER_KEYS if dataset.output_key is None else (dataset.output_key,)


def _turns(fields: Fields, key: str, role: str) -> list[Message]:
    value = fields[first_key(fields, (key,))]
    return messages_of(value, key) if isinstance(value, list) else [_said(role, checked_text(value, key))]


def _said(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _row(fields: Fields, used: Sequence[str], messages: list[Message], reply: Message | None, answer: str) -> ParsedRow:
    rest = {key: value for key, value in fields.items() if key not in (*used, "id", "env_name")}
    row_id, env_name = optional_text(fields, "id"), optional_text(fields, "env_name")
    return ParsedRow(messages, reply, answer, rest=rest, row_id=row_id, env_name=env_name)


def _question(fields: Fields, question_keys: Sequence[str], keys: Sequence[str], *, needs_answer: bool = False) -> ParsedRow:
    question_key, answer_key = first_key(fields, question_keys), next((key for key in keys if fields.get(key) is not None), None)
    messages = [_said("user", text_of(fields, (question_key,)))]
    if answer_key is None and not needs_answer:
        return _row(fields, (question_key,), messages, None, "")
    reply = answer = text_of(fields, keys)
    if GOLD_MARK in answer:
        # GSM8K's gold answers are integers with thousands separators.
        answer = answer.rpartition(GOLD_MARK)[2].strip().replace(",", "")
        if not answer:
            raise RowError(f"nothing follows {GOLD_MARK} in the answer")
    return _row(fields, (question_key, str(answer_key)), messages, _said("assistant", reply), answer)


def _chat(fields: Fields, dataset: DatasetConfig) -> ParsedRow:
    key, tool_key, keys = dataset.chat_key, dataset.tool_key, answer_keys(dataset)
    messages = messages_of(fields.get(key), key)
    if messages[0]["role"] != "system":
        beside = None if dataset.system_key is None else optional_text(fields, dataset.system_key)
        if (system := beside or dataset.system_prompt) is not None:
            messages.insert(0, _said("system", system))
    reply = messages.pop() if messages[-1]["role"] == "assistant" else None
    if not any(message["role"] == "user" for message in messages):
        raise RowError(f"{key} has no message of the user before the reply")
    answer = next((text_of(fields, (name,)) for name in keys if fields.get(name) is not None), "")
    if not answer and reply is not None:
        answer = str(reply["content"] or "").strip()
    tools = fields.get(tool_key) or []
    if isinstance(tools, str):
        # Tables of tools with unlike arguments hold them as text.
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise RowError(f"{tool_key} is a text that is not JSON: {error}") from error
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError(f"{tool_key} must be a list of objects")
    return replace(_row(fields, (key, tool_key, *keys), messages, reply, answer), tools=tools)


def _verl(fields: Fields, dataset: DatasetConfig) -> ParsedRow:
    messages = messages_of(fields.get("prompt"), "prompt")
    reward_model = fields.get("reward_model")
    if not isinstance(reward_model, dict):
        raise RowError("reward_model must be an object with ground_truth")
    answer = text_of(reward_model, ("ground_truth",))
    return _row(fields, ("prompt",), messages, _said("assistant", answer), answer)


def _squad(fields: Fields, dataset: DatasetConfig) -> ParsedRow:
    answers = fields.get("answers")
    texts = answers.get("text") if isinstance(answers, dict) else None
    if not isinstance(texts, list) or not texts:
        raise RowError("answers.text must be a list of answers, not empty")
    answer = checked_text(texts[0], "answers.text[0]")
    messages = [_said("system", text_of(fields, ("context",))), _said("user", text_of(fields, ("question",)))]
    return _row(fields, ("context", "question"), messages, _said("assistant", answer), answer)


def _gym(fields: Fields, dataset: DatasetConfig) -> ParsedRow:
    messages, tools = gym_conversation(fields)
    name = agent_of(fields)
    answer = fields.get("expected_answer")
    answer = "" if answer is None or isinstance(answer, list | dict) else plain_text(answer, "expected_answer").strip()
    # Their ids are those of the data sets that a blend was made of, and may repeat.
    rest = {key: value for key, value in fields.items() if key != "responses_create_params"}
    return ParsedRow(messages, answer=answer, tools=tools, rest=rest, agent=name)


def agent_of(fields: Fields) -> str | None:
    """`agent_ref.name` of a row, if it has one. RowError: it is no string."""
    agent = fields.get("agent_ref")
    name = agent.get("name") if isinstance(agent, dict) else None
    if name is not None and not isinstance(name, str):
        raise RowError("agent_ref.name must be a string")
    return name


def gym_conversation(fields: Fields) -> tuple[list[Message], list[Fields]]:
    """Messages and tools in OpenAI's chat format, from a row of NeMo Gym: `responses_create_params` is a request to the Responses API.

    A RowError says that they are not there, or hold what is not text, calls or their results.
    """
    name = "responses_create_params"
    request = fields.get(name)
    if not isinstance(request, dict):
        raise RowError(f"no object {name}")
    if "_hf_placeholder" in fields:
        raise RowError("the question is still a placeholder; fill it in with `python -m mrl.prepare nano3`")
    entries, tools = request.get("input"), request.get("tools") or []
    if isinstance(entries, str):
        entries = [_said("user", entries)]
    if not isinstance(entries, list) or not entries:
        raise RowError(f"{name}.input must be a text or a list of messages, not empty")
    messages = [_gym_message(entry, f"{name}.input[{index}]") for index, entry in enumerate(entries)]
    if request.get("instructions"):
        messages.insert(0, _said("system", plain_text(request["instructions"], f"{name}.instructions")))
    if not isinstance(tools, list):
        raise RowError(f"{name}.tools must be a list")
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise RowError(f"{name}.tools[{index}] must be an object of type function")
    # The Responses API has a function's fields beside the tool's type, the chat format has them below `function`.
    functions = [{key: value for key, value in tool.items() if key != "type" and value is not None} for tool in tools]
    chat_tools = [
        tool if "function" in tool else {"type": "function", "function": function} for tool, function in zip(tools, functions, strict=True)
    ]
    return messages, chat_tools


def _gym_message(entry: object, name: str) -> Message:
    if not isinstance(entry, dict):
        raise RowError(f"{name} must be an object")
    kind, role = entry.get("type", "message"), entry.get("role")
    if kind == "function_call":
        call = {"name": entry.get("name"), "arguments": entry.get("arguments")}
        return {"role": "assistant", "content": None, "tool_calls": [{"id": entry.get("call_id"), "type": "function", "function": call}]}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": entry.get("call_id"), "content": plain_text(entry.get("output"), f"{name}.output")}
    if kind != "message" or not isinstance(role, str):
        raise RowError(f"{name} is a {kind} of role {role}; only messages, function calls and their outputs are supported")
    # Chat templates know the role by its older name.
    return _said("system" if role == "developer" else role, content_text(entry.get("content"), f"{name}.content"))


def json_object(line: bytes) -> Fields:
    """The object in a line of JSON. Raises RowError if there is none."""
    if len(line) > MAX_LINE_BYTES:
        raise RowError(f"the line is longer than {MAX_LINE_BYTES >> 20} MiB")
    if b"\0" in line:
        raise RowError(f"NUL byte at column {line.index(0) + 1}")
    try:
        fields = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RowError(f"invalid UTF-8 at byte {error.start + 1}: {error.reason}") from error
    except json.JSONDecodeError as error:
        raise RowError(f"invalid JSON at column {error.colno}: {error.msg}") from error
    except RecursionError as error:
        raise RowError("invalid JSON: nested too deeply") from error
    except ValueError as error:  # a number of more digits than Python converts
        raise RowError(f"invalid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RowError(f"a row must be a JSON object, not {type(fields).__name__}")
    return fields


def text_of(fields: Fields, keys: Sequence[str]) -> str:
    """The text under the first of `keys` that is there, without surrounding white space; numbers count as text."""
    key = first_key(fields, keys)
    return checked_text(fields[key], key)


def optional_text(fields: Fields, key: str) -> str | None:
    """The text under `key`; None if it is absent or null."""
    return None if fields.get(key) is None else text_of(fields, (key,))


def first_key(fields: Fields, keys: Sequence[str]) -> str:
    """The first of `keys` that is there and not null. Raises RowError if none is."""
    key = next((key for key in keys if fields.get(key) is not None), None)
    if key is None:
        raise RowError(f"no key {' or '.join(keys)} (the row has {', '.join(map(repr, sorted(fields)[:8])) or 'none'})")
    return key


def checked_text(value: object, name: str) -> str:
    """`value` as a text without surrounding white space, which must not be empty; errors call it `name`."""
    text = plain_text(value, name)
    if not text.strip():
        raise RowError(f"{name} is empty")
    return text.strip()


def plain_text(value: object, name: str) -> str:
    """`value` as a text, unchanged; numbers count as text."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise RowError(f"{name} must be a string, not {type(value).__name__}")
    if "\0" in value:
        raise RowError(f"{name} contains a NUL character")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError(f"{name} contains half of a surrogate pair") from error
    return value


def messages_of(value: object, name: str) -> list[Message]:
    """A conversation: a list of objects with role and content, at least one. Joins contents in parts; they may only be texts."""
    if not isinstance(value, list) or not value:
        raise RowError(f"{name} must be a list of messages, not {_kind(value)}")
    messages = []
    for index, entry in enumerate(value):
        place = f"{name}[{index}]"
        if not isinstance(entry, dict):
            raise RowError(f"{place} must be an object with role and content, not {_kind(entry)}")
        role, content = entry.get("role"), entry.get("content")
        if role not in ROLES:
            raise RowError(f"{place}.role is {role!r}; use one of {', '.join(ROLES)}")
        if content is None and not entry.get("tool_calls"):
            raise RowError(f"{place} has no content")
        # Tables hold every key that any row has.
        message = {key: value for key, value in entry.items() if value is not None}
        messages.append(message | {"role": role, "content": None if content is None else content_text(content, f"{place}.content")})
    return messages


def content_text(content: object, name: str) -> str:
    """The text of a message's content, which is a text or a list of parts of text."""
    if not isinstance(content, list):
        return plain_text(content, name)
    texts = []
    for index, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else _kind(part)
            raise RowError(f"{name}[{index}] is {kind}; only text is supported")
        texts.append(plain_text(text, f"{name}[{index}]"))
    return "".join(texts)


def _kind(value: object) -> str:
    return "empty" if value == [] else "missing" if value is None else type(value).__name__


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
_FORMATS: dict[str, Callable[[Fields, DatasetConfig], ParsedRow]] = {
    "DAPOMath17K": _verl,
    "DAPOMathAIME2024": _verl,
    "NemoGymDataset": _gym,
    "openai_format": _chat,
    "squad": _squad,
    "tulu3_sft_mixture": _chat,
}
"""Other formats, by the name of the data set."""
