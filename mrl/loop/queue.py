# SPDX-License-Identifier: Apache-2.0
"""The rollout queue: asks for prompts in their order, as far ahead as rollouts may be old, and hands each step its
groups.

Synchronous runs, asynchronous runs and dynamic sampling are this queue with different numbers.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean
from types import MappingProxyType
from typing import TYPE_CHECKING

from mrl.algo.rewards import has_signal
from mrl.cluster.tasks import in_worker
from mrl.config.schema.run import RunConfig
from mrl.data.order import DifficultyPools, prompt_order
from mrl.data.prompts import PromptData
from mrl.loop.run import Stopped
from mrl.loop.signal_watch import NoSignal, reasons_of
from mrl.store.console import rollout_progress
from mrl.store.ledger import Ledger
from mrl.store.summary import Clock
from mrl.types import Prompt, PromptKey, RolloutGroup, RunState, SamplingParams

if TYPE_CHECKING:
    from mrl.cluster.rollouts import RolloutCollector

logger = logging.getLogger(__name__)
Revive = Callable[[int, Prompt], RolloutGroup | None]
"""The group of an (epoch, prompt) that an earlier attempt has sampled, or begun; None if there is none."""
# A group that was too old so often is waited for: to ask for it again and again would never train its prompt.
MAX_TOO_OLD = 2
NUM_LENGTH_RATIOS = 10
"""Steps over which the lengths of what is taken and asked for are compared: those of one step differ by chance."""


@dataclass(frozen=True)
class QueuePlan:
    """Numbers of a run that size its rollout queue."""

    num_prompts: int
    """Groups of a step."""
    num_generations: int
    """Rollouts of a group."""
    batch: int
    """Prompts asked for and looked at together."""
    max_batches: int | None
    """The run gives up when so many batches do not fill a step; None where every group counts."""
    under_way: int
    """Most prompts under way."""
    lag: int
    """Steps by which a rollout may be older than the weights that it trains."""
    samples_ahead: bool
    """True when engines sample while the policy is trained."""
    waits_for_refit: bool
    """True when engines finish all rollouts under way before they get new weights."""
    freshest_first: bool
    """True when a step takes the freshest groups that are ready instead of the next prompts in order."""
    takes_first: bool
    """True when a step takes the first groups that are whole, and leaves the others to the next ones."""
    min_length_ratio: float | None
    """Such a step waits for all its groups while steps have taken rollouts shorter than this share of those asked for;
    None: never.
    """


@dataclass(frozen=True)
class Supplied:
    """The groups of one step."""

    groups: list[RolloutGroup]
    dropped: list[PromptKey]
    """Prompts that the step left out: it consumes them too."""
    sampled: list[RolloutGroup]
    """All groups that the step looked at."""
    seconds: float
    """Seconds that the engines had for the groups."""
    num_drawn: int
    """Tokens that the engines drew in these, of whatever group; 0: unknown, as agents ask them over HTTP."""
    metrics: dict[str, float]

    @property
    def trained(self) -> list[PromptKey]:
        """Keys of `groups`."""
        return [group.key for group in self.groups]

    @property
    def rewards(self) -> dict[str, float]:
        """Mean reward of each prompt that the step consumes, by its id, over the rollouts with a reward."""
        consumed = {*self.trained, *self.dropped}
        of_prompts = {
            group.prompt.prompt_id: [one.reward for one in group.verdicts if one.has_reward]
            for group in sorted((*self.sampled, *self.groups), key=lambda group: group.epoch)
            if group.key in consumed
        }
        return {prompt_id: sum(rewards) / len(rewards) for prompt_id, rewards in of_prompts.items() if rewards}


def queue_plan(config: RunConfig) -> QueuePlan:
    grpo, ahead = config.rollouts, config.rollouts.async_grpo
    return QueuePlan(
        num_prompts=grpo.num_prompts_per_step,
        num_generations=grpo.num_generations_per_prompt,
        batch=grpo.num_prompts_per_batch,
        max_batches=grpo.dynamic_sampling_max_gen_batches if grpo.use_dynamic_sampling else None,
        under_way=grpo.num_prompts_under_way,
        lag=grpo.max_lag_steps,
        samples_ahead=ahead.max_lag_steps > 0,
        waits_for_refit=ahead.max_lag_steps > 0 and not ahead.in_flight_weight_updates,
        freshest_first=ahead.max_lag_steps > 0 and ahead.sample_freshest_first,
        takes_first=grpo.takes_first,
        min_length_ratio=grpo.min_taken_length_ratio,
    )


class RolloutQueue:
    """Asks for prompts, and hands each step its groups.

    `ledger` keeps a prompt as taken from the first request for it until a step trains on it or leaves it out.
    """

    def __init__(
        self,
        plan: QueuePlan,
        source: RolloutCollector,
        ledger: Ledger,
        prompts: Iterable[tuple[int, Prompt]],
        sampling: SamplingParams,
        *,
        last_step: int,
        has_signal: Callable[[RolloutGroup], bool] = lambda group: True,
        revive: Revive = lambda epoch, prompt: None,
    ) -> None:
        """`prompts` are all (epoch, prompt) not consumed yet."""
        self._revive = revive
        self.plan = plan
        self._source = source
        self._ledger = ledger
        self._prompts = iter(prompts)
        self._sampling = sampling
        self._last_step = last_step
        self._has_signal = has_signal
        self._asked: dict[PromptKey, RolloutGroup] = {}
        """Under way or waiting to be looked at, in the order of asking."""
        self._surplus: list[RolloutGroup] = []
        """Looked at, and left over for the next step."""
        self._again: list[tuple[int, Prompt]] = []
        """Left over, but too old by the next step: to be generated again."""
        self._num_too_old = Counter[PromptKey]()
        """Groups under way that were too old when they were sampled, and how often."""
        self._num_regenerated = 0
        self._lengths = TakenLengths()
        self._taken_at = time.monotonic()

    async def take(self, state: RunState, clock: Clock) -> Supplied | None:
        """Waits for groups of the step after `state`. None: prompts used up; Stopped from NoSignal: too few count."""
        plan, step = self.plan, state.step + 1
        ready, self._surplus = self._surplus, []
        sampled: list[RolloutGroup] = []
        dropped: list[PromptKey] = []
        num_batches = 0
        if not plan.samples_ahead:
            # Validation used the engines too, but not for this step.
            self._source.take_work()
        while len(ready) < plan.num_prompts:
            if num_batches == plan.max_batches:
                masked = [
                    f"; {count} are masked because of: {reason:.300}"
                    for reason, count in reasons_of(sampled).most_common(1)
                ]
                raise Stopped from NoSignal(
                    f"grpo.dynamic_sampling_max_gen_batches={plan.max_batches}: after so many batches of "
                    f"{plan.batch} prompts step {step} has {len(ready)} of {plan.num_prompts} groups whose rewards "
                    f"differ{''.join(masked)}; use prompts that are sometimes solved, raise "
                    "grpo.num_generations_per_prompt or grpo.batch_multiplier, or set grpo.use_dynamic_sampling=false"
                )
            await self._fill(step, state.weight_version)
            with clock.phase("generation"):
                looked_at = await self._wait_for_batch(state.weight_version)
            batch = await self._judge(looked_at, clock)
            if not looked_at:
                return None
            num_batches += 1
            for group in batch:
                del self._asked[group.key]
                del self._num_too_old[group.key]
                sampled.append(group)
                if self._has_signal(group):
                    ready.append(group)
                else:
                    dropped.append(group.key)
        groups, surplus = ready[: plan.num_prompts], ready[plan.num_prompts :]
        num_discarded = self._keep(surplus, next_version=state.weight_version + 1)
        # Where generation goes on meanwhile, all the time since the last step counts, else that of the phase.
        before, self._taken_at = self._taken_at, time.monotonic()
        # 0 where an earlier attempt has sampled all of them.
        seconds = max(1e-9, self._taken_at - before if plan.samples_ahead else clock.seconds("generation"))
        work = self._source.take_work()
        if plan.samples_ahead and num_batches > 0:
            clock.overlap("generation", work.seconds)
        metrics = self._metrics(groups, sampled, state.weight_version)
        if plan.max_batches is not None:
            metrics["train/dynamic_sampling_num_gen_batches"] = float(num_batches)
            metrics["train/dynamic_sampling_num_discarded_valid_samples"] = float(num_discarded)
        if work.seconds > 0:  # agents ask over HTTP, which is not counted here
            metrics["rollout/engine_idle_fraction"] = max(0.0, 1.0 - work.seconds / seconds)
        if work.num_drawn:
            metrics["rollout/recomputed_fraction"] = work.num_recomputed / work.num_drawn
        return Supplied(groups, dropped, sampled or groups, seconds, work.num_drawn, metrics)

    def _metrics(
        self, groups: Sequence[RolloutGroup], sampled: Sequence[RolloutGroup], weight_version: int
    ) -> dict[str, float]:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        ages, left = [weight_version - rollout.weight_version for rollout in rollouts], list(self._asked.values())
        num_mixed = sum(rollout.num_weight_versions > 1 for rollout in rollouts)
        num_regenerated, self._num_regenerated = self._num_regenerated, 0
        metrics = {
            "train/avg_trajectory_age": sum(ages) / len(ages),
            "train/max_trajectory_age": float(max(ages)),
            "rollout/mixed_version_fraction": num_mixed / len(rollouts),
            "train/buffer_size": float(sum(group.num_missing == 0 for group in left) + len(self._surplus)),
            "rollout/regenerated_groups": float(num_regenerated),
        }
        if self.plan.takes_first:
            metrics |= carried_metrics(groups, left, weight_version)
            metrics |= self._lengths.note(sampled, left, weight_version)
        return metrics

    async def sample(
        self,
        asked: Sequence[tuple[int, Prompt]],
        sampling: SamplingParams,
        *,
        num_generations: int,
        weight_version: int,
        clock: Clock,
    ) -> list[RolloutGroup]:
        """Groups of prompts outside the order, drawn from the engines' current weights."""
        groups = self._source.ask(asked, sampling, num_generations=num_generations, weight_version=weight_version)
        with clock.phase("generation"):
            await self._wait_for(groups, len(groups))
        return await self._judge(groups, clock)

    async def pause(self) -> dict[str, float]:
        """Waits for rollouts under way, if planned. Call it before engines get new weights. Stopped: by a signal."""
        if not self.plan.waits_for_refit:
            return {}
        start = time.monotonic()
        await self._source.drain()
        return {"refit/drain_seconds": time.monotonic() - start}

    async def go_on(self, state: RunState) -> None:
        """Asks for prompts of later steps. Call it after the engines got new weights."""
        if self.plan.samples_ahead and state.step < self._last_step:
            await self._fill(state.step + 1, state.weight_version)

    async def _fill(self, step: int, weight_version: int) -> None:
        again, self._again = self._again, []
        self._num_regenerated += len(again)
        self._ask(again, weight_version)
        most = self.plan.batch * (min(self.plan.lag, self._last_step - step) + 1)
        room = min(most, self.plan.under_way) - len(self._asked)
        new, revived = await in_worker(self._next, step, max(0, room))
        self._ask(new, weight_version, revived)

    def _next(self, step: int, room: int) -> tuple[list[tuple[int, Prompt]], dict[PromptKey, RolloutGroup]]:
        new = list(islice(self._prompts, room))
        if new:
            self._ledger.take(step, [(epoch, prompt.prompt_id) for epoch, prompt in new])
        return new, {group.key: group for group in (self._revive(*one) for one in new) if group is not None}

    def _ask(
        self,
        prompts: Sequence[tuple[int, Prompt]],
        weight_version: int,
        revived: Mapping[PromptKey, RolloutGroup] = MappingProxyType({}),
    ) -> None:
        keys = [(epoch, prompt.prompt_id) for epoch, prompt in prompts]
        wanted = [one for key, one in zip(keys, prompts, strict=True) if key not in revived]
        groups = self._source.ask(
            wanted, self._sampling, num_generations=self.plan.num_generations, weight_version=weight_version
        )
        if begun := [group for group in revived.values() if group.num_unjudged]:
            self._source.go_on(begun, self._sampling)
        found = {**revived, **{group.key: group for group in groups}}
        self._asked |= {key: found[key] for key in keys}

    def num_unjudged(self, weight_version: int) -> int:
        """Groups from weights up to a version that are sampled and have no verdict yet. Any thread may ask."""
        sampled = [group for group in list(self._asked.values()) if group.num_missing == 0 and group.num_unjudged > 0]
        return sum(group.oldest_version <= weight_version for group in sampled)

    async def _wait_for_batch(self, weight_version: int) -> list[RolloutGroup]:
        size = min(self.plan.batch, len(self._asked))
        is_choosing, first = self.plan.freshest_first or self.plan.takes_first, self.plan.takes_first
        while True:
            wanted = list(self._asked.values())
            if not is_choosing:
                wanted = wanted[:size]
            # By the next step they would be too old, once more. Where a step takes the first groups, at most twice its
            # prompts are under way, so that it has room for all that the last one has left.
            last = [
                one
                for one in wanted
                if (first or self._num_too_old[one.key] >= MAX_TOO_OLD)
                and weight_version - one.weight_version >= self.plan.lag
            ]
            if first and self._lengths.are_below(self.plan.min_length_ratio):
                last = wanted
            await self._wait_for(last, len(last))
            await self._wait_for(wanted, size)
            ready = [group for group in wanted if group.num_missing == 0]
            stale = [group for group in ready if weight_version - group.oldest_version > self.plan.lag]
            if not stale:
                if not is_choosing:
                    return ready
                age = 1 if first else -1
                return sorted(ready, key=lambda one: (one not in last, age * one.oldest_version))[:size]
            # Finish judging them before asking again: new rollouts have the same keys.
            await self._source.judge(stale)
            self._num_regenerated += len(stale)
            self._num_too_old.update(group.key for group in stale)
            if often := [group.prompt for group in stale if self._num_too_old[group.key] == MAX_TOO_OLD]:
                logger.warning(
                    "%d prompts (%s of %s and others) were sampled %d times, each time too old for its step. They "
                    "are asked once more, and a step waits for them. They take longer than "
                    "grpo.async_grpo.max_trajectory_age_steps=%d steps, or fresher ones came first: raise it, make "
                    "them shorter (max_new_tokens, an agent's turns), or set sample_freshest_first=false",
                    *(len(often), often[0].prompt_id, often[0].env_name, MAX_TOO_OLD, self.plan.lag),
                )
            self._ask([(group.epoch, self._asked.pop(group.key).prompt) for group in stale], weight_version)

    async def _wait_for(self, groups: Sequence[RolloutGroup], num_groups: int) -> None:
        self._source.tasks.check()
        num_missing = sum(group.num_missing for group in groups)
        if num_missing == 0:
            return
        with rollout_progress(num_missing) as progress:

            def show() -> None:
                nonlocal num_missing
                before, num_missing = num_missing, sum(group.num_missing for group in groups)
                progress.update(before - num_missing)

            await self._source.wait(lambda: sum(group.num_missing == 0 for group in groups) >= num_groups, show)

    async def _judge(self, groups: Sequence[RolloutGroup], clock: Clock) -> list[RolloutGroup]:
        with clock.phase("reward"):
            judged, scoring_s = await self._source.judge(groups)
        clock.overlap("reward", scoring_s)
        return judged

    def _keep(self, surplus: Sequence[RolloutGroup], *, next_version: int) -> int:
        num_discarded = 0
        for group in surplus:
            if next_version - group.oldest_version <= self.plan.lag:
                self._surplus.append(group)
            else:
                self._again.append((group.epoch, group.prompt))
                num_discarded += len(group.rollouts)
        return num_discarded


def carried_metrics(
    trained: Sequence[RolloutGroup], left: Sequence[RolloutGroup], weight_version: int
) -> dict[str, float]:
    """Measures how far a step that takes the first groups prefers short rollouts, and counts the groups that it leaves.

    `carried_length_ratio` is the mean length of rollouts that earlier steps began, over that of the others.
    """
    carried, fresh = [], []
    for group in trained:
        lengths = carried if group.weight_version < weight_version else fresh
        lengths += [rollout.num_generated for rollout in group.rollouts]
    metrics = {"rollout/unfinished_groups": float(sum(group.num_missing > 0 for group in left))}
    if carried and fresh and any(fresh):
        metrics["rollout/carried_length_ratio"] = sum(carried) / len(carried) / (sum(fresh) / len(fresh))
    return metrics


class TakenLengths:
    """Compares the lengths of the rollouts that steps take with those of all that they ask for."""

    def __init__(self) -> None:
        self._taken: dict[int, float] = {}
        """Mean length of what a step has taken, by its weight version, until all that it has asked for is whole."""
        self._asked = defaultdict[int, list[int]](list)
        """Lengths of what each step has asked for, as far as it is taken."""
        self._ratios = deque[float](maxlen=NUM_LENGTH_RATIOS)

    def note(
        self, taken: Sequence[RolloutGroup], left: Sequence[RolloutGroup], weight_version: int
    ) -> dict[str, float]:
        """Notes what a step takes and leaves; measures the last steps of which nothing is left."""
        lengths = [rollout.num_trained for group in taken for rollout in group.rollouts]
        if lengths:
            self._taken[weight_version] = fmean(lengths)
        for group in taken:
            self._asked[group.weight_version] += [rollout.num_trained for rollout in group.rollouts]
        metrics = {}
        for version in sorted(self._asked.keys() - {group.weight_version for group in left}):
            asked, mean = self._asked.pop(version), self._taken.pop(version, None)
            if mean is not None and any(asked):
                self._ratios.append(mean / fmean(asked))
                metrics["rollout/taken_length_ratio"] = self._ratios[-1]
        return metrics

    def are_below(self, limit: float | None) -> bool:
        """True if the mean of the last ratios is below a limit."""
        return limit is not None and len(self._ratios) > 0 and fmean(self._ratios) < limit


def open_queue(
    config: RunConfig,
    data: PromptData,
    source: RolloutCollector,
    ledger: Ledger,
    *,
    last_step: int,
    revive: Revive = lambda epoch, prompt: None,
) -> RolloutQueue:
    """The queue of a run, without the prompts that its ledger has consumed."""
    train, grpo = data.train, config.rollouts

    def prompts() -> Iterator[tuple[int, Prompt]]:
        # Once a checkpoint has been loaded: before, the ledger may hold steps that are rolled back, or have to be
        # restored.
        order, pools = prompt_order(config, train.sizes), config.data.difficulty_pools
        begin = ledger.begin_epoch
        leaves_out = DifficultyPools(pools, order.sizes, train.id_at, begin).leaves_out if pools else None
        consumed, num_epochs = ledger.state.consumed, grpo.max_num_epochs
        left = order.left(consumed, train.id_at, num_epochs=num_epochs, leaves_out=leaves_out)
        for epoch, index in left:
            yield epoch, train[index]

    def counts(group: RolloutGroup) -> bool:
        return not grpo.use_dynamic_sampling or has_signal(group, grpo)

    what = queue_plan(config), source, ledger, prompts(), data.sampling
    return RolloutQueue(*what, last_step=last_step, has_signal=counts, revive=revive)
