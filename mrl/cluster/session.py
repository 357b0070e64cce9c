# SPDX-License-Identifier: Apache-2.0
"""Starts the processes of a run, and owns the phases in which policy ranks and engines share their devices."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from mrl import startup
from mrl.cluster.deadlines import checkpoint_deadline
from mrl.cluster.engines import EngineGroup
from mrl.cluster.policies import PolicyGroup, convert_if_new
from mrl.cluster.refit import Refit
from mrl.cluster.rewards import Rewards
from mrl.cluster.rollouts import RolloutCollector
from mrl.cluster.runtime import Placement, placed_slots
from mrl.cluster.scheduling import until_no_engine_dies
from mrl.cluster.verbs import EngineVerbs, PolicyVerbs
from mrl.config.schema.run import RunConfig
from mrl.envs.endpoints import FILE_NAME
from mrl.phases import Phase

logger = logging.getLogger(__name__)


@dataclass
class PolicySession:
    """Policy ranks without engines. Nothing ever leaves their devices: they enter the phase "train" once and stay in it."""

    policies: PolicyGroup
    _is_training: bool = False

    def enter(self, phase: Phase) -> None:
        """Brings the policy into a phase in which it works."""
        if not self._is_training:
            self.policies.call(PolicyVerbs.enter, "train")
            self._is_training = True

    def saving(self) -> AbstractContextManager[None]:
        """Inside the `with` block the policy is in the phase in which it begins to save."""
        return nullcontext()


@dataclass(frozen=True)
class RolloutSession:
    """Policy ranks, engines, rewards, and the refit that connects them."""

    config: RunConfig
    policies: PolicyGroup
    engines: EngineGroup
    rewards: Rewards
    refit: Refit
    collector: RolloutCollector

    def enter(self, phase: Phase) -> None:
        """Brings the policy into a phase in which it works, and colocated engines, which yield their memory. Dedicated ones go on."""
        deadline_s = self.policies.deadline_s
        if self.engines.are_colocated:
            self.engines.enter(phase, deadline_s=deadline_s)
        self.policies.call(PolicyVerbs.enter, phase, deadline_s=deadline_s)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Inside the `with` block the policy is in the phase in which it begins to save. Engines keep their weights."""
        # The policy saves between a refit or a validation and the next rollouts.
        deadline_s = checkpoint_deadline(self.config).seconds
        self.policies.call(PolicyVerbs.enter, "checkpoint", deadline_s=deadline_s)
        yield
        self.policies.call(PolicyVerbs.enter, "generate", deadline_s=deadline_s)


Session = PolicySession | RolloutSession
"""The processes of a run, as the training loop sees them."""


@contextmanager
def start_session(config: RunConfig, *, pad_token_id: int, log_folder: Path) -> Iterator[RolloutSession]:
    """All actors of a run, inside the `with` block; policy and engines have each loaded the model folder by their own loader."""
    with placed_slots(config) as placement, endpoints_removed(log_folder):
        rewards = Rewards(config, placement, log_folder=log_folder)
        policies, engines, refit = start_models(config, placement, pad_token_id=pad_token_id, log_folder=log_folder)
        rewards.wait_until_built()
        startup.lap("rewards")
        collector = RolloutCollector(config, engines, rewards, seed=config.grpo.seed, restart_engine=refit.restart_engine)
        if config.grpo.async_grpo.max_lag_steps > 0:
            policies.beside = rewards.beside = collector
        yield RolloutSession(config, policies, engines, rewards, refit, collector)


@contextmanager
def start_policies(config: RunConfig, *, pad_token_id: int, log_folder: Path) -> Iterator[PolicySession]:
    """The policy ranks of a run without engines, inside the `with` block, with the model folder's weights."""
    with placed_slots(config) as placement:
        policies = PolicyGroup(config, placement, pad_token_id=pad_token_id, log_folder=log_folder)
        logger.info("Number of actors online: %d/%d", policies.world_size, placement.num_slots)
        yield PolicySession(policies)


@contextmanager
def start_engines(config: RunConfig, *, weight_version: int, log_folder: Path) -> Iterator[RolloutCollector]:
    """Engines and rewards alone, inside the `with` block; the engines sample from the model folder's weights as `weight_version`."""
    with placed_slots(config) as placement, endpoints_removed(log_folder):
        rewards = Rewards(config, placement, log_folder=log_folder)
        engines = EngineGroup(config, placement, log_folder=log_folder)
        engines.wait_until_built()
        rewards.wait_until_built()

        def serve(indices: Sequence[int]) -> None:
            engines.call(EngineVerbs.enter, "refit", only=indices)
            engines.call(EngineVerbs.serve, weight_version, only=indices)

        def restart(index: int) -> None:
            until_no_engine_dies(lambda restarted: serve(sorted(restarted)), engines.restart, died=index)
            engines.book.resubmit(index)

        serve(range(engines.num_engines))
        yield RolloutCollector(config, engines, rewards, seed=config.eval.seed, restart_engine=restart)


@contextmanager
def endpoints_removed(log_folder: Path) -> Iterator[None]:
    try:
        yield
    finally:
        (log_folder / FILE_NAME).unlink(missing_ok=True)


def start_models(config: RunConfig, placement: Placement, *, pad_token_id: int, log_folder: Path) -> tuple[PolicyGroup, EngineGroup, Refit]:
    """Policy ranks and engines with the model folder's weights, and the refit between them, its schedule built and proven; see `Refit`."""
    engines = EngineGroup(config, placement, log_folder=log_folder)
    if config.policy.generation.colocated.enabled and config.cluster.gpus_per_node:
        # vLLM sizes its KV cache by the free memory of the whole GPU, so nobody else may take any; then the cache leaves.
        convert_if_new(config)
        engines.wait_until_built()
        startup.lap("engines")
    policies = PolicyGroup(config, placement, pad_token_id=pad_token_id, log_folder=log_folder)
    engines.wait_until_built()
    startup.lap("engines")
    logger.info("Number of actors online: %d/%d", policies.world_size + placement.num_dedicated_slots, placement.num_slots)
    refit = Refit(config, placement, policies, engines)
    startup.lap("schedule")
    return policies, engines, refit
