"""Training on examples (`algorithm: sft|dpo|rm`): what the loop takes from conversations and pairs of answers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

from mrl.algo.supervised import perplexity
from mrl.capacity.phases import Phase
from mrl.cluster.payload import put_batch
from mrl.cluster.policy_group import PolicyGroup
from mrl.cluster.session import start_policies
from mrl.config.schema.algo import GrpoConfig
from mrl.config.schema.policy import PolicyConfig
from mrl.config.schema.run import RunConfig
from mrl.data.batch import as_in_validation, batch_examples
from mrl.data.order import prompts_of_step
from mrl.data.planning import SequenceCost, sequence_cost
from mrl.data.reading import LeftOut
from mrl.data.supervised import Example, SupervisedData, load_examples
from mrl.loop.budget import Budget
from mrl.loop.preflight import check_start
from mrl.loop.run import Run, StepData
from mrl.loop.saving import open_saver
from mrl.store.clock import Clock
from mrl.store.run_folder import RunFolder
from mrl.types import Batch, RunState

logger = logging.getLogger(__name__)


@dataclass
class ExampleSupplier:
    """Deals out examples in their order. There are no engines: the policy has its devices to itself."""

    config: RunConfig
    data: SupervisedData
    folder: RunFolder
    policies: PolicyGroup
    cost: SequenceCost
    is_training: bool = False
    """Whether the policy has entered the phase "train", which it never leaves."""

    def start(self) -> None:
        """There are no engines to prove."""

    def take(self, state: RunState, clock: Clock) -> StepData:
        """The batch of the step after `state`."""
        examples, config = self.data.train, self.config
        picked = prompts_of_step(
            state.step,
            prompts_per_step=config.policy.train_global_batch_size,
            num_prompts=len(examples),
            seed=config.training.seed,
            shuffle=config.data.shuffle,
        )
        keys = [(epoch, examples[index].example_id) for epoch, index in picked]
        self.folder.ledger.take(state.step + 1, keys)
        batch = self._batch([examples[index] for _, index in picked], config.policy)
        return StepData([batch], trained=keys, dropped=[], metrics={})

    def enter(self, phase: Phase) -> None:
        """Nothing leaves the policy's devices between the phases of a step."""
        if not self.is_training:
            self.policies.call("enter", "train", deadline_s=self.config.deadlines.train_s)
            self.is_training = True

    def refit(self, state: RunState) -> dict[str, float]:
        """There are no engines to refit."""
        return {}

    def validate(self, state: RunState) -> dict[str, float]:
        """Loss and related metrics over held-out tokens that are learned (sft) or held-out pairs, under NeMo RL's names."""
        config, training, held_out = self.config, self.config.training, self.data.validation
        assert not isinstance(training, GrpoConfig), "GRPO validates by rollouts"
        size, num_batches = training.val_global_batch_size, training.val_batches
        batches = [held_out[first : first + size] for first in range(0, len(held_out), size)]
        parts: list[tuple[float, dict[str, float]]] = []
        self.enter("train")
        for examples in batches[:num_batches] if num_batches > 0 else batches:
            batch = self._batch(examples, as_in_validation(config.policy, training.val_micro_batch_size))
            self.policies.set_batch(batch)
            if config.keeps_reference:
                self.policies.call("compute_reference_logprobs", deadline_s=config.deadlines.train_s)
            metrics = cast(dict[str, float], self.policies.call("evaluate", deadline_s=config.deadlines.train_s)[0])
            parts.append((len(examples) if config.learns_pairs else batch.num_valid_tokens, metrics))
        if not parts:
            return {}
        means = weighted_means(parts)
        if not config.learns_pairs:
            means = {"val_loss": means["loss"], "perplexity": perplexity(means["loss"])}
        logger.info("[Validate] step %d: %s", state.step, ", ".join(f"{name}={value:.4f}" for name, value in means.items()))
        prefix = "val/validation-default_" if config.learns_pairs else "val/"
        return {f"{prefix}{name}": value for name, value in means.items()}

    def _batch(self, examples: Sequence[Example], policy: PolicyConfig) -> Batch:
        """The batch of these examples, in rows as `policy` says."""
        return put_batch(batch_examples(examples, policy, dp_size=self.config.data_parallel_size, cost=self.cost))


@dataclass(frozen=True)
class ExampleTraining:
    """A run on examples that may start: its config and data are checked."""

    config: RunConfig
    data: SupervisedData

    @property
    def num_steps(self) -> int:
        """Steps of the whole run, which `preflight` has reckoned from the epochs."""
        return self.config.training.max_num_steps

    @property
    def left_out(self) -> list[LeftOut]:
        """Rows of the data that are left out."""
        return self.data.left_out

    @contextmanager
    def open(self, folder: RunFolder, budget: Budget) -> Iterator[Run[ExampleSupplier]]:
        """The run with all its actors, inside the `with` block."""
        config, data = self.config, self.data
        with (
            start_policies(config, pad_token_id=data.pad_token_id, log_folder=folder.log_folder / "actors") as policies,
            open_saver(config, folder, policies) as saver,
        ):
            supplier = ExampleSupplier(config, data, folder, policies, sequence_cost(config.policy.model_name))
            yield Run(config, folder, policies, supplier, saver, budget, self.num_steps)


def weighted_means(parts: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
    """Mean of each metric over parts of these weights, one part at least."""
    total = sum(weight for weight, _ in parts)
    return {name: sum(weight * metrics[name] for weight, metrics in parts) / total for name in parts[0][1]}


def preflight(config: RunConfig) -> SupervisedData:
    """Checks everything that can be known to be wrong before a process starts; returns the data, read and tokenised.

    The number of steps is known with the data: `max_num_steps` is what the epochs leave of it.

    Raises:
        ValueError: naming every key, file or row at fault, the rule, and the way out.
    """
    check_start(config)
    data = load_examples(config)
    training, batch_size = config.training, config.policy.train_global_batch_size
    num_steps = training.max_num_epochs * len(data.train) // batch_size
    if num_steps == 0:
        raise ValueError(
            f"policy.train_global_batch_size={batch_size}: {training.max_num_epochs} epochs of {len(data.train)} rows do not fill one batch"
            f"; lower it or raise {config.algorithm}.max_num_epochs"
        )
    training.max_num_steps = num_steps if training.max_num_steps < 0 else min(num_steps, training.max_num_steps)
    return data
