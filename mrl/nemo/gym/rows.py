# SPDX-License-Identifier: Apache-2.0
"""Conversations of NeMo Gym's rows, which are requests to the Responses API, in OpenAI's chat format."""

from __future__ import annotations

from mrl.data.fields import (
    LEADING,
    REQUEST,
    ROLES,
    Fields,
    Message,
    RowError,
    calls_of,
    content_text,
    message_of,
    plain_text,
    said,
)
from mrl.data.rows import schema_as_written

KEYS = ("role", "tool_calls", "tool_call_id")
"""Fields of a message that a template sees besides its content."""
ORDER = ("name", "description", "parameters")
"""Fields of a function, as templates get them from Gym."""


def gym_conversation(fields: Fields) -> tuple[list[Message], list[Fields]]:
    """OpenAI chat messages and tools from a NeMo Gym row: `responses_create_params` is a request to the Responses API.

    They are those that Gym's own converter (nemo_gym/responses_converter.py) hands to a chat template: what the
    assistant thinks, says and calls in one turn is one message, and so are `instructions` and the first system
    messages. RowError: they are not there, or hold what is not text, calls or their results.
    """
    request = fields.get(REQUEST)
    if not isinstance(request, dict):
        raise RowError(f"no object {REQUEST}")
    if "_hf_placeholder" in fields:
        raise RowError("the question is still a placeholder; fill it in with `python -m mrl.prepare nano3`")
    entries, tools = request.get("input"), request.get("tools") or []
    if isinstance(entries, str):
        entries = [said("user", entries)]
    if not isinstance(entries, list) or not entries:
        raise RowError(f"{REQUEST}.input must be a text or a list of messages, not empty")
    messages = list[Message]()
    for index, entry in enumerate(entries):
        message = _gym_message(entry, f"{REQUEST}.input[{index}]")
        if message["role"] == "assistant" and messages and messages[-1]["role"] == "assistant":
            message = _joined(messages.pop(), message)
        messages.append(message)
    if request.get("instructions"):
        texts = [plain_text(request["instructions"], f"{REQUEST}.instructions")]
        while messages and messages[0]["role"] in LEADING:
            texts.append(str(messages.pop(0)["content"]))
        messages.insert(0, said("system", "\n\n".join(texts)))
    if not isinstance(tools, list):
        raise RowError(f"{REQUEST}.tools must be a list")
    return messages, [_gym_tool(tool, f"{REQUEST}.tools[{index}]") for index, tool in enumerate(tools)]


def _gym_tool(tool: object, name: str) -> Fields:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise RowError(f"{name} must be an object of type function")
    # The Responses API has a function's fields next to the tool's type, the chat format has them below `function`.
    function = tool["function"] if isinstance(tool.get("function"), dict) else tool
    rest = [key for key in function if key not in (*ORDER, "type", "strict")]
    kept = {key: schema_as_written(function[key]) for key in (*ORDER, *rest) if function.get(key) is not None}
    return {"type": "function", "function": kept}


def _joined(said: Message, more: Message) -> Message:
    calls = [call for message in (said, more) for call in _list(message.get("tool_calls"))]
    content = f"{said['content'] or ''}{more['content'] or ''}"
    return {"role": "assistant", "content": content or None, **({"tool_calls": calls} if calls else {})}


def _list(value: object) -> list:
    return value if isinstance(value, list) else []


def _gym_message(entry: object, name: str) -> Message:
    if not isinstance(entry, dict):
        raise RowError(f"{name} must be an object")
    kind, role = entry.get("type") or "message", entry.get("role")
    if kind == "reasoning":
        texts = [content_text([part], f"{name}.summary") for part in _list(entry.get("summary"))]
        return {"role": "assistant", "content": "".join(f"<think>{text}</think>" for text in texts if text) or None}
    if kind == "function_call":
        call = {"name": entry.get("name"), "arguments": entry.get("arguments")}
        calls = [{"id": entry.get("call_id"), "type": "function", "function": call}]
        return {"role": "assistant", "content": None, "tool_calls": calls_of(calls, name)}
    if kind == "function_call_output":
        return {
            "role": "tool",
            "tool_call_id": entry.get("call_id"),
            "content": content_text(entry.get("output"), f"{name}.output"),
        }
    if kind != "message" or role not in ROLES:
        raise RowError(
            f"{name} is a {kind} of role {role}; only messages, reasoning, function calls and their outputs are "
            "supported"
        )
    message = message_of({key: entry.get(key) for key in KEYS} | {"content": entry.get("content") or ""}, name)
    if role == "assistant" and not message["content"]:
        message["content"] = None
    return message
