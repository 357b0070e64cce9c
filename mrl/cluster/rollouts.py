# SPDX-License-Identifier: Apache-2.0
"""Collects rollouts: sends requests to the engines and finished rollouts straight to the rewards, and hands back judged groups."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import ray

from mrl.cluster import hangs
from mrl.cluster.engines import EngineGroup
from mrl.cluster.errors import DeadlineExceeded
from mrl.cluster.payload import PayloadRef
from mrl.cluster.rewards import Rewards
from mrl.config.schema.run import RunConfig
from mrl.data.order import LengthHints
from mrl.types import Prompt, PromptKey, RolloutGroup, RolloutInfo, RolloutRequest, SamplingParams, request_seed

logger = logging.getLogger(__name__)


@dataclass
class AskedGroup:
    """A prompt with its requests; `infos` are the rollouts that have arrived, by request id."""

    prompt: Prompt
    requests: list[RolloutRequest]
    weight_version: int
    """Of the engines when the group was asked for."""
    infos: dict[str, RolloutInfo] = field(default_factory=dict)

    @property
    def num_missing(self) -> int:
        return len(self.requests) - len(self.infos)


class RolloutCollector:
    """Samples groups of rollouts and has them scored while generation goes on, for several callers at once.

    The key of a group is (epoch, prompt id). `ask` begins a group, `judge` hands it back with its verdicts.
    """

    def __init__(
        self, config: RunConfig, engines: EngineGroup, rewards: Rewards, *, seed: int, restart_engine: Callable[[int], None]
    ) -> None:
        """`restart_engine(index)` starts a dead engine again, on the current weights, and asks its unfinished requests again."""
        self.engines = engines
        self.rewards = rewards
        self.seed = seed
        self.deadline_s = config.deadlines.generate_s
        self.restart_engine = restart_engine
        self._hints = LengthHints() if config.policy.generation.longest_first else None
        self._groups: dict[PromptKey, AskedGroup] = {}
        self._turns: dict[str, RolloutInfo] = {}
        """Rollouts without a decision yet on whether another turn follows."""

    def ask(
        self, asked: Sequence[tuple[int, Prompt]], sampling: SamplingParams, *, num_generations: int, weight_version: int
    ) -> list[PromptKey]:
        """Asks engines that hold `weight_version` for rollouts of every (epoch, prompt), without waiting; returns the groups' keys."""
        for epoch, prompt in self._hints.longest_first(asked) if self._hints else asked:
            key = (epoch, prompt.prompt_id)
            assert key not in self._groups, f"{key} is under way"
            seeds = [request_seed(self.seed, epoch, prompt.prompt_id, index) for index in range(num_generations)]
            requests = [RolloutRequest(prompt.prompt_id, i, epoch, seed, prompt.token_ids, sampling) for i, seed in enumerate(seeds)]
            self._groups[key] = AskedGroup(prompt, requests, weight_version)
            self.engines.book.submit(requests)
        return [(epoch, prompt.prompt_id) for epoch, prompt in asked]

    def num_missing(self, keys: Sequence[PromptKey]) -> int:
        return sum(self._groups[key].num_missing for key in keys)

    def oldest_version(self, key: PromptKey) -> int:
        """Weight version of the oldest token of a sampled group."""
        return min(info.weight_version for info in self._groups[key].infos.values())

    def wait(self, is_enough: Callable[[], bool], *, on_progress: Callable[[], None]) -> None:
        """Collects rollouts until `is_enough`. `on_progress` is called whenever some have arrived.

        Call it while the policy holds the engines' weights: it starts engines that died again, and gives them these weights.

        Raises:
            DeadlineExceeded: no rollout arrives in time.
            RuntimeError: an engine keeps dying, or a rollout was drawn from weights older than it was asked of.
        """
        while not is_enough():
            assert self.engines.book.num_unfinished or self.rewards.num_undecided, "nothing is under way, and it is not enough"
            for index in sorted(self.engines.book.lost):
                self.restart_engine(index)
            self._collect()
            on_progress()

    def drain(self) -> None:
        """Collects everything under way on engines that live. The policy may hold other weights than the engines."""
        while self.engines.book.num_expected or self.rewards.num_undecided:
            self._collect()

    def judge(self, keys: Sequence[PromptKey]) -> tuple[list[RolloutGroup], float]:
        """Waits for the verdicts on these sampled groups and hands them out, with the seconds of scoring since the last call."""
        asked_ids = [request.request_id for key in keys for request in self._groups[key].requests]
        verdicts, seconds = self.rewards.collect(asked_ids)
        groups = []
        for key in keys:
            asked = self._groups.pop(key)
            infos = tuple(asked.infos[request.request_id] for request in asked.requests)
            groups.append(RolloutGroup(asked.prompt, infos, tuple(verdicts[info.request_id] for info in infos)))
            if self._hints:
                self._hints.note(asked.prompt, [info.num_generated for info in infos])
        return groups, seconds

    def take_busy_s(self) -> float:
        """Seconds since the last call in which an engine had a rollout to work on, as a mean over the engines."""
        busy_s, self.engines.busy_s = self.engines.busy_s, 0.0
        return busy_s / self.engines.num_engines

    def references(self) -> list[ray.ObjectRef]:
        return [*self.engines.references(), *self.rewards.references()]

    def advance(self) -> bool:
        """Takes what has arrived, sends it on, and asks for next turns; whether anything has arrived."""
        finished, decided = self.engines.take_ready(), self.rewards.take_ready()
        prompts = []
        for info in finished:
            group = self._groups[info.key]
            if info.weight_version < group.weight_version:
                raise RuntimeError(f"{info.request_id} was drawn from weight version {info.weight_version}, not {group.weight_version}")
            (self._turns if self.rewards.decides else group.infos)[info.request_id] = info
            prompts.append(group.prompt)
        if finished:
            self.rewards.submit(finished, prompts)
        for request_id, following in decided:
            info = self._turns.pop(request_id)
            group = self._groups[info.key]
            if isinstance(following, PayloadRef):
                self.engines.book.submit([dataclasses.replace(group.requests[info.rollout_index], earlier=following)])
            else:
                # A rollout whose next turn would not fit is truncated.
                is_truncated = following == "out of context"
                group.infos[request_id] = dataclasses.replace(info, finish_reason="length") if is_truncated else info
        return bool(finished or decided)

    def _collect(self) -> None:
        end, num_lost = time.monotonic() + self.deadline_s, len(self.engines.book.lost)
        while references := self.references():
            with hangs.waiting("generation", lambda: [*self.engines.asked(), *self.rewards.asked()], end - self.deadline_s):
                ray.wait(references, num_returns=1, timeout=max(0.0, end - time.monotonic()))
            if self.advance() or len(self.engines.book.lost) > num_lost:
                return
            if time.monotonic() > end:
                limit = f"{self.deadline_s:g} s (deadlines.generate_s)"
                if undecided := self.rewards.num_undecided:
                    raise DeadlineExceeded(
                        f"turns: no rollout arrived and no environment answered within {limit}; "
                        f"{undecided} turns wait for their environment"
                    )
                told = f"; {reason}" if (reason := hangs.explained(self.engines.asked())) else ""
                raise DeadlineExceeded(f"generation: {self.engines.book.missing()} unfinished and none arrived within {limit}{told}")
