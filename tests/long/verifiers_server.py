# SPDX-License-Identifier: Apache-2.0
"""An agent at a URL that runs environments of verifiers, in whose Python it runs: `python verifiers_server.py PORT`."""

import os
import sys

import uvicorn
import verifiers.v1 as vf
import verifiers_tasks
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

TASKS = {name: list(getattr(verifiers_tasks, name)(vf.TasksetConfig(id=name))) for name in ("CapitalTaskset", "WeatherTaskset")}


async def run(request: Request) -> JSONResponse:
    asked = await request.json()
    variable = "KEY_" + asked["base_url"].split("/")[-2]  # verifiers reads keys from the environment: one for each session
    os.environ[variable] = asked["api_key"]
    agent = vf.make_agent(
        vf.AgentConfig(
            model=asked["model"],
            client=vf.EvalClientConfig(base_url=asked["base_url"], api_key_var=variable),
            runtime=vf.SubprocessConfig(),
            harness=vf.HarnessConfig(id="null"),
            max_turns=3,
            timeout={"rollout": asked["deadline_s"]},
        )
    )
    try:
        trace = await agent.run(TASKS[asked["row"]["taskset"]][asked["row"]["index"]])
    finally:
        del os.environ[variable]
    if not trace.ok:
        return JSONResponse({"error": str(trace.errors[-1])})
    return JSONResponse({"reward": trace.reward, "metrics": {"turns": trace.num_turns, **trace.metrics}})


if __name__ == "__main__":
    uvicorn.run(Starlette(routes=[Route("/", run, methods=["POST"])]), host="127.0.0.1", port=int(sys.argv[1]))
