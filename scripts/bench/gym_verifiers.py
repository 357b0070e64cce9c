# SPDX-License-Identifier: Apache-2.0
"""Runs in NeMo Gym's environment, not mrl's: reads answer groups on stdin, prints Gym's rewards in order as JSON."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

REQUEST = {"responses_create_params": {"input": []}, "id": 0, "prompt": "", "category": "", "environment_name": ""}
RESPONSE = {
    "id": "r",
    "created_at": 0,
    "model": "m",
    "object": "response",
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}


def server_of(name, grading_mode):
    """The resource server and its class of requests."""
    from nemo_gym.base_resources_server import BaseResourcesServerConfig, BaseVerifyRequest, SimpleResourcesServer
    from nemo_gym.server_utils import ServerClient

    module = importlib.import_module(f"resources_servers.{name}.app")

    def own(base):
        bases = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, base)]
        return next(kind for kind in bases if kind.__module__ == module.__name__)

    options = {"grading_mode": grading_mode} if grading_mode else {}
    if name == "math_with_judge":
        judge = {"type": "responses_api_models", "name": "none"}
        options = {
            "judge_model_server": judge,
            "judge_responses_create_params": {"input": []},
            "should_use_judge": False,
        }
        options["library_verifier_timeout_seconds"] = 600.0  # its 10 s are not enough on a busy host
    config = own(BaseResourcesServerConfig)(host="", port=0, entrypoint="", name=name, **options)
    return own(SimpleResourcesServer)(config=config, server_client=MagicMock(spec=ServerClient)), own(BaseVerifyRequest)


def output_of(answer):
    """Output that Gym's model server makes of a text, or of `{"text", "calls"}`."""
    reply: dict[str, Any] = {"text": answer} if isinstance(answer, str) else answer
    calls, text = reply.get("calls") or [], reply.get("text") or ""
    content = [{"type": "output_text", "text": text, "annotations": []}]
    message = [{"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": content}]
    output = message if text or not calls else []
    for call in calls:
        arguments = call["arguments"] if isinstance(call["arguments"], str) else json.dumps(call["arguments"])
        output.append(
            {"type": "function_call", "id": "c", "call_id": "c", "name": call["name"], "arguments": arguments}
        )
    return output


def rewards(group):
    """Rewards of the answers to one row."""
    name, row = group["server"], group["row"]
    if name == "code_gen":
        return [run_program(row, reply) for reply, *_ in group["answers"]]
    # A mode that Gym takes from the server's config alone.
    mode = row.pop("grading_mode") if row.get("grading_mode") == "lenient_answer_colon_md" else None
    server, request = server_of(name, mode)
    bodies = [
        {**REQUEST, **row, "response": {**RESPONSE, "output": output_of(reply)}} for reply, *_ in group["answers"]
    ]
    return [asyncio.run(server.verify(request.model_validate(body))).reward for body in bodies]


def run_program(row, reply):
    """The reward of `code_gen` without its Ray."""
    from lcb_integration.compute_code_generation_metrics import check_correctness
    from lcb_integration.extraction_utils import LMStyle, extract_code

    program = extract_code(reply, LMStyle.OpenAIChat)
    tests = {"fn_name": None, **row["verifier_metadata"]["unit_tests"]}
    results = check_correctness({"input_output": json.dumps(tests)}, program, 10, False)[0] if program else [False]
    return float(all(result is True or result == 1 for result in results))


if __name__ == "__main__":
    import resources_servers

    sys.path.insert(0, str(Path(next(iter(resources_servers.__path__))) / "code_gen"))
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # verifiers print
    print(json.dumps([rewards(group) for group in json.load(sys.stdin)]), file=answer, flush=True)
