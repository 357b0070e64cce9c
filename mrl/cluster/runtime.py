"""Starts and stops Ray for one run. On a laptop the cluster is private to the driver and dies with it."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import ray
from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader  # pyright: ignore[reportAttributeAccessIssue]  compiled, without stubs

from conversion.files.owners import Owner, heartbeat, may_live, this_process
from mrl.cluster.head import join_cluster
from mrl.cluster.reaper import start_reaper
from mrl.config.schema.run import RunConfig

logger = logging.getLogger(__name__)

FOLDER_PREFIX = "mrl-ray-"
OWNER_FILE = "owner.json"
RAY_FOLDER = "ray"
"""Inside the folder of a run, which nobody else may enter: Ray opens its own to everybody."""
# Weights never travel through the object store and payloads are a few bytes a token, so a small store is enough on a laptop.
OBJECT_STORE_BYTES = 256 * 2**20
REAPER_TIMEOUT_S = 30.0


@contextmanager
def ray_runtime(config: RunConfig) -> Iterator[None]:
    """Ray, up inside the `with` block: a private local cluster on one node, the launcher's cluster (RAY_ADDRESS) on several."""
    reclaim_dead_owners()
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    owner_file = folder / OWNER_FILE
    owner_file.write_text(json.dumps(asdict(this_process())))
    reaper = start_reaper(folder)
    # The first failure of a group call is raised with its reason; Ray would print those of all other ranks on top.
    os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
    # Ray gives its workers niceness 15: beside any other work on the host, ranks would miss each other's deadlines.
    os.environ["RAY_worker_niceness"] = "0"
    try:
        if config.cluster.num_nodes > 1:
            join_cluster()
        else:
            use_private_token(folder)
            listen_on_loopback()
            # Ray joins any local cluster it finds unless told otherwise. Logical CPUs only bound how many actors may be placed.
            ray.init(
                address="local",
                num_cpus=config.num_units + 2,
                num_gpus=config.cluster.gpus_per_node,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=str(folder / RAY_FOLDER),
            )
        with heartbeat(owner_file):
            yield
    finally:
        ray.shutdown()
        reaper.communicate(timeout=REAPER_TIMEOUT_S)


def use_private_token(folder: Path) -> None:
    """Lets only processes of this run join its cluster: Ray would otherwise keep one token for all runs in the home folder."""
    token_file = folder / "token"
    token_file.touch(mode=0o600)
    token_file.write_text(secrets.token_hex(32))
    # A shell may have tokens off for another cluster; Ray switches them on where nothing is said.
    os.environ.pop("RAY_AUTH_MODE", None)
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token_file)
    # A process that has had a cluster before would offer that one's token.
    AuthenticationTokenLoader.instance().reset_cache()
    # It says at every start that token authentication is on, and how to switch it off.
    logging.getLogger("ray").setLevel(logging.ERROR)


def listen_on_loopback() -> None:
    """Lets the processes of a cluster of one node listen on 127.0.0.1 alone: Ray's metrics ask nobody for a token.

    Ray replaces a `_node_ip_address` of 127.0.0.1 by the host's own, unless it takes the platform for one without clusters. That is a
    constant, read from RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER when Ray is imported (ray/_private/services.py in 2.60).
    """
    ray_constants.ENABLE_RAY_CLUSTER = False


def reclaim_dead_owners() -> None:
    """Removes session folders of this user's runs whose driver and reaper are both gone, as after a power loss.

    Containers that share the folder but not their process ids, and other hosts, see a sign of life of each other once in a while.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        if folder.lstat().st_uid != os.getuid():
            continue
        try:
            owner = Owner(**json.loads((folder / OWNER_FILE).read_text()))
            is_dead = not may_live(owner, folder / OWNER_FILE)
        except (OSError, ValueError, TypeError):  # not made to its end, or not by us
            continue
        if is_dead:
            logger.info("removing %s, left by process %d on %s", folder, owner.pid, owner.host)
            shutil.rmtree(folder, ignore_errors=True)
