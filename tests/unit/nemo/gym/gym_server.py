# SPDX-License-Identifier: Apache-2.0
"""A server like NeMo Gym's, for tests of that form alone: a head server, and an agent asking the model as `vllm_model`.

After nemo-gym 0.5.0: `nemo_gym/server_utils.py` (HeadServer), `responses_api_agents/simple_agent/app.py` (`/run`), and
`responses_api_models/vllm_model/app.py` (what is asked, and where token ids stand). The real servers run in tests/long.
"""

from __future__ import annotations

import json
import socket
import threading

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from mrl.rollout import http_gate
from tests.waiting import HANG_S

IDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


class GymForm:
    """An agent `two_turns`, whose rows say what it does: `does`."""

    def __init__(self, policy_base_url: str, key: str) -> None:
        self.model, self.headers = f"{policy_base_url}/chat/completions", {"Authorization": f"Bearer {key}"}
        self.rows: list[dict] = []
        self.asked: list[dict] = []
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        routes = [Route("/global_config_dict_yaml", self.config), Route("/run", self.run, methods=["POST"])]
        # Open to all, as NeMo Gym's are.
        server = http_gate.make_server(Starlette(routes=routes), has_key=lambda *_: True, max_body=10**7)
        threading.Thread(target=server.run, args=([listener],), daemon=True).start()

    @property
    def head_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def config(self, _: Request) -> JSONResponse:
        agent = {"entrypoint": "app.py", "host": "127.0.0.1", "port": self.port}
        resources = {"entrypoint": "app.py", "host": "127.0.0.1", "port": 1}
        instances = {
            "two_turns": {"responses_api_agents": {"simple_agent": agent}},
            "r": {"resources_servers": {"r": resources}},
        }
        # YAML, of which JSON is a part, as a text in JSON.
        return JSONResponse(json.dumps({"verbose": True, "config_paths": ["a.yaml"], **instances}))

    async def ask(self, client: httpx.AsyncClient, messages: list[dict], row: dict) -> dict:
        """The message of the model's answer, with its token ids."""
        params = row["responses_create_params"]
        body = {
            "model": "m",
            "messages": messages,
            "logprobs": True,
            "top_logprobs": 0,
            "return_tokens_as_token_ids": True,
        }
        body |= {
            "temperature": params["temperature"],
            "top_p": params["top_p"],
            "max_tokens": params["max_output_tokens"],
        }
        self.asked.append(body)
        response = await client.post(self.model, json=body | row.get("ask", {}), headers=self.headers, timeout=HANG_S)
        response.raise_for_status()
        (choice,) = response.json()["choices"]
        assert set(IDS) <= choice["message"].keys(), "Gym would ask /tokenize"
        return choice["message"]

    async def run(self, request: Request) -> JSONResponse:
        row = await request.json()
        self.rows.append(row)
        if row["does"] == "fail":
            return JSONResponse({"detail": "boom"}, status_code=500)
        messages, output = list(row["responses_create_params"]["input"]), []
        async with httpx.AsyncClient() as client:
            for _ in range(2):
                message = await self.ask(client, messages, row)
                content = [{"type": "output_text", "text": message["content"], "annotations": []}]
                ids = {name: message[name] for name in IDS}
                output.append({"type": "message", "role": "assistant", "content": content, "id": "msg_1", **ids})
                calls = [{"type": "function_call_output", "call_id": "c", "output": "13"}]
                output += calls
                messages += [
                    {"role": "assistant", "content": message["content"], **ids},
                    {"role": "user", "content": "13"},
                ]
        if row["does"] == "invent":
            output[0]["generation_token_ids"] = [*output[0]["generation_token_ids"], 5]
        if row["does"] == "repeat":
            output.append(output[0])
        result = {
            "responses_create_params": row["responses_create_params"],
            "response": {"output": output},
            "reward": 0.75,
        }
        result |= {"num_tries": 2, "is_right": True, "note": "text", "half": None}
        return JSONResponse(result | row.get("result", {}))
