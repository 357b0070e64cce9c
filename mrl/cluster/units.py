"""Which worker units carry policy ranks and which carry engine workers. Pure arithmetic on the config; `placement.py` finds them nodes.

Units 0 to num_policy_ranks - 1 carry the policy rank of the same number. Colocated engines share those units; dedicated engines have
the units that follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mrl.config.schema.run import RunConfig


@dataclass(frozen=True)
class EngineUnits:
    """Worker units of one engine; `units[i]` carries its worker `i`."""

    engine_index: int
    units: tuple[int, ...]

    def device_ids(self, gpus_per_node: int) -> tuple[int, ...]:
        """GPU of each worker among those of its node, where the policy rank of its unit is too; empty on hosts without GPUs."""
        return tuple(unit % gpus_per_node for unit in self.units) if gpus_per_node else ()


def engine_units(config: RunConfig) -> tuple[EngineUnits, ...]:
    """The units of every engine: consecutive, and spread evenly over those that may serve; on GPU hosts all of these do."""
    tp, num_engines = config.policy.generation.vllm_cfg.tensor_parallel_size, config.num_engines
    if not num_engines:
        return ()
    num_serving = config.num_dedicated_units or config.num_policy_ranks
    first = config.num_units - num_serving
    stride = num_serving // num_engines // tp * tp
    assert stride >= tp, "mrl.config.rules.layout refuses more engine workers than units"
    starts = (first + index * stride for index in range(num_engines))
    return tuple(EngineUnits(index, tuple(range(start, start + tp))) for index, start in enumerate(starts))


def unit_table(hosts: Sequence[str], num_policy_ranks: int, engines: Sequence[EngineUnits]) -> list[str]:
    """One line per unit: its host (`hosts[unit]`), policy rank, engine and its worker."""
    served = {unit: f"{engine.engine_index}.{worker}" for engine in engines for worker, unit in enumerate(engine.units)}
    width = max(map(len, (*hosts, "node")))
    lines = [f"unit  {'node':<{width}}  rank  engine.worker"]
    for unit, host in enumerate(hosts):
        rank = str(unit) if unit < num_policy_ranks else "-"
        lines.append(f"{unit:<5} {host:<{width}}  {rank:<5} {served.get(unit, '-')}")
    return lines


def share_of_cores(unit: int, node_of: Mapping[int, int], num_cores: Mapping[int, int]) -> int:
    """Cores of a unit's node for each of its units, at least 1; `num_cores` by node."""
    node = node_of[unit]
    return max(1, num_cores[node] // sum(other == node for other in node_of.values()))


def find_engine_across_nodes(node_of: Mapping[int, int], engines: Sequence[EngineUnits]) -> EngineUnits | None:
    """An engine whose workers would be on several nodes; None if there is none."""
    return next((engine for engine in engines if len({node_of[unit] for unit in engine.units}) > 1), None)
