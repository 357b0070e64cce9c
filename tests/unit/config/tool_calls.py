# SPDX-License-Identifier: Apache-2.0
"""One call, `add(a=2)`, in the formats that models write, after the model cards; `tests/stack/rollout` gives them to
vLLM's parsers.
"""

CALLS = {
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>",
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>',
    "llama3_json": '{"name": "add", "parameters": {"a": 2}}',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 2}}]',
    "glm45": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
        '```json\n{"a": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "deepseek_v31": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "deepseek_v32": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">2'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        '{"a": 2}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">2</parameter>\n</invoke>\n</minimax:tool_call>'
    ),
    "seed_oss": "<seed:tool_call>\n<function=add>\n<parameter=a>2</parameter>\n</function>\n</seed:tool_call>",
    "longcat": '<longcat_tool_call>{"name": "add", "arguments": {"a": 2}}</longcat_tool_call>',
    "olmo3": "<function_calls>add(a=2)</function_calls>",
    "granite": '<|tool_call|>[{"name": "add", "arguments": {"a": 2}}]',
    "internlm": '<|action_start|><|plugin|>{"name": "add", "parameters": {"a": 2}}<|action_end|>',
    "apertus": '<|tools_prefix|>[{"add": {"a": 2}}]<|tools_suffix|>',
    "functiongemma": "<start_function_call>call:add{a:<escape>2<escape>}<end_function_call>",
    "step3": (
        "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="add"><steptml:parameter name="a">2</steptml:parameter></steptml:invoke>'
        "<｜tool_call_end｜><｜tool_calls_end｜>"
    ),
    "lfm2": "<|tool_call_start|>[add(a=2)]<|tool_call_end|>",
    "gemma4": "<|tool_call>call:add{a:2}<tool_call|>",
}
