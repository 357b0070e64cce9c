"""Collects a step's rollouts: requests out to the engines, finished rollouts straight to the rewards, groups back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mrl.cluster.engine_group import EngineGroup, index_of
from mrl.cluster.reward_actor import Rewards
from mrl.cluster.waiting import ActorLost
from mrl.types import Prompt, RolloutGroup, RolloutInfo, RolloutRequest, SamplingParams, request_seed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Generated:
    """Sampled rollouts without their verdicts."""

    prompts: list[Prompt]
    groups: list[list[RolloutInfo]]
    """groups[i] = rollouts of prompts[i], in order of `rollout_index`."""


class RolloutCollector:
    """Samples groups of rollouts and has them scored while generation goes on."""

    def __init__(
        self, engines: EngineGroup, rewards: Rewards, *, run_seed: int, deadline_s: float, restart_engine: Callable[[int], None]
    ) -> None:
        """`restart_engine(index)` starts a dead engine again; see `Refit.restart_engine`."""
        self.engines = engines
        self.rewards = rewards
        self.run_seed = run_seed
        self.deadline_s = deadline_s
        self.restart_engine = restart_engine

    def generate(
        self,
        asked: Sequence[tuple[int, Prompt]],
        sampling: SamplingParams,
        *,
        num_generations: int,
        weight_version: int,
        on_progress: Callable[[int], None],
    ) -> Generated:
        """Samples `num_generations` rollouts of every (epoch, prompt); they are scored as they arrive, `judge` has the verdicts.

        Raises:
            RuntimeError: a rollout was drawn from other weights than `weight_version`, or an engine keeps dying.
        """
        requests = [self._request(prompt, sampling, epoch, index) for epoch, prompt in asked for index in range(num_generations)]
        by_id = {prompt.prompt_id: prompt for _, prompt in asked}
        infos: dict[str, RolloutInfo] = {}
        self.engines.submit(requests)
        while self.engines.num_unfinished:
            try:
                finished = self.engines.collect(self.deadline_s)
            except ActorLost as lost:
                self.restart_engine(index_of(lost))
                continue
            for info in finished:
                if info.weight_version != weight_version:
                    raise RuntimeError(f"{info.request_id} was drawn from weight version {info.weight_version}, not {weight_version}")
                infos[info.request_id] = info
            self.rewards.submit(finished, [by_id[info.prompt_id] for info in finished])
            on_progress(len(finished))
        rollouts = [infos[request.request_id] for request in requests]
        groups = [rollouts[first : first + num_generations] for first in range(0, len(rollouts), num_generations)]
        return Generated([prompt for _, prompt in asked], groups)

    def judge(self, generated: Generated) -> tuple[list[RolloutGroup], float]:
        """The groups of one `generate`, in the order in which their prompts were asked, once the last verdict is in.

        Also the seconds of scoring, during the generation and since.
        """
        verdicts, seconds = self.rewards.collect()
        groups = [
            RolloutGroup(prompt, tuple(rollouts), tuple(verdicts[rollout.request_id] for rollout in rollouts))
            for prompt, rollouts in zip(generated.prompts, generated.groups, strict=True)
        ]
        return groups, seconds

    def _request(self, prompt: Prompt, sampling: SamplingParams, epoch: int, index: int) -> RolloutRequest:
        seed = request_seed(self.run_seed, epoch, prompt.prompt_id, index)
        return RolloutRequest(prompt.prompt_id, index, epoch, seed, prompt.token_ids, sampling)
