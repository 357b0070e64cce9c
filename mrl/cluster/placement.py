"""Which worker unit holds which policy rank and which engine worker.

A worker unit is a GPU, or on hosts without GPUs a policy rank. Every unit has one policy rank; a TP group of consecutive
units of one node has one engine, placed with its first unit.
"""

from __future__ import annotations

from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mrl.config.schema import RunConfig


@dataclass(frozen=True)
class EngineUnits:
    """Worker units of one engine; engine worker `i` shares its unit with policy rank `units[i]`."""

    engine_index: int
    units: tuple[int, ...]


def engine_units(config: RunConfig) -> tuple[EngineUnits, ...]:
    """The units of every engine, spread evenly over all units; on GPU hosts every unit serves.

    Raises:
        ValueError: an engine would not fit into one node, or there are more engine workers than units.
    """
    tp = config.policy.generation.vllm_cfg.tensor_parallel_size
    num_units, per_node, num_engines = config.cluster.num_units, config.cluster.units_per_node, config.num_engines
    if per_node % tp:
        raise ValueError(
            f"policy.generation.vllm_cfg.tensor_parallel_size={tp} does not divide the {per_node} worker units of a node: "
            "an engine must fit into one node; choose a divisor"
        )
    if num_engines * tp > num_units:
        raise ValueError(
            f"policy.generation.num_cpu_engines={num_engines} engines of {tp} workers need {num_engines * tp} worker units, "
            f"but the cluster has {num_units}; lower it, or raise cluster.cpu_units_per_node"
        )
    stride = num_units // num_engines // tp * tp
    return tuple(EngineUnits(index, tuple(range(index * stride, index * stride + tp))) for index in range(num_engines))


class Placement:
    """The placement group of a run: one bundle per worker unit, and the actor options that put an actor on a unit."""

    def __init__(self, config: RunConfig, *, timeout_s: float) -> None:
        """Reserves the units.

        Raises:
            RuntimeError: the cluster cannot hold them within `timeout_s`.
        """
        cluster = config.cluster
        self.num_units = cluster.num_units
        self.engines = engine_units(config)
        bundle = {"CPU": 1.0, "GPU": 1.0} if cluster.gpus_per_node else {"CPU": 1.0}
        self._group: PlacementGroup = placement_group([bundle] * self.num_units, strategy="PACK")
        if not self._group.wait(timeout_s):
            raise RuntimeError(
                f"{self.num_units} worker units could not be placed within {timeout_s:g} s; the cluster has {ray.cluster_resources()}; "
                "check cluster.num_nodes and cluster.gpus_per_node"
            )

    def options(self, unit: int, environment: dict[str, str]) -> dict[str, object]:
        """Options of an actor on `unit`. Actors take no Ray resources of their own and see all devices: the device index is ours."""
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=unit)
        return {
            "num_cpus": 0,
            "num_gpus": 0,
            "scheduling_strategy": strategy,
            "max_restarts": 0,
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", **environment}},
        }

    def table(self) -> list[str]:
        """One line per unit: node, policy rank, engine and its worker."""
        nodes: dict[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
        served = {unit: f"{engine.engine_index}.{worker}" for engine in self.engines for worker, unit in enumerate(engine.units)}
        lines = ["unit  node      rank  engine.worker"]
        for unit in range(self.num_units):
            engine = served.get(unit, "-")
            lines.append(f"{unit:<5} {nodes[unit][:8]}  {unit:<5} {engine}")
        return lines
