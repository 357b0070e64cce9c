# SPDX-License-Identifier: Apache-2.0
"""Rules of sections `data` and `env`: findable data sets, their processors and prompt files, existing environments."""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from mrl import rooms
from mrl.config.errors import COMMAND_LINE, Problems, is_required
from mrl.config.model import is_hub_id, way_to_prepare
from mrl.config.schema.data import DATASETS, GYM_PROCESSOR, DataDefaultConfig, DatasetConfig, known_dataset, names_of
from mrl.config.schema.env import (
    BUILT_IN,
    CALLS_TOOLS,
    FROM_VERIFIERS,
    REASONING_PARSERS,
    SERVERS,
    TOOL_PARSERS,
    EnvConfig,
)
from mrl.config.schema.run import RunConfig

ENTRY_POINT_GROUP = "mrl.rewards"
GRADED = ("instruction_following",)
"""Graders of mrl's whose rewards may lie between 0 and 1."""
NEMO_GYM = "nemo_gym"
"""Value of `data.default.env_name` for rows that name their environment by `agent_ref`."""


def environment_names(config: EnvConfig) -> tuple[str, ...]:
    """Names a row may give: built-in environments, the user's functions and agents, and those of installed packages."""
    installed = _installed(tuple(sys.path))
    built_in = tuple(SERVERS[server] for server in config.gym_servers if config.embeds(server)) or BUILT_IN
    return tuple(dict.fromkeys((*built_in, *config.own.functions, *config.agents, *installed)))


def own_function(env_name: str, config: EnvConfig) -> str | None:
    """Path of an environment's reward function: the user's own, or an installed package's. None: another grader."""
    return config.own.functions.get(env_name) or _installed(tuple(sys.path)).get(env_name)


@functools.cache
def _installed(_path: tuple[str, ...]) -> dict[str, str]:
    """Installed packages' reward functions by name, read once per search path: each look reads all packages' files."""
    points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    return {point.name: f"{point.module}:{point.attr}" for point in points}


def route_of(agent_name: str, config: EnvConfig) -> str | None:
    """Environment of rows with this `agent_ref`: the user's agent of that name, a built-in grader, or NeMo Gym's agent.

    None if there is none.
    """
    server = agent_name.removesuffix("_simple_agent")
    if agent_name in config.agents:
        return agent_name
    if config.embeds(server):
        return SERVERS[server]
    return agent_name if config.has_gym_servers else None


def is_agent(env_name: str, config: EnvConfig) -> bool:
    """True if an agent (the user's, or a server of NeMo Gym) handles the rows of an environment."""
    return env_name in config.agents or (
        config.has_gym_servers and env_name not in (*BUILT_IN, *environment_names(config))
    )


def part_of(env_name: str, config: EnvConfig) -> str:
    """Names the part that handles an environment's rows, with its address or path: `agent sums (http://host:8000)`."""
    place = config.agents.get(env_name) or own_function(env_name, config)
    if place is None and is_agent(env_name, config):
        place = "of NeMo Gym's servers"
    return f"{'agent' if is_agent(env_name, config) else 'environment'} {env_name}" + (f" ({place})" if place else "")


def parts_at_work(env_names: Iterable[str], config: EnvConfig) -> list[str]:
    """Sentences on rollouts by what handles them, most first: `12 rollouts are with agent sums (http://host:8000)`."""
    counts = Counter(env_names).most_common()
    return [f"{count} rollouts are with {part_of(name, config)}" for name, count in counts]


def gives_accuracy(env_name: str, config: EnvConfig) -> bool:
    """True for a grader of mrl's that says right or wrong, so that the mean of its rewards is an accuracy."""
    return env_name in BUILT_IN and env_name not in GRADED and own_function(env_name, config) is None


def key_of(name: str, default: DataDefaultConfig, dataset: DatasetConfig, key: str) -> str:
    """The key that gave a data set at `key` its value of `name`: its own, or that of `data.default`."""
    return f"data.default.{name}" if vars(default)[name] == vars(dataset)[name] else f"{key}.{name}"


def check_environments(config: RunConfig, problems: Problems) -> None:
    """Checks that the environments of section `env`, and the one of `data.default.env_name`, exist."""
    section = config.env
    rooms.check_gym(config, problems)
    sections = {
        "own.functions": section.own.functions,
        "own.agents": section.own.agents,
        "remote": section.remote,
        "verifiers": section.verifiers,
    }
    seen = dict.fromkeys((*BUILT_IN, NEMO_GYM), "a built-in environment")
    for where, named in sections.items():
        for name in named:
            if name in seen:
                problems.add(f"env.{where}.{name}", f"{seen[name]} has that name", "choose another")
            seen[name] = f"one of env.{where}"
    for name in section.verifiers_args.keys() - section.verifiers.keys():
        rule, known = "env.verifiers has no such environment", ", ".join(section.verifiers)
        problems.add(f"env.verifiers_args.{name}", rule, f"use {known}" if known else f"set env.verifiers.{name}")
    if section.has_agents:
        _check_agents(config, problems)
    tables = section.workplace_assistant.tables_path
    if tables is not None and not os.path.exists(tables):
        problems.add(
            "env.workplace_assistant.tables_path", f"no such file or folder in {os.getcwd()}", "correct the path"
        )
    names = (*environment_names(section), *((NEMO_GYM,) if section.should_use_nemo_gym else ()))
    if config.data.default.env_name not in names:
        rule = "no such environment"
        if config.data.default.env_name == NEMO_GYM:
            rule += " unless env.should_use_nemo_gym=true"
        problems.add("data.default.env_name", rule, _one_of(config.data.default.env_name, names))


def _one_of(name: str | None, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name or "", names, n=1)
    return "".join([f"use {near[0]}, the nearest of " if near else "use one of ", ", ".join(names)])


def check_parsers(config: RunConfig, problems: Problems) -> None:
    """Checks that environments can read the formats of the configured reasoning and tool parsers."""
    section, default = config.env, config.data.default.env_name
    chat = config.policy.generation.vllm_cfg.http_server_serving_chat_kwargs
    prefix = "policy.generation.vllm_cfg.http_server_serving_chat_kwargs"
    named = {default, *(SERVERS.get(server) for server in section.gym_servers)}
    named |= {dataset.env_name for dataset in config.data.sets.values()}
    if chat.tool_parser not in (None, *TOOL_PARSERS) and CALLS_TOOLS in named:
        rule = f"env.{CALLS_TOOLS} does not read this format of tool calls"
        problems.add(
            f"{prefix}.tool_parser",
            rule,
            f"use a model with one of {', '.join(TOOL_PARSERS)}, or leave that environment out",
        )
    elif chat.tool_parser not in (None, *TOOL_PARSERS) and config.rollouts.invalid_tool_call_advantage is not None:
        rule = f"nobody reads calls in the format of {prefix}.tool_parser={chat.tool_parser}"
        problems.add(
            "grpo.invalid_tool_call_advantage",
            rule,
            f"set it to null, or use a model with one of {', '.join(TOOL_PARSERS)}",
        )
    if chat.reasoning_parser not in (None, *REASONING_PARSERS) and section.should_use_nemo_gym:
        rule = "environments of NeMo Gym grade what follows the thoughts, and do not know how this parser finds them"
        problems.add(f"{prefix}.reasoning_parser", rule, f"use a model with one of {', '.join(REASONING_PARSERS)}")


def _check_agents(config: RunConfig, problems: Problems) -> None:
    gym = "env.nemo_gym.command" if config.env.nemo_gym.command else "env.nemo_gym.head_server.host"
    named = {
        "env.own.agents": config.env.own.agents,
        "env.remote": config.env.remote,
        "env.verifiers": config.env.verifiers,
    }
    key = next((where for where, agents in named.items() if agents), gym)
    for name, url in config.env.remote.items():
        try:
            parts = urlsplit(url)
            is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # no port, or no host
            is_right = False
        if not is_right:
            problems.add(
                f"env.remote.{name}",
                "an agent's server has an address that begins with http:// or https://",
                "give its URL",
            )
    if not config.policy.generation.vllm_cfg.expose_http_server:
        rule = f"{key} names agents, which ask the engines over HTTP"
        problems.add("policy.generation.vllm_cfg.expose_http_server", rule, "leave it out, or set it to true")
    generation = config.policy.generation
    is_told_apart = (generation.val_temperature, generation.val_top_p) != (generation.temperature, generation.top_p)
    if config.env.has_gym_servers and generation.val_top_k != generation.top_k and not is_told_apart:
        rule = (
            f"{key} names servers, which ask with temperature and top_p alone, and by these it is not known "
            "whether they validate"
        )
        problems.add("policy.generation.val_top_k", rule, "use policy.generation.top_k, or another val_temperature")


def check_data(config: RunConfig, problems: Problems) -> None:
    """Checks that the data sets can be found and read."""
    data = config.data
    for key, dataset in data.sets.items():
        kinds = ("pairs",) if config.learns_pairs else ("answers", *([] if config.has_engines else ["conversations"]))
        _check_dataset(key, dataset, data.default, names_of(*kinds), problems, config.facts.origins)
        names = (*environment_names(config.env), NEMO_GYM)
        if config.has_engines and dataset.env_name not in (*names, data.default.env_name):
            problems.add(f"{key}.env_name", "no such environment", _one_of(dataset.env_name, names))
        if (dataset.data_path or "").startswith(FROM_VERIFIERS):
            _check_environment_rows(key, dataset, config, problems)
    if data.validation is not None:
        _check_list("data.validation", data.validation.datasets, problems)


def check_training(config: RunConfig, problems: Problems) -> None:
    """Checks that a training run has training rows, and that weights say how much of each data set."""
    _check_list("data.train", config.data.train.datasets, problems)
    weighted = {key: dataset.weight for key, dataset in config.data.train_sets.items()}
    if any(weight is not None for weight in weighted.values()):
        for key in [key for key, weight in weighted.items() if weight is None]:
            rule = "other data sets have a weight, beside which a number of rows is none"
            problems.add(f"{key}.weight", rule, "give a weight to each data set, or to none")
    _check_pools(config, problems)
    for key, dataset in config.data.train_sets.items():
        asked, template = (
            key_of(name, config.data.default, dataset, key) for name in ("teacher_key", "teacher_prompt_file")
        )
        if dataset.teacher_key is not None and not config.teachers:
            rule = "it is what a teacher is asked, and there is none"
            problems.add(asked, rule, "set it to null, or learn from a teacher (docs/algorithms.md)")
        elif dataset.teacher_prompt_file is not None and dataset.teacher_key is None:
            problems.add(template, "no text goes into it: teacher_key=null", f"set {asked}, or this to null")


def _check_pools(config: RunConfig, problems: Problems) -> None:
    pools, key = config.data.difficulty_pools, "data.difficulty_pools"
    if not pools:
        return
    if config.algorithm not in ("grpo", "ppo"):
        rule = f"prompts are pooled by their rewards, and algorithm={config.algorithm} trains on none"
        problems.tell(key, ", ".join(pools), rule, "leave it out")
    if len({pool.threshold for pool in pools.values()}) < len(pools):
        problems.tell(key, ", ".join(pools), "two pools have one threshold", "give each its own")
    if not any(pool.weight for pool in pools.values()):
        problems.tell(key, ", ".join(pools), "every weight is 0", "give one pool a weight above 0")


def _check_list(key: str, datasets: Sequence[DatasetConfig] | None, problems: Problems) -> None:
    if datasets is not None and not datasets:
        problems.tell(key, "[]", "a list of data sets has one at least", "give a data set")


def _check_environment_rows(key: str, dataset: DatasetConfig, config: RunConfig, problems: Problems) -> None:
    name = (dataset.data_path or "").removeprefix(FROM_VERIFIERS)
    if name not in config.env.verifiers:
        rule = f"env.verifiers has no environment {name}"
        known = ", ".join(FROM_VERIFIERS + one for one in config.env.verifiers)
        problems.add(f"{key}.data_path", rule, f"use {known}" if known else f"set env.verifiers.{name}=PYTHON")
    elif not config.has_engines:
        rule = "rows of verifiers are asked and judged, and nobody samples here"
        problems.add(f"{key}.data_path", rule, "use rows with answers to learn")


OF_CHOICES = (
    'write its rows as {"question": the question and its lettered options, "answer": "B"} into a JSONL file, and set '
    "data.dataset_name=null and data_path=FILE; env_name=mcqa reads the letter that a reply chooses"
)
"""The way to NeMo RL's evaluations of multiple choice, which are published as tables that mrl does not read."""


def _check_dataset(
    key: str,
    dataset: DatasetConfig,
    default: DataDefaultConfig,
    known: str,
    problems: Problems,
    origins: Mapping[str, str],
) -> None:
    name, path = dataset.dataset_name, dataset.data_path
    if name is not None and name not in DATASETS:
        name_key = key_of("dataset_name", default, dataset, key)
        problems.add(
            name_key,
            "no such data set is known",
            OF_CHOICES
            if name.startswith(("gpqa", "mmlu"))
            else f"use one of {known}, or leave it out and give data_path",
        )
    elif path is None and known_dataset(name).hub_id is None:
        problem = is_required(f"{key}.data_path")
        if name is not None:
            rule = f"{problem.key} is required: mrl knows the keys of dataset_name={name}, and no place of its rows"
            problem = replace(problem, rule=rule)
        if key == "data.validation":
            problem = replace(problem, way_out=f"{problem.way_out}, or data.validation=null for a run without")
        # A file that writes null leaves the path to its launcher, as it does the model.
        is_left = not origins.get(problem.key, COMMAND_LINE).startswith(COMMAND_LINE)
        problems.extend([replace(problem, kind="to be provided") if is_left else problem])
    elif path is not None and not (path.startswith(FROM_VERIFIERS) or os.path.exists(path) or is_hub_id(path)):
        way_out = (
            "correct the path: it names a .jsonl, .json, .parquet or .arrow file, a folder of them, "
            "or a data set's id on the Hugging Face Hub"
        )
        if made := way_to_prepare(path):
            way_out = f"correct the path ({made})"
        elif path.isidentifier():
            way_out += f"; by name mrl knows {known}"
        if "://" in path:
            problems.add(
                f"{key}.data_path", "mrl reads no rows from an address", "download the file, and give its path"
            )
        else:
            problems.add(f"{key}.data_path", f"no such file or folder in {Path.cwd()}", way_out, "to be provided")
    for name in ("prompt_file", "system_prompt_file", "system_prompt", "system_key", "teacher_prompt_file"):
        given, given_key = vars(dataset)[name], key_of(name, default, dataset, key)
        if given is not None and dataset.processor == GYM_PROCESSOR:
            rule = f"processor={GYM_PROCESSOR} leaves conversations as the rows give them"
            problems.add(given_key, rule, "set it to null, or use another processor")
        elif given is not None and name.endswith("file") and not os.path.isfile(given):
            problems.add(given_key, f"no such file in {Path.cwd()}", "correct the path", "to be provided")
    if dataset.system_prompt is not None and dataset.system_prompt_file is not None:
        rule = "system_prompt_file is set, too, and a conversation gets one system message"
        problems.add(key_of("system_prompt", default, dataset, key), rule, "set one of them to null")
