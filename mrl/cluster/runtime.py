# SPDX-License-Identifier: Apache-2.0
"""Ray for one run: a private cluster on one node, the launcher's cluster on several, and a place for every slot of the run."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import ray
from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader  # pyright: ignore[reportAttributeAccessIssue]  compiled, without stubs
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from conversion.files.owners import Owner, heartbeat, may_live, this_process
from mrl import env, startup
from mrl.cluster.calls import wait_all
from mrl.cluster.deadlines import all_deadlines
from mrl.cluster.errors import NoCluster
from mrl.cluster.lifetime import start_reaper
from mrl.cluster.scheduling import engine_slots, find_engine_across_nodes, share_of_cores, slot_table
from mrl.config.schema.run import RunConfig
from mrl.envs.workers import usable_cores

logger = logging.getLogger(__name__)

FOLDER_PREFIX = "mrl-ray-"
OWNER_FILE = "owner.json"
RAY_FOLDER = "ray"
"""Inside the session folder of a run, which nobody else may enter: Ray opens its own to everybody."""
SLOT_RESOURCE = "worker_units"
"""NeMo RL's name for the Ray resource of a launched node: as many as it has slots."""
# Weights never travel through the object store and payloads are a few bytes a token, so a small store is enough on a laptop. What a
# teacher says of a step's rollouts comes on top.
OBJECT_STORE_BYTES = 256 * 2**20
REAPER_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 10.0


@contextmanager
def ray_runtime(config: RunConfig) -> Iterator[Path]:
    """Ray, up inside the `with` block: a private local cluster on one node, the launcher's cluster (RAY_ADDRESS) on several.

    Gives the session folder, which nobody else may enter, and which goes with the run.
    """
    reclaim_dead_owners()
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    owner_file = folder / OWNER_FILE
    owner_file.write_text(json.dumps(asdict(this_process())))
    reaper = start_reaper(folder)
    # The driver raises the first failure of a group call with its reason; Ray would print those of all other ranks on top.
    os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
    # Ray gives its workers niceness 15: beside any other work on the host, ranks would miss each other's deadlines.
    os.environ["RAY_worker_niceness"] = "0"
    # Ray starts a Python process for each CPU ahead of time. Our actors have environments of their own, so that none takes one of these.
    os.environ["RAY_prestart_worker_first_driver"] = "0"
    try:
        if config.cluster.num_nodes > 1:
            join_cluster()
        else:
            _keep_others_out(folder)
            # Ray joins any local cluster it finds unless told otherwise. Logical CPUs only bound how many actors may be placed.
            ray.init(
                address="local",
                num_cpus=config.num_slots + 2,
                num_gpus=config.cluster.gpus_per_node,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES + config.teacher_bytes,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=str(folder / RAY_FOLDER),
            )
        with heartbeat(owner_file):
            yield folder
    finally:
        ray.shutdown()
        reaper.communicate(timeout=REAPER_TIMEOUT_S)


def join_cluster() -> None:
    """Joins the launcher's cluster (RAY_ADDRESS); raises NoCluster if nobody answers there, or it refuses this process."""
    address = env.RAY_ADDRESS.read()
    if address is None:
        raise NoCluster("RAY_ADDRESS is not set: several nodes are a Ray cluster, which scripts/ray.sub or python -m mrl.launch starts")
    # Looks first whether it is there: Ray would try for minutes, and say little.
    found = re.fullmatch(r"(.+):(\d+)", address)
    if found is not None and "://" not in address:
        try:
            socket.create_connection((found[1], int(found[2])), timeout=CONNECT_TIMEOUT_S).close()
        except OSError as error:
            raise NoCluster(
                f"RAY_ADDRESS={address}: nobody answers there ({error}); the head has ended, or the address is one of an earlier job: "
                "set it to the head of this one"
            ) from error
    try:
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise NoCluster(f"RAY_ADDRESS={address}: {reason}; the token (RAY_AUTH_TOKEN_PATH) and Ray's version must be the head's") from error


def _keep_others_out(folder: Path) -> None:
    # Ray would otherwise keep one token for all runs in the home folder.
    token_file = folder / "token"
    token_file.touch(mode=0o600)
    token_file.write_text(secrets.token_hex(32))
    # A shell may have tokens off for another cluster; Ray switches them on when the variable is absent.
    os.environ.pop("RAY_AUTH_MODE", None)
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token_file)
    # A process that has had a cluster before would offer that one's token.
    AuthenticationTokenLoader.instance().reset_cache()
    # At every start Ray logs that token authentication is on, and how to switch it off.
    logging.getLogger("ray").setLevel(logging.ERROR)
    # Ray's metrics ask nobody for a token. It replaces a `_node_ip_address` of 127.0.0.1 by the host's own, unless it takes the platform
    # for one without clusters: a constant, read from RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER at its import (ray/_private/services.py in 2.60).
    ray_constants.ENABLE_RAY_CLUSTER = False


def reclaim_dead_owners() -> None:
    """Removes session folders of this user's runs whose driver and reaper are both gone, as after a power loss."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        if folder.lstat().st_uid != os.getuid():
            continue
        # Other hosts, and containers that share the folder but not their process ids, judge each other by a heartbeat in the owner file.
        try:
            owner = Owner(**json.loads((folder / OWNER_FILE).read_text()))
            is_dead = not may_live(owner, folder / OWNER_FILE)
        except (OSError, ValueError, TypeError):  # its owner is still writing it, or it is not ours
            continue
        if is_dead:
            logger.info("removing %s, left by process %d on %s", folder, owner.pid, owner.host)
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def placed_slots(config: RunConfig) -> Iterator[Placement]:
    """Ray, and a place for every slot, inside the `with` block."""
    with ray_runtime(config) as folder:
        deadlines = all_deadlines(config)
        for deadline in deadlines:
            logger.info("%s", deadline)
        placement = Placement(config, folder, timeout_s=deadlines[0].seconds)
        for line in placement.table():
            logger.info("%s", line)
        startup.lap("ray")
        yield placement


class Placement:
    """The Ray placement group of a run, one bundle per slot, and the options that put an actor on a slot."""

    def __init__(self, config: RunConfig, folder: Path, *, timeout_s: float) -> None:
        """Reserves the slots; raises RuntimeError if they do not fit within `timeout_s`, or only with an engine across two nodes."""
        self.folder = folder
        """The session folder, on the node of this process."""
        self.num_slots = config.num_slots
        self.num_policy_ranks = config.num_policy_ranks
        self.engines = engine_slots(config)
        bundle = {"CPU": 1.0, "GPU": 1.0} if config.cluster.gpus_per_node else {"CPU": 1.0}
        if not config.cluster.gpus_per_node and SLOT_RESOURCE in ray.cluster_resources():
            # The launcher has given each of its nodes its number of slots; by CPUs alone, Ray would put all of them on one node.
            bundle[SLOT_RESOURCE] = 1.0
        self._group: PlacementGroup = placement_group([bundle] * self.num_slots, strategy="PACK")
        if not self._group.wait(timeout_s):
            raise RuntimeError(
                f"{self.num_slots} slots could not be placed within {timeout_s:g} s; the cluster has {ray.cluster_resources()}; "
                "check cluster.num_nodes and cluster.gpus_per_node"
            )
        names: dict[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
        nodes = {name: node for node, name in enumerate(dict.fromkeys(names[bundle] for bundle in range(self.num_slots)))}
        # Slots are numbered node by node, whichever order Ray has filled the nodes in.
        self._bundles = sorted(range(self.num_slots), key=lambda bundle: nodes[names[bundle]])
        self.node_of: dict[int, int] = {slot: nodes[names[bundle]] for slot, bundle in enumerate(self._bundles)}
        self.first_slots = [slot for slot in range(self.num_slots) if slot == 0 or self.node_of[slot] != self.node_of[slot - 1]]
        """The first slot of each node."""
        hosts = {node["NodeID"]: str(node["NodeManagerHostname"]) for node in ray.nodes()}
        self._hosts = [hosts[names[bundle]] for bundle in self._bundles]
        if (engine := find_engine_across_nodes(self.node_of, self.engines)) is not None:
            raise RuntimeError(
                f"Ray put slots {engine.slots} of engine {engine.engine_index} on several nodes, but an engine fits into one; "
                "check that every node offers the same number of slots"
            )
        # Cores by node that Slurm or a container leaves to the processes which Ray starts there.
        self._num_cores: dict[int, int] = {}
        if config.cluster.gpus_per_node:
            task, slots = ray.remote(usable_cores), enumerate(self.first_slots)
            pending = {node: task.options(num_cpus=0, scheduling_strategy=self._on(slot)).remote() for node, slot in slots}
            self._num_cores = wait_all(pending, deadline_s=timeout_s, what="count of the cores of nodes")

    @property
    def num_dedicated_slots(self) -> int:
        """Slots with an engine worker and no policy rank."""
        return self.num_slots - self.num_policy_ranks

    def num_threads(self, slot: int) -> int:
        """CPU threads of the policy rank on `slot`, for optimizer steps and copies in host memory."""
        # One on hosts without GPUs, where results must not depend on how a sum is split.
        return share_of_cores(slot, self.node_of, self._num_cores) if self._num_cores else 1

    def options(self, slot: int, environment: dict[str, str]) -> dict[str, object]:
        """Options of an actor on `slot`. Actors take no Ray resources of their own and see all devices: mrl sets the device index."""
        return {
            "num_cpus": 0,
            "num_gpus": 0,
            "scheduling_strategy": self._on(slot),
            "max_restarts": 0,
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", **environment}},
        }

    def table(self) -> list[str]:
        return slot_table(self._hosts, self.num_policy_ranks, self.engines)

    def _on(self, slot: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._bundles[slot])
