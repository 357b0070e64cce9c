# SPDX-License-Identifier: Apache-2.0
"""Rollouts under way: each a coroutine in the driver's event loop. The training loop asks for groups of them and waits.

A coroutine asks a book for an answer: of an engine or a reward actor, which works on what it is asked. Needs no Ray.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from conversion.texts import listed
from mrl.algo.rewards import shape_effort
from mrl.cluster import hangs
from mrl.cluster.errors import DeadlineExceeded
from mrl.cluster.tasks import GENERATION, Silence
from mrl.config.schema.run import RunConfig
from mrl.config.texts import rounded
from mrl.data.order import LengthHints
from mrl.metrics import EngineWork
from mrl.types import (
    Prompt,
    PromptKey,
    RolloutGroup,
    RolloutInfo,
    RolloutRequest,
    SamplingParams,
    Verdict,
    request_seed,
)

if TYPE_CHECKING:
    from mrl.cluster.engines import EngineGroup
    from mrl.cluster.gateway import GatewayGroup
    from mrl.cluster.rewards import Rewards

# Engines answer between two polls; one that takes longer is being refitted, or hangs.
UNFINISHED_S = 10.0


class RolloutCollector:
    """Samples groups of rollouts and has them scored while the driver does something else, for several callers at once.

    `ask` begins groups, `wait` waits until they are sampled, `judge` hands them back with their verdicts.
    """

    def __init__(
        self,
        config: RunConfig,
        engines: EngineGroup,
        rewards: Rewards,
        *,
        seed: int,
        restart_engine: Callable[[int], Awaitable[object]],
        gateways: GatewayGroup | None = None,
    ) -> None:
        """`restart_engine(index)` restarts a dead engine on the current weights and asks its unfinished requests again.

        `gateways` run the agents, if the config names any.
        """
        assert engines.tasks is rewards.tasks, "whoever waits hears of both"
        self.engines = engines
        self.rewards = rewards
        self.tasks = engines.tasks
        """Rollouts, and news of them and their verdicts."""
        self.seed = seed
        self.gateways = gateways
        # An agent may do without the model for as long as its deadline allows.
        self.deadline_s = config.deadlines.generate_s + (config.env.agent_timeout_s if gateways is not None else 0.0)
        self.deadline_s = max(self.deadline_s, engines.silence_s)
        self.restart_engine = restart_engine
        self.effort = config.env.nemo_gym.effort_levels if config.env.should_use_nemo_gym else None
        self.on_whole: Callable[[RolloutGroup], None] = lambda group: None
        """Called with each group whose rollouts are all sampled and judged."""
        self._under_way: dict[PromptKey, RolloutGroup] = {}
        """Groups of the training that are not whole."""
        self._begun: dict[tuple[PromptKey, int], RolloutInfo] = {}
        """Their rollouts without a verdict, as far as the driver has heard that they are sampled."""
        self._hints = LengthHints()
        self._num_missing = 0
        self._work = EngineWork()

    def ask(
        self,
        asked: Sequence[tuple[int, Prompt]],
        sampling: SamplingParams,
        *,
        num_generations: int,
        weight_version: int,
    ) -> list[RolloutGroup]:
        """Asks engines with `weight_version` for rollouts of every (epoch, prompt), without waiting; returns groups."""
        groups = {
            (epoch, prompt.prompt_id): RolloutGroup(
                prompt, epoch=epoch, num_generations=num_generations, weight_version=weight_version
            )
            for epoch, prompt in asked
        }
        if len(groups) < len(asked):
            ((_, twice), _) = Counter((epoch, prompt.prompt_id) for epoch, prompt in asked).most_common(1)[0]
            raise ValueError(
                f"prompt {twice} is asked for twice in one call, with the same random numbers; ask once, for more "
                "rollouts"
            )
        ordered = self._hints.longest_first(asked)
        self.go_on([groups[epoch, prompt.prompt_id] for epoch, prompt in ordered], sampling)
        return list(groups.values())

    def go_on(self, groups: Sequence[RolloutGroup], sampling: SamplingParams) -> None:
        """Asks for what is missing of groups, also of those that an earlier attempt has `begun`, without waiting."""
        for group in groups:
            self._num_missing += group.num_missing
            if group.epoch >= 0:  # validation has another
                self._under_way[group.key] = group
            is_agents = self.gateways is not None and self.gateways.does(group.prompt.env_name)
            run = self._agent_rollout if is_agents else self._rollout
            for index in set(range(group.num_generations)) - set(group.judged):
                self.tasks.begin(run(group, index, sampling))

    async def unfinished(self, is_last: bool) -> list[RolloutGroup]:
        """Groups of the training that are not whole, with what is sampled of them.

        Each has the rollouts with a verdict, and what has none as `begun`. RuntimeError: no answer from engines; only
        if the run ends (`is_last`), they are asked while they do not sample.
        """
        if not self._under_way or (self.engines.book.is_held and not is_last):
            return []
        try:
            async with asyncio.timeout(UNFINISHED_S):
                sampled = await self.engines.unfinished()
        except TimeoutError as error:
            raise RuntimeError("engines do not tell what they have sampled of unfinished rollouts") from error
        found = {}
        for rollout in sampled:
            request = rollout.request
            found[(request.epoch, request.prompt_id), request.rollout_index] = rollout
        groups = list[RolloutGroup]()
        for key, group in self._under_way.items():
            begun = list[RolloutInfo]()
            for index in set(range(group.num_generations)) - set(group.judged):
                rollout, known = found.get((key, index)), self._begun.get((key, index))
                if rollout is not None and (known is None or known.length < len(rollout.token_ids)):
                    # Else it is news of a turn that has ended meanwhile.
                    known = self._begun[key, index] = RolloutInfo.of(rollout, rollout)
                begun += [known] if known is not None else []
            judged = tuple(one for one in group.rollouts if one.rollout_index in group.judged)
            if judged or begun:
                groups.append(dataclasses.replace(group, rollouts=judged, begun=tuple(begun)))
        return groups

    async def wait(self, is_enough: Callable[[], bool], look: Callable[[], None] = lambda: None) -> None:
        """Waits until `is_enough`; calls `look` meanwhile.

        Call it while the policy holds the engines' weights: it starts engines that died again, and gives them these
        weights.

        Raises:
            DeadlineExceeded: no rollout arrives in time.
            RuntimeError: an engine keeps dying, or a rollout was drawn from weights older than it was asked of.
        """
        while not is_enough():
            while lost := self.engines.book.lost:  # a restart may have met and restarted another
                await self.restart_engine(min(lost))
            await self._wait(lambda: is_enough() or bool(self.engines.book.lost), look)

    async def drain(self) -> None:
        """Waits for everything under way on engines that live. The policy may hold other weights than the engines."""

        def is_drained() -> bool:
            book, num_agents = self.engines.book, self.gateways.book.num_unfinished if self.gateways is not None else 0
            # Agents wait for an engine to come back, if all are lost.
            has_engine = len(book.lost | book.absent) < self.engines.num_engines
            return self._num_missing - num_agents == book.num_lost and not (num_agents and has_engine)

        await self._wait(is_drained)

    async def judge(self, groups: Sequence[RolloutGroup]) -> tuple[list[RolloutGroup], float]:
        """Waits for the verdicts on sampled groups; returns the groups, and seconds of scoring since the last call."""
        await self.rewards.wait_for(lambda: not any(group.num_unjudged for group in groups))
        for group in groups:
            self._hints.note(group.prompt, [rollout.num_trained for rollout in group.rollouts])
        judged = groups if self.effort is None else [shape_effort(group, self.effort) for group in groups]
        return list(judged), self.rewards.take_seconds()

    def take_work(self) -> EngineWork:
        """Work of the engines since the last call: tokens of all, and seconds as a mean over the engines."""
        before, self._work = self._work, self.engines.work
        work = self._work.since(before)
        return work._replace(seconds=work.seconds / max(1, len(self.engines.serving)))

    async def _rollout(self, group: RolloutGroup, index: int, sampling: SamplingParams) -> None:
        """Samples a turn and has it judged; then the next one, or the rollout ends."""
        epoch, prompt = group.epoch, group.prompt
        seed = request_seed(self.seed, epoch, prompt.prompt_id, index)
        request = RolloutRequest(prompt.prompt_id, index, epoch, seed, prompt.token_ids, sampling)
        info, place = next((one for one in group.begun if one.rollout_index == index), None), (group.key, index)
        if info is not None:
            self._begun[place] = info
        if info is not None and info.finish_reason == "abort":
            assert info.payload is not None
            request, info = dataclasses.replace(request, earlier=info.payload), None
        while True:
            if info is None:
                info = await self.engines.book.ask(request.request_id, request)
            if info.weight_version < group.weight_version:
                raise RuntimeError(
                    f"{info.request_id} was drawn from weight version {info.weight_version}, not {group.weight_version}"
                )
            if group.epoch >= 0:
                self._begun[place] = info
            if not self.rewards.decides:
                self._note_sampled(group, info)
            self.tasks.tell(GENERATION)
            judged = await self.rewards.book.ask(info.request_id, (info, prompt, None))
            if isinstance(judged, tuple):
                break
            request, info = dataclasses.replace(request, earlier=judged), None
        verdict, ending = judged
        if self.rewards.decides:
            # A rollout whose next turn would not fit is truncated.
            self._note_sampled(
                group, dataclasses.replace(info, finish_reason="length") if ending == "out of context" else info
            )
        self._note_judged(group, index, verdict)

    async def _agent_rollout(self, group: RolloutGroup, index: int, sampling: SamplingParams) -> None:
        """Runs an agent on the row in a gateway session, which keeps its samples until a rank trains on them."""
        assert self.gateways is not None
        seed = request_seed(self.seed, group.epoch, group.prompt.prompt_id, index)
        ended = await self.gateways.run_agent(group.prompt, index, group.epoch, seed, sampling, group.weight_version)
        for engine in ended.engines:
            self.engines.book.note_answer(engine)
        self._note_sampled(group, ended.info)
        self.tasks.tell(GENERATION)
        verdict = ended.verdict
        # What sampled nothing has no form.
        if self.rewards.inspects and ended.info.finish_reason != "abort":
            judged = await self.rewards.book.ask(ended.info.request_id, (ended.info, group.prompt, verdict))
            assert isinstance(judged, tuple), "agents decide alone when their rollouts end"
            verdict = judged[0]
        self._note_judged(group, index, verdict)

    def _waits(self) -> list[str]:
        return [*(self.gateways.waits() if self.gateways is not None else ()), *self.rewards.waits()]

    def _note_sampled(self, group: RolloutGroup, info: RolloutInfo) -> None:
        group.note_sampled(info)
        self._num_missing -= 1

    def _note_judged(self, group: RolloutGroup, index: int, verdict: Verdict) -> None:
        group.note_judged(index, verdict)
        self._begun.pop((group.key, index), None)
        if not (group.num_missing or group.num_unjudged):
            group.begun = ()
            if group.epoch >= 0:
                self._under_way.pop(group.key, None)
            self.on_whole(group)
        self.tasks.tell(GENERATION)

    async def _wait(self, is_enough: Callable[[], bool], look: Callable[[], None] = lambda: None) -> None:
        def who() -> list[str]:
            books = [self.engines.book, self.rewards.book, *([self.gateways.book] if self.gateways is not None else [])]
            return [*self._waits(), *(name for book in books for name in book.called())]

        try:
            await self.tasks.wait(is_enough, what=GENERATION, who=who, limit_s=self.deadline_s, look=look)
        except Silence:
            limit = f"{rounded(self.deadline_s)} s (deadlines.generate_s)"
            if undecided := self.rewards.num_undecided:
                raise DeadlineExceeded(
                    f"turns: no rollout arrived and no environment answered within {limit}; {undecided} turns wait "
                    f"for their environment: {listed(self.rewards.waits())}"
                ) from None
            reasons = [*self._waits(), *filter(None, [hangs.explained(self.engines.book.called())])]
            told = "".join(f"; {reason}" for reason in reasons)
            raise DeadlineExceeded(
                f"generation: {self.engines.book.missing()} unfinished and none arrived within {limit}{told}"
            ) from None
