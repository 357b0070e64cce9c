"""Which environments there are, and which one a row is for."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping

from mrl.config.schema.env import BUILT_IN, EnvConfig

ENTRY_POINT_GROUP = "mrl.rewards"
NEMO_GYM = "nemo_gym"
"""What `data.default.env_name` says where rows name their environment by `agent_ref`."""

SERVERS: Mapping[str, str] = {
    "math_with_judge": "math",
    "mcqa": "mcqa",
    "code_gen": "code",
    "instruction_following": "instruction_following",
    "structured_outputs": "structured_outputs",
    "workplace_assistant": "workplace_assistant",
}
"""NeMo Gym's resource servers, and the environments that do what they do. Rows name the agent `<server>_simple_agent`."""


def environment_names(config: EnvConfig) -> tuple[str, ...]:
    """Names that a row may give: built-in environments, the user's own functions, and those of installed packages."""
    installed = (entry_point.name for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP))
    built_in = tuple(SERVERS[server] for server in config.gym_servers if server in SERVERS) or BUILT_IN
    return tuple(dict.fromkeys((*built_in, *config.own.functions, *installed)))


def environment_of_agent(agent_name: str) -> str | None:
    """The environment that does what this agent of NeMo Gym does; None if there is none."""
    return SERVERS.get(agent_name.removesuffix("_simple_agent"))


def find_environment_problems(config: EnvConfig, default_env_name: str) -> list[str]:
    """What is wrong with `env`, and with `data.default.env_name`."""
    problems = [
        f"env.nemo_gym.config_paths: no environment does what {server} does; leave it out, or use {', '.join(SERVERS)}"
        for server in config.gym_servers
        if server not in SERVERS
    ]
    problems += [
        f"env.own.functions.{name}={path}: a built-in environment has that name; choose another"
        for name, path in config.own.functions.items()
        if name in (*BUILT_IN, NEMO_GYM)
    ]
    problems += [
        f"env.own.functions.{name}={path}: must be MODULE:FUNCTION; write for example my_rewards:{name}"
        for name, path in config.own.functions.items()
        if not all(part.isidentifier() for part in path.replace(":", ".", 1).split(".")) or ":" not in path
    ]
    tables = config.workplace_assistant.tables_path
    if tables is not None and not os.path.exists(tables):
        problems.append(f"env.workplace_assistant.tables_path={tables}: no such file or folder in {os.getcwd()}; correct the path")
    if not problems:
        problems += [
            f"env.own.functions.{name}={path}: there is no module {module}; start the run in its folder, install it, or set PYTHONPATH"
            for name, path in config.own.functions.items()
            if importlib.util.find_spec(module := path.partition(":")[0].partition(".")[0]) is None
        ]
    names = (*environment_names(config), *((NEMO_GYM,) if config.should_use_nemo_gym else ()))
    if default_env_name not in names:
        problems.append(f"data.default.env_name={default_env_name}: no such environment; use one of {', '.join(names)}")
    return problems
