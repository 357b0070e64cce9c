# SPDX-License-Identifier: Apache-2.0
"""Conversations to text, the one way for all algorithms: in the chat template's form, with every message in the text.

Templates drop what they do not know without a word: roles, calls of tools, texts next to calls.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jinja2

from mrl.config.conversations import THOUGHTS
from mrl.data.fields import EndlessRow, Fields, Message, RowError
from mrl.data.trial import row_limit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

OLDER_ROLES = {"developer": "system", "function": "tool", "environment": "user"}
"""The role that stands for another in templates that do not know that one."""
# Templates lay texts out anew, and those of Nemotron and SmolLM take these switches for commands.
_LAYOUT = re.compile(r"\s+|/no_think|/think")
_MARK = "the-tool-stands-here"


@dataclass(frozen=True)
class Conversation:
    """Messages, and the tools that the assistant may call. An empty list of tools is not passed to the template."""

    messages: Sequence[Message]
    tools: Sequence[Fields] = ()


def fit(
    given: Conversation,
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: Mapping[str, object] | None,
    *,
    add_generation_prompt: bool,
) -> tuple[Conversation, str]:
    """The conversation as the chat template takes it, and its text. RowError: what the template refuses or drops."""
    errors: list[str] = []
    for candidate in _forms(given, str(tokenizer.chat_template)):
        try:
            text = write(candidate, tokenizer, template_kwargs, add_generation_prompt=add_generation_prompt)
            if "None" in text and _writes_none(candidate, text, tokenizer, template_kwargs):
                continue  # the form that has a text in its place follows
            lost = lost_part(
                candidate, text, names_tools=bool(given.tools) and _shows_tools(tokenizer, str(tokenizer.chat_template))
            )
            if lost is None:
                return candidate, text
            errors.append(f"the chat template leaves {lost} out; use a template that writes it, or change the row")
        except RowError as refusal:
            errors.append(str(refusal))
    raise RowError(". In another form: ".join(dict.fromkeys(errors)))


def write(
    conversation: Conversation,
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: Mapping[str, object] | None,
    *,
    add_generation_prompt: bool,
) -> str:
    """Renders a conversation by the chat template. RowError: the template refuses it. EndlessRow: it does not end."""
    # Templates take what transformers' annotations leave out: contents and tools of any JSON.
    messages: Any = list(conversation.messages)
    extra: dict[str, Any] = {**(template_kwargs or {}), "add_generation_prompt": add_generation_prompt}
    if conversation.tools:
        extra["tools"] = list(conversation.tools)
    try:
        with row_limit():
            return str(tokenizer.apply_chat_template(messages, tokenize=False, **extra))
    except EndlessRow:
        raise
    except Exception as error:  # the template is the model's, written in Jinja, and raises what it likes
        words = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
        raise RowError(f"the chat template does not take this conversation: {words}") from error


def _forms(given: Conversation, template: str) -> Iterator[Conversation]:
    """Yields the conversation in each form that templates accept, the commonest first.

    Most walk through the arguments of calls as objects, some join them as JSON text; some want a text with calls, if
    only an empty one; many know fewer roles than a row may have, one name for thoughts, and tools and calls only as
    OpenAI writes them.
    """
    has_older = any(message["role"] in OLDER_ROLES for message in given.messages)
    calls: list[Any] = [message["tool_calls"] for message in given.messages if "tool_calls" in message]
    has_bare = any("function" not in entry for entries in (*calls, given.tools) for entry in entries)
    messages = _with_known_thoughts(given.messages, template)
    for wraps in (False, True)[: 1 + has_bare]:
        tools = [_wrapped(tool) for tool in given.tools] if wraps else given.tools
        for as_text, keeps_none in ((False, True), (False, False), (True, True), (True, False))[: 4 if calls else 1]:
            formed = [_with_calls(message, as_text=as_text, wraps=wraps) for message in messages]
            if not keeps_none:
                formed = _blank(formed)
            for names in [{}, OLDER_ROLES] if has_older else [{}]:
                yield Conversation(renamed(formed, names), tools)


def _with_known_thoughts(messages: Sequence[Message], template: str) -> Sequence[Message]:
    known = [key for key in THOUGHTS if re.search(rf"""\.{key}\b|['"]{key}['"]""", template)]
    names = {key: known[0] for key in THOUGHTS if known and key not in known}
    return [
        message if message.keys() & set(known) else {names.get(key, key): value for key, value in message.items()}
        for message in messages
    ]


def _writes_none(
    conversation: Conversation,
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: Mapping[str, object] | None,
) -> bool:
    """True if the template writes the missing content of a tool call's message as Python's None, as GLM 4.5's does."""
    if all(message["content"] is not None for message in conversation.messages):
        return False
    blank = Conversation(_blank(conversation.messages), conversation.tools)
    try:
        return write(blank, tokenizer, template_kwargs, add_generation_prompt=False).count("None") < text.count("None")
    except RowError:
        return False


def _blank(messages: Sequence[Message]) -> list[Message]:
    return [{**message, "content": message["content"] or ""} for message in messages]


def renamed(messages: Sequence[Message], names: Mapping[str, str]) -> list[Message]:
    """The messages with other names for some roles."""
    return [{**message, "role": names.get(str(message["role"]), message["role"])} for message in messages]


def _with_calls(message: Message, *, as_text: bool, wraps: bool) -> Message:
    calls: Any = message.get("tool_calls")
    if not calls:
        return message
    shown = []
    for call in calls:
        function = call.get("function", call)
        arguments: Any = function.get("arguments") or {}
        if isinstance(arguments, str) != as_text:
            arguments = json.dumps(arguments, ensure_ascii=False) if as_text else json.loads(arguments)
        function = {**function, "arguments": arguments}
        shown.append(
            {**call, "function": function} if "function" in call else _wrapped(function) if wraps else function
        )
    return {**message, "tool_calls": shown}


def _wrapped(function: Fields) -> Fields:
    if "function" in function:
        return function
    inside = {key: value for key, value in function.items() if key not in ("id", "type")}
    return {**({"id": function["id"]} if "id" in function else {}), "type": "function", "function": inside}


def lost_part(conversation: Conversation, text: str, *, names_tools: bool = False) -> str | None:
    """Describes parts of a conversation that its rendered text lacks; None if all are there, white space aside."""
    for _, what, arguments in _calls(conversation.messages):
        if isinstance(arguments, str):
            is_lost = arguments not in text
        else:  # some templates write an object as Python does
            written = repr(arguments)
            num_said = sum(str(message["content"]).count(written) for message in conversation.messages)
            is_lost = bool(arguments) and text.count(written) > num_said
        if is_lost:
            return what
    named = [tool.get("function", tool) for tool in conversation.tools] if names_tools else []
    parts = [("the tools", str(tool["name"])) for tool in named if isinstance(tool, dict) and "name" in tool]
    parts += [(what, part.strip()) for what, part in _parts(conversation.messages)]
    # Each has a place of its own. The longest first, so that no other takes a piece of it.
    parts = sorted(((what, part) for what, part in parts if part), key=lambda pair: -len(pair[1]))
    rest = text
    for _, part in parts:
        if part not in rest:
            break
        rest = rest.replace(part, "\0", 1)
    else:
        return None
    rest = _LAYOUT.sub("", text)
    for what, part in parts:
        forms = (
            _LAYOUT.sub("", form) for form in (part, json.dumps(part, ensure_ascii=False)[1:-1], json.dumps(part)[1:-1])
        )
        found = next((form for form in forms if form in rest), None)
        if found is None:
            return what
        rest = rest.replace(found, "\0", 1) if found else rest
    return None


def _parts(messages: Sequence[Message]) -> Iterator[tuple[str, str]]:
    """Parts that the text of a conversation must hold, with their names.

    Templates drop thoughts of earlier turns on purpose; those of a last message of the assistant are learned.
    """
    for index, message in enumerate(messages):
        content, what = str(message.get("content") or ""), f"message {index + 1} of role {message['role']}"
        if message["role"] != "assistant":
            yield what, content
            continue
        *thoughts, said = re.split("</?think>", content)
        yield what, said
        if index == len(messages) - 1:
            thoughts += [thought for key in THOUGHTS if isinstance(thought := message.get(key), str)]
            yield from ((f"the thoughts of {what}", thought) for thought in thoughts)
    for name, what, arguments in _calls(messages):
        yield what, name
        yield from ((what, text) for text in _texts(arguments))


def _calls(messages: Sequence[Message]) -> Iterator[tuple[str, str, object]]:
    for index, message in enumerate(messages):
        calls: Any = message.get("tool_calls") or []
        for function in (call.get("function", call) for call in calls):
            yield function["name"], f"the call of {function['name']} in message {index + 1}", function["arguments"]


def _texts(arguments: object) -> Iterator[str]:
    for entry in (
        arguments.values() if isinstance(arguments, dict) else arguments if isinstance(arguments, list) else ()
    ):
        if isinstance(entry, str):
            yield entry
        else:
            yield from _texts(entry)


@lru_cache(maxsize=8)
def _shows_tools(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """True if the template shows tools. If not, warns once: environments may need a row's tools all the same."""
    schema = {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}, "required": ["x"]}
    tools: Any = [{"type": "function", "function": {"name": _MARK, "description": "x", "parameters": schema}}]
    try:
        shown = _MARK in str(
            tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tools=tools, tokenize=False)
        )
    except (jinja2.TemplateError, TypeError, ValueError, AttributeError):
        return True  # rows that have tools say why
    if not shown:
        logger.warning("The chat template ignores tools: the model does not see the tools of the rows")
    return shown
