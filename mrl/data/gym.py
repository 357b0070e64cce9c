"""Conversations of NeMo Gym's rows, which are requests to OpenAI's Responses API, as OpenAI's chat format."""

from __future__ import annotations

from mrl.data.fields import Fields, Message, RowError, content_text, plain_text

Tool = dict[str, object]


def gym_conversation(fields: Fields) -> tuple[list[Message], list[Tool]]:
    """The messages and tools of `responses_create_params`.

    Raises:
        RowError: they are not there, or hold what is not text, calls or their results.
    """
    request = fields.get("responses_create_params")
    if not isinstance(request, dict):
        raise RowError("no object responses_create_params")
    if "_hf_placeholder" in fields:
        raise RowError("the question is still a placeholder; fill it in with `python -m mrl.prepare nano3`")
    entries = request.get("input")
    if isinstance(entries, str):
        entries = [{"role": "user", "content": entries}]
    if not isinstance(entries, list) or not entries:
        raise RowError("responses_create_params.input must be a text or a list of messages, not empty")
    messages = [_message(entry, f"responses_create_params.input[{index}]") for index, entry in enumerate(entries)]
    if request.get("instructions"):
        messages.insert(0, {"role": "system", "content": plain_text(request["instructions"], "responses_create_params.instructions")})
    tools = request.get("tools") or []
    if not isinstance(tools, list):
        raise RowError("responses_create_params.tools must be a list")
    return messages, [_tool(tool, f"responses_create_params.tools[{index}]") for index, tool in enumerate(tools)]


def _message(entry: object, name: str) -> Message:
    if not isinstance(entry, dict):
        raise RowError(f"{name} must be an object")
    kind = entry.get("type", "message")
    if kind == "function_call":
        call = {"name": entry.get("name"), "arguments": entry.get("arguments")}
        return {"role": "assistant", "content": None, "tool_calls": [{"id": entry.get("call_id"), "type": "function", "function": call}]}
    if kind == "function_call_output":
        output = plain_text(entry.get("output"), f"{name}.output")
        return {"role": "tool", "tool_call_id": entry.get("call_id"), "content": output}
    role = entry.get("role")
    if kind != "message" or not isinstance(role, str):
        raise RowError(f"{name} is a {kind} of role {role}; only messages, function calls and their outputs are supported")
    # Chat templates know the role by its older name.
    return {"role": "system" if role == "developer" else role, "content": content_text(entry.get("content"), f"{name}.content")}


def _tool(tool: object, name: str) -> Tool:
    """A tool of the Responses API has its function's fields beside its type, one of the chat format below `function`."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise RowError(f"{name} must be an object of type function")
    if "function" in tool:
        return tool
    function = {key: value for key, value in tool.items() if key != "type" and value is not None}
    return {"type": "function", "function": function}
