# SPDX-License-Identifier: Apache-2.0
"""`python -m mrl.doctor [CONFIG [a.b=c ...]] [--refit]`: checks that this host or cluster fits a run; names remedies.

Without a config it takes seconds and imports no library that may be broken. Where RAY_ADDRESS is set it asks every node
of that cluster.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from mrl import env, lacking
from mrl.config.command_line import add_config, take_config
from mrl.config.secrets import redact_text, start_logging
from mrl.ops.doctor.findings import Finding, as_json, has_problem, merge_nodes, table
from mrl.ops.doctor.host import judge_machine
from mrl.ops.doctor.probe import HostFacts, probe_host
from mrl.ops.doctor.software import judge_software, read_wanted

if TYPE_CHECKING:
    from mrl.config.schema.run import RunConfig

logger = logging.getLogger(__name__)


def diagnose(config: RunConfig | None, say: Callable[[str], None] = lambda text: None) -> list[Finding]:
    """Findings about the hosts, then about a run's inputs if there is a config; raises ConfigError if that is wrong.

    `say` gets the name of each part before it begins.
    """
    root = env.cache_root()
    folders = {} if root is None else {"the cache": root}
    inputs: list[Finding] = []
    if config is not None:
        from mrl.ops.doctor.run_inputs import check_inputs

        say("the models, data and disks of the run")
        inputs = check_inputs(config)
        if config.checkpointing.enabled:
            folders["checkpoints"] = Path(config.checkpointing.checkpoint_dir).absolute()
    say(
        "the nodes of the cluster" if env.RAY_ADDRESS.read() else "the libraries, GPUs, memory and network of this host"
    )
    hosts = diagnose_cluster(folders, config) if env.RAY_ADDRESS.read() else _this_host(folders, config)
    return hosts + inputs


def _this_host(folders: dict[str, Path], config: RunConfig | None) -> list[Finding]:
    return judge_host(
        probe_host(folders, is_in_cluster=False, tries_imports=config is not None), config, is_in_cluster=False
    )


def judge_host(facts: HostFacts, config: RunConfig | None, *, is_in_cluster: bool) -> list[Finding]:
    """Findings from the facts of a host that runs alone, or is a node of a cluster."""
    # A rank and a worker of an engine for each slot, at most, and on each node rewards, loads and Ray's own agents.
    num_nodes = 0 if config is None else config.cluster.num_nodes + config.num_grader_nodes
    num_processes = None if config is None else 2 * config.num_slots + config.num_own_slots + 8 * num_nodes
    findings = judge_software(facts, read_wanted())
    findings += judge_machine(facts, is_in_cluster=is_in_cluster, num_processes=num_processes)
    if config is not None:
        from mrl.ops.doctor.run_inputs import judge_gpus

        findings += judge_gpus(config, facts)
    return findings


def diagnose_cluster(folders: dict[str, Path], config: RunConfig | None) -> list[Finding]:
    """Findings about the nodes of the cluster at RAY_ADDRESS; about this host alone if there is none."""
    try:
        from mrl.ops.doctor.nodes import judge_cluster, report_nodes

        # Ray prints the nodes' output.
        with redirect_stdout(sys.stderr):
            reports, lost = report_nodes(folders, list(folders.values()), tries_imports=config is not None)
    except (ImportError, RuntimeError) as error:
        remedy = "start the cluster, or unset RAY_ADDRESS to look at this host alone"
        return [*_this_host(folders, config), Finding("cluster", "problem", " ".join(str(error).split()), remedy)]
    by_node = {
        report.name: judge_host(report.look.facts, config, is_in_cluster=True)
        for report in reports
        if report.look is not None
    }
    in_job = env.SLURM_JOB_NUM_NODES.read() or ""
    num_expected = int(in_job) if in_job.isdigit() else None
    if config is not None:
        num_expected = config.cluster.num_nodes + config.num_grader_nodes
    num_graders = 0 if config is None else config.num_grader_nodes
    return merge_nodes(by_node) + judge_cluster(reports, lost=lost, num_expected=num_expected, num_graders=num_graders)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Exit code 0: no problem; 1: there is a problem; 2: the input is at fault."""
    parser = argparse.ArgumentParser(
        prog="python -m mrl.doctor", description="Says whether this host or cluster is fit for a run."
    )
    add_config(parser)
    parser.add_argument(
        "--refit",
        action="store_true",
        help="only: refit changed weights, and compare bytes and logprobs of trainer and engines",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    options = parser.parse_intermixed_args(arguments)
    options.config, options.overrides = take_config(options)
    if options.refit and options.config is None:
        parser.error("--refit needs a config, e.g. python -m mrl.doctor grpo_tiny.yaml --refit")
    if options.refit and options.json:
        parser.error("--refit prints a table only; leave out --json")
    secrets, config = start_logging(stream=sys.stderr if options.json else None), None

    def say(part: str) -> None:
        if not options.json:
            logger.info("Looking at %s ...", part)

    try:
        if options.config is not None:
            say("the config, whose libraries take seconds to import")
            from mrl.config.load import load_config

            if options.refit:
                from mrl.ops.doctor.refit import run_refit

                return run_refit(options.config, options.overrides, secrets)
            config = load_config(options.config, options.overrides, secrets=secrets)
        findings = diagnose(config, say)
    except ValueError as error:
        logger.error("%s", error)
        return 2
    except ImportError as error:
        if options.config is None:
            raise
        text = f"the config cannot be read: {error}"
        findings = [*diagnose(None, say), Finding("imports", "problem", text, lacking(error) or "install it anew")]
    if options.json:
        print(redact_text(as_json(findings), secrets))
    else:
        logger.info("%s", "\n".join(table(findings)))
    return 1 if has_problem(findings) else 0
