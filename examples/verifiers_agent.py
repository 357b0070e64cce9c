# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportMissingImports=false
"""Any taskset of verifiers as an agent, in the Python where verifiers is installed.

`python verifiers_agent.py rows NAME > rows.jsonl` writes a row for each of its tasks,
`python verifiers_agent.py serve PORT` runs them. NAME is a package, or a file NAME.py in PYTHONPATH.
"""

import functools
import json
import os
import sys
from typing import Any

import uvicorn
import verifiers.v1 as vf
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

MAX_TURNS = 16


@functools.cache
def tasks_of(name: str) -> list[Any]:
    """All tasks of a taskset, in its own order."""
    return list(vf.load_taskset(vf.EnvConfig(taskset={"id": name}).taskset))


def rows(name: str) -> list[str]:
    return [
        json.dumps(
            {
                "question": str(task.data.prompt),
                "answer": "judged by verifiers",
                "env_name": name,
                "taskset": name,
                "index": index,
            }
        )
        for index, task in enumerate(tasks_of(name))
    ]


async def run(request: Request) -> JSONResponse:
    asked = await request.json()
    variable = (
        "KEY_" + asked["base_url"].split("/")[-2]
    )  # verifiers reads keys from the environment: one for each session
    os.environ[variable] = asked["api_key"]
    agent = vf.make_agent(
        vf.AgentConfig(
            model=asked["model"],
            client=vf.EvalClientConfig(base_url=asked["base_url"], api_key_var=variable),
            runtime=vf.SubprocessConfig(),
            harness=vf.HarnessConfig(id="null"),
            max_turns=MAX_TURNS,
            timeout={"rollout": asked["deadline_s"]},
        )
    )
    try:
        trace = await agent.run(tasks_of(asked["row"]["taskset"])[asked["row"]["index"]])
    finally:
        del os.environ[variable]
    if not trace.ok or not trace.num_turns:
        return JSONResponse({"error": str(trace.errors[-1]) if trace.errors else "the model has said nothing"})
    return JSONResponse({"reward": trace.reward, "metrics": {"turns": trace.num_turns, **trace.metrics}})


if __name__ == "__main__":
    if sys.argv[1] == "rows":
        print(*rows(sys.argv[2]), sep="\n")
    else:
        uvicorn.run(Starlette(routes=[Route("/", run, methods=["POST"])]), host="127.0.0.1", port=int(sys.argv[2]))
