# SPDX-License-Identifier: Apache-2.0
"""`python -m mrl.plan CONFIG [a.b=c ...]`: predicts a run's memory, bytes and time, names layouts that fit, in seconds.

Nothing here imports torch, Ray, vLLM or Megatron. Exit code 2: the config is refused, or does not fit.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from conversion.files.durable import write_atomic
from mrl.config.command_line import add_config, needed_config, number
from mrl.config.errors import ConfigError
from mrl.config.files import find_config
from mrl.config.load import read_run
from mrl.config.rules.plausible import find_short_rows
from mrl.config.secrets import start_logging
from mrl.ops.view.page import HERE, page
from mrl.plan.hardware import GIB, GPUS, full_name
from mrl.plan.longest_rows import describe_longest
from mrl.plan.plan import (
    NUM_BEST,
    Plan,
    as_data,
    describe,
    describe_candidates,
    make_plan,
    mean_tokens_of,
    nearest,
    problems_of,
    search_layouts,
    with_config_json,
)
from mrl.plan.search import Layouts

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m mrl.plan", description="Predict memory, bytes and time of a run.")
    add_config(parser)
    parser.add_argument(
        "--gpu", type=full_name, choices=GPUS, default="h100-80g", help="the GPU of all nodes (default: %(default)s)"
    )
    parser.add_argument(
        "--mean-tokens",
        type=number(float, least=1),
        help="tokens of a mean rollout with its prompt, for the times (default: half the longest)",
    )
    parser.add_argument(
        "--node-memory", type=number(float, least=1), metavar="GIB", help="host memory of a node, to compare with"
    )
    parser.add_argument("--search", action="store_true", help="rank all layouts of trainer and engines on these GPUs")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the plan as a page")
    options = parser.parse_intermixed_args(arguments)
    name, overrides = needed_config(parser, options)
    secrets = start_logging(stream=sys.stderr if options.json else sys.stdout)
    try:
        return _plan(name, overrides, options, secrets)
    except ConfigError as error:
        for problem in error.problems:
            logger.error("%s", problem)
    except ValueError as error:
        logger.error("%s", error)
    return 2


def _plan(name: str, overrides: Sequence[str], options: argparse.Namespace, secrets: set[str]) -> int:
    config, _, problems = read_run(find_config(name), overrides, secrets=secrets)
    if config is None or problems:
        raise ConfigError(problems)
    mean_tokens_of(config, options.mean_tokens)  # before the seconds that a plan takes
    if not config.cluster.gpus_per_node:
        raise ValueError(
            "cluster.gpus_per_node=0: a run without GPUs shares the host's memory; set it to the GPUs of a node to "
            "plan for them"
        )
    gpu, config = GPUS[options.gpu], with_config_json(config)
    if refused := problems_of(config):
        for line in refused:
            logger.error("%s", line)
        with suppress(ValueError):  # what is refused, as of nodes or files, may leave no layout to look at
            if found := nearest(search_layouts(config, gpu, None, mean_tokens=options.mean_tokens)):
                logger.info("%s", "\n".join(describe_candidates("Nearest layouts that fit:", found)))
        return 2
    node_memory = None if options.node_memory is None else options.node_memory * GIB
    plan = make_plan(config, gpu, mean_tokens=options.mean_tokens, node_memory=node_memory)
    found = (
        search_layouts(config, gpu, plan.refit, mean_tokens=options.mean_tokens)
        if options.search or plan.misfit
        else None
    )
    lines = describe(plan)
    if plan.misfit:
        rows = describe_longest(config, plan.model, gpu)
        lines.append(f"Does not fit: {plan.misfit}" + (f"; {rows}" if rows else ""))
    if plan.host_misfit:
        lines.append(f"Does not fit: {plan.host_misfit}")
    lines += [f"Warning: {doubt}" for doubt in find_short_rows(config)]
    if found and plan.misfit and not options.search:
        lines += describe_candidates(
            "Nearest layouts that fit:" if found.best else "No layout fits on these GPUs", nearest(found)
        )
    if found and options.search:
        lines += describe_candidates(
            f"Layouts: {len(found.best)} of {found.num_tried} fit, fastest first", found.best[:NUM_BEST]
        )
        lines += [f"  {number:6} not: {reason}" for reason, number in found.refused.most_common()]
    if options.json:
        print(json.dumps(as_data(plan, found), indent=1))
    else:
        for line in lines:
            logger.info("%s", line)
    if options.html:
        write_page(options.html, plan, found, name)
    return 2 if plan.misfit or plan.host_misfit else 0


SCRIPTS = (HERE / "uplot.js", HERE / "page.js", HERE / "plan.js", HERE / "start.js")


def write_page(path: Path, plan: Plan, found: Layouts | None, name: str) -> None:
    """Writes the page, and replaces an older one at once."""
    title = f"Plan of {name}: {Path(plan.config.policy.model_name).name} on {plan.config.num_slots} {plan.gpu.name}"
    write_atomic(path, page([{"name": title, "lines": describe(plan), **as_data(plan, found)}], scripts=SCRIPTS))
