# SPDX-License-Identifier: Apache-2.0
"""Training on examples (`algorithm: sft|dpo|rm`): batches and validation from conversations and pairs of answers."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cached_property

from mrl.algo.supervised import perplexity
from mrl.cluster.payload import put_batch
from mrl.cluster.session import Session, start_policies
from mrl.cluster.tasks import in_worker
from mrl.cluster.verbs import PolicyVerbs
from mrl.config.model import with_value
from mrl.config.schema.algo import GrpoConfig
from mrl.config.schema.policy import PolicyConfig
from mrl.config.schema.run import RunConfig
from mrl.config.schema.teachers import DistillationConfig
from mrl.data.batch import batch_examples
from mrl.data.order import PromptOrder, num_steps_of, prompt_order
from mrl.data.planning import SequenceCost, sequence_cost
from mrl.data.supervised import Example, SupervisedData, load_examples
from mrl.loop.preflight import check_start
from mrl.loop.run import Budget, Run, Step, Training
from mrl.loop.saving import open_saver
from mrl.store.identity import identity_of, with_template_date
from mrl.store.run_folder import RunFolder
from mrl.types import Batch, RunState

logger = logging.getLogger(__name__)


@dataclass
class ExampleSupplier:
    """Deals out examples in their order. There are no engines to prove or to refit."""

    config: RunConfig
    data: SupervisedData
    folder: RunFolder
    session: Session
    cost: SequenceCost

    @cached_property
    def order(self) -> PromptOrder:
        """The order of the examples, which keeps that of the epoch under way."""
        return prompt_order(self.config, self.data.train.sizes)

    async def prove_weights(self) -> None: ...

    async def take(self, state: RunState, step: Step) -> list[Batch]:
        return await in_worker(self._take, state, step)

    def _take(self, state: RunState, step: Step) -> list[Batch]:
        examples, config = self.data.train, self.config
        batch_size = config.policy.train_global_batch_size
        picked = self.order.at(state.step * batch_size, batch_size)
        step.trained = [(epoch, examples[index].example_id) for epoch, index in picked]
        self.folder.ledger.take(step.number, step.trained)
        return [self._batch([examples[index] for _, index in picked], config.policy)]

    async def refit(self, state: RunState) -> dict[str, float]:
        return {}

    async def validate(self, state: RunState) -> dict[str, float]:
        """Loss and related metrics over held-out learned tokens (sft) or held-out pairs, under NeMo RL's names."""
        return await self.session.on_ranks(self._validate, state)

    def _validate(self, state: RunState) -> dict[str, float]:
        config, training, held_out = self.config, self.config.training, self.data.validation
        assert not isinstance(training, GrpoConfig | DistillationConfig), "these validate by rollouts"
        size, num_batches = training.val_global_batch_size, training.val_batches
        batches = [held_out[first : first + size] for first in range(0, len(held_out), size)]
        parts: list[tuple[float, dict[str, float]]] = []
        self.session.enter("train")
        for examples in batches[:num_batches] if num_batches > 0 else batches:
            batch = self._batch(examples, replace(config.policy, train_micro_batch_size=training.val_micro_batch_size))
            self.session.policies.set_batches([batch])
            if config.keeps_reference:
                self.session.policies.call(PolicyVerbs.compute_reference_logprobs)
            metrics = self.session.policies.call(PolicyVerbs.evaluate)[0]
            parts.append((len(examples) if config.learns_pairs else batch.num_valid_tokens, metrics))
        if not parts:
            return {}
        total = sum(weight for weight, _ in parts)
        means = {name: sum(weight * metrics[name] for weight, metrics in parts) / total for name in parts[0][1]}
        if not config.learns_pairs:
            means = {"val_loss": means["loss"], "perplexity": perplexity(means["loss"])}
        logger.info(
            "[Validate] step %d: %s", state.step, ", ".join(f"{name}={value:.4f}" for name, value in means.items())
        )
        prefix = "val/validation-default_" if config.learns_pairs else "val/"
        return {f"{prefix}{name}": value for name, value in means.items()}

    def _batch(self, examples: Sequence[Example], policy: PolicyConfig) -> Batch:
        return put_batch(batch_examples(examples, policy, dp_size=self.config.data_parallel_size, cost=self.cost))


def prepare(config: RunConfig) -> Training[ExampleSupplier]:
    """Checks config, model and data before any process starts; returns the ready run. ValueError: wrong input."""
    config = with_template_date(check_start(config))
    data = load_examples(config)
    training, num_steps = config.training, num_steps_of(config, len(data.train))
    num_steps = num_steps if training.max_num_steps < 0 else min(num_steps, training.max_num_steps)
    config = with_value(config, f"{config.algorithm}.max_num_steps", num_steps)

    @asynccontextmanager
    async def open_run(folder: RunFolder, budget: Budget) -> AsyncIterator[Run[ExampleSupplier]]:
        log_folder = folder.log_folder / "actors"
        with start_policies(config, pad_token_id=data.pad_token_id, log_folder=log_folder) as session:
            async with open_saver(config, folder, session) as saver:
                supplier = ExampleSupplier(config, data, folder, session, sequence_cost(config.policy.model_name))
                yield Run(config, folder, supplier, saver, budget, num_steps)

    return Training(config, num_steps, data.left_out, identity_of(config, data.train, data.left_out), open_run)
