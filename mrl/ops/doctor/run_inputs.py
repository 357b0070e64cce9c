# SPDX-License-Identifier: Apache-2.0
"""Checks this machine for a run's inputs: model folders, data, disks, GPUs."""

from __future__ import annotations

from pathlib import Path

from conversion.files.hf_folder import weight_files
from mrl import env
from mrl.config.errors import ConfigError
from mrl.config.model import is_downloaded, read_model, with_cached_folders
from mrl.config.rules.checks import checkpoint_demand, existing_parent, find_problems
from mrl.config.schema.run import RunConfig
from mrl.config.texts import spell_bytes
from mrl.gpus import Builds, find_misfit, vllm_build
from mrl.ops.doctor.findings import Finding, has_problem
from mrl.ops.doctor.model_files import check_model
from mrl.ops.doctor.probe import HostFacts, read_disk


def check_inputs(config: RunConfig) -> list[Finding]:
    """Findings about models, data and disks on this machine; raises ConfigError if the config itself is wrong."""
    config = with_cached_folders(config)
    problems = find_problems(config)
    if refused := [problem for problem in problems if problem.kind == "refused"]:
        raise ConfigError(refused)
    findings = [
        Finding("to be provided", "note" if is_downloaded(problem) else "problem", str(problem)) for problem in problems
    ]
    folders = {Path(section.model_name): None for section in config.sections.values()}
    present = [folder for folder in folders if (folder / "config.json").is_file()]
    of_models = [finding for folder in present for finding in check_model(folder)]
    findings += of_models
    if len(present) == len(folders) and not has_problem(of_models):
        findings += _disks(config, present)
    if not any(problem.key.startswith(("policy.model_name", "policy.tokenizer.name", "data.")) for problem in problems):
        # Both import transformers, which may be the broken library.
        from mrl.data.prompts import load_prompts
        from mrl.data.supervised import load_examples

        try:
            data = load_prompts(config) if config.has_engines else load_examples(config)
            text = f"rows to train on: {len(data.train):,}, held out: {len(data.validation):,}"
            findings.append(Finding("data", "ok", text))
        except ValueError as error:
            findings.append(Finding("data", "problem", str(error)))
    return findings


def judge_gpus(config: RunConfig, facts: HostFacts) -> list[Finding]:
    """Findings if libraries or GPUs of this host are not those that the config asks for."""
    wanted = config.cluster.gpus_per_node
    torch = facts.torch_cuda or "cpu" if "torch" in facts.packages else None
    if misfit := find_misfit(wanted, Builds(torch, vllm_build(facts.packages)), has_engines=config.has_engines):
        # Login nodes may have an installation for CPUs.
        text, _, remedy = misfit.partition("; ")
        return [Finding("installation", "note" if wanted and facts.gpus is None else "problem", text, remedy)]
    found = len(facts.gpus.driver.gpus) if facts.gpus and facts.gpus.driver else 0
    if wanted == 0 or found == wanted:
        return []
    text = f"cluster.gpus_per_node={wanted}, this host has {found}"
    if found == 0:
        return [Finding("GPUs of the run", "note", text, "no problem on a login node; the nodes of the run need them")]
    remedy = f"set cluster.gpus_per_node={found}, or ask for more"
    return [Finding("GPUs of the run", "note" if found > wanted else "problem", text, remedy)]


def _disks(config: RunConfig, folders: list[Path]) -> list[Finding]:
    findings = []
    if config.checkpointing.enabled:
        demand = checkpoint_demand(config, read_model(Path(config.policy.model_name)).num_parameters)
        if demand.needed_bytes <= demand.free_bytes:
            folder = existing_parent(config.checkpointing.checkpoint_dir)
            findings.append(Finding("checkpoints to come", "ok", f"{folder}: {demand.text}"))
    root, num_bytes = env.cache_root(), sum(path.stat().st_size for folder in folders for path in weight_files(folder))
    if root is not None and (free := read_disk(root).free_bytes) < num_bytes:
        text = (
            f"{root}: {spell_bytes(free)} are free; the first run of these models writes them there, "
            f"{spell_bytes(num_bytes)}"
        )
        remedy = f"unless they are there (python -m mrl.convert cache list), set {env.MRL_CACHE.name} to another disk"
        findings.append(Finding("disk for the cache", "note", text, remedy))
    return findings
