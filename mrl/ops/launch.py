# SPDX-License-Identifier: Apache-2.0
"""`python -m mrl.launch slurm|k8s|lepton CONFIG [a.b=c ...]`: prints a config's cluster job; with --submit, submits it.

`wait` waits for the nodes of a launched Ray cluster; how it asks Ray for them is in mrl/cluster/nodes.py.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from mrl import env
from mrl.check import examine
from mrl.config.command_line import add_config, needed_config, number
from mrl.config.files import find_config
from mrl.config.load import has_automatic_gpus, load_config
from mrl.config.model import with_cached_folders
from mrl.config.rules.checks import find_problems
from mrl.config.schema.run import RunConfig
from mrl.config.secrets import JOB, start_logging
from mrl.config.texts import rounded
from mrl.gpus import find_misfit, read_builds
from mrl.ops.launchers import kubernetes, slurm
from mrl.plan.hardware import GIB, GPUS, NODES
from mrl.plan.plan import prediction
from mrl.store.loggers.sink import flat
from mrl.store.resuming import IN_USE

logger = logging.getLogger(__name__)
printed = logging.getLogger(JOB)

SUBMIT_TIMEOUT_S = 120.0
POLL_S = 1.0
# Lepton's secrets, named as their variables: the Hub's token, and a token that only nodes of the job know (openssl rand
# -hex 32).
LEPTON_SECRETS = ("HF_TOKEN", "RAY_AUTH_TOKEN")

Joined = Sequence[tuple[str, int]]
"""Host name and number of slots (GPUs, or policy ranks on hosts without GPUs) of every node that is online."""


def launch_slurm(options: argparse.Namespace) -> None:
    """Prints a script that submits the run, or submits it."""
    config = load_config(options.config, options.overrides)
    cluster, name = config.cluster, options.name or slurm.job_name(Path(config.checkpointing.checkpoint_dir).absolute())
    job = slurm.SlurmJob(
        train_command(config, options), cluster.num_nodes, cluster.gpus_per_node, cluster.slots_per_node,
        options.log_dir.absolute(), options.time,
        name, options.account, options.partition, options.container, options.mounts,
        hub_folder_in_container(config, options),
        is_gres_site=not options.gpus_per_node_option,
        environment=None if options.container else env.VENV.read() or sys.prefix,
    )  # fmt: skip
    misfit = find_misfit(cluster.gpus_per_node, read_builds(), has_engines=config.has_engines)
    if job.environment == sys.prefix and misfit is not None:
        fault = f"the job would use this command's Python ({sys.prefix}): {misfit}; or name another: VENV=FOLDER"
        if options.submit:
            raise ValueError(fault)
        logger.warning("%s", fault)
    notes = [*further_nodes(config), *compare_limits(config, options.time)]
    printed.info("%s%s", slurm.render(job), "".join(f"# {line}\n" for line in notes))
    if options.submit:
        job.log_folder.mkdir(parents=True, exist_ok=True)
        command, variables = slurm.submission(job)
        submit(command, environment=variables)


def launch_kubernetes(options: argparse.Namespace) -> None:
    """Prints the manifest, or applies it."""
    config = load_config(options.config, options.overrides)
    cluster = config.cluster
    job = kubernetes.KubernetesJob(
        train_command(config, options), cluster.num_nodes, cluster.gpus_per_node, cluster.slots_per_node, options.name,
        options.namespace,
        options.image, options.claim, options.mount, options.instance_type, options.efa, options.cpus, options.memory,
        options.shm, options.host_network or options.efa > 0,
        config.num_grader_nodes, options.grader_cpus, options.grader_memory,
    )  # fmt: skip
    check_mounted(options, [Path(options.mount)], f"--mount {options.mount}", run_folder(config))
    text = "".join(f"# {note}\n" for note in check_nodes(config, options)) + kubernetes.render(job)
    printed.info("%s", text)
    if options.submit:
        submit(["kubectl", "apply", "--filename", "-"], text=text)


def launch_lepton(options: argparse.Namespace) -> None:
    """Prints the fields of the form of a DGX Cloud Lepton batch job."""
    config = load_config(options.config, options.overrides)
    check_mounted(options, [Path(options.mount)], f"--mount {options.mount}", run_folder(config))
    cluster = config.cluster
    nodes, gpus = cluster.num_nodes, cluster.gpus_per_node
    command = shlex.join(train_command(config, options))
    variables = {"COMMAND": command, "CLUSTER_NUM_NODES": nodes, "CLUSTER_GPU_PER_NODE": gpus}
    variables |= {"UNITS_PER_NODE": cluster.slots_per_node, "HF_HOME": f"{options.mount}/huggingface"}
    lines = [
        "# Batch Jobs > Create Job > Custom",
        f"# Resources: {gpus} GPUs per node, {nodes} workers",
        f"# Custom Container: {options.image}",
        "# Run Command:",
        "exec bash /opt/mrl/scripts/ray_node.sh",
        "# Environment Variables:",
        *(f"{name}={value}" for name, value in variables.items()),
        *(f"{name}=<secret {name}>" for name in LEPTON_SECRETS),
        *(f"# {line}" for line in further_nodes(config)),
        f"# Mount Storage: a volume that all workers share, at {options.mount}; keep model, data and checkpoints there",
    ]
    printed.info("%s", "\n".join(lines) + "\n")


def further_nodes(config: RunConfig) -> list[str]:
    """Tells which nodes the job does not start."""
    num_nodes = config.num_grader_nodes
    how = 'they join the head as docs/cluster.md says, "Nodes for rewards", and the run waits for them'
    return [f"Not in this job: the nodes of env.placement.num_nodes={num_nodes}; {how}"] if num_nodes else []


def compare_limits(config: RunConfig, time_limit: str) -> list[str]:
    """Tells how much of its time limit an attempt leaves unused, if that is more than half.

    Raises:
        ValueError: Slurm would end the attempt before `checkpointing.checkpoint_must_save_by`.
    """
    limit_s, save_by_s = slurm.in_seconds(time_limit), config.checkpointing.must_save_by_s
    if limit_s is not None and limit_s <= slurm.SIGNAL_S:
        raise ValueError(
            f"--time {time_limit}: {limit_s / 60:g} minutes, and Slurm asks the run to end {slurm.SIGNAL_S / 60:g} "
            "minutes before; give more, as HOURS:MINUTES:SECONDS"
        )
    if limit_s is None or save_by_s is None:
        return []
    key = f"checkpointing.checkpoint_must_save_by={config.checkpointing.checkpoint_must_save_by}"
    if save_by_s > limit_s - slurm.SIGNAL_S:
        raise ValueError(
            f"{key}: Slurm ends the attempt before, at --time {time_limit}, and signals that {slurm.SIGNAL_S} s ahead; "
            "give a longer --time or an earlier time to save"
        )
    if 2 * save_by_s >= limit_s:
        return []
    way_out = "give a shorter --time or a later time to save"
    return [f"{key}: an attempt ends there, with most of --time {time_limit} unused; {way_out}"]


def warnings_of_limits(time_limit: str, config: str, overrides: Sequence[str]) -> str:
    """Lines of what `compare_limits` says of a job that scripts/launch_nanov3.sh submits."""
    try:
        notes = compare_limits(load_config(config, list(overrides)), time_limit)
    except ValueError as error:
        notes = [str(error)]
    return "".join(f"[WARNING] {note} (--time: TIME)\n" for note in notes)


def placeholders(config: RunConfig) -> list[str]:
    """Settings that still have a placeholder of a packaged config; of several with the same, the first."""
    found: dict[str, str] = {}
    for key, value in flat(asdict(config)).items():
        for path in re.findall(r"/path/to/[\w./-]*", str(value)):
            found.setdefault(path, key)
    return [f"{key}={path}" for path, key in found.items()]


def run_folder(config: RunConfig) -> dict[str, Path]:
    """The run folder, by its setting."""
    folder = config.checkpointing.checkpoint_dir
    return {f"checkpointing.checkpoint_dir={folder}": Path(folder)}


def hub_folder_in_container(config: RunConfig, options: argparse.Namespace) -> str | None:
    """HF_HOME of a Slurm job in a container, by default on the mount of the run folder; None without a container.

    Raises:
        ValueError: the container does not see config file, run folder or HF_HOME.
    """
    if not options.container:
        return None
    # FROM:TO:FLAGS, or one folder that has the same path in both. The container's working folder is that of submission.
    targets = [Path(mount.split(":")[:2][-1]) for mount in (options.mounts or "").split(",")]
    places = {name: folder.absolute() for name, folder in run_folder(config).items()}
    chosen = env.HF_HOME.read()
    hub = {f"HF_HOME={chosen}": Path(chosen)} if chosen else {}
    check_mounted(options, targets, f"--mounts {options.mounts or 'FROM:TO'}", places | hub)
    return chosen or str(
        next(target for target in targets for folder in places.values() if is_below(folder, target)) / "huggingface"
    )


def is_below(place: Path, folder: Path) -> bool:
    """Tells whether a path lies in a folder, `..` written out."""
    return Path(os.path.normpath(place)).is_relative_to(folder)


def check_mounted(options: argparse.Namespace, mounts: Sequence[Path], given: str, places: dict[str, Path]) -> None:
    """Raises ValueError if the config file or one of these places is on a container's disk, unseen by other nodes."""
    if (file := Path(options.config)).is_file():
        places = places | {f"config {options.config}": file.absolute()}
    if wrong := [name for name, place in places.items() if not any(is_below(place, mount) for mount in mounts)]:
        raise ValueError(
            f"{', '.join(wrong)}: on the container's own disk, which is lost with it, and which no other node sees; "
            f"name an absolute path below {given}, where all nodes mount their shared storage"
        )


def check_nodes(config: RunConfig, options: argparse.Namespace) -> list[str]:
    """Checks that the planned run fits a pod's memory and GPUs; else ValueError. Returns what could not be compared."""
    node, limit = NODES.get(options.instance_type), kubernetes.in_bytes(options.memory)
    if node and (config.cluster.gpus_per_node > node.num_gpus or limit > node.memory_gib * GIB):
        raise ValueError(
            f"cluster.gpus_per_node={config.cluster.gpus_per_node}, --memory {options.memory}: no pod fits on a node "
            f"of --instance-type {options.instance_type}, which has {node.num_gpus} GPUs and {node.memory_gib} GiB"
        )
    gpu, local = GPUS[node.gpu] if node else None, with_cached_folders(config)
    if not config.cluster.gpus_per_node or any(problem.kind == "not checked" for problem in find_problems(local)):
        return [
            (
                "Memory is not compared with the nodes: the run has no GPUs, or the config.json of its model is not on "
                "this host"
            )
        ]
    try:
        said = prediction(local, gpu, limit)
    except ValueError as error:
        raise ValueError(
            f"{error} (--memory {options.memory}); python -m mrl.plan {options.config} ... --gpu NAME says more"
        ) from error
    return [said] if node else [said, "GPU memory is not compared: --instance-type is none of " + ", ".join(NODES)]


def wait(options: argparse.Namespace) -> None:
    """Waits for the nodes of a launched Ray cluster."""
    from mrl.cluster.nodes import connect, joined_nodes

    names = options.nodes.split(",")
    connect()
    wait_for_nodes(
        joined_nodes,
        num_nodes=len(names),
        num_slots=options.units,
        names=names,
        timeout_s=options.timeout,
    )


def wait_for_nodes(
    read: Callable[[], Joined], *, num_nodes: int, num_slots: int, names: Sequence[str], timeout_s: float
) -> None:
    """Returns when `read` gives `num_slots` slots on `num_nodes` nodes; logs whenever more have joined.

    `names` are those of the nodes, if the launcher knows them.

    Raises:
        RuntimeError: they are not online within `timeout_s`; names or counts the missing nodes.
    """
    deadline = time.monotonic() + timeout_s
    online = -1
    while True:
        joined = read()
        slots = sum(count for _, count in joined)
        if slots != online:
            online = slots
            logger.info(
                "[INFO][%s] Number of actors online: %d/%d", datetime.now().strftime("%F %T"), online, num_slots
            )
        if online >= num_slots and len(joined) >= num_nodes:
            return
        if time.monotonic() > deadline:
            missing = (
                ", ".join(missing_nodes(names, (host for host, _ in joined)))
                or f"{num_nodes - len(joined)} of {num_nodes} nodes"
            )
            raise RuntimeError(
                f"{online} of {num_slots} slots are online after {rounded(timeout_s)} s (JOIN_TIMEOUT_S); missing, "
                f"see the logs: {missing}"
            )
        time.sleep(POLL_S)


def missing_nodes(names: Sequence[str], hosts: Iterable[str]) -> list[str]:
    """The nodes among `names`, as the scheduler calls them, whose hosts have not joined; both may carry a domain."""
    found = {host.split(".")[0] for host in hosts}
    return [name for name in names if name.split(".")[0] not in found]


def train_command(config: RunConfig, options: argparse.Namespace) -> list[str]:
    """The command of the run. A config file is given by its absolute path, which all nodes see."""
    path = Path(options.config)
    name = str(path.absolute()) if path.is_file() else options.config
    find_config(name)
    # The nodes would count their own GPUs; the job asks for those of this config.
    gpus = [f"cluster.gpus_per_node={config.cluster.gpus_per_node}"] if has_automatic_gpus(config) else []
    return ["python", "-m", "mrl.train", name, *options.overrides, *gpus]


def check_text(options: argparse.Namespace) -> None:
    """Raises ValueError if an argument holds a line break or other invisible character, which could hide a command."""
    for name, value in vars(options).items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str | Path) and not str(text).isprintable():
                written = name if name in ("config", "overrides") else f"--{name.replace('_', '-')}"
                raise ValueError(
                    f"{written} {str(text)!r}: line breaks and control characters are not handed on to launchers; "
                    "leave them out, or set such a value in the config file"
                )


def submit(command: Sequence[str], *, text: str | None = None, environment: dict[str, str] | None = None) -> None:
    """Runs a scheduler's own command; RuntimeError: this host lacks the command, or it refuses the job."""
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            timeout=SUBMIT_TIMEOUT_S,
            env=os.environ | (environment or {}),
            check=False,
        )
    except FileNotFoundError as error:
        raise RuntimeError(
            f"{command[0]} is not on this host's PATH; run this where jobs are submitted, or without --submit"
        ) from error
    if done.returncode:
        raise RuntimeError(
            f"{command[0]} refused (code {done.returncode}): {done.stderr.strip() or done.stdout.strip()}"
        )
    logger.info("%s", done.stdout.strip())


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mrl.launch", description="Runs a config on a cluster.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    on_slurm = _runs(commands, "slurm", "a job of scripts/ray.sub", launch_slurm)
    further = "; sbatch reads its other options from variables: SBATCH_QOS=high python -m mrl.launch slurm ..."
    on_slurm.set_defaults(name=None, of_others=further)
    on_slurm.add_argument("--account")
    on_slurm.add_argument("--partition")
    on_slurm.add_argument(
        "--time", default="8:00:00", help="limit of one attempt; longer runs are requeued (default: %(default)s)"
    )
    on_slurm.add_argument(
        "--container", help="image for Slurm's pyxis plugin; without it the nodes use the virtual environment"
    )
    on_slurm.add_argument("--mounts", help="folders to mount into it: FROM:TO,...")
    on_slurm.add_argument(
        "--log-dir", type=Path, default=Path("logs"), help="a folder that all nodes share (default: %(default)s)"
    )
    on_slurm.add_argument(
        "--gpus-per-node", dest="gpus_per_node_option", action="store_true", help="the site has no --gres"
    )

    on_kubernetes = _runs(commands, "k8s", "a Kubernetes Indexed Job", launch_kubernetes)
    on_kubernetes.add_argument("--namespace", default="default")
    on_kubernetes.add_argument("--image", required=True, help="an image of scripts/docker")
    on_kubernetes.add_argument(
        "--claim", required=True, help="PersistentVolumeClaim that all nodes can mount, for model, data and checkpoints"
    )
    on_kubernetes.add_argument("--mount", default="/shared", help="where it is mounted (default: %(default)s)")
    on_kubernetes.add_argument("--instance-type", help="only nodes of this type, e.g. p4d.24xlarge")
    on_kubernetes.add_argument(
        "--efa", type=number(int, least=0), default=0, help="EFA devices of a node, e.g. 4 on p4d, 32 on p5"
    )
    on_kubernetes.add_argument(
        "--host-network", action="store_true", help="use the nodes' network, as cards with RDMA need; --efa does"
    )
    on_kubernetes.add_argument("--cpus", type=number(int, least=1), default=48)
    on_kubernetes.add_argument("--memory", default="384Gi")
    on_kubernetes.add_argument("--shm", default="128Gi", help="size of /dev/shm (default: %(default)s)")
    on_kubernetes.add_argument(
        "--grader-cpus",
        type=number(int, least=1),
        default=16,
        help="of each pod of env.placement (default: %(default)s)",
    )
    on_kubernetes.add_argument("--grader-memory", default="64Gi", help="of each of them (default: %(default)s)")

    on_lepton = _runs(commands, "lepton", "a batch job of DGX Cloud Lepton", launch_lepton, can_submit=False)
    on_lepton.add_argument("--image", required=True, help="an image of scripts/docker")
    on_lepton.add_argument("--mount", default="/mnt", help="where the shared volume is mounted (default: %(default)s)")

    waiting = commands.add_parser(
        "wait", help="wait until all nodes of the Ray cluster at RAY_ADDRESS have joined (the scripts call it)"
    )
    waiting.add_argument("--nodes", required=True, help="their names, with commas between them")
    waiting.add_argument(
        "--units",
        type=number(int, least=1),
        required=True,
        help="slots of all of them: GPUs, or policy ranks on hosts without GPUs",
    )
    waiting.add_argument("--timeout", type=number(float, least=0), default=1800.0, metavar="SECONDS")
    waiting.set_defaults(run=wait, of_others="")
    options, behind = parser.parse_known_args(arguments)
    if wrong := [word for word in behind if word.startswith("-") or "words" not in options]:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}{options.of_others}")
    if "words" in options:  # argparse has closed the list of words at the first option
        options.words = [*options.words, *behind]
        options.config, options.overrides = needed_config(parser, options)
        options.words = []
    return options


def _runs(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    what: str,
    run: Callable[[argparse.Namespace], None],
    *,
    can_submit: bool = True,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=what, description=f"Prints {what} that runs a config.")
    add_config(parser)
    parser.add_argument("--name", default="mrl", help="of the job (default: mrl; on Slurm, after the run folder)")
    parser.set_defaults(submit=False, of_others="")
    if can_submit:
        parser.add_argument("--submit", action="store_true", help="send it, after printing it")
    parser.set_defaults(run=functools.partial(_run_checked, run))
    return parser


def _run_checked(run: Callable[[argparse.Namespace], None], options: argparse.Namespace) -> None:
    """Runs a command for a config that a start would not refuse; ValueError: it would."""
    checked = examine(options.config, options.overrides)
    # A job waits for the one of the same run (`singleton` of ray.sub), and its start looks again.
    if refused := [problem for problem in checked.refused if problem.id != IN_USE]:
        raise ValueError("; ".join([*map(str, refused), f"python -m mrl.train {options.config} ... --check says more"]))
    config = load_config(options.config, options.overrides)
    if (left := placeholders(config)) and options.submit:
        raise ValueError(f"{', '.join(left)}: placeholders; put your own in their place")
    run(options)
    if left:
        printed.info("# To be replaced before a start: %s", ", ".join(left))


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Exit code 0; 2 if the input is at fault; 1 if the cluster is at fault."""
    options = parse_arguments(arguments)
    start_logging(stream=sys.stderr)  # standard output is the job, which a pipe may take
    try:
        check_text(options)
        options.run(options)
    except ValueError as error:
        logger.error("[ERROR] %s", error)
        return 2
    except RuntimeError as error:
        logger.error("[ERROR] %s", error)
        return 1
    return 0
