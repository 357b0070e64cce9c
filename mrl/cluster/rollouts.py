"""Collects rollouts: requests out to the engines, finished rollouts straight to the rewards, groups back."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import ray

from mrl.cluster.engine_group import EngineGroup, index_of
from mrl.cluster.payload import PayloadRef
from mrl.cluster.reward_actor import Rewards
from mrl.cluster.waiting import ActorLost, DeadlineExceeded
from mrl.data.order import LengthHints
from mrl.data.turns import Ending
from mrl.types import Prompt, PromptKey, RolloutGroup, RolloutInfo, RolloutRequest, SamplingParams, Verdict, request_seed

logger = logging.getLogger(__name__)


@dataclass
class AskedGroup:
    """A prompt whose rollouts were asked for; `infos` are those that have arrived, by request id."""

    prompt: Prompt
    requests: list[RolloutRequest]
    weight_version: int
    """Of the engines when it was asked."""
    infos: dict[str, RolloutInfo] = field(default_factory=dict)

    @property
    def num_missing(self) -> int:
        return len(self.requests) - len(self.infos)


class RolloutCollector:
    """Samples groups of rollouts and has them scored while generation goes on.

    Groups are named by (epoch, prompt id). They are asked for, sampled, and leave with their verdicts, for several callers at once.
    """

    def __init__(
        self,
        engines: EngineGroup,
        rewards: Rewards,
        *,
        run_seed: int,
        deadline_s: float,
        restart_engine: Callable[[int], None],
        longest_first: bool = True,
    ) -> None:
        """`restart_engine(index)` starts a dead engine again; see `Refit.restart_engine`."""
        self.engines = engines
        self.rewards = rewards
        self.run_seed = run_seed
        self.deadline_s = deadline_s
        self.restart_engine = restart_engine
        self._hints = LengthHints() if longest_first else None
        self._groups: dict[PromptKey, AskedGroup] = {}
        self._verdicts: dict[str, Verdict] = {}
        self._turns: dict[str, RolloutInfo] = {}
        """Rollouts of which it is not known yet whether another turn follows."""

    def ask(
        self, asked: Sequence[tuple[int, Prompt]], sampling: SamplingParams, *, num_generations: int, weight_version: int
    ) -> list[PromptKey]:
        """Asks for `num_generations` rollouts of every (epoch, prompt); the names of the groups. Does not wait.

        The engines hold weights of `weight_version`.
        """
        for epoch, prompt in self._hints.longest_first(asked) if self._hints else asked:
            key = (epoch, prompt.prompt_id)
            assert key not in self._groups, f"{key} is under way"
            requests = [self._request(prompt, sampling, epoch, index) for index in range(num_generations)]
            self._groups[key] = AskedGroup(prompt, requests, weight_version)
            self.engines.submit(requests)
        return [(epoch, prompt.prompt_id) for epoch, prompt in asked]

    def num_missing(self, keys: Sequence[PromptKey]) -> int:
        """How many rollouts of these groups have not arrived."""
        return sum(self._groups[key].num_missing for key in keys)

    def oldest_version(self, key: PromptKey) -> int:
        """Weight version of the oldest token of a sampled group."""
        return min(info.weight_version for info in self._groups[key].infos.values())

    def wait(self, is_enough: Callable[[], bool], *, on_progress: Callable[[], None]) -> None:
        """Collects rollouts until `is_enough`. `on_progress` is called whenever some have arrived.

        To be called while the policy holds the engines' weights: engines that died are started again, and given them.

        Raises:
            DeadlineExceeded: no rollout arrives in time.
            RuntimeError: an engine keeps dying, or a rollout was drawn from weights older than it was asked of.
        """
        while not is_enough():
            assert self.engines.num_unfinished or self.rewards.num_undecided, "nothing is under way, and it is not enough"
            try:
                for index in sorted(self.engines.lost):
                    self.restart_engine(index)
                self._collect()
            except ActorLost as lost:
                self.restart_engine(index_of(lost))
            on_progress()

    def drain(self) -> None:
        """Collects all that is under way on engines that live. The policy may hold other weights than the engines.

        Raises:
            DeadlineExceeded: no rollout arrives in time.
        """
        while self.engines.num_expected or self.rewards.num_undecided:
            try:
                self._collect()
            except ActorLost as lost:
                self.engines.lost.add(index_of(lost))

    def judge(self, keys: Sequence[PromptKey]) -> tuple[list[RolloutGroup], float]:
        """The groups of these names, in this order, once their last verdict is in; all of them are sampled, and leave.

        Also the seconds of scoring since the last call.
        """
        verdicts, seconds = self.rewards.collect()
        self._verdicts.update(verdicts)
        groups = []
        for key in keys:
            asked = self._groups.pop(key)
            infos = tuple(asked.infos[request.request_id] for request in asked.requests)
            groups.append(RolloutGroup(asked.prompt, infos, tuple(self._verdicts.pop(info.request_id) for info in infos)))
            if self._hints:
                self._hints.note(asked.prompt, [info.num_generated for info in infos])
        return groups, seconds

    def take_busy_s(self) -> float:
        """Seconds in which an engine had a rollout to work on, since the last call; their mean over the engines."""
        busy_s, self.engines.busy_s = self.engines.busy_s, 0.0
        return busy_s / self.engines.num_engines

    def references(self) -> list[ray.ObjectRef]:
        """See `mrl.cluster.waiting.Background`."""
        return [*self.engines.references(), *self.rewards.references()]

    def advance(self) -> None:
        """See `mrl.cluster.waiting.Background`."""
        self._arrived(self.engines.take_ready())
        self._decided(self.rewards.take_ready())

    def _collect(self) -> None:
        """Waits for rollouts of the engines, and for what environments make of turns."""
        if not self.rewards.num_undecided:
            self._arrived(self.engines.collect(self.deadline_s))
            return
        end, num_lost = time.monotonic() + self.deadline_s, len(self.engines.lost)
        while True:
            ray.wait(self.references(), num_returns=1, timeout=max(0.0, end - time.monotonic()))
            finished, decided = self.engines.take_ready(), self.rewards.take_ready()
            self._arrived(finished)
            self._decided(decided)
            if finished or decided or len(self.engines.lost) > num_lost:
                return
            if time.monotonic() > end:
                raise DeadlineExceeded(
                    f"turns: no rollout arrived and no environment answered within {self.deadline_s:g} s (deadlines.generate_s); "
                    f"{self.rewards.num_undecided} turns wait for their environment"
                )

    def _decided(self, decisions: Sequence[tuple[str, PayloadRef | Ending]]) -> None:
        """Asks for the next turns of rollouts that go on; the others are complete, and truncated if a turn would not fit."""
        for request_id, following in decisions:
            info = self._turns.pop(request_id)
            group = self._groups[info.key]
            if isinstance(following, PayloadRef):
                self.engines.submit([dataclasses.replace(group.requests[info.rollout_index], earlier=following)])
            else:
                is_truncated = following == "out of context"
                group.infos[request_id] = dataclasses.replace(info, finish_reason="length") if is_truncated else info

    def _arrived(self, finished: list[RolloutInfo]) -> None:
        prompts = []
        for info in finished:
            group = self._groups[info.key]
            if info.weight_version < group.weight_version:
                raise RuntimeError(f"{info.request_id} was drawn from weight version {info.weight_version}, not {group.weight_version}")
            (self._turns if self.rewards.decides else group.infos)[info.request_id] = info
            prompts.append(group.prompt)
        if finished:
            self.rewards.submit(finished, prompts)

    def _request(self, prompt: Prompt, sampling: SamplingParams, epoch: int, index: int) -> RolloutRequest:
        seed = request_seed(self.run_seed, epoch, prompt.prompt_id, index)
        return RolloutRequest(prompt.prompt_id, index, epoch, seed, prompt.token_ids, sampling)
