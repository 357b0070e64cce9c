# SPDX-License-Identifier: Apache-2.0
"""Ray for one run: a private cluster on one node, the launcher's cluster on several, and a place for every slot."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import ray
from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader  # pyright: ignore[reportAttributeAccessIssue]  compiled, without stubs
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from conversion.files.owners import Owner, heartbeat, may_live, this_process
from mrl import env, startup
from mrl.cluster import hangs
from mrl.cluster.calls import dead_daemons, ray_thread, wait_all
from mrl.cluster.daemons import NO_ADDRESS, OBJECT_STORE_BYTES, ended_children, last_words, settings_of_ray
from mrl.cluster.environment import SIGNS
from mrl.cluster.errors import NoCluster
from mrl.cluster.hangs import RAY_PROCESSES
from mrl.cluster.lifetime import REAPER_TIMEOUT_S, end_reaper, kill_processes, read_capacity, start_reaper
from mrl.cluster.lookouts import Lookouts
from mrl.cluster.members import Member, heads, members, warn_of_public
from mrl.cluster.scheduling import (
    elastic_slots,
    engine_slots,
    find_shared_node,
    find_uneven_engine,
    judge_slots,
    own_slots,
    share_of_cores,
    slot_table,
)
from mrl.cluster.watchdog import start_watchdog
from mrl.config.schema.run import RunConfig
from mrl.config.texts import rounded
from mrl.envs.workers import usable_cores
from mrl.plan.deadlines import all_deadlines, start_deadline
from mrl.signals import LISTENER, MARK, shielded
from mrl.types import PayloadRef

logger = logging.getLogger(__name__)

FOLDER_PREFIX = "mrl-ray-"
OWNER_FILE = "owner.json"
RAY_FOLDER = "ray"
"""Inside the session folder of a run, which nobody else may enter: Ray opens its own to everybody."""
SLOT_RESOURCE = "worker_units"
"""NeMo RL's name for the Ray resource of a launched node: as many as it has slots."""
CONNECT_TIMEOUT_S = 10.0
# A head that does not answer: Ray's own limits add up to minutes.
JOIN_TIMEOUT_S = 600.0
POLL_S = 1.0
STARTS = (0.5, 0.2, 0.3)
"""Tries to start Ray: how much of the time for a start each gets. The first has most: Ray's call to a head that is dead
holds the process until `RAY_gcs_rpc_server_reconnect_timeout_s`, which ends it, so that there is no second try.
"""
SHUTDOWN_SHARE = 0.1
"""Part of the time for a start in which a call must end once Ray's processes are dead."""
RAY_LIMITS = {
    "RAY_gcs_server_port_wait_time_s": 1,
    "RAY_raylet_start_wait_time_s": 1,
    "RAY_worker_register_timeout_seconds": 1,
    "RAY_agent_register_timeout_ms": 1000,
    "RAY_gcs_rpc_server_reconnect_timeout_s": 1,
}
"""Time that Ray gives its own processes to start, and the other processes after the death of its head, in which a run
saves. Its defaults, of 15 to 60 s, are too short for a busy host."""
MAX_REASON = 300
PLACE_S = 10.0
"""Ray places what fits in less."""
ABSENT = "absent"
"""Host of a slot for which there is no node yet."""


@contextmanager
def ray_runtime(config: RunConfig, log_folder: Path | None = None) -> Iterator[Path]:
    """Ray, up in the `with` block: a private local cluster on one node, the launcher's (RAY_ADDRESS) on several.

    Gives the session folder, which nobody else may enter, and which goes with the run. With `log_folder`, a watchdog
    looks at the run's processes, and writes there.
    """
    reclaim_dead_owners()
    members.clear()
    heads.clear()
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    owner_file = folder / OWNER_FILE
    owner_file.write_text(json.dumps(asdict(this_process())))
    with shielded():
        reaper = start_reaper(folder)
    LISTENER.reaper_pid = reaper.pid
    watchdog = start_watchdog(config, folder, log_folder)
    # The driver raises the first failure of a group call with its reason; Ray would print those of all other ranks on
    # top.
    os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
    # Ray gives its workers niceness 15: with any other work on the host, ranks would miss each other's deadlines.
    os.environ["RAY_worker_niceness"] = "0"
    # Ray starts a Python process for each CPU ahead of time. Our actors have environments of their own, so that none
    # takes one of these.
    os.environ["RAY_prestart_worker_first_driver"] = "0"
    try:
        with shielded(), hangs.waiting("start of Ray", lambda: RAY_PROCESSES, time.monotonic(), may_idle=True):
            if config.cluster.num_nodes > 1:
                join_cluster()
                living = wait_for_graders(config, limit_s=start_deadline(config).seconds)
                members[:] = [
                    Member(str(node["NodeManagerHostname"]), node["NodeManagerAddress"], node["NodeManagerPort"])
                    for node in living
                ]
                warn_of_public(members)
                address, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
                heads[:] = [
                    Member(member.host, address, int(port), "gcs_server")
                    for member in members
                    if member.address == address
                ]
            else:
                _keep_others_out(folder)
                start_ray(config, folder)
        if watchdog is not None:
            watchdog.look_after(dead_daemons)
            if config.cluster.num_nodes > 1:
                watchdog.lookouts = Lookouts(folder.name, watchdog.interval_s)
        with heartbeat(owner_file):
            yield folder
    except RuntimeError as error:
        if hangs.explained([]):
            # Ray ends this process, too, once its daemons, which hang, have been killed.
            logger.error("The attempt ended: %s. Logs of the actors: %s. The same command resumes.", error, log_folder)
        raise
    finally:
        if watchdog is not None:
            watchdog.stop()
        shut_down(reaper, folder)


def start_ray(config: RunConfig, folder: Path) -> None:
    """Starts Ray for this run alone, with its files in `folder`; NoCluster: it does not start in `STARTS` tries."""
    limit_s = start_deadline(config).seconds
    for name, unit in RAY_LIMITS.items():
        os.environ.setdefault(name, str(round(limit_s * unit)))
    for start, share in enumerate(STARTS, 1):
        killed = ended_children()  # those of the try before, which this process has killed itself
        try:
            # Ray joins any local cluster it finds unless told otherwise. Logical CPUs only bound how many actors may be
            # placed.
            ray_thread().within(
                round(share * limit_s, 1),
                "ray.init",
                ray.init,
                address="local",
                num_cpus=config.num_slots + 2,
                num_gpus=config.cluster.gpus_per_node,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES + config.frozen_output_bytes,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=str(folder / RAY_FOLDER),
            )
            return
        except (Exception, SystemExit) as error:  # Ray raises Exception itself where a daemon is late
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:MAX_REASON]}"
            if said := last_words(folder / RAY_FOLDER, killed):
                reason += f" ({said})"
            kill_processes(str(folder))
            if is_held := not _is_reset(min(REAPER_TIMEOUT_S, SHUTDOWN_SHARE * limit_s)):
                reason += "; the call does not end with Ray's processes, so that only a new process can try again"
            if is_held or start == len(STARTS):
                raise NoCluster(
                    f"Ray does not start on this host, tried {start} time{'s' * (start > 1)}: {reason}; this host has "
                    f"{read_capacity()}; {settings_of_ray()}end what else runs here, or raise deadlines.start_s; "
                    "python -m mrl.doctor looks at the host"
                ) from error
            logger.warning("Ray has not started (%s); this host has %s; trying again", reason, read_capacity())


def _is_reset(limit_s: float) -> bool:
    """Ends what is left of a start whose processes are dead. False: its call still waits for their head."""
    try:
        ray_thread().within(limit_s, "ray.shutdown", ray.shutdown)
    except TimeoutError:
        return False
    return True


_held: list[PayloadRef] = []


def end_ray() -> None:
    """Shuts Ray down while all references to payloads are held. TimeoutError: it does not end in time.

    Ray 2.60 removes its worker before Python knows, and ends the process without a word if another thread lets go of a
    reference in between (core_worker_process.cc).
    """
    _held.extend(one for one in gc.get_objects() if type(one) is PayloadRef)
    ray_thread().within(REAPER_TIMEOUT_S, "ray.shutdown", ray.shutdown)
    _held.clear()


def shut_down(reaper: subprocess.Popen[bytes], folder: Path) -> None:
    """Ends Ray and all processes of the run; only logs those that do not end."""
    # While Ray shuts down. It would wait a second for each of its daemons, which block the signal by which it asks them
    # to end.
    assert reaper.stdin is not None
    reaper.stdin.close()
    try:
        if not ray_thread().is_held:  # Ray would end this process while it waits
            end_ray()
    except TimeoutError as error:
        logger.warning("%s; its processes are killed", error)
    for left in end_reaper(reaper, folder):
        logger.warning("%s has been killed and does not end; it is left behind", left)
    LISTENER.reaper_pid = None


def join_cluster() -> None:
    """Joins the launcher's cluster (RAY_ADDRESS); raises NoCluster if nobody answers, or it refuses this process."""
    address = env.RAY_ADDRESS.read()
    if address is None:
        raise NoCluster(NO_ADDRESS)
    # Looks first whether it is there: Ray would try for minutes, and say little.
    found = re.fullmatch(r"(.+):(\d+)", address)
    if found is not None and "://" not in address:
        try:
            socket.create_connection((found[1], int(found[2])), timeout=CONNECT_TIMEOUT_S).close()
        except OSError as error:
            raise NoCluster(
                f"RAY_ADDRESS={address}: nobody answers there ({error}); the head has ended, or the address is one "
                "of an earlier job: set it to the head of this one"
            ) from error
    try:
        ray_thread().within(
            JOIN_TIMEOUT_S, "ray.init", ray.init, address="auto", log_to_driver=False, logging_level=logging.ERROR
        )
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise NoCluster(
            f"RAY_ADDRESS={address}: {reason}; the token (RAY_AUTH_TOKEN_PATH) and Ray's version must be the head's"
        ) from error


def wait_for_graders(config: RunConfig, *, limit_s: float) -> list[dict]:
    """Ray's nodes that are online, once there is one for each of the run, those of `env.placement` included.

    The launcher has waited for those of the slots. RuntimeError: one does not join in time.
    """
    wanted, end = config.cluster.num_nodes + config.num_grader_nodes, time.monotonic() + limit_s
    while True:
        living = [node for node in ray.nodes() if node["Alive"]]
        if not config.num_grader_nodes or len(living) >= wanted:
            return living
        if time.monotonic() > end:
            raise RuntimeError(
                f"{len(living)} of {wanted} nodes are online after {rounded(limit_s)} s: cluster.num_nodes="
                f"{config.cluster.num_nodes} and env.placement.num_nodes={config.env.placement.num_nodes}, which join "
                "without slots (docs/cluster.md); look at their logs, or raise deadlines.start_s"
            )
        time.sleep(POLL_S)


def _keep_others_out(folder: Path) -> None:
    # Ray would otherwise keep one token for all runs in the home folder.
    token_file = folder / "token"
    token_file.touch(mode=0o600)
    token_file.write_text(secrets.token_hex(32))
    # A shell may have tokens off for another cluster; Ray switches them on when the variable is absent.
    os.environ.pop("RAY_AUTH_MODE", None)
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token_file)
    AuthenticationTokenLoader.instance().reset_cache()
    logging.getLogger("ray").setLevel(logging.ERROR)
    # Ray's metrics ask nobody for a token. It replaces a `_node_ip_address` of 127.0.0.1 by the host's own, unless it
    # takes the platform for one without clusters: a constant, read from RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER at its import
    # (ray/_private/services.py in 2.60).
    ray_constants.ENABLE_RAY_CLUSTER = False


def reclaim_dead_owners() -> None:
    """Removes session folders of this user's runs whose driver and reaper are both gone, as after a power loss."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        if folder.lstat().st_uid != os.getuid():
            continue
        # Other hosts, and containers that share the folder but not their process ids, judge each other by a heartbeat
        # in the owner file.
        try:
            owner = Owner(**json.loads((folder / OWNER_FILE).read_text()))
            is_dead = not may_live(owner, folder / OWNER_FILE)
        except (OSError, ValueError, TypeError):  # its owner is still writing it, or it is not ours
            continue
        if is_dead:
            logger.info("removing %s, left by process %d on %s", folder, owner.pid, owner.host)
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def placed_slots(config: RunConfig, log_folder: Path | None = None, *, trains: bool = True) -> Iterator[Placement]:
    """Ray, and a place for every slot, in the `with` block; see `ray_runtime`. Without `trains`: an evaluation."""
    with ray_runtime(config, log_folder) as folder:
        deadlines = all_deadlines(config, trains=trains)
        for deadline in deadlines:
            logger.info("%s", deadline)
        placement = Placement(config, folder, timeout_s=deadlines[0].seconds)
        for line in placement.table():
            logger.info("%s", line)
        startup.lap("ray")
        yield placement


class Placement:
    """The Ray placement groups of a run, one bundle per slot, and the options that put an actor on a slot."""

    def __init__(self, config: RunConfig, folder: Path, *, timeout_s: float) -> None:
        """Reserves slots; raises RuntimeError if they do not fit within `timeout_s`, or only with an uneven engine."""
        self.folder = folder
        self.num_slots = config.num_slots
        self.num_policy_ranks = config.num_policy_ranks
        self.engines = engine_slots(config)
        self.own_slots = own_slots(config)
        """Slots of each model with nodes of its own."""
        self.judges = judge_slots(config)
        bundle = {"CPU": 1.0, "GPU": 1.0} if config.cluster.gpus_per_node else {"CPU": 1.0}
        if not config.cluster.gpus_per_node and SLOT_RESOURCE in ray.cluster_resources():
            # The launcher has given each of its nodes its number of slots; by CPUs alone, Ray would put all of them on
            # one node.
            bundle[SLOT_RESOURCE] = 1.0
        elastic = elastic_slots(config)
        num_fixed = self.num_slots - sum(map(len, elastic))
        self._places = dict[int, tuple[PlacementGroup, int]]()
        """Placement group and bundle of each slot. Ray finds another node for a group whose node is lost."""
        self.absent_engines: set[int] = set()
        """Engines without a place at the start."""
        names = self._place(self._reserve(range(num_fixed), bundle, "PACK"), timeout_s)
        if names is None:
            raise RuntimeError(self._unplaced(timeout_s))
        fixed_nodes = {*names.values()}
        names |= self._place_elastic(
            [self._reserve(slots, bundle, "STRICT_PACK") for slots in elastic], config, timeout_s
        )
        if elastic:
            forget_nodes({*names.values()} - fixed_nodes)
        nodes = {name: node for node, name in enumerate(dict.fromkeys(names.values()))}
        self.node_of: dict[int, int] = {slot: nodes[name] for slot, name in names.items()}
        self.first_slots = [slot for slot in range(num_fixed) if slot == 0 or names[slot] != names[slot - 1]]
        """First slot of each node, without those that may be lost."""
        hosts = {node["NodeID"]: str(node["NodeManagerHostname"]) for node in ray.nodes()}
        self._hosts = [hosts.get(name, ABSENT) for name in names.values()]
        engines = [engine for group in (self.engines, *self.judges.values()) for engine in group]
        if (engine := find_uneven_engine(self.node_of, engines)) is not None:
            raise RuntimeError(
                f"Ray put more slots of engine {engine.engine_index} ({engine.slots}) on one node than on another; "
                "check that every node offers the same number of slots"
            )
        if (model := find_shared_node(self.node_of, self.own_slots, self.num_slots)) is not None:
            raise RuntimeError(
                f"Ray put slots of the {model}, which has nodes of its own, on a node of others; check that every node "
                f"offers {config.cluster.slots_per_node} slots"
            )
        self.reward_options = [self._options(where, {}) for where in self._reward_places(config, {*names.values()})]
        """An actor's options on each node of rewards."""
        self._num_cores: dict[int, int] = {}
        if config.cluster.gpus_per_node:
            task, slots = ray.remote(usable_cores), enumerate(self.first_slots)
            pending = {
                node: task.options(num_cpus=0, scheduling_strategy=self._on(slot)).remote() for node, slot in slots
            }
            self._num_cores = wait_all(pending, deadline_s=timeout_s, what="count of the cores of nodes")

    def _reserve(self, slots: range, bundle: dict[str, float], strategy: str) -> tuple[range, PlacementGroup]:
        group = placement_group([bundle] * len(slots), strategy=strategy)
        self._places |= {slot: (group, place) for place, slot in enumerate(slots)}
        return slots, group

    def _place(self, reserved: tuple[range, PlacementGroup], timeout_s: float) -> dict[int, str] | None:
        """The node of each of these slots, node by node; None: they do not fit within `timeout_s`."""
        slots, group = reserved
        if not group.wait(timeout_s):
            return None
        names: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
        first = list(dict.fromkeys(names[place] for place in range(len(slots))))
        # Slots are numbered node by node, whichever order Ray has filled the nodes in.
        places = sorted(range(len(slots)), key=lambda place: first.index(names[place]))
        self._places |= {slot: (group, place) for slot, place in zip(slots, places, strict=True)}
        return {slot: names[place] for slot, place in zip(slots, places, strict=True)}

    def _place_elastic(
        self, reserved: Sequence[tuple[range, PlacementGroup]], config: RunConfig, timeout_s: float
    ) -> dict[int, str]:
        """The node of each slot of engines that come and go, once the fewest are placed; of others `ABSENT` and N."""
        generation, end = config.policy.generation, time.monotonic() + timeout_s
        least, found, waiting = generation.min_num_engines or 0, dict[int, str](), list(reserved)
        while waiting and time.monotonic() < end:
            is_enough = len(found) // generation.num_workers >= least
            end = min(end, time.monotonic() + PLACE_S) if is_enough else end
            # Ray serves them in any order.
            for one in list(waiting):
                if placed := self._place(one, POLL_S):
                    found |= placed
                    waiting.remove(one)
        if len(found) // generation.num_workers < least:
            raise RuntimeError(self._unplaced(timeout_s))
        absent = {slot: f"{ABSENT} {number}" for number, (slots, _) in enumerate(waiting) for slot in slots}
        self.absent_engines = {engine.engine_index for engine in self.engines if engine.slots[0] in absent}
        return dict(sorted((found | absent).items()))

    def _unplaced(self, timeout_s: float) -> str:
        return (
            f"{self.num_slots} slots could not be placed within {rounded(timeout_s)} s; the cluster has "
            f"{ray.cluster_resources()}; check cluster.num_nodes and cluster.gpus_per_node"
        )

    @property
    def num_dedicated_slots(self) -> int:
        """Slots with an engine worker and no policy rank."""
        return self.num_slots - self.num_policy_ranks - sum(map(len, self.own_slots.values()))

    def num_threads(self, slot: int) -> int:
        """CPU threads of the policy rank on `slot`, for optimizer steps and copies in host memory."""
        return share_of_cores(slot, self.node_of, self._num_cores) if self._num_cores else 1

    def options(self, slot: int, environment: dict[str, str]) -> dict[str, object]:
        """An actor's options on `slot`. Actors take no Ray resources and see all devices: mrl sets the device index."""
        return self._options(self._on(slot), environment)

    def _options(self, where: object, environment: dict[str, str]) -> dict[str, object]:
        given = {
            "OMP_NUM_THREADS": "1",
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
            SIGNS: Path(os.environ[MARK]).name,
        }
        return {
            "num_cpus": 0,
            "num_gpus": 0,
            "scheduling_strategy": where,
            "max_restarts": 0,
            "runtime_env": {"env_vars": given | environment},
        }

    def _reward_places(self, config: RunConfig, with_slots: set[str]) -> Sequence[object]:
        """Places of the reward actors: each node of slots, or nodes that have neither a slot of a run nor a GPU."""
        num_nodes = config.num_grader_nodes
        if not num_nodes:
            return [self._on(slot) for slot in self.first_slots]
        free = sorted(
            (str(node["NodeManagerHostname"]), str(node["NodeID"]))
            for node in ray.nodes()
            if node["Alive"]
            and node["NodeID"] not in with_slots
            and not any(node["Resources"].get(name) for name in ("GPU", SLOT_RESOURCE))
        )
        if len(free) < num_nodes:
            raise RuntimeError(
                f"env.placement.num_nodes={num_nodes}, and the cluster has {len(free)} nodes without slots and GPUs; "
                "let more of them join (docs/cluster.md), or lower it: 0 computes rewards on the nodes of the slots"
            )
        return [NodeAffinitySchedulingStrategy(node_id, soft=False) for _, node_id in free[:num_nodes]]

    def table(self) -> list[str]:
        return slot_table(self._hosts, self.num_policy_ranks, self.engines, self.own_slots)

    def _on(self, slot: int) -> PlacementGroupSchedulingStrategy:
        group, place = self._places[slot]
        return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place)


def forget_nodes(names: set[str]) -> None:
    """Lets nodes, by their ids, be lost: they are no `members` of the run."""
    ports = {
        (node["NodeManagerAddress"], node["NodeManagerPort"]) for node in ray.nodes() if str(node["NodeID"]) in names
    }
    members[:] = [member for member in members if (member.address, member.port) not in ports]
