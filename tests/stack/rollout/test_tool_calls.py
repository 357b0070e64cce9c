# SPDX-License-Identifier: Apache-2.0
"""`mrl.envs.tool_calls` against vLLM's parsers, with which agents over HTTP get their calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mrl.envs.tool_calls import ToolCall, tool_calls
from tests.stack.rollout.tool_tokenizer import save_tool_tokenizer
from tests.unit.config.tool_calls import CALLS

if TYPE_CHECKING:
    from vllm.tokenizers import TokenizerLike

TYPES = {"a": "integer", "b": "string", "f": "number", "flag": "boolean", "xs": "array", "o": "object"}
PROPERTIES = {name: {"type": kind} for name, kind in TYPES.items()}
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": PROPERTIES}}},
    {"type": "function", "function": {"name": "noop", "parameters": {"type": "object", "properties": {}}}},
]


NEEDED = {
    "llama3_json": ["<|python_tag|>"],
    "mistral": ["[TOOL_CALLS]"],
    "lfm2": ["<|tool_call_start|>", "<|tool_call_end|>"],
    **dict.fromkeys(("deepseek_v3", "deepseek_v31"), ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"]),
}
"""Tokens without which a parser does not start."""


def parameter(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


def call(body: str, name: str = "add") -> str:
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TokenizerLike:
    from vllm.tokenizers import get_tokenizer

    return get_tokenizer(save_tool_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def vllm_s(text: str, tokenizer: TokenizerLike, name: str = "qwen3_coder") -> list[tuple[str, object]]:
    """Names and arguments as vLLM reads them."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    request = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": ""}], "tools": TOOLS})
    kind = ToolParserManager.get_tool_parser(name)
    if name == "llama3_json":  # the byte tokenizer has no mark of Python, which that format needs not
        kind = type("Llama", (kind,), {"bot_token": "<tool_call>"})
    parser = kind(tokenizer, [*(request.tools or ())])
    found = parser.extract_tool_calls(text, request).tool_calls
    return [(one.function.name, json.loads(one.function.arguments)) for one in found]


@pytest.mark.parametrize("name", CALLS)
def test_the_parser_of_a_format_reads_its_call(name: str, tokenizer: TokenizerLike, tmp_path: Path):
    """The parser that a chat template with these marks gets from `mrl.config.parsers`."""
    from vllm.tokenizers import get_tokenizer

    from mrl.rollout.serving import check_tool_parser

    if name in NEEDED:
        with pytest.raises(RuntimeError, match=f"tool_parser={name} does not work"):
            check_tool_parser(name, tokenizer)
        file = save_tool_tokenizer(tmp_path) / "tokenizer.json"
        for mark, old in zip(NEEDED[name], ("</tool_call>", "<tool_call>"), strict=False):
            file.write_text(file.read_text().replace(old, mark))
        tokenizer = get_tokenizer(tmp_path)
    check_tool_parser(name, tokenizer)
    assert vllm_s(CALLS[name], tokenizer, name) == [("add", {"a": 2})]


def read(calls: list[ToolCall]) -> list[tuple[str, object]]:
    return [(one.name, dict(one.arguments)) for one in calls]


@pytest.mark.parametrize(
    "text",
    [
        "no call",
        call(parameter("a", "2") + parameter("b", "x")),
        call(parameter("a", "1")) + "\n" + call(parameter("b", "y")),
        call("", name="noop"),
        "words before\n" + call(parameter("a", "3")) + " and behind",
        call(parameter("b", "  two\n lines ")),
        call(parameter("b", "007")),
        call(parameter("f", "2.5") + parameter("flag", "True")),
        call(parameter("xs", '[1, "two"]') + parameter("o", '{"k": null}')),
        call(parameter("unknown", "5")),
        call(parameter("a", "5"), name="unknown"),
        "<tool_call><function=add><parameter=a>4</parameter></function></tool_call>",
        "<tool_call>\n<function=add>\n" + parameter("a", "4") + "</function>",
    ],
)
def test_both_read_the_same_calls(text: str, tokenizer: TokenizerLike):
    calls = tool_calls(text, TOOLS)
    assert [one.error for one in calls] == [""] * len(calls)
    assert read(calls) == vllm_s(text, tokenizer)


@pytest.mark.parametrize(
    ("text", "error", "repaired"),
    [
        (call(parameter("a", "two")), "argument a: 'two' is no integer", [("add", {"a": "two"})]),
        (call(parameter("xs", "[1,")), "argument xs: '[1,' is no array", [("add", {"xs": "[1,"})]),
        ("<tool_call>\n<function=add>\n" + parameter("a", "4") + "</tool_call>", "not a call", [("add", {"a": 4})]),
        ("<tool_call>\n<function=add>\n<parameter=a>\n4", "not a call", [("add", {})]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "not a call", []),
        (call("words\n" + parameter("a", "4")), "text outside of the parameters", [("add", {"a": 4})]),
    ],
)
def test_what_vllm_repairs_is_an_error_to_environments(
    text: str, error: str, repaired: list[tuple[str, object]], tokenizer: TokenizerLike
):
    """A model is not to learn that broken calls work."""
    (found,) = tool_calls(text, TOOLS)
    assert found.error.startswith(error)
    assert vllm_s(text, tokenizer) == repaired


ONE, TWO = '{"name": "add", "arguments": {"a": 1, "b": "x}"}}', '{"name": "noop", "parameters": {}}'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(
            ("hermes", text)
            for text in (
                "none",
                f"so\n<tool_call>\n{ONE}\n</tool_call> and <tool_call>{ONE}",
                f"<tool_call>{ONE}</tool_call>",
            )
        ),
        *(("hermes", f"<tool_call>{ONE}</tool_call><tool_call>{text}</tool_call>") for text in ("{", TWO, "7", "[]")),
        *(
            ("llama3_json", text)
            for text in (ONE, f"so {ONE}; {TWO} end", f"{ONE} {{", "{}", "none", f'{{"a": {ONE}}}')
        ),
    ],
)
def test_json_is_read_as_vllm_reads_it(name: str, text: str, tokenizer: TokenizerLike):
    assert read([one for one in tool_calls(text, TOOLS, name) if not one.error]) == vllm_s(text, tokenizer, name)
