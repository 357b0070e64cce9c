# SPDX-License-Identifier: Apache-2.0
"""`python -m mrl.check CONFIG [a.b=c ...]`: prints the resolved run, the fate of NeMo RL's keys, and all that is wrong.

Also `--check` of `python -m mrl.train` and `mrl.evaluate`.

Nothing here imports torch, Ray, vLLM or Megatron.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from mrl.cluster.daemons import obstacles_of
from mrl.config.command_line import add_config, needed_config
from mrl.config.errors import ConfigError, NotKnown, Problem, told
from mrl.config.files import find_config
from mrl.config.load import changes_since, read_run
from mrl.config.migration import Migration
from mrl.config.model import find_missing_weights, find_wrong_weights, with_cached_folders
from mrl.config.rules.checks import find_problems
from mrl.config.rules.plausible import find_doubts
from mrl.config.schema.run import CheckpointingConfig, RunConfig
from mrl.config.secrets import redact, run_entry, start_logging
from mrl.data.order import find_few_rows
from mrl.description import ROWS, ROWS_OF_EVALUATION, ROWS_OF_TRAINING
from mrl.gpus import find_fault, host_gpus
from mrl.inputs import Look, look_at_inputs
from mrl.kernels import describe_missing, missing_kernels
from mrl.plan.hardware import GPUS, Gpu, full_name, local_gpu, local_memory
from mrl.plan.plan import prediction
from mrl.store.checkpoints import RUN_CONFIG, CheckpointStore, checkpoints_text, find_lost_run, is_run_folder
from mrl.store.marks import STEP_FOLDER
from mrl.store.run_files import ABOUT

logger = logging.getLogger(__name__)
Found = TypeVar("Found")

OPTION, STRICT, GPU, JSON = "--check", "--strict", "--gpu", "--json"
NEVER_SEEN = (
    (
        "values of weights, of which only the files' headers are read; what own functions do; ports, other hosts and "
        "the network"
    ),
    "GPUs and drivers, which `python -m mrl.doctor` looks at",
)
WIDTH = 14
HYDRAS = {
    **dict.fromkeys(
        ("-c", "--cfg"), "--check says what the config means; `--check --json` prints its every value under `config`"
    ),
    **dict.fromkeys(("-m", "--multirun"), "start one run for each value"),
    **dict.fromkeys(("-cn", "--config-name"), "write --config FILE.yaml"),
    **dict.fromkeys(("-cp", "--config-path", "-cd", "--config-dir"), "write the folder into --config FOLDER/FILE.yaml"),
}
"""Option -> what is typed here instead."""
NEMO_RL_SCRIPT = re.compile(r"(?:^|/)run_\w+\.py$")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line of `python -m mrl.train`, with `name` of the config and `words` the overrides."""
    parser = argparse.ArgumentParser(prog="python -m mrl.train", description="Train a policy.")
    add_config(parser)
    parser.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="of the run's log: lines, or JSON objects"
    )
    options = _parse(parser, arguments)
    options.secrets = start_logging(
        "plain" if options.check else options.log_format, sys.stderr if options.json else None
    )
    options.name, options.words = needed_config(parser, options)
    return options


def parse_evaluation(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line of `python -m mrl.evaluate`. Log lines as `parse_arguments` says."""
    parser = argparse.ArgumentParser(
        prog="python -m mrl.evaluate", description="Ask a model held-out prompts and judge its answers."
    )
    words = "a config, a run folder, a step_N folder or a model, then overrides"
    parser.add_argument("words", nargs="*", metavar="CONFIG|DIR|a.b=c", help=words)
    parser.add_argument(
        "--config", help="the config; with a folder, that which says how it is asked (default: that of the run)"
    )
    options = _parse(parser, arguments)
    if options.config is not None and not (options.words and is_place(options.words[0])):
        options.words, options.config = [options.config, *options.words], None
    if not options.words:
        parser.error("which model? e.g. python -m mrl.evaluate results/grpo_tiny")
    options.secrets = start_logging("plain" if options.check else "text", sys.stderr if options.json else None)
    return options


def is_place(word: str) -> bool:
    """Tells a config or a folder, in whose name there may be a `=`, from an override."""
    return "=" not in word or os.path.exists(word)  # Path raises where the name is too long for a file


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    parser.add_argument(
        OPTION, action="store_true", help="print what the config means and what is wrong with it, and start nothing"
    )
    parser.add_argument(
        STRICT, action="store_true", help=f"with {OPTION}: a file, model or disk that this machine lacks is wrong, too"
    )
    parser.add_argument(
        GPU,
        type=full_name,
        choices=GPUS,
        help=f"with {OPTION}: compares the plan with this GPU of the nodes (default: this host's)",
    )
    parser.add_argument(JSON, action="store_true", help=f"with {OPTION}: print problems as JSON, all else to stderr")
    for word in sys.argv[1:] if arguments is None else arguments:
        if (way_out := HYDRAS.get(word.partition("=")[0])) is not None:
            parser.error(f"{word}: an option of Hydra's; {way_out}")
        if NEMO_RL_SCRIPT.search(word):
            parser.error(f"{word}: a script of NeMo RL, in whose place this command is; leave it out")
    options = parser.parse_intermixed_args(arguments)
    for name, given in ((STRICT, options.strict), (GPU, options.gpu), (JSON, options.json)):
        if given and not options.check:
            parser.error(f"{name} goes with {OPTION}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m mrl.train --check`."""
    options = parse_arguments(arguments)
    return check_run(options, options.name, options.words)


def check_evaluation(options: argparse.Namespace) -> int:
    """`check_run` of parsed arguments of `python -m mrl.evaluate`. Exports no checkpoint: uses the config's model."""
    name, *overrides = options.words
    try:
        target = find_target(name, options.config)
    except ValueError as error:
        logger.error("%s", error)
        return 2
    return check_run(options, target.config, [*target.model_overrides(), *overrides], to_evaluate=True)


@dataclass(frozen=True)
class Checked:
    """Findings of a check."""

    config: RunConfig | None
    """None if not even the algorithm is known. Reading a value that is not known raises NotKnown."""
    migration: Migration
    problems: list[Problem]
    path: Path | None = None
    doubts: Sequence[str] = ()
    """Values that are probably slips."""
    prediction: str = ""
    """The memory that a run on GPUs is predicted to need, if nothing is wrong."""
    unseen: Sequence[str] = ()
    """Parts of data, model and run folder that nobody looked at."""

    @property
    def refused(self) -> list[Problem]:
        """Faults of the config itself."""
        return [problem for problem in self.problems if problem.kind == "refused"]

    @property
    def unchecked(self) -> list[Problem]:
        """Rules that could not be applied, and what they lack."""
        return [problem for problem in self.problems if problem.kind == "not checked"]

    @property
    def unknown_models(self) -> list[str]:
        """A line that names the models without a config.json here, if any."""
        unread = [
            problem for problem in self.unchecked if problem.key.endswith("model_name") and problem.value is not None
        ]
        lacking = [f"{problem.key}={problem.value}" for problem in unread]
        if lacking:
            return [f"the model: no config.json of {', '.join(lacking)} is here, which says what it can run"]
        return []

    @property
    def provided(self) -> list[Problem]:
        """Files and disks that this machine lacks, though no rule needs them."""
        return [problem for problem in self.problems if problem.kind == "to be provided"]


def examine(
    name: str | Path,
    overrides: Sequence[str] = (),
    *,
    to_evaluate: bool = False,
    is_strict: bool = False,
    secrets: set[str] | None = None,
    gpu: Gpu | None = None,
) -> Checked:
    """Checks a config file as far as possible without starting anything; `is_strict` reads all rows.

    `gpu` is that of the nodes; None: this host's, whose memory is then a node's, too.
    """
    try:
        path = find_config(name)
        config, migration, problems = read_run(path, overrides, to_evaluate=to_evaluate, secrets=secrets)
    except ConfigError as error:
        return Checked(None, Migration(), list(error.problems))
    checked = Checked(config, migration, problems, path)
    if config is None:
        return checked
    return examine_config(config, checked, to_evaluate=to_evaluate, is_strict=is_strict, gpu=gpu)


def examine_config(
    config: RunConfig, loaded: Checked, *, to_evaluate: bool = False, is_strict: bool = False, gpu: Gpu | None = None
) -> Checked:
    """Adds all that rules, files and data say of `config` to `loaded`, the findings of its reading."""
    problems = [*loaded.problems, *_known(lambda: find_missing_weights(config), [])]
    config = with_cached_folders(config)
    problems += find_problems(config, to_evaluate=to_evaluate)
    problems += _known(lambda: find_wrong_weights(config), [])
    if not to_evaluate:
        lost = _known(lambda: find_lost_run(Path(config.checkpointing.checkpoint_dir)), None)
        problems += [
            *(told(text, "rows") for text in find_few_rows(config)),
            *([told(lost, "run-folder")] if lost else []),
        ]
    look = _known(lambda: look_at_inputs(config, is_strict=is_strict, to_evaluate=to_evaluate), Look())
    lacks, slower = _known(lambda: look_at_environment(config), ([], []))
    # Reading rows fails for the own function that a rule has refused by its key.
    sentences = {problem.sentence for problem in problems}
    seen = [problem for problem in look.problems if problem.key or problem.sentence not in sentences]
    problems = list(dict.fromkeys([*problems, *lacks, *seen]))
    doubts = [*find_doubts(config), *slower, *look.doubts]
    checked = replace(loaded, config=config, problems=problems, doubts=doubts, unseen=look.unseen)
    if not (to_evaluate or checked.refused or checked.unchecked) and config.cluster.gpus_per_node:
        try:
            here = local_gpu() if gpu is None else None
            return replace(checked, prediction=prediction(config, gpu or here, local_memory() if here else None))
        except ValueError as error:
            problems.append(told(error, "memory"))
    return checked


def _known(step: Callable[[], Found], default: Found) -> Found:
    """The findings of a step, or `default` if it reads a value that is not known, or a run folder of somebody else.

    Either has a problem already.
    """
    try:
        return step()
    except (NotKnown, PermissionError):
        return default


def look_at_environment(config: RunConfig) -> tuple[list[Problem], list[str]]:
    """Reasons why this host's installation would be refused at a start, and warnings.

    A host without GPUs may be a login node of those that have them: there it is a warning that no run starts.
    """
    gpus, num_nodes, has_engines = config.cluster.gpus_per_node, config.cluster.num_nodes, config.has_engines
    try:
        fault = find_fault(gpus, num_nodes=num_nodes, has_engines=has_engines)
        if gpus and host_gpus() == 0:
            return [], [f"a start on this host would refuse it: {fault}"] if fault is not None else []
    except ValueError as error:
        fault = str(error)
    if faults := [*([fault] if fault is not None else []), *obstacles_of(config)]:
        return [told(fault, "machine", "to be provided") for fault in faults], []
    return [], [text] if gpus and (text := describe_missing(missing_kernels())) else []


def check_run(options: argparse.Namespace, name: str, overrides: Sequence[str], *, to_evaluate: bool = False) -> int:
    """Prints the resolved run and every fault of its config. Exit code 0; 2 if something is refused.

    Files, models and disks that this machine lacks are listed as to be provided; only `--strict` refuses for them.
    """
    strict, gpu = options.strict, GPUS.get(options.gpu)
    checked = examine(name, overrides, to_evaluate=to_evaluate, is_strict=strict, secrets=options.secrets, gpu=gpu)
    if options.json:
        found = {
            "problems": [problem.as_json() for problem in checked.problems],
            "warnings": [*checked.migration.idle_overrides(), *checked.doubts],
            "config": None if (config := checked.config) is None else _known(lambda: asdict(config), None),
        }
        sys.stdout.write(json.dumps(redact(found, options.secrets), indent=1, default=str) + "\n")
    return tell(checked, to_evaluate=to_evaluate, strict=strict)


def tell(checked: Checked, *, to_evaluate: bool = False, strict: bool = False) -> int:
    """Logs the findings of a check, what is refused last, and returns the exit code."""
    groups: dict[str, Sequence[Problem | str]] = {}
    if checked.path is not None:
        described = [] if checked.config is None else describe_run(checked.config, to_evaluate=to_evaluate)
        groups[f"Config: {checked.path}"] = [*described, *([checked.prediction] if checked.prediction else [])]
    groups |= {f"NeMo RL's keys, {title}: {len(lines)}": lines for title, lines in checked.migration.sections().items()}
    config = checked.config
    if config is not None and not to_evaluate and (changes := _known(lambda: _changes(config), [])):
        groups[f"Changed since the last attempt: {len(changes)}"] = changes
    if (different := checked.migration.differences()) is not None:
        groups[f"Behaves differently from NeMo RL: {len(different)}"] = different
    if warnings := [*checked.migration.idle_overrides(), *checked.doubts]:
        groups[f"Warnings: {len(warnings)}"] = warnings
    if checked.config is not None:
        groups["Not looked at:"] = [*checked.unseen, *NEVER_SEEN, *checked.unknown_models]
    groups[f"To be provided: {len(checked.provided)}"] = checked.provided
    groups[f"Not checked: {len(checked.unchecked)}"] = checked.unchecked
    limits = ", as far as it could be checked" if checked.unchecked else ""
    groups[f"Refused: {len(checked.refused)}{limits}"] = checked.refused
    for title, lines in groups.items():
        logger.info("%s", title)
        for line in "\n".join(map(str, lines)).splitlines():
            logger.info("  %s", line)
    return 2 if checked.refused or (strict and checked.problems) else 0


def _changes(config: RunConfig) -> list[str]:
    folder = Path(config.checkpointing.checkpoint_dir)
    changes = changes_since(folder / RUN_CONFIG, config)
    if not (folder / ABOUT).is_file():
        return changes
    from mrl.store.identity import code_changes  # imports the libraries that read rows

    return [*changes, *code_changes(folder / ABOUT, config)]


def describe_run(config: RunConfig, *, to_evaluate: bool = False) -> list[str]:
    """Describes the run in a dozen lines: model, layout, batch, lengths, data, optimizer, checkpoints."""
    lines = []
    for name, text in (ROWS | (ROWS_OF_EVALUATION if to_evaluate else {})).items():
        if to_evaluate and name in ROWS_OF_TRAINING:
            continue
        try:
            found = text(config).splitlines()
            lines += [f"{label:<{WIDTH}}{line}" for label, line in zip((name, *[""] * len(found)), found, strict=False)]
        except NotKnown as error:
            lines.append(f"{name:<{WIDTH}}{error}")
        except OSError as error:
            lines.append(f"{name:<{WIDTH}}{error.filename}: {error.strerror}")
    return lines


@dataclass(frozen=True)
class Target:
    """The checkpoint or model that is evaluated."""

    config: str
    name: str
    model: Path | None = None
    checkpoint: Path | None = None
    """Checkpoint of a run, to be exported first."""

    def model_overrides(self) -> list[str]:
        """The overrides that point the config at `model`."""
        if self.model is None:
            return []
        from mrl.config.overrides import quoted  # imports Hydra

        return [f"{key}={quoted(self.model)}" for key in ("policy.model_name", "policy.tokenizer.name")]


def find_target(name: str, config: str | None) -> Target:
    """Resolves `name`, a config or a folder.

    Raises:
        ValueError: it is a folder of neither kind, or has no checkpoint.
    """
    folder = Path(name)
    if not folder.is_dir():
        if STEP_FOLDER.fullmatch(folder.name) and (folder.parent / RUN_CONFIG).is_file():
            raise ValueError(f"{name}: no such checkpoint; {checkpoints_text(folder.parent)}")
        return Target(name, Path(name).stem)
    if (folder / "config.json").is_file():
        if config is None:
            raise ValueError(
                f"{name} is a model; name with --config the config whose data, environments and sampling to use"
            )
        return Target(config, folder.resolve().name, model=folder.resolve())
    run = folder if is_run_folder(folder) else folder.resolve().parent
    found = next((place / RUN_CONFIG for place in (folder, run) if (place / RUN_CONFIG).is_file()), None)
    if found is None:
        raise ValueError(
            f"{name} is no run folder ({RUN_CONFIG}), none of its checkpoints, and no Hugging Face folder (config.json)"
        )
    checkpoint = folder
    if run == folder:
        newest = CheckpointStore(run, CheckpointingConfig()).newest(with_shards=True)
        if newest is None:
            raise ValueError(f"{name} has no complete checkpoint yet; give the model's folder instead")
        checkpoint = newest.folder
    return Target(config or str(found), f"{run.resolve().name}-{checkpoint.name}", checkpoint=checkpoint)


if __name__ == "__main__":
    sys.exit(run_entry(lambda: main([OPTION, *sys.argv[1:]])))
