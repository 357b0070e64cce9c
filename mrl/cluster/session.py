# SPDX-License-Identifier: Apache-2.0
"""Starts the processes of a run, and owns the phases in which policy ranks and engines share their devices."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from conversion.files.durable import remove_file
from mrl import startup
from mrl.cluster.engines import EngineGroup
from mrl.cluster.gateway import JudgeGroup, start_gateways, start_judges
from mrl.cluster.policies import PolicyGroup, Ranks, convert_if_new
from mrl.cluster.refit import Refitter
from mrl.cluster.rewards import Rewards
from mrl.cluster.rollouts import RolloutCollector
from mrl.cluster.runtime import Placement, placed_slots
from mrl.cluster.scheduling import until_no_engine_dies
from mrl.cluster.tasks import BackgroundTasks, in_worker, started_tasks
from mrl.cluster.verbs import EngineVerbs, PolicyVerbs
from mrl.config.model import with_value
from mrl.config.schema.run import RunConfig
from mrl.envs.endpoints import FILE_NAME
from mrl.phases import PHASES, REFERENCE, ModelName, Phase, role_of
from mrl.plan.deadlines import checkpoint_deadline
from mrl.types import Prompt, TrainSequence

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class PolicySession:
    """Policy ranks without engines. Nothing ever leaves their devices: they enter phase "train" once and stay in it."""

    policies: PolicyGroup
    reference: PolicyGroup | None = None
    """The reference, if it has nodes of its own."""
    _is_training: bool = False

    def enter(self, phase: Phase) -> None:
        """Brings the policy into a phase in which it works."""
        if not self._is_training:
            self.policies.call(PolicyVerbs.enter, "train")
            self._is_training = True

    @property
    def trained_models(self) -> Mapping[ModelName, PolicyGroup]:
        """Models that a checkpoint holds."""
        return {"policy": self.policies}

    def saving(self) -> AbstractContextManager[None]:
        """Inside the `with` block the policy is in the phase in which it begins to save."""
        return nullcontext()

    def loading(self) -> AbstractContextManager[None]:
        """Inside the `with` block the policy can load a checkpoint."""
        return nullcontext()

    on_ranks = staticmethod(in_worker)

    def room(self, *, is_needed: bool) -> AbstractAsyncContextManager[None]:
        """Nobody needs to make room."""
        return nullcontext()


@dataclass(frozen=True)
class RolloutSession:
    """Policy ranks, engines, rewards, and the refit that connects them."""

    config: RunConfig
    policies: PolicyGroup
    models_beside: Mapping[ModelName, PolicyGroup]
    """The further models of the policy ranks. They are on the host whenever none of their phases has been entered."""
    models_apart: Mapping[ModelName, PolicyGroup]
    """Models with nodes of their own, which stay in phase "teacher"."""
    engines: EngineGroup
    rewards: Rewards
    refit: Refitter
    collector: RolloutCollector

    @property
    def reference(self) -> PolicyGroup | None:
        """The reference, if it has nodes of its own."""
        return self.models_apart.get(REFERENCE)

    @property
    def trained_models(self) -> Mapping[ModelName, PolicyGroup]:
        """Models that a checkpoint holds."""
        groups = {"policy": self.policies, **self.models_beside}
        return {model: groups[model] for model in self.config.trained_models}

    def enter(self, phase: Phase, worker: ModelName | None = None) -> None:
        """Brings all models, and colocated engines, into the phase in which `worker` works. Dedicated engines go on."""
        deadline_s = self.policies.deadline_s
        if self.engines.are_colocated:
            self.engines.enter(phase, deadline_s=deadline_s)
        models: dict[ModelName, PolicyGroup] = {"policy": self.policies, **self.models_beside}

        def phase_of(model: ModelName) -> Phase:
            return "logprob" if worker is not None and model != worker and role_of(model) == role_of(worker) else phase

        def takes(model: ModelName) -> tuple[bool, bool]:
            place = PHASES[phase_of(model)].of(model)
            return place.optimizer == "device", place.weights == "device"

        for model in sorted(models, key=takes):
            models[model].call(PolicyVerbs.enter, phase_of(model), deadline_s=deadline_s)

    async def on_ranks(self, function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """Awaits a function that enters phases. From here to the next refit nothing more is asked of colocated engines.

        What a signal has left under way is not sampled without a KV cache.
        """
        if self.engines.are_colocated:
            self.engines.book.hold(True)
        return await in_worker(function, *arguments, **options)

    def make_room(self) -> None:
        """Moves all models but the policy off the devices, as engines need the memory now."""
        for group in self.models_beside.values():
            group.call(PolicyVerbs.enter, "refit")

    def skip_refit(self) -> None:
        """Lets dedicated engines sample the next rollouts with their present weights."""
        self.enter("refit")
        self.policies.call(PolicyVerbs.enter, "generate")

    def with_teacher_outputs(self, sequences: Sequence[TrainSequence], asked: Sequence[Prompt]) -> list[TrainSequence]:
        """Adds the teacher outputs of each sequence, by its teacher's name and behind the teacher's own prompt, if any.

        Teachers with nodes of their own work at the same time, and those on the policy's one after another.
        """
        taught, apart = list(sequences), dict[ModelName, Callable[[], list[TrainSequence]]]()
        places = {
            model: [place for place, prompt in enumerate(asked) if prompt.teacher == model]
            for model in sorted({prompt.teacher for prompt in asked})
        }

        def teach(group: PolicyGroup) -> Callable[[], list[TrainSequence]]:
            mine = places[group.model]
            own = [asked[place].teacher_token_ids for place in mine]
            prompts = {index: token_ids for index, token_ids in enumerate(own) if token_ids}
            return group.teach([sequences[place] for place in mine], prompts, self.config.num_taught_logits)

        def take(model: ModelName, outputs: list[TrainSequence]) -> None:
            for place, sequence in zip(places[model], outputs, strict=True):
                taught[place] = sequence

        for model in places:
            if model in self.models_apart:
                apart[model] = teach(self.models_apart[model])
        for model in places:
            if model not in apart:
                self.enter("teacher", model)
                take(model, teach(self.models_beside[model])())
        for model, finish in apart.items():
            take(model, finish())
        return taught

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Inside the `with` block all trained models are in the phase where saves begin; see `room`."""
        deadline_s = checkpoint_deadline(self.config).seconds
        for group in self.trained_models.values():
            group.call(PolicyVerbs.enter, "checkpoint", deadline_s=deadline_s)
        yield
        for group in self.trained_models.values():
            group.call(PolicyVerbs.enter, "generate", deadline_s=deadline_s)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Inside the `with` block, between refit zero and the first refit, all trained models can load a checkpoint."""
        beside = [group for model, group in self.trained_models.items() if model != "policy"]
        for group in beside:
            group.call(PolicyVerbs.enter, "load", deadline_s=group.start_s)
        yield
        for group in beside:
            group.call(PolicyVerbs.enter, "refit", deadline_s=group.start_s)

    @asynccontextmanager
    async def room(self, *, is_needed: bool) -> AsyncIterator[None]:
        """Inside the `async with` block colocated engines, refitted before, leave their KV cache memory to the models.

        Without `is_needed`, to save, only if there are several: the policy saves from where it is.
        """
        if not self.engines.are_colocated or not (is_needed or len(self.trained_models) > 1):
            yield
            return
        deadline_s = self.policies.start_s if is_needed else checkpoint_deadline(self.config).seconds
        await self.on_ranks(self.engines.enter, "checkpoint", deadline_s=deadline_s)
        yield
        await in_worker(self.engines.enter, "generate", deadline_s=deadline_s)
        self.engines.book.hold(False)


Session = PolicySession | RolloutSession


@asynccontextmanager
async def start_session(config: RunConfig, *, pad_token_id: int, log_folder: Path) -> AsyncIterator[RolloutSession]:
    """All actors of a run, in the block; policy and engines each loaded the model folder by their own loader."""
    async with started_services(config, log_folder) as (placement, tasks, rewards, judges):
        models, engines, refit = await start_models(
            config, placement, pad_token_id=pad_token_id, log_folder=log_folder, tasks=tasks
        )
        policies = models.pop("policy")
        apart = {model: models.pop(model) for model in config.own_nodes}
        await in_worker(rewards.wait_until_built)
        startup.lap("rewards")
        gateways = await start_gateways(config, placement, engines, judges, log_folder=log_folder)
        restart = refit.restart_engine
        collector = RolloutCollector(
            config, engines, rewards, seed=config.rollouts.seed, restart_engine=restart, gateways=gateways
        )
        yield RolloutSession(config, policies, models, apart, engines, rewards, refit, collector)


@contextmanager
def start_policies(config: RunConfig, *, pad_token_id: int, log_folder: Path) -> Iterator[PolicySession]:
    """The policy ranks of a run without engines, in the `with` block, with the model folder's weights."""
    with placed_slots(config, log_folder) as placement:
        ranks, reference = Ranks(config, placement, log_folder=log_folder), None
        if config.has_reference_apart:
            own = Ranks(config, placement, log_folder=log_folder, own=REFERENCE)
            reference = start_apart(config, own, REFERENCE, pad_token_id=pad_token_id)
        policies = PolicyGroup(config, ranks, pad_token_id=pad_token_id)
        num_ranks = policies.world_size + (reference.world_size if reference is not None else 0)
        logger.info("Number of actors online: %d/%d", num_ranks, placement.num_slots)
        yield PolicySession(policies, reference)


@asynccontextmanager
async def start_engines(config: RunConfig, *, weight_version: int, log_folder: Path) -> AsyncIterator[RolloutCollector]:
    """Engines and rewards alone, in the block; engines sample from the model's weights as `weight_version`."""
    # No refit brings weights to one that comes back.
    config = with_value(config, "policy.generation.min_num_engines", None)
    async with started_services(config, log_folder, trains=False) as (placement, tasks, rewards, judges):
        engines = EngineGroup(config, placement, log_folder=log_folder, tasks=tasks)
        await in_worker(engines.wait_until_up)
        await in_worker(rewards.wait_until_built)

        def serve(indices: Sequence[int]) -> None:
            engines.call(EngineVerbs.enter, "refit", only=indices)
            engines.call(EngineVerbs.serve, weight_version, only=indices)

        async def attempt(restarted: set[int]) -> None:
            await in_worker(serve, sorted(restarted))

        async def restart(index: int) -> None:
            await until_no_engine_dies(attempt, engines.restart, died=index)
            engines.book.begin(index)

        await in_worker(serve, range(engines.num_engines))
        gateways = await start_gateways(config, placement, engines, judges, log_folder=log_folder)
        yield RolloutCollector(
            config, engines, rewards, seed=config.eval.seed, restart_engine=restart, gateways=gateways
        )


@asynccontextmanager
async def started_services(
    config: RunConfig, log_folder: Path, *, trains: bool = True
) -> AsyncIterator[tuple[Placement, BackgroundTasks, Rewards, Mapping[str, JudgeGroup]]]:
    """Ray, a place for every slot, the driver's tasks, and what judges, inside the block."""
    with placed_slots(config, log_folder, trains=trains) as placement:
        try:
            async with started_tasks() as tasks:
                rewards = Rewards(config, placement, log_folder=log_folder, tasks=tasks)
                judges = start_judges(config, placement, log_folder=log_folder, tasks=tasks)
                yield placement, tasks, rewards, judges
        finally:
            remove_file(log_folder / FILE_NAME)


def start_apart(config: RunConfig, ranks: Ranks, model: ModelName, *, pad_token_id: int) -> PolicyGroup:
    """A model with nodes of its own, with its folder's weights where it works with them."""
    group = PolicyGroup(config, ranks, pad_token_id=pad_token_id, model=model)
    group.call(PolicyVerbs.enter, "teacher", deadline_s=ranks.start_s)
    return group


async def start_models(
    config: RunConfig, placement: Placement, *, pad_token_id: int, log_folder: Path, tasks: BackgroundTasks
) -> tuple[dict[ModelName, PolicyGroup], EngineGroup, Refitter]:
    """Models of ranks and engines with their folders' weights, and the refit, its schedule proven; see `Refitter`."""
    engines = EngineGroup(config, placement, log_folder=log_folder, tasks=tasks)
    models, refit = await in_worker(
        _start_models, config, placement, engines, pad_token_id=pad_token_id, log_folder=log_folder
    )
    return models, engines, refit


def _start_models(
    config: RunConfig, placement: Placement, engines: EngineGroup, *, pad_token_id: int, log_folder: Path
) -> tuple[dict[ModelName, PolicyGroup], Refitter]:
    # Before a model is converted into a cache that they do not share. They take no memory of a GPU yet.
    ranks, models = Ranks(config, placement, log_folder=log_folder), dict[ModelName, PolicyGroup]()
    apart = {model: Ranks(config, placement, log_folder=log_folder, own=model) for model in config.own_nodes}
    if config.policy.generation.colocated.enabled and config.cluster.gpus_per_node:
        # vLLM sizes its KV cache by the free memory of the whole GPU, so nobody else may take any; then the cache
        # leaves.
        convert_if_new(config)
        engines.wait_until_up()
        startup.lap("engines")
    for model, own_ranks in apart.items():
        models[model] = start_apart(config, own_ranks, model, pad_token_id=pad_token_id)
    for model in (*config.models_beside, "policy"):
        models[model] = PolicyGroup(config, ranks, pad_token_id=pad_token_id, model=model)
        if model != "policy":
            models[model].call(PolicyVerbs.enter, "refit", deadline_s=ranks.start_s)
    policies = models["policy"]
    engines.wait_until_up()
    startup.lap("engines")
    logger.info(
        "Number of actors online: %d/%d",
        policies.world_size
        + config.num_own_slots
        + placement.num_dedicated_slots
        - len(placement.absent_engines) * config.policy.generation.num_workers,
        placement.num_slots,
    )
    refit = Refitter(config, placement, policies, engines)
    startup.lap("schedule")
    return models, refit
