# SPDX-License-Identifier: Apache-2.0
"""Children that score each environment's rollouts on one node: their number, and the deadline of one verdict."""

from __future__ import annotations

import os
from collections.abc import Sequence

from mrl.config.rules.data import NEMO_GYM, environment_names, is_agent
from mrl.config.schema.env import BUILT_IN, SERVERS, EnvConfig, WorkersConfig
from mrl.config.schema.run import RunConfig
from mrl.envs.code import GRACE_S

# With one worker, all texts would wait for the deadline of a slow one.
MIN_WORKERS = 2


def usable_cores() -> int:
    """Cores of this node that Slurm or a container leaves to this process."""
    return len(os.sched_getaffinity(0))


def environments_of(config: RunConfig) -> tuple[str, ...]:
    """Environments that share a node's cores: the user's and the data sets'. Rows may name others, given as much."""
    env = config.env
    named = dict.fromkeys(dataset.env_name for dataset in config.data.sets.values())
    elsewhere = {*BUILT_IN} - {SERVERS[server] for server in env.gym_servers or SERVERS if env.embeds(server)}
    of_gym = [name for name in environment_names(env) if name not in elsewhere]
    names = [name for asked in named for name in (of_gym if asked == NEMO_GYM else (asked,))]
    return tuple(name for name in dict.fromkeys((*env.own.functions, *names)) if name not in env.agents)


def num_workers(name: str, config: RunConfig, *, num_cores: int) -> int:
    """Children of an environment on a node with these cores."""
    asked = _asked(name, config)
    if asked is None:
        return max(MIN_WORKERS, num_cores // max(1, len(environments_of(config))))
    # Built-in environments compute. Functions of users may wait for a server, and take no core then.
    return max(MIN_WORKERS, min(asked, num_cores)) if name in BUILT_IN else asked


def describe_workers(config: RunConfig, *, num_cores: int | None, asked: Sequence[str] | None = None) -> str:
    """Workers of each environment on a node with these cores; says so if the config asks for more than it has cores.

    None stands for a node whose cores are not known. `asked` are those that rows name, where that is known.
    """
    names = environments_of(config)
    if asked is not None and NEMO_GYM not in asked:
        names = tuple(name for name in asked if name in names or not is_agent(name, config.env))
    if num_cores is None:
        asked_for = [f"{name} {_asked(name, config) or 'its share of the cores'}" for name in names]
        return (
            f"one actor; workers on each {_kind(config)}, whose cores are not known here: "
            f"{', '.join(asked_for) or 'none, agents give all rewards'}"
        )
    workers = {name: num_workers(name, config, num_cores=num_cores) for name in names}
    children = ", ".join(f"{name} {num}" for name, num in workers.items()) or "none, agents give all rewards"
    text = f"one actor; workers on {num_cores} core{'s' * (num_cores != 1)}: {children}"
    for name, given in workers.items():
        num_asked = _asked(name, config)
        if num_asked is not None and num_asked > given:
            key = f"env.{name}.num_workers={_section(name, config.env).num_workers}"
            text += (
                f"; {key} asks for {num_asked} on a node, which has no cores for more than {given}: use more "
                "nodes, or null for all cores"
            )
    return text


def _kind(config: RunConfig) -> str:
    num_nodes = config.num_grader_nodes
    return f"of {num_nodes} further node{'s' * (num_nodes > 1)} without slots" if num_nodes else "node"


def longest_verdict_s(config: RunConfig) -> float:
    """Seconds that the slowest environment may take for one rollout."""
    return GRACE_S + max(_section(name, config.env).timeout_s for name in (*BUILT_IN, "own"))


def _section(name: str, config: EnvConfig) -> WorkersConfig:
    return vars(config)[name] if name in BUILT_IN else config.own


def _asked(name: str, config: RunConfig) -> int | None:
    num_asked = _section(name, config.env).num_workers
    return None if num_asked is None else -(-num_asked // (config.num_grader_nodes or config.cluster.num_nodes))
