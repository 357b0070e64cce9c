# SPDX-License-Identifier: Apache-2.0
"""Rules of section `env.nemo_gym`: NeMo Gym's servers are there for the rows that mrl has no grader for."""

from __future__ import annotations

import shlex
import shutil
from urllib.parse import urlsplit

from mrl.config.errors import Problems
from mrl.config.schema.env import GYM_PATH, SERVERS, EnvConfig
from mrl.config.schema.run import RunConfig

PREFIX = "env.nemo_gym"
COMPARED = "num_rollouts_per_prompt"
NUM_COMPARED = 16
"""Its value in Gym's resources_servers/genrm_compare/configs/genrm_compare.yaml."""


def served(config: EnvConfig) -> list[str]:
    """Servers that the config names and no built-in grader replaces."""
    return [server for server in config.gym_servers if not config.embeds(server)]


def check_gym(config: RunConfig, problems: Problems) -> None:
    """Checks that rows reach NeMo Gym's servers, and these servers the gateway."""
    section = config.env
    gym = section.nemo_gym
    if gym.thinking_tags is not None and len(gym.thinking_tags) != 2:
        problems.add(f"{PREFIX}.thinking_tags", "thoughts have an opening and a closing mark", "give two, or null")
    if gym.has_servers and not section.should_use_nemo_gym:
        key = f"{PREFIX}.command" if gym.command else f"{PREFIX}.head_server.host"
        problems.add(key, "no row goes to a server of NeMo Gym", "set env.should_use_nemo_gym=true, or leave it out")
    if gym.command and gym.head_server.host:
        problems.add(
            f"{PREFIX}.command", f"{PREFIX}.head_server.host says that the servers run already", "leave one of them out"
        )
    if gym.command and not ((words := _words(gym.command)) and shutil.which(words[0])):
        problems.add(
            f"{PREFIX}.command",
            "no such program on this machine",
            "give the path of ng_run in NeMo Gym's environment",
            "to be provided",
        )
    if gym.head_server.host:
        _check_address(config, problems)
    elif gym.command:
        _check_compared(config, problems)
    if section.should_use_nemo_gym and not gym.has_servers:
        if missing := served(section):
            rule = f"mrl has no grader for rows of {', '.join(missing)}"
            if judges := sorted(gym.judged & SERVERS.keys()):
                rule += f" ({', '.join(judges)}: should_use_judge=true)"
            way_out = (
                f"let the run start NeMo Gym's servers ({PREFIX}.command=PATH/ng_run), or start them and give "
                f"{PREFIX}.head_server.host; or leave these out"
            )
            problems.add(f"{PREFIX}.config_paths", rule, way_out, "to be provided")
        elif not gym.embedded:
            problems.add(f"{PREFIX}.embedded", "NeMo Gym's servers grade all rows", f"set {PREFIX}.command, or true")


def _check_compared(config: RunConfig, problems: Problems) -> None:
    found = {"genrm_compare_resources_server": NUM_COMPARED} if "genrm_compare" in config.env.gym_servers else {}
    for name, instance in config.env.nemo_gym.servers.items():
        options = (instance.get("resources_servers") or {}).get("genrm_compare") if isinstance(instance, dict) else None
        if isinstance(options, dict) and COMPARED in options:
            found[name] = options[COMPARED]
    section = "distillation" if config.algorithm == "distillation" else "grpo"
    wanted = config.rollouts.num_generations_per_prompt
    for name, number in found.items():
        if number != wanted:
            key = f"{PREFIX}.{name}.resources_servers.genrm_compare.{COMPARED}"
            rule = f"genrm_compare waits for {number} answers of a prompt ({key}), which never come"
            problems.add(f"{section}.num_generations_per_prompt", rule, f"set {key}={wanted}")


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # a quote that does not end
        return []


def _check_address(config: RunConfig, problems: Problems) -> None:
    gym = config.env.nemo_gym
    form = f"http://HOST:PORT{GYM_PATH}"
    try:
        parts = urlsplit(gym.policy_base_url or "")
        is_right = parts.scheme == "http" and parts.port is not None and parts.path == GYM_PATH
    except ValueError:  # no port
        is_right = False
    if not is_right:
        rule = (
            f"{PREFIX}.head_server.host names servers that ask the gateway for the model, whose address they "
            "must know beforehand"
        )
        problems.add(f"{PREFIX}.policy_base_url", rule, f"give {form}, of this run's first node, as in their env.yaml")
    if not gym.policy_api_key:
        rule = f"{PREFIX}.head_server.host names servers that show a key to the gateway"
        problems.add(
            f"{PREFIX}.policy_api_key",
            rule,
            "give the one of their env.yaml, from an environment variable: ${oc.env:NAME}",
        )


def describe_routes(config: RunConfig) -> str:
    """Says who handles rows with an `agent_ref`, and which servers the user must start; "" without NeMo Gym's rows."""
    section = config.env
    if not section.should_use_nemo_gym:
        return ""
    here = [server for server in (section.gym_servers or SERVERS) if section.embeds(server)]
    elsewhere = served(section)
    lines = [f"graded here: rows of {', '.join(here)}"] if here else []
    if not elsewhere and not section.has_gym_servers:
        lines[0] += "; there is nothing else to start"
    else:
        lines.append(
            f"on NeMo Gym's servers: rows of {', '.join(elsewhere) or 'all other agents'}; {_to_start(section)}"
        )
    if section.agents:
        lines.append(f"by your agents: rows of {', '.join(section.agents)}")
    return "\n".join(lines)


def _to_start(section: EnvConfig) -> str:
    gym = section.nemo_gym
    if gym.command:
        return f"the run starts them by {gym.command}"
    if gym.head_server.host:
        where = f"{gym.head_server.host}:{gym.head_server.port}"
        asked = gym.policy_base_url or f"http://HOST:PORT{GYM_PATH}, which {PREFIX}.policy_base_url is to say"
        return f"you start them, with their head server at {where} and policy_base_url={asked}"
    return f"nothing starts them: set {PREFIX}.command or {PREFIX}.head_server.host"
