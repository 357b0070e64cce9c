"""Which environments there are, and which one a row is for."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping

from mrl.config.errors import Problems
from mrl.config.schema.env import BUILT_IN, EnvConfig
from mrl.config.schema.run import RunConfig

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


def check_environments(config: RunConfig, problems: Problems) -> None:
    """Adds the problems of section `env`, and of `data.default.env_name`."""
    section = config.env
    for server in section.gym_servers:
        if server not in SERVERS:
            problems.add(
                "env.nemo_gym.config_paths", f"no environment does what {server} does", f"leave it out, or use {', '.join(SERVERS)}"
            )
    for name, path in section.own.functions.items():
        key, module = f"env.own.functions.{name}", path.partition(":")[0].partition(".")[0]
        is_path = ":" in path and all(part.isidentifier() for part in path.replace(":", ".", 1).split("."))
        if name in (*BUILT_IN, NEMO_GYM):
            problems.add(key, "a built-in environment has that name", "choose another")
        if not is_path:
            problems.add(key, "must be MODULE:FUNCTION", f"write for example my_rewards:{name}")
        elif name not in BUILT_IN and importlib.util.find_spec(module) is None:
            problems.add(key, f"there is no module {module}", "start the run in its folder, install it, or set PYTHONPATH")
    tables = section.workplace_assistant.tables_path
    if tables is not None and not os.path.exists(tables):
        problems.add("env.workplace_assistant.tables_path", f"no such file or folder in {os.getcwd()}", "correct the path")
    names = (*environment_names(section), *((NEMO_GYM,) if section.should_use_nemo_gym else ()))
    if config.data.default.env_name not in names:
        problems.add("data.default.env_name", "no such environment", f"use one of {', '.join(names)}")
