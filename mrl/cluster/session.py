"""Everything of a run that is alive: Ray, policy ranks, engines, rewards, and the refit that connects them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mrl.capacity.phases import Phase
from mrl.capacity.start_deadline import start_deadline
from mrl.cluster.engine_group import EngineGroup
from mrl.cluster.placement import Placement
from mrl.cluster.policy_group import PolicyGroup
from mrl.cluster.refit import Refit
from mrl.cluster.reward_actor import Rewards
from mrl.cluster.rollouts import RolloutCollector
from mrl.cluster.runtime import ray_runtime
from mrl.config.schema.run import RunConfig
from mrl.envs.endpoints import FILE_NAME

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Session:
    """The actors of a run, up and holding the starting weights."""

    policies: PolicyGroup
    engines: EngineGroup
    rewards: Rewards
    refit: Refit
    collector: RolloutCollector

    def enter(self, phase: Phase, *, deadline_s: float) -> None:
        """Brings the policy into a phase in which it works, and colocated engines, which yield their memory. Dedicated ones go on."""
        if self.engines.are_colocated:
            self.engines.enter(phase, deadline_s=deadline_s)
        self.policies.call("enter", phase, deadline_s=deadline_s)


@contextmanager
def start_session(config: RunConfig, *, pad_token_id: int, log_folder: Path) -> Iterator[Session]:
    """All actors of a run, inside the `with` block; policy and engines have each loaded the model folder by their own loader."""
    with placed_units(config) as placement, endpoints_removed(log_folder):
        rewards = Rewards(config, placement, log_folder=log_folder)
        policies, engines, refit = start_models(config, placement, pad_token_id=pad_token_id, log_folder=log_folder)
        rewards.wait_until_built()
        collector = RolloutCollector(
            engines,
            rewards,
            run_seed=config.grpo.seed,
            deadline_s=config.deadlines.generate_s,
            restart_engine=refit.restart_engine,
            longest_first=config.policy.generation.longest_first,
        )
        if config.grpo.async_grpo.max_lag_steps > 0:
            policies.beside = rewards.beside = collector
        yield Session(policies, engines, rewards, refit, collector)


@contextmanager
def start_policies(config: RunConfig, *, pad_token_id: int, log_folder: Path) -> Iterator[PolicyGroup]:
    """The policy ranks of a run without engines, inside the `with` block, with the model folder's weights."""
    with placed_units(config) as placement:
        policies = PolicyGroup(config, placement, pad_token_id=pad_token_id, log_folder=log_folder)
        logger.info("Number of actors online: %d/%d", policies.world_size, placement.num_units)
        yield policies


@contextmanager
def start_engines(config: RunConfig, *, weight_version: int, log_folder: Path) -> Iterator[RolloutCollector]:
    """Engines and rewards alone, inside the `with` block; the engines sample from the model folder's weights, called `weight_version`."""
    with placed_units(config) as placement, endpoints_removed(log_folder):
        rewards = Rewards(config, placement, log_folder=log_folder)
        engines = EngineGroup(config, placement, log_folder=log_folder)
        engines.wait_until_built()
        rewards.wait_until_built()

        def serve(indices: Sequence[int]) -> None:
            deadline_s = config.deadlines.refit_s
            engines.call("enter", "refit", deadline_s=deadline_s, only=indices)
            engines.call("set_weight_version", weight_version, deadline_s=deadline_s, only=indices)
            engines.call("enter", "generate", deadline_s=deadline_s, only=indices)

        def restart(index: int) -> None:
            engines.restart(index)
            serve([index])
            engines.resubmit(index)

        serve(range(engines.num_engines))
        yield RolloutCollector(
            engines,
            rewards,
            run_seed=config.eval.seed,
            deadline_s=config.deadlines.generate_s,
            restart_engine=restart,
            longest_first=config.policy.generation.longest_first,
        )


@contextmanager
def placed_units(config: RunConfig) -> Iterator[Placement]:
    """Ray, and a place for every worker unit, inside the `with` block."""
    with ray_runtime(config):
        deadline = start_deadline(config)
        logger.info("%s", deadline)
        placement = Placement(config, timeout_s=deadline.seconds)
        for line in placement.table():
            logger.info("%s", line)
        yield placement


@contextmanager
def endpoints_removed(log_folder: Path) -> Iterator[None]:
    """After the `with` block nobody finds addresses of engines that are gone."""
    try:
        yield
    finally:
        (log_folder / FILE_NAME).unlink(missing_ok=True)


def start_models(config: RunConfig, placement: Placement, *, pad_token_id: int, log_folder: Path) -> tuple[PolicyGroup, EngineGroup, Refit]:
    """Policy ranks and engines with the model folder's weights, and the refit between them, its schedule built and proven.

    Raises:
        ScheduleError, RuntimeError: see `Refit`.
    """
    engines = EngineGroup(config, placement, log_folder=log_folder)
    if config.policy.generation.colocated.enabled and config.cluster.gpus_per_node:
        # vLLM sizes its KV cache by the free memory of the whole GPU, so nobody else may take any; then the cache leaves.
        engines.wait_until_built()
    policies = PolicyGroup(config, placement, pad_token_id=pad_token_id, log_folder=log_folder)
    engines.wait_until_built()
    logger.info("Number of actors online: %d/%d", policies.world_size + placement.num_dedicated_units, placement.num_units)
    return policies, engines, Refit(config, placement, policies, engines)
