# SPDX-License-Identifier: Apache-2.0
"""Rules of section `judges`: names, nodes, and those that the policy's engines keep."""

from __future__ import annotations

import re

from mrl.config.errors import Problems
from mrl.config.judge_runs import judge_run
from mrl.config.passthrough import check_arguments
from mrl.config.rules import layout, models
from mrl.config.schema.run import RunConfig

NAME = re.compile(r"[A-Za-z0-9_-]+")
TAKEN = ("policy_model", "policy")
"""Names of the policy, for NeMo Gym's servers and for agents."""
_KEYS = re.compile(
    r"\bpolicy\.(?:generation\.(?:vllm_cfg\.(?:http_server_serving_chat_kwargs\.)?|(?=vllm_kwargs))|(?=model_name))"
)
"""Beginnings of the policy's keys that a judge has, too."""


def check_judges(config: RunConfig, problems: Problems) -> None:
    """Checks that each judge can be asked by its name, and that its engines fit its nodes and its model."""
    slots = config.cluster.slots_per_node
    for name, judge in config.judges.items():
        at = f"judges.{name}"
        if not NAME.fullmatch(name) or name in TAKEN:
            rule = f"{name} is no name for a judge: it stands in its address"
            problems.tell(at, None, rule, f"use letters, digits, - and _, and not {' or '.join(TAKEN)}")
        workers, whole = judge.num_workers, judge.num_nodes * slots
        if whole % workers or (slots % workers and workers % slots):
            rule = f"its {judge.num_nodes} nodes of {slots} slots hold no whole engines of {workers} workers"
            way_out = "change its parallel sizes so that an engine takes a part of a node, or whole nodes"
            problems.add(f"{at}.num_nodes", rule, way_out)
            continue
        run = judge_run(config, name)
        inner = Problems(run)
        checks = (layout.check_engine_slots, layout.check_engines, layout.check_servers, check_arguments)
        for check in (*checks, models.check_engine_files):
            check(run, inner)
        if (sizes := models.read_sizes(run, inner, "whether its engines can hold it")) is not None:
            layout.check_layout(run, sizes, inner)
        for problem in inner.merged:
            if (of_judge := _KEYS.sub(f"{at}.", problem.key)) != problem.key:
                length = "policy.max_total_sequence_length", f"{at}.max_model_len"
                rule, way_out = (_KEYS.sub(f"{at}.", text.replace(*length)) for text in (problem.rule, problem.way_out))
                problems.tell(of_judge, problem.value, rule, way_out or " ", problem.kind)


def check_no_judges(config: RunConfig, problems: Problems) -> None:
    """Checks that a run without rollouts has no judges."""
    if config.judges:
        rule, way_out = f"algorithm={config.algorithm} has no rollouts to judge", "leave it out"
        problems.tell("judges", ", ".join(config.judges), rule, way_out)
