"""Where the worker units of a run are: one Ray placement group, one bundle per unit (a GPU, or a process on hosts without GPUs)."""

from __future__ import annotations

import os
from typing import cast

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mrl.cluster.join import UNIT_RESOURCE
from mrl.cluster.units import engine_units, find_engine_across_nodes, share_of_cores, unit_table
from mrl.cluster.waiting import wait_all
from mrl.config.schema.run import RunConfig


class Placement:
    """The placement group of a run, and the actor options that put an actor on a unit."""

    def __init__(self, config: RunConfig, *, timeout_s: float) -> None:
        """Reserves the units.

        Raises:
            RuntimeError: the cluster cannot hold them within `timeout_s`, or only with an engine across two nodes.
        """
        self.num_units = config.num_units
        self.num_policy_ranks = config.num_policy_ranks
        self.engines = engine_units(config)
        bundle = {"CPU": 1.0, "GPU": 1.0} if config.cluster.gpus_per_node else {"CPU": 1.0}
        if not config.cluster.gpus_per_node and UNIT_RESOURCE in ray.cluster_resources():
            # A launcher has said how many units each of its nodes has; with CPUs alone to go by, all of them would come to lie on one.
            bundle[UNIT_RESOURCE] = 1.0
        self._group: PlacementGroup = placement_group([bundle] * self.num_units, strategy="PACK")
        if not self._group.wait(timeout_s):
            raise RuntimeError(
                f"{self.num_units} worker units could not be placed within {timeout_s:g} s; the cluster has {ray.cluster_resources()}; "
                "check cluster.num_nodes and cluster.gpus_per_node"
            )
        names: dict[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
        nodes = {name: node for node, name in enumerate(dict.fromkeys(names[bundle] for bundle in range(self.num_units)))}
        # Units are numbered node by node, whichever order Ray has filled the nodes in.
        self._bundles = sorted(range(self.num_units), key=lambda bundle: nodes[names[bundle]])
        self.node_of: dict[int, int] = {unit: nodes[names[bundle]] for unit, bundle in enumerate(self._bundles)}
        hosts = {node["NodeID"]: str(node["NodeManagerHostname"]) for node in ray.nodes()}
        self._hosts = [hosts[names[bundle]] for bundle in self._bundles]
        if (engine := find_engine_across_nodes(self.node_of, self.engines)) is not None:
            raise RuntimeError(
                f"units {engine.units} of engine {engine.engine_index} came to lie on several nodes, but an engine fits into one; "
                "check that every node offers the same number of units"
            )
        self._num_cores = self._count_cores(timeout_s) if config.cluster.gpus_per_node else {}

    @property
    def num_dedicated_units(self) -> int:
        """Units with an engine worker and no policy rank."""
        return self.num_units - self.num_policy_ranks

    def num_threads(self, unit: int) -> int:
        """CPU threads of the policy rank on `unit`, for optimizer steps and copies in host memory; see `share_of_cores`.

        One on hosts without GPUs, where results must not depend on how a sum is split.
        """
        return share_of_cores(unit, self.node_of, self._num_cores) if self._num_cores else 1

    def options(self, unit: int, environment: dict[str, str]) -> dict[str, object]:
        """Options of an actor on `unit`. Actors take no Ray resources of their own and see all devices: the device index is ours."""
        return {
            "num_cpus": 0,
            "num_gpus": 0,
            "scheduling_strategy": self._strategy(unit),
            "max_restarts": 0,
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", **environment}},
        }

    def table(self) -> list[str]:
        """One line per unit, see `mrl.cluster.units.unit_table`."""
        return unit_table(self._hosts, self.num_policy_ranks, self.engines)

    def _strategy(self, unit: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._bundles[unit])

    def _count_cores(self, timeout_s: float) -> dict[int, int]:
        """By node, the cores that Slurm or a container leaves to the processes which Ray starts there."""
        task = ray.remote(usable_cores)
        units = {node: unit for unit, node in self.node_of.items()}
        pending = {node: task.options(num_cpus=0, scheduling_strategy=self._strategy(unit)).remote() for node, unit in units.items()}
        return cast(dict[int, int], wait_all(pending, deadline_s=timeout_s, what="count of the cores of nodes"))


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))
