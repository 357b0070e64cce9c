# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportMissingImports=false
"""Runs an environment of the library verifiers in the Python where that is installed, as an agent of the run.

`python -P verifiers_child.py SPEC rows` prints the rows of the environment's data set, `... SPEC serve LISTENER_FD
REPORT_FD PARENT_PID` answers as every agent does, with the key of its address on stdin. SPEC is JSON: `name`,
`args` and `split`. A refusal is a line of JSON, `{"rule", "way_out", "kind"}`, and exit code 3. Imports nothing of mrl.
"""

from __future__ import annotations

import asyncio
import ctypes
import difflib
import importlib
import importlib.util
import inspect
import json
import os
import secrets
import signal
import socket
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

REFUSED = 3
ABSENT = "to be provided"
"""The kind of a fault that another machine may not have."""
WITH_LOADER, WITH_TASKS = "verifiers>=0.1.14,<0.4", "verifiers==0.4.0"
"""Versions that take a module's `load_environment`, and those that take its taskset."""
MAX_TURNS = 16
MAX_FRAMES = 8
"""Turns of a taskset's agent; environments of load_environment have a limit of their own."""
HELD_OUT = "set data.validation=null and data.train.split_validation_size"
PR_SET_PDEATHSIG = 1
RESULT = os.fdopen(os.dup(1), "w", encoding="utf-8")


def refuse(rule: str, way_out: str, kind: str = "refused") -> NoReturn:
    """Ends the program with the reason, as JSON for the run."""
    print(json.dumps({"rule": rule, "way_out": way_out, "kind": kind}), file=RESULT, flush=True)
    sys.exit(REFUSED)


def check_arguments(given: Iterable[str], known: Mapping[str, bool], takes_any: bool, what: str) -> None:
    """Refuses arguments that are not in `known`, or are needed (True there) and not given."""
    given = list(given)
    for name in [] if takes_any else [name for name in given if name not in known]:
        near = difflib.get_close_matches(name, known, 1)
        meant = f"write {near[0]}, " if near else ""
        refuse(f"{what} has no argument {name}", f"{meant}use one of {', '.join(known) or 'none'}")
    if missing := [name for name, is_needed in known.items() if is_needed and name not in given]:
        refuse(f"{what} needs {', '.join(missing)}", "give it under env.verifiers_args")


class Classic:
    """An environment that a module's `load_environment` makes: verifiers 0.1 to 0.3."""

    def __init__(self, module: Any, spec: Mapping[str, Any]) -> None:
        import verifiers as vf

        loader = getattr(vf, "load_environment", None)
        if loader is None:
            version = getattr(vf, "__version__", "")
            way_out = f"{sys.executable} -m pip install '{WITH_LOADER}'"
            refuse(f"{spec['name']} has a load_environment, which verifiers {version} does not take", way_out, ABSENT)
        parameters = inspect.signature(module.load_environment).parameters.values()
        named = [one for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
        known = {one.name: one.default is one.empty for one in named}
        takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)
        check_arguments(spec["args"], known, takes_any, f"load_environment of {spec['name']}")
        self.spec, self.env = spec, loader(spec["name"], **spec["args"])
        if getattr(self.env, "requires_group_rollouts", False):
            refuse(f"rewards of {spec['name']} compare the answers of a group", "use an environment that judges each")

    def rows(self) -> Iterable[dict[str, Any]]:
        """A row for each example of the data set, which the rollout gets back whole."""
        is_validation = self.spec["split"] == "validation"
        examples = self.env.get_eval_dataset() if is_validation else self.env.get_dataset()
        if is_validation and self.env.eval_dataset is None:  # it has given the other one
            refuse(f"{self.spec['name']} has no data set to validate with", HELD_OUT)
        for example in examples:
            beside = {name: value for name, value in example.items() if name != "prompt"}
            yield {"prompt": example["prompt"], "answer": example.get("answer"), "example": beside}

    async def run(self, asked: Mapping[str, Any], variable: str) -> dict[str, Any]:
        """The reward of one rollout of the environment with the run's model."""
        from verifiers.clients import resolve_client
        from verifiers.types import ClientConfig

        row, url, limit_s = asked["row"], asked["base_url"], asked["deadline_s"]
        config = ClientConfig(api_base_url=url, api_key_var=variable, max_retries=0, timeout=limit_s)
        client = resolve_client(config)
        try:
            example = {**row["example"], "prompt": row["conversation"]}
            output = await self.env.run_rollout(example, client, asked["model"], {})
        finally:
            await client.close()
        if error := output.get("error"):
            return {"error": str(error)}
        return answer_of(output["reward"], output.get("metrics") or {})


class Tasks:
    """A taskset of verifiers 0.4, whose tasks a single agent does."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        import verifiers.v1 as vf

        if not hasattr(vf, "taskset_config_type"):
            way_out = f"{sys.executable} -m pip install {WITH_TASKS} uv"
            refuse(f"{spec['name']} has no load_environment, and this verifiers takes no tasksets", way_out, ABSENT)
        try:
            fields = vf.taskset_config_type(spec["name"]).model_fields
        except Exception as error:  # importing a module runs the user's code
            rule = f"{spec['name']} has no load_environment, and is no taskset: {type(error).__name__}: {error}"
            refuse(rule, f"write either; a load_environment needs {WITH_LOADER}")
        known = {name: field.is_required() for name, field in fields.items() if name != "id"}
        check_arguments(spec["args"], known, False, f"the config of {spec['name']}")
        config = vf.EnvConfig(taskset={"id": spec["name"], **spec["args"]})  # pyright: ignore[reportArgumentType]
        if spec["split"] == "validation":
            refuse(f"{spec['name']} has one set of tasks", HELD_OUT)
        self.tasks = list(vf.load_taskset(config.taskset))

    def rows(self) -> Iterable[dict[str, Any]]:
        """A row for each task, with its number and its checksum."""
        for index, task in enumerate(self.tasks):
            prompt = task.data.prompt
            messages = prompt if isinstance(prompt, str) else [message.model_dump() for message in prompt or []]
            yield {"prompt": messages, "answer": None, "example": {"index": index, "key": task.key}}

    async def run(self, asked: Mapping[str, Any], variable: str) -> dict[str, Any]:
        """The reward of one rollout of a task with the run's model."""
        import verifiers.v1 as vf

        example = asked["row"]["example"]
        task = self.tasks[example["index"]]
        if task.key != example["key"]:
            return {"error": f"task {example['index']} is another one than its row was made of: make the rows anew"}
        agent = vf.make_agent(
            vf.AgentConfig(
                model=asked["model"],
                client=vf.EvalClientConfig(base_url=asked["base_url"], api_key_var=variable),
                runtime=vf.SubprocessConfig(),
                harness=vf.HarnessConfig(id="null"),
                max_turns=MAX_TURNS,
                timeout={"rollout": asked["deadline_s"]},  # pyright: ignore[reportArgumentType]
            )
        )
        trace = await agent.run(task)
        if not trace.ok or not trace.num_turns:
            return {"error": str(trace.errors[-1]) if trace.errors else "the model has said nothing"}
        return answer_of(trace.reward, {"turns": trace.num_turns, **trace.metrics})


def answer_of(reward: float, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of an agent; metrics that are no numbers are left out."""
    return {
        "reward": reward,
        "metrics": {name: value for name, value in metrics.items() if isinstance(value, int | float)},
    }


def is_there(module: str) -> bool:
    """True if this Python finds a module."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # nor the package that it is to be in
        return False


def load(spec: Mapping[str, Any]) -> Classic | Tasks:
    """Loads the environment; an error names a missing part."""
    if not is_there("verifiers"):
        kinds = f"'{WITH_LOADER}' for a load_environment, or {WITH_TASKS} uv for a taskset"
        way_out = f"python3 -m venv DIR && DIR/bin/pip install {kinds}; give DIR/bin/python"
        refuse(f"{sys.executable} has no verifiers", way_out, ABSENT)
    name = spec["name"].rsplit("/", 1)[-1].split("@")[0].replace("-", "_")
    own = "verifiers.v1.tasksets"
    is_shipped = is_there(f"{own}.{name}")
    if not is_shipped and not is_there(name):
        rule = f"{sys.executable} has no environment {spec['name']}: there is no module {name}"
        package = name.replace("_", "-")
        refuse(rule, f"{sys.executable} -m pip install {package}, or start the run in the folder of {name}.py", ABSENT)
    try:
        module = importlib.import_module(f"{own}.{name}" if is_shipped else name)
    except Exception as error:  # importing a module runs the user's code
        way_out = f"{sys.executable} -m pip install what it needs; a load_environment needs {WITH_LOADER}"
        refuse(f"{spec['name']} cannot be imported: {type(error).__name__}: {error}", way_out, ABSENT)
    return Classic(module, spec) if hasattr(module, "load_environment") else Tasks(spec)


def write_rows(environment: Classic | Tasks, spec: Mapping[str, Any]) -> None:
    """Writes the rows as mrl reads them: an answer is wanted of each, and the environment's own judge decides."""
    for row in environment.rows():
        written = {**row, "answer": str(row["answer"] or "judged by verifiers"), "env_name": spec["name"]}
        print(json.dumps({**written, "conversation": row["prompt"]}, default=str), file=RESULT)
    RESULT.flush()


def serve(environment: Classic | Tasks, words: Sequence[str]) -> None:
    """Serves rollouts at the run's socket until the parent dies."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    listener_fd, _, parent_pid = map(int, words)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit("the parent is gone")
    key = f"Bearer {sys.stdin.readline().strip()}"

    async def run(request: Request) -> Response:
        if not secrets.compare_digest(request.headers.get("authorization", ""), key):
            return JSONResponse({"error": "wrong key"}, 401)
        asked = await request.json()
        # verifiers reads keys from the environment: one for each session.
        variable = "KEY_" + secrets.token_hex(8)
        os.environ[variable] = asked["api_key"]
        try:
            async with asyncio.timeout(asked["deadline_s"]):
                return JSONResponse(await environment.run(asked, variable))
        except TimeoutError:
            return JSONResponse({"error": "the environment takes over env.agent_timeout_s", "status": "timeout"})
        except Exception as error:  # of the user's environment: the rollout is masked with this reason
            frames = traceback.format_list(traceback.extract_tb(error.__traceback__)[-MAX_FRAMES:])
            message = "".join(traceback.format_exception_only(error))[:500].rstrip()
            trace = "".join(["Traceback:\n", *frames, message])
            return JSONResponse({"error": f"{type(error).__name__}: {error}", "trace": trace})
        finally:
            del os.environ[variable]

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    routes = [Route("/", run, methods=["POST"]), Route("/health", health)]
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="warning", lifespan="off"))
    server.run(sockets=[socket.socket(fileno=listener_fd)])


if __name__ == "__main__":
    os.dup2(2, 1)  # what the environment prints
    SPEC = json.loads(sys.argv[1])
    if sys.argv[2] == "rows":
        try:
            write_rows(load(SPEC), SPEC)
        except Exception as failure:  # of the user's environment
            TRACE = traceback.extract_tb(failure.__traceback__)
            OWN = next((one for one in reversed(TRACE) if "site-packages" not in one.filename), TRACE[-1])
            refuse(f"it failed at {OWN.filename}:{OWN.lineno}: {type(failure).__name__}: {failure}", "correct it")
    else:
        serve(load(SPEC), sys.argv[3:])
