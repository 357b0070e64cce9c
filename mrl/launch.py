"""`python -m mrl.launch slurm|k8s|lepton CONFIG [a.b=c ...]`: prints what brings the run onto a cluster; with --submit, sends it."""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from mrl.config.files import find_config
from mrl.config.load import load_config
from mrl.config.schema.run import ClusterConfig
from mrl.launchers import kubernetes, lepton, slurm
from mrl.launchers.join import wait_for_nodes

logger = logging.getLogger(__name__)

SUBMIT_TIMEOUT_S = 120.0
# Variables and the secrets of Lepton that hold them: the Hub's token, and what only nodes of the job know (openssl rand -hex 32).
LEPTON_SECRETS = {"HF_TOKEN": "HF_TOKEN", "RAY_AUTH_TOKEN": "RAY_AUTH_TOKEN"}


def launch_slurm(options: argparse.Namespace) -> None:
    """Prints a script that submits the run, or submits it."""
    cluster = cluster_of(options)
    job = slurm.SlurmJob(
        train_command(options, cluster), cluster.num_nodes, cluster.gpus_per_node, options.log_dir.absolute(), options.time, options.name,
        options.account, options.partition, options.container, options.mounts, is_gres_site=not options.gpus_per_node_option,
    )  # fmt: skip
    logger.info("%s", slurm.render(job))
    if options.submit:
        job.log_folder.mkdir(parents=True, exist_ok=True)
        submit(slurm.arguments(job), environment=slurm.variables(job))


def launch_kubernetes(options: argparse.Namespace) -> None:
    """Prints the manifest, or applies it."""
    cluster = cluster_of(options)
    job = kubernetes.KubernetesJob(
        train_command(options, cluster), cluster.num_nodes, cluster.gpus_per_node, options.name, options.namespace, options.image,
        options.claim, options.mount, options.instance_type, options.efa, options.cpus, options.memory, options.shm,
    )  # fmt: skip
    text = kubernetes.render(job)
    logger.info("%s", text)
    if options.submit:
        submit(["kubectl", "apply", "--filename", "-"], text=text)


def launch_lepton(options: argparse.Namespace) -> None:
    """Prints what goes into the form of a batch job."""
    cluster = cluster_of(options)
    command = train_command(options, cluster)
    nodes, gpus = cluster.num_nodes, cluster.gpus_per_node
    logger.info("%s", lepton.render(command, num_nodes=nodes, gpus_per_node=gpus, image=options.image, secrets=LEPTON_SECRETS))


def wait(options: argparse.Namespace) -> None:
    """Waits for the nodes of a launched Ray cluster."""
    # Rendering needs no Ray.
    from mrl.cluster.join import connect, joined_nodes

    names = options.nodes.split(",") if options.nodes else []
    connect()
    wait_for_nodes(joined_nodes, num_nodes=options.num_nodes or len(names), num_units=options.units, names=names, timeout_s=options.timeout)


def cluster_of(options: argparse.Namespace) -> ClusterConfig:
    """The cluster that the config asks for."""
    return load_config(options.config, options.overrides).cluster


def train_command(options: argparse.Namespace, cluster: ClusterConfig) -> list[str]:
    """The run itself. A config that is a file is named by its path, as all nodes see it."""
    path = Path(options.config)
    name = str(path.absolute()) if path.is_file() else options.config
    find_config(name)
    return ["python", "-m", "mrl.train", name, *options.overrides]


def check_text(options: argparse.Namespace) -> None:
    """Raises ValueError if an argument holds a line break or another character that cannot be seen: it could say more than it shows."""
    for name, value in vars(options).items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str | Path) and not str(text).isprintable():
                written = name if name in ("config", "overrides") else f"--{name.replace('_', '-')}"
                raise ValueError(
                    f"{written} {str(text)!r}: line breaks and control characters are not handed on to launchers; "
                    "leave them out, or set such a value in the config file"
                )


def submit(command: Sequence[str], *, text: str | None = None, environment: dict[str, str] | None = None) -> None:
    """Runs a scheduler's own command.

    Raises:
        RuntimeError: it is not there, or refuses.
    """
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=SUBMIT_TIMEOUT_S, env=os.environ | (environment or {}), check=False
        )
    except FileNotFoundError as error:
        raise RuntimeError(f"{command[0]} is not on this host's PATH; run this where jobs are submitted, or without --submit") from error
    if done.returncode:
        raise RuntimeError(f"{command[0]} refused (code {done.returncode}): {done.stderr.strip() or done.stdout.strip()}")
    logger.info("%s", done.stdout.strip())


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m mrl.launch", description="Brings a run onto a cluster.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    on_slurm = _runs(commands, "slurm", "a job of scripts/ray.sub", launch_slurm)
    on_slurm.add_argument("--account")
    on_slurm.add_argument("--partition")
    on_slurm.add_argument("--time", default="8:00:00", help="limit of one attempt; longer runs are requeued (default: %(default)s)")
    on_slurm.add_argument("--container", help="image for Slurm's pyxis plugin; without it the nodes use the virtual environment")
    on_slurm.add_argument("--mounts", help="what is mounted into it: FROM:TO,...")
    on_slurm.add_argument("--log-dir", type=Path, default=Path("logs"), help="a folder that all nodes share (default: %(default)s)")
    on_slurm.add_argument("--gpus-per-node", dest="gpus_per_node_option", action="store_true", help="the site has no --gres")

    on_kubernetes = _runs(commands, "k8s", "a Kubernetes Indexed Job", launch_kubernetes)
    on_kubernetes.add_argument("--namespace", default="default")
    on_kubernetes.add_argument("--image", required=True, help="an image of scripts/docker")
    on_kubernetes.add_argument(
        "--claim", required=True, help="PersistentVolumeClaim that all nodes can mount, for model, data and checkpoints"
    )
    on_kubernetes.add_argument("--mount", default="/shared", help="where it is mounted (default: %(default)s)")
    on_kubernetes.add_argument("--instance-type", help="only nodes of this type, e.g. p4d.24xlarge")
    on_kubernetes.add_argument("--efa", type=int, default=0, help="EFA devices of a node, e.g. 4 on p4d, 32 on p5")
    on_kubernetes.add_argument("--cpus", type=int, default=48)
    on_kubernetes.add_argument("--memory", default="384Gi")
    on_kubernetes.add_argument("--shm", default="128Gi", help="size of /dev/shm (default: %(default)s)")

    on_lepton = _runs(commands, "lepton", "a batch job of DGX Cloud Lepton", launch_lepton, can_submit=False)
    on_lepton.add_argument("--image", required=True, help="an image of scripts/docker")

    waiting = commands.add_parser("wait", help="wait until all nodes of the Ray cluster at RAY_ADDRESS have joined (the scripts call it)")
    waiting.add_argument("--nodes", default="", help="their names, with commas between them")
    waiting.add_argument("--num-nodes", type=int, default=0, help="how many, where the names are not known")
    waiting.add_argument("--units", type=int, required=True, help="worker units of all of them")
    waiting.add_argument("--timeout", type=float, default=1800.0, metavar="SECONDS")
    waiting.set_defaults(run=wait)
    return parser.parse_args(arguments)


def _runs(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    what: str,
    run: Callable[[argparse.Namespace], None],
    *,
    can_submit: bool = True,
) -> argparse.ArgumentParser:
    """A command that brings a run somewhere."""
    parser = commands.add_parser(name, help=what, description=f"Prints {what} that makes the run of a config.")
    parser.add_argument("config", help="config file (a path, or a packaged name)")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c")
    parser.add_argument("--name", default="mrl", help="of the job (default: %(default)s)")
    if can_submit:
        parser.add_argument("--submit", action="store_true", help="send it, after printing it")
    parser.set_defaults(run=run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Exit code 0; 2 if the input is at fault; 1 if the cluster is."""
    options = parse_arguments(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout, force=True)
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


if __name__ == "__main__":
    sys.exit(main())
